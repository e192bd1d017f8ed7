"""Small policies whose right answers are worked out by hand, in every runtime of a bundle."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.compiler.bundle import Bundle, Contract, Normalizer, ObservationTerm, RecurrentState, export
from graphrl.compiler.bundle.runners import make_player
from graphrl.graph import KeyedGraph
from graphrl.models import RunningNorm

TARGETS = (
    *(["c99"] if shutil.which("cc") else []), "numpy", *(["onnx"] if importlib.util.find_spec("onnxruntime") else [])
)  # fmt: skip


def players(bundle: Bundle) -> dict[str, Any]:
    """Each runtime, at the start of an episode."""
    return {target: make_player(target, bundle.path, bundle.manifest) for target in TARGETS}


def written(folder: Path, graph: KeyedGraph, example: Mapping[Any, Tensor], contract: Contract | None = None) -> Bundle:
    return export(graph, folder / "b", TensorDict(dict(example), batch_size=[1]), contract=contract, targets=TARGETS)


def test_the_normaliser_is_in_every_runtime(tmp_path: Path) -> None:
    """Running mean 100, deviation 10, an actor that changes nothing: 110 becomes 1."""
    norm = RunningNorm(1, eps=0.0)
    norm.mean.fill_(100.0)
    norm.var.fill_(100.0)
    graph = KeyedGraph((norm, ["observation"], ["z"]), (nn.Identity(), ["z"], ["action"]), out_keys=["action"])
    inside = ObservationTerm("observation", normalizer=Normalizer("inside", (100.0,), (10.0,), 0.0))
    row = {"observation": torch.full((1, 1), 110.0)}
    bundle = written(tmp_path, graph, row, Contract(rate_hz=50, observations=(inside,)))
    assert graph.eval()(TensorDict(row, batch_size=[1]))["action"].item() == 1.0
    for target, player in players(bundle).items():
        assert np.ravel(player.step({"observation": np.full((1, 1), 110.0, np.float32)})["action"]) == [1.0], target


def test_a_gru_goes_on_from_where_it_starts_and_forgets_at_a_reset(tmp_path: Path) -> None:
    """GRU(4, 8) from a random state, 20 steps against float64; step 2 differs from a step 1 with its observation."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 2)
    graph = KeyedGraph((cell, ["observation", "h"], [("next", "h")]), (head, [("next", "h")], ["action"]))
    h, seen, wanted = torch.randn(1, 8), torch.randn(20, 1, 4), []
    contract = Contract(recurrent=(RecurrentState("h", ("next", "h"), tuple(h[0].tolist())),))
    bundle = written(tmp_path, graph, {"observation": torch.zeros(1, 4), "h": torch.zeros(1, 8)}, contract)
    runtimes = players(bundle)
    cell.double(), head.double()
    h = h.double()
    for x in seen:
        h = cell(x.double(), h)
        wanted.append(head(h).detach().numpy().ravel())
    for target, player in runtimes.items():

        def episode(first: int = 0, player: Any = player) -> np.ndarray:
            player.reset()
            return np.stack([np.ravel(player.step({"observation": x.numpy()})["action"]) for x in seen[first:]])

        found = episode()
        assert np.abs(found - np.stack(wanted)).max() < 1e-6, target
        assert np.array_equal(episode(), found), target
        assert not np.allclose(episode(first=1)[0], found[1], atol=1e-3), target


def test_a_vector_and_an_image_are_two_named_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cnn = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 64))
    norm = RunningNorm(15)
    norm.mean.copy_(torch.arange(15.0))
    graph = KeyedGraph(
        (norm, ["vector"], ["v"]), (cnn, ["image"], ["f"]), (lambda *x: torch.cat(x, -1), ["v", "f"], ["x"]),
        (nn.Linear(15 + 64, 3), ["x"], ["action"]), out_keys=["action"],
    )  # fmt: skip
    row = {"vector": torch.randn(1, 15), "image": torch.randn(1, 1, 8, 8)}
    bundle = written(tmp_path, graph, row)
    assert {p["key"]: p["shape"] for p in bundle.manifest["inputs"]} == {"vector": [1, 15], "image": [1, 1, 8, 8]}
    runtimes = players(bundle)
    wide = {key: value.double() for key, value in row.items()}
    wanted = graph.eval().double()(TensorDict(wide, batch_size=[1]))["action"].detach().numpy().ravel()
    for target, player in runtimes.items():
        found = np.ravel(player.step({key: value.numpy() for key, value in row.items()})["action"])
        assert np.abs(found - wanted).max() < 1e-6, target


def test_a_counter_starts_at_one_in_every_copy(tmp_path: Path) -> None:
    graph = KeyedGraph((lambda x, n: (x * 0 + n + 1, n + 1), ["observation", "n"], ["action", ("next", "n")]))
    contract = Contract(recurrent=(RecurrentState("n", ("next", "n"), 1.0),))
    bundle = written(tmp_path, graph, {"observation": torch.ones(1, 1), "n": torch.ones(1, 1)}, contract)
    for runtimes in (players(bundle), players(bundle)):
        for target, player in runtimes.items():
            row = {"observation": np.ones((1, 1), np.float32)}
            assert [float(np.ravel(player.step(row)["action"])[0]) for _ in range(3)] == [2.0, 3.0, 4.0], target
