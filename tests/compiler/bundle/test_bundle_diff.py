"""What ``diff`` tells of two bundles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_gru import CONTRACT, START, gru
from tensordict import TensorDict
from torch import nn

from graphrl.compiler.bundle import Bundle, export
from graphrl.compiler.bundle.diff import diff
from graphrl.graph import KeyedGraph


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(gru(), tmp_path_factory.mktemp("d") / "b", START, contract=CONTRACT, targets=("numpy",))


def places(a: Bundle, b: Bundle) -> dict[str, tuple[str, str]]:
    return {d.place: (d.ours, d.theirs) for d in diff(a, b)}


def test_the_same_export_does_not_differ(made: Bundle, tmp_path: Path) -> None:
    assert diff(made, export(gru(), tmp_path / "b", START, contract=CONTRACT, targets=("numpy",))) == []


def test_a_weight_is_told_by_its_largest_difference(made: Bundle, tmp_path: Path) -> None:
    other = gru()
    with torch.no_grad():
        other[1].module.bias[1] += 0.5
    found = places(made, export(other, tmp_path / "b", START, contract=CONTRACT, targets=("numpy",)))
    (name,) = (p for p in found if p.startswith("weight"))
    assert "bias, most at [1], 1 of 2 entries" in name
    assert float(found[name][1]) - float(found[name][0]) == pytest.approx(0.5)
    assert not [p for p in found if p.startswith(("contract", "graph"))] and "files.weights.safetensors" in found


def test_contract_fields_are_told_by_name(made: Bundle, tmp_path: Path) -> None:
    term = replace(CONTRACT.observations[0], low=(-5.0, -5.0, -7.0), unit="rad")
    other = export(gru(), tmp_path / "b", START, contract=replace(CONTRACT, rate_hz=60, observations=(term,)),
                   targets=("numpy",))  # fmt: skip
    found = places(made, other)
    assert found["contract.rate_hz"] == ("50", "60")
    assert found["contract.observations[0].low[2]"] == ("-5.0", "-7.0")
    assert found["contract.observations[0].unit"] == ("null", '"rad"')
    assert not [p for p in found if p.startswith(("weight", "graph"))]


def test_a_graph_is_told_by_its_first_node_that_differs(made: Bundle, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    td = TensorDict(observation=torch.zeros(1, 3), batch_size=[1])
    bundles = [export(KeyedGraph((module, ["observation"], ["action"])), tmp_path / str(i), td, targets=("numpy",))
               for i, module in enumerate((net, nn.Sequential(net[0], nn.ReLU())))]  # fmt: skip
    found = places(*bundles)
    (where,) = (p for p in found if p.startswith("graph: first"))
    assert "aten.tanh" in found[where][0] and "aten.relu" in found[where][1] and "graph: operations" not in found
    found = places(made, bundles[0])
    assert "graph: operations" in found and any("absent" in v for p, v in found.items() if p.startswith("weight"))
