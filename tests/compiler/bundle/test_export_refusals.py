"""Policies that a bundle would silently change: refused at export."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from graphrl import KeyedGraph
from graphrl.compiler.bundle import Contract, RecurrentState, export
from graphrl.errors import BundleError
from graphrl.models import GaussianActor, GRUModule


def test_a_recurrent_state_that_would_be_lost_is_an_error(tmp_path: Path) -> None:
    graph = KeyedGraph(GRUModule(4, 8), (torch.nn.Linear(8, 2), ["features"], ["action"]))
    data = TensorDict(observation=torch.randn(1, 4), recurrent_state=torch.zeros(1, 8), batch_size=[1])
    data["is_init"] = torch.zeros(1, 1, dtype=torch.bool)
    with pytest.raises(BundleError, match=r"'recurrent_state'.*declare it in Contract\(recurrent"):
        export(graph, tmp_path / "b", data, targets=("c99",))
    contract = Contract(recurrent=(RecurrentState("recurrent_state", ("next", "recurrent_state")),))
    bundle = export(graph, tmp_path / "b", data, targets=("c99", "numpy"), contract=contract)
    policy = bundle.policy()
    with np.load(bundle.path / "golden.npz") as golden:
        assert golden["sequence/in/is_init"].reshape(-1).tolist() == golden["sequence/reset"].tolist()
        assert 0 < golden["in/is_init"].sum() < len(golden["kind"])
    state = data["recurrent_state"]
    for _ in range(20):
        x = torch.randn(1, 4)
        step = graph(data.clone().update({"observation": x, "recurrent_state": state}))
        state = step["next", "recurrent_state"].detach()
        found = policy({"observation": x[0].numpy(), "is_init": [False]})
        torch.testing.assert_close(torch.as_tensor(found), step["action"][0].detach(), rtol=1e-5, atol=1e-5)


def test_a_float64_example_is_refused_at_the_edge(tmp_path: Path) -> None:
    data = TensorDict(observation=torch.randn(1, 3, dtype=torch.float64), batch_size=[1])
    with pytest.raises(BundleError, match="'observation' is float64 in the example"):
        export(GaussianActor(3, 2), tmp_path / "b", data, targets=("c99",))
