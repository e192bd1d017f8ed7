"""Every robot policy as a bundle: C, ONNX and numpy against float64, on rows and along a sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from robot_scripts import robot_scripts

import graphrl as grl
from graphrl.bench.robot_policies import POLICIES, make_policy
from graphrl.compiler.bundle import Bundle, Contract, CPolicy
from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.compiler.bundle.runtime import Policy

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

TARGETS = ("c99", "onnx", "numpy")


def exported(name: str, shrink: int, folder: Path) -> Bundle:
    policy = make_policy(name, shrink)
    contract = Contract(rate_hz=policy.rate_hz)
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


@pytest.fixture(scope="module")
def robot() -> Iterator[SimpleNamespace]:
    """The example's driver and packets, imported as its scripts import each other."""
    with robot_scripts("protocol", "drive") as scripts:
        yield scripts


class Wire:
    """A robot at the other end of the wire: it sends what its sensors say, and keeps the answers."""

    def __init__(self, packets: list[bytes]) -> None:
        self.packets, self.answers = packets, []

    def settimeout(self, seconds: float) -> None: ...

    def recv(self, size: int) -> bytes:
        return self.packets.pop(0)

    def send(self, data: bytes) -> None:
        self.answers.append(data)


def assert_driven(name: str, bundle: Bundle, robot: SimpleNamespace) -> None:
    """Two episodes with `drive.py`, sensors in another order, against the graph as a collector runs it."""
    made, protocol, resets = make_policy(name, 16), robot.protocol, (0, 3)
    made.graph.eval()
    sensors = [key for key in made.graph.in_keys if key != "is_init" and key not in dict(made.state)]
    contract, packets, wanted, state = bundle.manifest["contract_hash"][:16], [], [], {}
    for t, td in enumerate(made.episode(5, resets)):
        state = {key: td[key] for key, _ in made.state} if t in resets else state
        td.update(state)
        values = np.concatenate([td[key].numpy().reshape(-1) for key in sensors])[::-1]
        payload = protocol.pack_floats(values.tolist())
        packets.append(protocol.Packet(protocol.OBSERVATION, contract, t, payload, t in resets).pack())
        with torch.no_grad():
            made.graph(td)
        wanted.append(td["action"][0].numpy())
        state = {key: td[following] for key, following in made.state}
    policy = Policy.load(bundle.path)
    names = [f"{key}[{i}]" for key in sensors for i in range(made.example[key].numel())][::-1]
    assert len(protocol.pack_welcome(made.rate_hz, names, [])) < protocol.LARGEST - 4096
    wire: Any = Wire([*packets, protocol.Packet(protocol.BYE, contract).pack()])
    actuators = [f"action_{i}" for i in range(wanted[0].size)]
    into, out = robot.drive.columns(policy, names), robot.drive.outlets(policy, actuators)
    assert robot.drive.drive(wire, policy, contract, into, out).startswith("driver: 5 steps, status 0")
    found = np.stack([protocol.unpack(data).floats for data in wire.answers])
    np.testing.assert_allclose(found, np.stack(wanted), rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", POLICIES)
def test_every_target_is_near_float64_and_a_robot_drives_it_with_its_sensors_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, robot: SimpleNamespace
) -> None:
    monkeypatch.setattr(CPolicy.__init__, "__defaults__", (None, ("-O0",)))  # compiling is what takes time
    bundle = exported(name, 16, tmp_path)
    assert_near_float64(bundle)
    assert_driven(name, bundle, robot)
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
