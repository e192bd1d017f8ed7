"""Policies that a bundle would silently change: refused at export."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from graphrl import KeyedGraph
from graphrl.compiler.bundle import export
from graphrl.errors import BundleError
from graphrl.models import GaussianActor


def test_a_recurrent_state_that_would_be_lost_is_an_error(tmp_path: Path) -> None:
    cell = (torch.nn.GRUCell(4, 8), ["observation", "h"], [("next", "h")])
    graph = KeyedGraph(cell, (torch.nn.Linear(8, 2), [("next", "h")], ["action"]))
    data = TensorDict(observation=torch.randn(1, 4), h=torch.zeros(1, 8), batch_size=[1])
    with pytest.raises(BundleError, match=r"'h'.*declare it in Contract\(recurrent"):
        export(graph, tmp_path / "b", data, targets=("c99",))


def test_a_float64_example_is_refused_at_the_edge(tmp_path: Path) -> None:
    data = TensorDict(observation=torch.randn(1, 3, dtype=torch.float64), batch_size=[1])
    with pytest.raises(BundleError, match="'observation' is float64 in the example"):
        export(GaussianActor(3, 2), tmp_path / "b", data, targets=("c99",))
