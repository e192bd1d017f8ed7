from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from c_cases import Case, assert_equal, cases, run_together
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import graphrl as grl
from graphrl.compiler.backends.onnx import BACKEND, export_onnx
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.errors import CompileError, MissingExtraError
from graphrl.graph import KeyedGraph

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

CASES = cases()


def traced(fn: object, out: str = "y", **inputs: Tensor) -> Program:
    batch = next(iter(inputs.values())).shape[:1]
    return run_passes(trace(KeyedGraph((fn, list(inputs), [out])), TensorDict(inputs, batch_size=batch)))


def session(path: Path) -> object:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def together() -> dict[str, tuple[Tensor, Tensor]]:
    return run_together(CASES, BACKEND, lambda program: program)  # as traced: no pass has removed anything


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_operation_equals_eager(case: Case, together: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_equal(case, *together[case.name])


def test_inputs_are_bound_by_name(tmp_path: Path) -> None:
    """The mapping f(x1, x2) = 2 x1 + 3 x2 must not depend on the order of the call."""
    program = traced(lambda x1, x2: 2 * x1 + 3 * x2, x1=torch.zeros(1, 1), x2=torch.zeros(1, 1))
    export_onnx(program, tmp_path / "f.onnx")
    run = session(tmp_path / "f.onnx").run
    one, zero = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    assert run(["y"], {"x2": one, "x1": zero})[0].item() == 3
    assert run(["y"], {"x1": zero, "x2": one})[0].item() == 3
    assert run(["y"], {"x1": one, "x2": zero})[0].item() == 2


def test_nested_keys_name_the_tensors(tmp_path: Path) -> None:
    graph = KeyedGraph(
        (torch.tanh, [("agents", "observation")], [("agents", "action/raw")]), (lambda h: h + 1, ["h"], ["h"])
    )
    inputs = TensorDict({("agents", "observation"): torch.zeros(2, 3), "h": torch.zeros(2, 3)}, batch_size=[2])
    export_onnx(trace(graph, inputs), tmp_path / "f.onnx")
    loaded = session(tmp_path / "f.onnx")
    assert [i.name for i in loaded.get_inputs()] == ["agents/observation", "h"]
    assert [o.name for o in loaded.get_outputs()] == ["agents/action~1raw", "h~out"]


def test_file_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 2))
    graph = KeyedGraph(TensorDictModule(net, in_keys=["observation"], out_keys=["action"]))
    program = run_passes(trace(graph, TensorDict(observation=torch.zeros(1, 8), batch_size=[1])), deploy=True)
    for name in ("a", "b"):
        export_onnx(program, tmp_path / f"{name}.onnx", metadata={"rate_hz": "50"})
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
    model = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    assert model.opset_import[0].version == 18
    assert {p.key: p.value for p in model.metadata_props} == {"rate_hz": "50"}
    assert not any(t.external_data for t in model.graph.initializer)


def test_symbolic_batch(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 4))
    graph = KeyedGraph(
        TensorDictModule(net, in_keys=["observation"], out_keys=["p"]),
        (lambda p: p[:, :2].view(-1, 2, 1), ["p"], ["action"]),
    )
    program = run_passes(trace(graph, TensorDict(observation=torch.zeros(3, 8), batch_size=[3])))
    export_onnx(program, tmp_path / "f.onnx", symbolic_batch=True)
    loaded = session(tmp_path / "f.onnx")
    assert loaded.get_inputs()[0].shape == ["batch", 8]
    for batch in (1, 3, 7):
        x = torch.randn(batch, 8)
        found = loaded.run(["action"], {"observation": x.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), net(x)[:, :2, None].detach(), atol=1e-6, rtol=0)
    fixed = traced(lambda x: x - x.mean(0), x=torch.zeros(3, 2))
    with pytest.raises(CompileError, match="mean.*fixes the batch size"):
        export_onnx(fixed, tmp_path / "g.onnx", symbolic_batch=True)


def test_weights_are_live_in_process() -> None:
    net = nn.Linear(4, 2)
    graph = KeyedGraph(TensorDictModule(net, in_keys=["observation"], out_keys=["action"]))
    x = torch.randn(1, 4)
    program = run_passes(trace(graph, TensorDict(observation=x, batch_size=[1])))
    lowered = BACKEND.lower(program)
    for change in (lambda: None, lambda: net.weight.data.mul_(2), lambda: net.load_state_dict(
        {k: v.clone() + 1 for k, v in net.state_dict().items()}, assign=True)):  # fmt: skip
        change()
        torch.testing.assert_close(lowered(program.arguments([x]))[0], net(x).detach(), atol=1e-6, rtol=1e-6)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def test_written_state_is_explicit(tmp_path: Path) -> None:
    counter = Counter()
    program = trace(
        KeyedGraph(TensorDictModule(counter, in_keys=["x"], out_keys=["y"])),
        TensorDict(x=torch.zeros(1, 3), batch_size=[1]),
    )
    lowered = BACKEND.lower(program)
    x = torch.zeros(1, 3)
    assert [lowered(program.arguments([x]))[0][0, 0].item() for _ in range(3)] == [2, 3, 4]
    export_onnx(program, tmp_path / "f.onnx")
    loaded = session(tmp_path / "f.onnx")
    (name,) = (i.name for i in loaded.get_inputs() if i.name.startswith("state/"))
    state = np.ones(3, np.float32)
    for step in (2, 3, 4):
        y, state = loaded.run(None, {"x": x.numpy(), name: state})
        assert y.tolist() == [[step] * 3]


def test_refusal_names_operation_node_and_key(tmp_path: Path) -> None:
    program = traced(torch.nextafter, a=torch.zeros(1, 2), b=torch.zeros(1, 2))
    refusal = BACKEND.supports(program)
    assert refusal is not None
    assert "nextafter" in refusal.reason and "node 'nextafter'" in refusal.reason and "'y'" in refusal.reason
    with pytest.raises(CompileError, match="nextafter"):
        export_onnx(program, tmp_path / "f.onnx")
    assert not list(tmp_path.iterdir())


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(torch.tanh, x=torch.zeros(1, 2))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refusal = BACKEND.supports(program)
    assert refusal is not None and "pip install 'graphrl[onnx]'" in refusal.reason
    with pytest.raises(MissingExtraError, match="graphrl\\[onnx\\]"):
        export_onnx(program, tmp_path / "f.onnx")


def test_empty_batches_are_refused() -> None:
    refusal = BACKEND.supports(traced(torch.tanh, x=torch.zeros(0, 2)))
    assert refusal is not None and "no elements" in refusal.reason


def test_gradients_over_two_batch_dims():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    graph = KeyedGraph((net, ["x"], ["y"]))
    fast, grads, x = grl.compile(graph, backend="onnx", strict=True), [], torch.randn(2, 5, 3)
    for call in (graph, fast):
        leaf = x.clone().requires_grad_()
        graph.zero_grad()
        call(TensorDict(x=leaf, batch_size=[2, 5]))["y"].square().sum().backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in net.parameters())])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)


def test_truth_values_are_compared_and_combined_as_numbers():
    def run(d, e, x):
        more = [(d > 0) * x, (d >= e) * x, (d < e) * x, (d <= 1) * x, (d == e) * x, (d != 0) * x]
        return torch.stack([*more, torch.maximum(d, e) * x, torch.minimum(d, e) * x, (d * e) * x, (d + e) * x])

    graph = KeyedGraph((run, ["d", "e", "x"], ["y"]))
    flags = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    td = TensorDict(d=flags[0], e=flags[1], x=torch.randn(4), batch_size=[])
    fast = grl.compile(graph, td, backend="onnx", strict=True)
    with torch.no_grad():
        assert torch.equal(fast(td.clone())["y"], graph(td.clone())["y"])


def test_what_the_runtime_itself_does_not_take_is_a_refusal(monkeypatch):

    def fail(*_, **__):
        raise ValueError("no kernel\nmore")

    monkeypatch.setattr(ort, "InferenceSession", fail)
    program = grl.trace(KeyedGraph((torch.tanh, ["x"], ["y"])), TensorDict(x=torch.zeros(2), batch_size=[]))
    assert BACKEND.supports(program).reason == "ONNX Runtime does not take this program: no kernel"
