"""The commands that read a bundle: what they print, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from graphrl.cli import main
from graphrl.compiler.bundle import ActionContract, Bundle, Contract, export
from graphrl.compiler.bundle.runtime import Policy
from graphrl.graph import KeyedGraph


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder, made = tmp_path_factory.mktemp("bundles"), []
    contract = Contract(rate_hz=50, action=ActionContract(names=("hip", "knee"), unit="N m"))
    for seed in range(2):
        torch.manual_seed(seed)
        graph = KeyedGraph((nn.Linear(3, 2), ["observation"], ["action"]))
        td = TensorDict(observation=torch.zeros(2, 3), batch_size=[2])
        made.append(export(graph, folder / str(seed), td, contract=contract, targets=("numpy",)))
    return made


def test_inspect(bundles: list[Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundles[0].path)]) == 0
    text = capsys.readouterr().out
    digest = bundles[0].manifest["files"]["graph.json"][:16]
    for part in (bundles[0].manifest["contract_hash"][:12], "rate_hz", "50", '"N m"', "observation", "[1, 3]", "numpy",
                 "eager", "1e-05 allowed", "graph.json", digest, "contract.md"):  # fmt: skip
        assert part in text, part
    assert "decimation" not in text  # null
    assert main(["inspect", str(bundles[0].path.parent)]) == 2
    assert "is no bundle" in capsys.readouterr().err


def test_diff(bundles: list[Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(b.path) for b in bundles)
    assert main(["diff", first, first]) == 0 and "do not differ" in capsys.readouterr().out
    assert main(["diff", first, second]) == 1
    text = capsys.readouterr().out
    assert "weight" in text and "entries" in text and "difference(s)" in text


def test_replay(bundles: list[Bundle], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, xs = Policy.load(bundles[0].path), np.random.default_rng(0).normal(size=(5, 3))
    np.savez(tmp_path / "log.npz", observation=xs, action=[policy.step({"observation": x})["action"] for x in xs])
    assert main(["replay", str(bundles[0].path), str(tmp_path / "log.npz")]) == 0
    assert "5 steps agree" in capsys.readouterr().out
    assert main(["replay", str(bundles[1].path), str(tmp_path / "log.npz")]) == 1
    text = capsys.readouterr().out
    assert "step 0: 'action', " in text and ("hip: recorded" in text or "knee: recorded" in text)
    assert main(["replay", str(bundles[1].path), str(tmp_path / "log.npz"), "--tolerance", "100"]) == 0
    assert main(["replay", str(bundles[0].path), str(tmp_path / "no.npz")]) == 2
    assert "no.npz cannot be read" in capsys.readouterr().err
