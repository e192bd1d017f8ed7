"""Random keyed graphs: after every pass, and in every backend, values and gradients are eager's."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.check_program import check_program
from graphrl.compiler.passes.pipeline import DEPLOY, LIVE
from graphrl.compiler.trace import trace_joint
from graphrl.compiler.verify import relative_error
from graphrl.errors import GraphError

WIDTH, ROWS = 4, 16
KEYS = ["x", "h", "a", "b", "c", ("next", "x")]


def slice_and_pad(x):
    return torch.cat([x[..., 1:3], x[..., :2]], -1)


def residual(x):
    return x + x.tanh() * 0.5


def detached(x):
    return x.detach() * 0.5 + x


def repeated(x):
    return x.sigmoid() * 2 - x.sigmoid()


def normalised(x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1.0)


def turned(x):
    return x.t().contiguous().t().clamp(-2.0, 2.0)


def joined(x, y):
    return torch.cat([x, y], -1)[..., ::2]


def chosen(x, y):
    return torch.where(x > y, x, 0.5 * y)


class Ensemble(nn.Module):
    """Equal networks side by side, which one pass runs as one."""

    def __init__(self, lanes=3):
        super().__init__()
        members = [nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(lanes)]
        self.members = nn.ModuleList(members)

    def forward(self, x):
        return torch.stack([member(x) for member in self.members]).mean(0)


UNARY = [torch.tanh, torch.relu, torch.sin, slice_and_pad, residual, detached, repeated, normalised, turned]
BINARY = [torch.add, torch.mul, joined, chosen, torch.maximum]


@st.composite
def graphs(draw, without=()):
    """A random well-formed graph over rows of ``WIDTH`` numbers, a batch for it, and which key it is judged by."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    layers = [nn.Linear(WIDTH, WIDTH), Ensemble()]
    layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(), nn.LayerNorm(WIDTH))]
    known, nodes = ["x"], []
    for _ in range(draw(st.integers(1, 7))):
        two = draw(st.booleans())
        reads = [draw(st.sampled_from(known)) for _ in range(1 + two)]
        operation = draw(st.sampled_from([f for f in (BINARY if two else [*UNARY, *layers]) if f not in without]))
        write = draw(st.sampled_from(KEYS))
        nodes.append((operation, reads, [write]))
        known += [write] if write not in known else []
    outs = {write for _, _, (write,) in nodes}
    shown = draw(st.lists(st.sampled_from(sorted(outs, key=str)), min_size=1, unique=True))
    return KeyedGraph(*nodes, out_keys=shown).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)


def results(graph, call, x):
    """Outputs by key, then the gradients of input and weights."""
    graph.zero_grad()
    x = x.clone().requires_grad_()
    out = call(TensorDict(x=x, batch_size=[ROWS]))
    values = [out.get(key) for key in graph.out_keys]
    loss = sum((v * (1 + i)).square().sum() for i, v in enumerate(values))
    if loss.requires_grad:
        loss.backward()
    return [v.detach() for v in values], [x.grad, *(p.grad for p in graph.parameters())]


def assert_equal(graph, fast, x):
    other = copy.deepcopy(graph)
    (values, gradients), (wanted, wanted_gradients) = results(graph, fast, x), results(other, other, x)
    torch.testing.assert_close(values, wanted, rtol=1e-11, atol=1e-12)
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        zero = torch.zeros(()) if found is None and expected is None else None
        if zero is None:
            found = torch.zeros_like(expected) if found is None else found
            expected = torch.zeros_like(found) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


steady = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@settings(steady, max_examples=20)
@given(graphs())
def test_the_interpreted_program_equals_eager_in_values_and_gradients(case):
    graph, x = case
    assert_equal(graph, grl.compile(graph, backend="eager", strict=True), x)


@settings(steady, max_examples=60)
@given(graphs(), st.data())
def test_selecting_a_key_keeps_its_value(case, data):
    graph, x = case
    key = data.draw(st.sampled_from(graph.out_keys))
    cut = graph.select(out_keys=[key])
    assert len(cut) <= len(graph) and set(cut.state_dict()) <= set(graph.state_dict())
    td = TensorDict(x=x, batch_size=[ROWS])
    assert torch.equal(cut(td.clone()).get(key), graph(td.clone()).get(key))


@settings(steady, max_examples=60)
@given(graphs())
def test_nesting_changes_nothing(case):
    graph, x = case
    half = len(graph) // 2
    nodes = list(graph)
    try:
        nested = KeyedGraph(
            *([KeyedGraph(*nodes[:half])] if half else []), KeyedGraph(*nodes[half:]), out_keys=graph.out_keys
        )
    except GraphError:  # a value that only the other half reads is lost in a half of its own
        return
    td = TensorDict(x=x, batch_size=[ROWS])
    for key in graph.out_keys:
        assert torch.equal(nested(td.clone()).get(key), graph(td.clone()).get(key))


class Side(nn.Module):
    """One graph among others in a larger one."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def forward(self, x):
        out = self.graph(TensorDict(x=x, batch_size=[ROWS]))
        return tuple(out.get(key) for key in self.graph.out_keys)


def side_by_side(cases):
    """Many graphs as one, so that one compilation tries all of them."""
    nodes = [(Side(graph), ["x"], [(f"graph_{i}", f"out_{j}") for j in range(len(graph.out_keys))])
             for i, (graph, _) in enumerate(cases)]  # fmt: skip
    return KeyedGraph(*nodes)


class Cases(list):
    def __repr__(self):
        return f"{len(self)} graphs"


def groups(size, **options):
    return st.lists(graphs(**options), min_size=size, max_size=size).map(Cases)


many = settings(steady, phases=[Phase.generate])  # shrinking would compile for minutes


@pytest.mark.parametrize("passes", [LIVE, DEPLOY], ids=["live", "deploy"])
@settings(many, max_examples=2)
@given(cases=groups(15))
def test_every_pass_keeps_values_and_gradients_is_legal_and_is_done_after_one_run(passes, cases):
    graph, x = side_by_side(cases), cases[0][1]
    td = TensorDict(x=x, batch_size=[ROWS])
    joint = trace_joint(graph, td, [True] * len(graph.in_keys))
    program = grl.trace(graph, td) if joint is None else joint.program
    arguments = [x if port.key == "x" else torch.randn(port.shape, dtype=port.dtype) for port in program.inputs]
    check_program(program)
    with torch.no_grad():
        wanted = program.run(*arguments)
        for step in passes:
            after = check_program(step(program), step.__name__)
            torch.testing.assert_close(after.run(*arguments), wanted, rtol=1e-11, atol=1e-12)
            assert step(after).code == after.code, step.__name__
            program = after


@settings(many, max_examples=10)
@given(groups(20))
def test_200_interpreted_programs_equal_eager_in_values_and_gradients(cases):
    graph, x = side_by_side(cases), cases[0][1]
    assert_equal(graph, grl.compile(graph, backend="eager", strict=True), x)


@settings(many, max_examples=4)
@given(groups(20, without=(slice_and_pad, joined)))  # the gradient of a slice is not among generated C's operations
def test_80_graphs_in_generated_c_equal_eager_in_values_and_gradients(cases):
    graph, x = side_by_side(cases), cases[0][1]
    single = copy.deepcopy(graph).float()
    fast = grl.compile(single, backend="native", strict=True)
    runs = [results(single, fast, x.float()), results(single, single, x.float()), results(graph, graph, x)]
    for found, own, expected in zip(*([*values, *gradients] for values, gradients in runs), strict=True):
        if expected is not None:
            found = torch.zeros_like(expected) if found is None else found
            own = torch.zeros_like(expected) if own is None else own
            assert relative_error(found, expected) <= 8 * relative_error(own, expected) + 1e-5


@settings(many, max_examples=1)
@given(groups(12))
def test_inductor_equals_eager_in_values_and_gradients(cases):
    graph, x = side_by_side(cases), cases[0][1]
    assert_equal(graph, grl.compile(graph, backend="inductor", strict=True), x)
