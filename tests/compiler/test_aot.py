from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import graphrl as grl
from graphrl.compiler.backends import aot
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.compiler.verify import verify_lowered
from graphrl.errors import CompileError
from graphrl.graph import KeyedGraph

pytestmark = pytest.mark.usefixtures("fresh_cache")


class Everything(nn.Module):
    """A layer, a draw, written state, every kind of input, and outputs that are views, constants and state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("total", torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, wide: Tensor, index: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        noisy = torch.where(flag, y + torch.randn_like(y), y)
        before = self.total.clone()
        self.total.mul_(0.5).add_(y.detach().mean(0))
        self.calls += 1
        return noisy, wide.exp(), wide[index], self.calls * 2, before, self.total, y.t(), torch.tensor([1.0, 2.0])


def batch() -> TensorDict:
    x, wide = torch.randn(4, 3), torch.randn(4, 2, dtype=torch.float64)
    flag = torch.tensor([[True], [False], [True], [False]])
    return TensorDict(x=x, wide=wide, index=torch.tensor([3, 0, 1, 1]), flag=flag, batch_size=[])


@pytest.fixture(scope="module")
def everything() -> grl.compiler.compiled.CompiledGraph:
    torch.manual_seed(0)
    graph = KeyedGraph((Everything(), ["x", "wide", "index", "flag"], list("abcdefgh")))
    return grl.compile(graph, batch(), backend="aot", strict=True)


def test_outputs_draws_and_written_state_equal_eager(everything):
    module, td = everything.graph[0].module, batch()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    results = []
    for call in (everything.graph, everything):
        module.load_state_dict(before)
        torch.manual_seed(3)
        with torch.no_grad():
            out = [call(td.clone()) for _ in range(2)][-1]
        results.append({**{k: out[k] for k in "abcdefgh"}, **{k: v.clone() for k, v in module.state_dict().items()}})
    for key, wanted in results[0].items():
        torch.testing.assert_close(results[1][key], wanted, rtol=1e-6, atol=1e-6)
    assert everything.entries()[0].backend == "aot" and module.calls == before["calls"] + 2


def test_weights_are_live_and_outputs_are_new_tensors(everything):
    module, td = everything.graph[0].module, batch()
    with torch.no_grad():
        first = everything(td.clone())
        kept = {k: first[k].clone() for k in "abdh"}
        module.layer.weight.zero_()
        module.layer.bias.fill_(5.0)
        second = everything(td.clone())
    assert all(torch.equal(first[k], kept[k]) for k in kept)
    assert torch.equal(second["g"], torch.full((2, 4), 5.0))


def test_gradients_pass_through():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    graph = KeyedGraph((net, ["x"], ["y"]))
    x = torch.randn(5, 3, dtype=torch.float64)
    fast = grl.compile(graph, backend="aot", strict=True)
    grads = []
    for call in (graph, fast):
        net.zero_grad()
        call(TensorDict(x=x, batch_size=[5]))["y"].square().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_a_whole_update_equals_eager():
    def make():
        torch.manual_seed(1)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        def step(td):
            loss = (net(td["x"]) - td["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        return net, step

    td = TensorDict(x=torch.randn(6, 3), y=torch.randn(6, 1), batch_size=[6])
    (net, step), (other, eager) = make(), make()
    fast = grl.compile_update(step, td, backend="aot", strict=True)
    for _ in range(3):
        found, wanted = fast(td), eager(td)
        torch.testing.assert_close(found["loss"], wanted["loss"])
    torch.testing.assert_close(dict(net.state_dict()), dict(other.state_dict()))


def test_a_package_is_loaded_by_torch_alone_and_compiled_once(tmp_path, fresh_cache, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    td = TensorDict(x=torch.randn(2, 3), batch_size=[2])
    graph = KeyedGraph((net, ["x"], ["y"]), (lambda y: y + torch.randn_like(y), ["y"], ["noisy"]))
    program = run_passes(trace(graph, td), deploy=True)
    aot.write_package(program, tmp_path / "policy.pt2")
    loaded = torch._inductor.aoti_load_package(str(tmp_path / "policy.pt2"))
    noise = torch.randn(2, 2)
    with torch.no_grad():
        wanted = net(td["x"])
        found = dict(zip(program.out_keys, loaded(td["x"], noise), strict=True))
        net[0].weight.zero_()
        again = dict(zip(program.out_keys, loaded(td["x"], noise), strict=True))
    torch.testing.assert_close(found["y"], wanted)
    torch.testing.assert_close(found["noisy"], wanted + noise)
    assert torch.equal(again["y"], found["y"])  # weights are inside: another weight in training changes nothing

    live = run_passes(trace(graph, td))
    aot.BACKEND.lower(live)
    monkeypatch.setattr(aot, "_compile", lambda *_: pytest.fail("compiled again"))
    lowered = aot.BACKEND.lower(live)
    verify_lowered(live, lowered, "aot", live.arguments([td["x"]]))


def test_programs_that_differ_in_a_number_alone_are_kept_apart(monkeypatch):
    written = []
    monkeypatch.setattr(aot, "_compile", lambda module, arguments, threads, path: path.write_bytes(b""))
    for number in (1.0, 2.0, 1.0):
        graph = KeyedGraph((lambda x, n=number: x * n + torch.tensor([n, 1.0]), ["x"], ["y"]))
        program = run_passes(trace(graph, TensorDict(x=torch.zeros(3, 2), batch_size=[3])))
        written.append(aot._cached_package(program, threads=1))
    written.append(aot._cached_package(program, threads=2))
    assert written[0] == written[2] and len(set(written)) == 3


def test_refusals_and_errors_say_what_to_do(tmp_path, monkeypatch):
    graph = KeyedGraph((nn.Linear(3, 2), ["x"], ["y"]))
    empty = trace(graph, TensorDict(x=torch.zeros(0, 3), batch_size=[0]))
    assert "is empty" in aot.BACKEND.supports(empty).reason
    with pytest.raises(CompileError, match="is empty"):
        aot.BACKEND.lower(empty)
    some = trace(graph, TensorDict(x=torch.zeros(2, 3), batch_size=[2]))
    with pytest.raises(CompileError, match="ends in .pt2, not 'policy.so'"):
        aot.write_package(some, tmp_path / "policy.so")
    with pytest.raises(CompileError, match="is empty"):
        aot.write_package(empty, tmp_path / "policy.pt2")
    monkeypatch.setattr(torch.export, "export", lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler\nmore")))
    with pytest.raises(CompileError, match="could not compile this program: no compiler$"):
        aot.write_package(some, tmp_path / "policy.pt2")


@pytest.mark.parametrize(
    ("package", "here", "reason"),
    [
        ({}, {}, None),
        ({"torch": "2.13.0+cu130"}, {"torch": "2.13.0+cpu"}, None),
        ({"instruction_set": "AVX2"}, {"instruction_set": "AVX512"}, None),
        ({"instruction_set": "DEFAULT"}, {"instruction_set": "AVX2"}, None),
        ({"torch": "2.13.0"}, {"torch": "2.13.1+cpu"}, "is for torch 2.13.0, here is 2.13.1"),
        ({"instruction_set": "AVX512"}, {"instruction_set": "AVX2"}, "x86_64 with AVX512, here is x86_64 with AVX2"),
        ({"instruction_set": "SVE256"}, {"instruction_set": "DEFAULT"}, "with SVE256, here is x86_64 with DEFAULT"),
        ({"machine": "aarch64", "instruction_set": "DEFAULT"}, {}, "for aarch64 with DEFAULT, here is x86_64"),
    ],
)
def test_a_package_is_for_one_torch_and_an_instruction_set(package, here, reason, monkeypatch):
    host = {"torch": "2.13.0", "machine": "x86_64", "instruction_set": "AVX2"}
    monkeypatch.setattr(aot, "package_host", lambda: host | here)
    said = aot.why_not_on_host(host | package)
    assert said is None if reason is None else reason in said
