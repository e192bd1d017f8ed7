"""``export(weights=...)``: every runtime computes with the rounded weights, and what rounding moved is told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_gru import CONTRACT, START, gru
from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.compiler.backends.c99.weights import encode
from graphrl.compiler.bundle import Bundle, Contract, CPolicy, Normalizer, ObservationTerm, export, verify
from graphrl.compiler.bundle.weights import LIMITS, round_weights
from graphrl.compiler.trace import trace
from graphrl.errors import BundleError
from graphrl.graph import KeyedGraph
from graphrl.models import RunningNorm

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
MEAN = (-5.0, -3.0, -1.0, 1.0, 3.0, 5.0)
FORMS = ("float16", "int8")
SMALL = {"float16": "uint16_t", "int8": "int8_t"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPolicy.__init__, "__defaults__", (None, ("-O0",)))  # compiling is what takes time


def rows(*shape: int) -> TensorDict:
    generator = torch.Generator().manual_seed(3)
    return TensorDict(observation=torch.randn(4, *shape, generator=generator) * 10, batch_size=[4])


def normalised() -> KeyedGraph:
    torch.manual_seed(0)
    norm = RunningNorm(6, eps=1e-8)
    norm.mean.copy_(torch.tensor(MEAN))
    norm.var.copy_(torch.logspace(-6, 6, 6))
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
    return KeyedGraph((norm, ["observation"], ["z"]), (net, ["z"], ["action"]), out_keys=["action"])


def sight() -> KeyedGraph:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ELU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(72, 3))
    return KeyedGraph((lambda x: net(x[:, None]), ["observation"], ["action"]), out_keys=["action"])


def heads() -> KeyedGraph:
    """Two equal networks, which the passes run as one batched product: its weights are put together from four."""
    torch.manual_seed(2)
    left, right = (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
    return KeyedGraph((left, ["observation"], ["a"]), (right, ["observation"], ["b"]),
                      (lambda a, b: a + b, ["a", "b"], ["action"]), out_keys=["action"])  # fmt: skip


def weights_of(bundle: Bundle) -> dict[str, Tensor]:
    return {slot.name: slot.read() for slot in bundle.program().state}


@pytest.mark.parametrize("form", FORMS)
def test_every_runtime_has_the_rounded_weights(form: str, tmp_path: Path) -> None:
    policy = gru()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    targets = ("c99", "numpy") + (("onnx",) if _has("onnx") and _has("onnxruntime") else ())
    plain = export(policy, tmp_path / "plain", START, contract=CONTRACT, targets=("c99",))
    made = export(policy, tmp_path / "b", START, contract=CONTRACT, targets=targets, weights=form)
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    assert set(made.parity) == {"eager", *targets} and max(made.parity.values()) <= 1e-5
    assert set(verify(made.path).errors) == set(targets)
    for (name, kept), original in zip(weights_of(made).items(), weights_of(plain).values(), strict=True):
        rounded = encode(original.t()[None], form).decode()[0].t() if original.dim() == 2 else original
        assert torch.equal(kept, rounded), name  # biases stay
        assert original.dim() != 2 or not torch.equal(kept, original)
    small = re.findall(rf"^static const {SMALL[form]} ", (made.path / "c" / "policy.c").read_text(), re.MULTILINE)
    assert len(small) == 3
    assert made.manifest["c"]["weight_bytes"] < plain.manifest["c"]["weight_bytes"]


@pytest.mark.parametrize(("make", "form"), [(normalised, "float16"), (sight, "int8"), (heads, "int8")])
def test_products_of_every_kind_are_stored_small(make: type, form: str, tmp_path: Path) -> None:
    """A folded normaliser would spread the columns; a convolution has a column a channel; equal networks are one."""
    example = rows(7, 7) if make is sight else rows(6)
    std = tuple((torch.logspace(-6, 6, 6) + 1e-8).sqrt().tolist())
    stated = Normalizer("inside", MEAN, std) if make is normalised else Normalizer("none")
    contract = Contract(rate_hz=50, observations=(ObservationTerm("observation", normalizer=stated),))
    bundle = export(make(), tmp_path / "b", example, targets=("c99", "numpy"), weights=form, contract=contract)
    text = (bundle.path / "c" / "policy.c").read_text()
    sizes = [int(n) for n in re.findall(r"^static const float \w+\[(\d+)\]", text, re.MULTILINE)]
    assert max(sizes) <= 128, sizes  # biases, statistics and scales
    assert bundle.manifest["checks"]["weights"] == bundle.manifest["checks"]["normalizer"] == "passed"


def test_float32_is_what_it_was(tmp_path: Path) -> None:
    plain = export(normalised(), tmp_path / "a", rows(6), targets=("numpy",))
    said = export(normalised(), tmp_path / "b", rows(6), targets=("numpy",), weights="float32")
    assert plain.manifest["files"] == said.manifest["files"] and plain.manifest["weights"] == "float32"
    assert "rounding" not in plain.manifest["reports"]["parity"]


def test_what_rounding_moved_is_told(tmp_path: Path) -> None:
    policy, example = normalised(), rows(6)
    bundle = export(policy, tmp_path / "b", example, targets=("numpy",), weights="int8")
    report = json.loads((bundle.path / "reports" / "parity.json").read_text())
    assert report["reference"] == "eager in float64, weights rounded to int8"
    told = report["rounding"]
    assert told == bundle.manifest["reports"]["parity"]["rounding"] and told["allowed"] == LIMITS["int8"]
    with np.load(bundle.path / "golden.npz") as file:
        golden = {name: file[name] for name in file.files}
    with torch.no_grad():
        exact = policy.double()(TensorDict(observation=torch.from_numpy(golden["in/observation"][:, 0]).double()))
    usual = golden["kind"] != "extreme"
    wanted = exact["action"].numpy()[usual]
    moved, spread = np.abs(golden["out/action"][usual, 0] - wanted).max(), np.sqrt(wanted.var(0).mean())
    assert 1e-4 < moved and told["absolute"] == pytest.approx(moved, rel=1e-3)
    assert told["relative"] == pytest.approx(moved / spread, rel=1e-2)
    page = (bundle.path / "reports" / "contract.md").read_text()
    assert f"moved the action by {told['relative']:.1e}" in page and "rounded to int8" in page
    assert f"weights in int8: rounding moved the action by {told['relative']:.1e}" in str(bundle)


def test_rounding_that_moves_too_much_stops_the_export(tmp_path: Path) -> None:
    """One large weight in a column takes the int8 steps of the small ones, which carry the action."""
    layer = nn.Linear(6, 2)
    with torch.no_grad():
        layer.weight.fill_(1e-3)[:, 0] = 1.0
    policy = KeyedGraph((lambda x: layer(x * torch.tensor([1e-4, 1, 1, 1, 1, 1])), ["observation"], ["action"]))
    with pytest.raises(BundleError, match="check 'weights': weights rounded to int8 move the action by .* is allowed"):
        export(policy, tmp_path / "b", rows(6), targets=("numpy",), weights="int8")
    waived = export(policy, tmp_path / "b", rows(6), targets=("numpy",), weights="int8", waive=("weights",))
    assert waived.manifest["checks"]["weights"].startswith("waived: weights rounded to int8")
    assert (
        export(policy, tmp_path / "c", rows(6), targets=("numpy",), weights="float16").manifest["weights"] == "float16"
    )


def test_a_pose_behind_the_network_hides_no_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    told = []
    for pose in (0.0, 100.0):
        graph = KeyedGraph((net, ["observation"], ["raw"]), (lambda raw, pose=pose: raw + pose, ["raw"], ["action"]))
        bundle = export(graph, tmp_path / str(pose), rows(6), targets=("numpy",), weights="int8", waive=("weights",))
        told.append(bundle.manifest["reports"]["parity"]["rounding"]["relative"])
    assert told[1] == pytest.approx(told[0], rel=1e-3) and told[0] > 1e-3


def test_a_weight_beyond_float16_and_an_unknown_format(tmp_path: Path) -> None:
    layer = nn.Linear(6, 2)
    with torch.no_grad():
        layer.weight.fill_(1e5)
    policy = KeyedGraph((layer, ["observation"], ["action"]))
    with pytest.raises(BundleError, match="a weight of 1e\\+05 at 'addmm' is too large for float16"):
        export(policy, tmp_path / "b", rows(6), targets=("numpy",), weights="float16")
    with pytest.raises(BundleError, match="weights='int4': there are .*int8"):
        export(policy, tmp_path / "b", rows(6), targets=("numpy",), weights="int4")
    assert list(tmp_path.iterdir()) == []


def test_a_generator_that_reads_codes_wrongly_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import graphrl.compiler.backends.c99.matmul as matmul

    monkeypatch.setitem(matmul._READ, torch.int8, ("int8_t", "(float)(1 + {})"))
    with pytest.raises(BundleError, match="check 'parity': c99 differs"):
        export(gru(), tmp_path / "b", START, contract=CONTRACT, targets=("c99",), weights="int8")


def test_an_observation_is_no_weight() -> None:
    graph = KeyedGraph((lambda x, w: x[:, None] @ w, ["observation", "w"], ["action"]))
    td = TensorDict(observation=torch.randn(1, 3), w=torch.randn(1, 3, 3), batch_size=[1])
    program = trace(graph, td)
    wanted = program.run(*(td[k] for k in program.in_keys))
    assert torch.equal(round_weights(program, "int8").run(*(td[k] for k in program.in_keys))[0], wanted[0])


def _has(package: str) -> bool:
    return __import__("importlib").util.find_spec(package) is not None
