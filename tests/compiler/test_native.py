from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from c_cases import Case, assert_equal, cases, run_together
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from graphrl.compiler.backends import native
from graphrl.compiler.backends.native import BACKEND, NativeProgram, find_compiler
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.compiler.verify import verify_lowered
from graphrl.errors import CompileError
from graphrl.graph import KeyedGraph

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler"),
    pytest.mark.usefixtures("fresh_cache"),
]


def traced(module: nn.Module, *shape: int) -> tuple[Program, Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    graph = KeyedGraph(TensorDictModule(module, in_keys=["observation"], out_keys=["action"]))
    return run_passes(trace(graph, TensorDict(observation=x, batch_size=shape[:1]))), x


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


CASES = cases()


@pytest.fixture(scope="module")
def together() -> dict[str, tuple[Tensor, Tensor]]:
    return run_together(CASES, BACKEND, run_passes)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_operation_equals_eager(case: Case, together: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_equal(case, *together[case.name])


@pytest.mark.parametrize("batch", [0, 1, 2, 5, 15, 16, 37])
def test_batches(batch: int) -> None:
    net = mlp(17, 64, 65, 6)
    program, x = traced(net, batch, 17)
    lowered = BACKEND.lower(program)
    (found,) = lowered(program.arguments([x]))
    assert found.shape == (batch, 6)
    torch.testing.assert_close(found, net(x).detach(), atol=2e-6, rtol=0)
    verify_lowered(program, lowered, "native", program.arguments([x]))


def test_weights_are_live() -> None:
    net = mlp(4, 32, 2)
    program, x = traced(net, 1, 4)
    lowered = BACKEND.lower(program)

    def check() -> None:
        torch.testing.assert_close(lowered(program.arguments([x]))[0], net(x).detach(), atol=1e-6, rtol=1e-6)

    check()
    with torch.no_grad():
        net[0].weight.zero_()
        check()
        net[2].bias.data.add_(1)  # does not count up the tensor's version
        check()
    net.load_state_dict({k: v * 2 + 1 for k, v in net.state_dict().items()})
    check()
    net.load_state_dict({k: v.clone() - 3 for k, v in net.state_dict().items()}, assign=True)
    check()
    net[0].weight.data = torch.randn(4, 32).t()  # moved, and not contiguous
    check()


def test_weight_of_another_dtype_is_an_error() -> None:
    net = mlp(4, 8, 2)
    program, x = traced(net, 1, 4)
    lowered = BACKEND.lower(program)
    lowered(program.arguments([x]))
    net.double()
    with pytest.raises(CompileError, match="weight.*is now.*float64"):
        lowered(program.arguments([x]))


def test_strided_inputs_are_copied() -> None:
    net = mlp(4, 8, 2)
    program, _ = traced(net, 3, 4)
    x = torch.randn(4, 3).t()
    torch.testing.assert_close(BACKEND.lower(program)(program.arguments([x]))[0], net(x).detach(), atol=1e-6, rtol=0)


def test_call_into_given_tensors() -> None:
    net = mlp(4, 8, 2)
    program, x = traced(net, 1, 4)
    out = torch.full((1, 2), float("nan"))
    BACKEND.lower(program).call_into(program.arguments([x]), [out])
    torch.testing.assert_close(out, net(x).detach(), atol=1e-6, rtol=0)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def test_written_state() -> None:
    counter = Counter()
    program, x = traced(counter, 1, 3)
    lowered = BACKEND.lower(program)
    assert counter.count.tolist() == [1, 1, 1]
    for step in (2, 3, 4):
        torch.testing.assert_close(lowered(program.arguments([x]))[0], x + step)
        assert counter.count.tolist() == [step] * 3
    counter.count = torch.ones(3, 2)[:, 0]
    lowered(program.arguments([x]))
    assert counter.count.tolist() == [2, 2, 2]


class Swap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        old = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(old)
        return x + old


def test_state_that_is_swapped() -> None:
    swap = Swap()
    program, x = traced(swap, 1, 2)
    (found,) = BACKEND.lower(program)(program.arguments([x]))
    assert torch.equal(found, x) and swap.a.tolist() == [1, 1] and swap.b.tolist() == [0, 0]


def test_draws_come_in_as_arguments() -> None:
    program, x = traced(_Noisy(), 2, 3)
    assert len(program.noise) == 1
    arguments = program.arguments([x])
    torch.testing.assert_close(BACKEND.lower(program)(arguments)[0], program.graph_module(*arguments)[0])


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * 0.1


def test_large_scratch_is_thread_local() -> None:
    net = mlp(8, 256, 256, 4)
    program, x = traced(net, 512, 8)
    lowered = BACKEND.lower(program)
    assert "static __thread" in lowered.code
    wanted, results = net(x).detach(), []

    def work() -> None:
        for _ in range(5):
            results.append(lowered(program.arguments([x]))[0])

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 15
    for found in results:
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=0)


def test_second_process_finds_the_cache(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, x = traced(mlp(3, 5, 2), 1, 3)
    first = NativeProgram(program)
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    second = NativeProgram(program)
    assert torch.equal(first(program.arguments([x]))[0], second(program.arguments([x]))[0])
    assert not [p.name for p in (fresh_cache / "programs").iterdir() if p.name.startswith(".")]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = KeyedGraph((torch.tanh, ["x"], ["y"]))
    program = trace(graph, TensorDict(x=torch.zeros(1, 2, dtype=torch.float64), batch_size=[1]))
    refusal = BACKEND.supports(program)
    assert refusal is not None and "float64" in refusal.reason
    with pytest.raises(CompileError, match="float64"):
        BACKEND.lower(program)
    fine, _ = traced(mlp(2, 2), 1, 2)
    assert BACKEND.supports(fine) is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    refusal = BACKEND.supports(fine)
    assert refusal is not None and refusal.reason == "no C compiler: install gcc or clang, or set CC"


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", str(tmp_path / "file"))
    program, _ = traced(mlp(2, 3), 1, 2)
    with pytest.raises(CompileError, match="GRAPHRL_CACHE_DIR"):
        BACKEND.lower(program)
