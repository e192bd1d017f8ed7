"""Programs cut into parts: who runs what, and that values, gradients, draws and written state stay eager's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from test_random_graphs import assert_equal, graphs, steady
from torch import Tensor, nn

import graphrl as grl
from graphrl.compiler import lower, parts
from graphrl.compiler.backends import Refusal, get_backend
from graphrl.compiler.backends.native import find_compiler
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.errors import CompileError
from graphrl.graph import KeyedGraph

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


class Picky:
    """Interprets programs, but refuses some operations; notes what it was given."""

    name = "picky"

    def __init__(self, dislikes):
        self.dislikes, self.ran = set(dislikes), []

    def supports(self, program):
        names = {n.target.__name__.split(".")[0] for n in program.graph_module.graph.nodes if n.op == "call_function"}
        bad = sorted(names & self.dislikes)
        return Refusal(f"no {bad[0]}") if bad else None

    def lower(self, program):
        assert self.supports(program) is None
        self.ran.append(program)
        return get_backend("eager").lower(program)


def use(monkeypatch, backend, smallest=1):
    monkeypatch.setattr(lower, "get_backend", lambda name: backend if name == "picky" else get_backend(name))
    for asking in ("compiled", "update"):
        monkeypatch.setattr(f"graphrl.compiler.{asking}.get_backend", lambda name: None)
    monkeypatch.setattr(lower, "FALLBACKS", ("eager",))
    monkeypatch.setattr(parts, "MIN_OPERATIONS", smallest)
    monkeypatch.setattr(parts, "MAX_PARTS", 99)


OPERATIONS = (
    "add mul tanh relu sin sigmoid cat slice addmm gt where mean sub div maximum permute clamp native_layer_norm"
).split()


def test_random_graphs_cut_anywhere_equal_eager_in_values_and_gradients(monkeypatch):
    backends = set()

    @settings(steady, max_examples=40, phases=[Phase.generate])
    @given(graphs(), st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=6, unique=True))
    def run(case, dislikes):
        graph, x = case
        use(monkeypatch, Picky(dislikes))
        fast = grl.compile(graph, backend="picky")
        assert_equal(graph, fast, x)
        backends.add(fast.entries()[0].backend)

    run()
    assert len({b for b in backends if "picky (" in b and "eager (" in b}) > 3, "too few graphs were cut to tell"


class Stateful(nn.Module):
    """Writes state that other operations read before and after, with a draw between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("turn", torch.zeros(4, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x - self.mean).sin()
        noisy = (y + torch.randn_like(y) * self.mean.exp()).cumsum(-1)
        self.mean.lerp_(noisy.mean(0), 0.5)
        self.turn.copy_(self.turn.t() + noisy.t() @ noisy)
        self.count += 1
        return noisy.tanh() * self.mean, self.turn.sum(), y.t()


@pytest.mark.parametrize("dislikes", [["sin"], ["cumsum", "exp"], ["mean", "tanh"], ["addmm", "add"]])
def test_written_state_and_draws_equal_eager(monkeypatch, dislikes):
    backend = Picky(dislikes)
    use(monkeypatch, backend)
    torch.manual_seed(0)
    graph = KeyedGraph((Stateful(), ["x"], ["a", "b", "c"]))
    td = TensorDict(x=torch.randn(4, 4), batch_size=[])
    fast = grl.compile(graph, td, backend="picky")
    assert "picky (" in fast.entries()[0].backend and "eager (" in fast.entries()[0].backend and backend.ran
    before = {k: v.clone() for k, v in graph.state_dict().items()}
    results = []
    for call in (graph, fast):
        graph.load_state_dict(before)
        torch.manual_seed(7)
        with torch.no_grad():
            out = [call(td.clone()) for _ in range(3)][-1]
        results.append(({k: out[k] for k in "abc"}, {k: v.clone() for k, v in graph.state_dict().items()}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert results[1][1]["nodes.0.module.count"] == 3


def test_a_cut_update_equals_eager(monkeypatch):
    def make():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        def step(td):
            loss = (net(td["x"]) - td["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            return {"loss": loss}

        return net, step

    backend = Picky(["tanh", "sqrt"])
    use(monkeypatch, backend)
    td = TensorDict(x=torch.randn(6, 3), y=torch.randn(6, 1), batch_size=[6])
    (net, step), (other, eager) = make(), make()
    fast = grl.compile_update(step, td, backend="picky")
    for _ in range(3):
        found, wanted = fast(td), eager(td)
        torch.testing.assert_close(found["loss"], wanted["loss"])
    torch.testing.assert_close(dict(net.state_dict()), dict(other.state_dict()))
    assert "picky (" in fast.entries()[0].backend and all(not s.mutated for p in backend.ran for s in p.state)


def chain(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *middle, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values


@needs_compiler
def test_native_keeps_the_network_around_an_operation_that_it_lacks():
    graph = KeyedGraph((chain(Sorted()), ["x"], ["y"]))
    td = TensorDict(x=torch.randn(3, 4), batch_size=[3])
    fast = grl.compile(graph, td, backend="native")
    (entry,) = fast.entries()
    assert entry.backend == "native (2 parts), inductor (1 part)"
    assert [r.split(",")[0] for r in entry.refusals] == [
        "native: operation sort.default is not supported in generated C"
    ]
    text = str(grl.explain(fast))
    assert "part 1 on inductor, 1 thread: 1 sort" in text and "part 2 on native" in text and "on the way to 'y'" in text
    out = [torch.empty(3, 2)]
    with torch.no_grad():
        wanted = graph(td.clone())["y"]
        torch.testing.assert_close(fast(td.clone())["y"], wanted)
        fast.call_into([td["x"]], out)
        torch.testing.assert_close(out[0], wanted)
        rows = [[torch.empty(3, 2)] for _ in range(2)]
        step = fast.bind_rows([[td["x"]], [2 * td["x"]]], rows)
        step(0), step(1)
        torch.testing.assert_close(rows[0][0], wanted)
        torch.testing.assert_close(rows[1][0], graph(TensorDict(x=2 * td["x"], batch_size=[3]))["y"])
        graph[0].module[0].weight.zero_()  # weights stay live in every part
        torch.testing.assert_close(fast(td.clone())["y"], graph(td.clone())["y"])
    with pytest.raises(CompileError, match="native refuses program: operation sort.default"):
        grl.compile(graph, td, backend="native", strict=True)


def test_refusals_of_one_kind_are_one_line():
    def run(x):
        return x.sin().tanh().sin() + torch.sort(x, -1).values.tanh()

    program = run_passes(trace(KeyedGraph((run, ["x"], ["y"])), TensorDict(x=torch.randn(2, 3), batch_size=[2])))
    reasons = list(parts.unsupported_nodes(Picky(["sin", "sort"]), program).values())
    assert reasons == ["no sin", "no sin", "no sort"]
    assert lower._summary(reasons) == ["no sin (and 1 more)", "no sort"]


@needs_compiler
def test_gradients_flow_through_parts():
    graph = KeyedGraph((chain(Sorted()), ["x"], ["y"]))
    fast = grl.compile(graph, backend="native")
    x = torch.randn(3, 4)
    grads = []
    for call in (graph, fast):
        graph.zero_grad()
        leaf = x.clone().requires_grad_()
        call(TensorDict(x=leaf, batch_size=[3]))["y"].square().sum().backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in graph.parameters())])
    torch.testing.assert_close(grads[1], grads[0])
    assert "native (" in fast.entries()[0].backend


def test_a_part_too_small_for_a_call_goes_to_its_neighbour(monkeypatch):
    backend = Picky(["addmm"])
    use(monkeypatch, backend, smallest=8)
    graph = KeyedGraph((chain(), ["x"], ["y"]))  # without products only a tanh and a relu are left
    fast = grl.compile(graph, TensorDict(x=torch.randn(3, 4), batch_size=[3]), backend="picky")
    assert fast.entries()[0].backend == "eager" and fast.entries()[0].refusals == ("picky: no addmm",)


def test_too_many_parts_are_not_made(monkeypatch):
    use(monkeypatch, Picky(["sin"]))
    monkeypatch.setattr(parts, "MAX_PARTS", 8)

    def run(x, times):
        for _ in range(times):
            x = x.tanh().sin()
        return x

    for times, backend in ((4, "picky (4 parts), eager (4 parts)"), (5, "eager")):
        graph = KeyedGraph((lambda x, n=times: run(x, n), ["x"], ["y"]))
        fast = grl.compile(graph, TensorDict(x=torch.randn(3), batch_size=[3]), backend="picky")
        assert fast.entries()[0].backend == backend


def test_what_the_backend_refuses_as_a_whole_is_not_cut(monkeypatch):
    graph = KeyedGraph((chain(), ["x"], ["y"])).double()
    fast = grl.compile(graph, TensorDict(x=torch.randn(3, 4).double(), batch_size=[3]), backend="native")
    assert fast.entries()[0].backend == "inductor"


def test_a_program_that_writes_into_its_input_is_not_cut(monkeypatch):
    use(monkeypatch, Picky(["sin"]))
    graph = KeyedGraph((lambda x: x.add_(1).tanh().sin(), ["x"], ["y"]))
    fast = grl.compile(graph, TensorDict(x=torch.randn(3), batch_size=[3]), backend="picky")
    assert fast.entries()[0].backend == "eager"
