"""Every robot policy as a bundle: C, ONNX and numpy against float64, on rows and along a sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import graphrl as grl
from graphrl.bench.robot_policies import POLICIES, make_policy
from graphrl.compiler.bundle import Bundle, Contract, CPolicy, RecurrentState
from graphrl.compiler.bundle.c_policy import find_compiler

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

TARGETS = ("c99", "onnx", "numpy")


def exported(name: str, shrink: int, folder: Path) -> Bundle:
    policy = make_policy(name, shrink)
    recurrent = tuple(RecurrentState(key, following) for key, following in policy.state)
    contract = Contract(rate_hz=policy.rate_hz, recurrent=recurrent or None)
    return grl.export(policy.graph, folder / name, torch.cat([*policy.episode(4)]), targets=TARGETS, contract=contract)


def assert_near_float64(bundle: Bundle) -> None:
    """Along single rows, and along the sequence where there is state to carry: two episodes, a reset between."""
    report = bundle.manifest["reports"]["parity"]
    assert set(report["max_relative_error"]) == {"eager", *TARGETS}
    errors = dict(report["max_relative_error"])
    if bundle.contract["recurrent"]:
        assert report["sequence_steps"] == 20
        errors |= {f"{name}, sequence": error for name, error in report["sequence_relative_error"].items()}
    assert all(0 <= error <= 1e-5 for error in errors.values()), errors


@pytest.mark.parametrize("name", POLICIES)
def test_every_target_is_near_float64(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPolicy.__init__, "__defaults__", (None, ("-O0",)))  # compiling is what takes time
    bundle = exported(name, 16, tmp_path)
    assert_near_float64(bundle)
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    metadata = {p.key: p.value for p in model.metadata_props}
    assert json.loads(metadata["contract"]) == bundle.contract
    assert metadata["contract_hash"] == bundle.manifest["contract_hash"]
    assert not any(t.external_data for t in model.graph.initializer)
    for side, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):  # state is explicit
        assert [v.name for v in values] == [p["key"] for p in bundle.manifest[side]]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_every_target_is_near_float64_at_real_size(name: str, tmp_path: Path) -> None:
    assert_near_float64(exported(name, 1, tmp_path))
