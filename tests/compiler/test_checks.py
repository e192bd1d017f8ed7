"""Asserts and argument checks in traced code: answered while tracing, made again at each call."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Distribution, Normal

import graphrl as grl
from graphrl.errors import GraphError, TraceError
from graphrl.models import CategoricalActor, GaussianActor, TanhGaussianActor

BACKENDS = ["eager", "inductor", "native", "onnx"]


def observations(n=4):
    return TensorDict(observation=torch.randn(n, 5), batch_size=[n])


def asserting(x):
    assert x.isfinite().all(), "x must be finite"
    if (x.abs() > 10).any():
        raise ValueError("x is too large")
    return 2 * x


def graph_of(function):
    return grl.KeyedGraph((function, ["x"], ["y"]))


def batch_of(x):
    return TensorDict(x=x, batch_size=[len(x)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_assert_that_fails_later_raises_its_own_error(backend):
    fast = grl.compile(graph_of(asserting), batch_of(torch.zeros(3, 2)), backend=backend, strict=True)
    assert torch.equal(fast(batch_of(torch.ones(3, 2)))["y"], torch.full((3, 2), 2.0))
    with pytest.raises(ValueError, match="x is too large"):
        fast(batch_of(torch.full((3, 2), 11.0)))
    with pytest.raises(AssertionError, match="x must be finite"):
        fast.call(torch.full((3, 2), float("nan")))
    assert torch.equal(fast.call(torch.ones(3, 2))[0], torch.full((3, 2), 2.0))
    assert fast.retraces == [] and len(fast.entries()[0].program.assumptions) == 2


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_check_holds_with_gradients_too(backend):
    fast = grl.compile(graph_of(asserting), backend=backend, strict=True)
    x = torch.ones(3, 2, requires_grad=True)
    fast(batch_of(x))["y"].sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 2.0))
    with pytest.raises(ValueError, match="x is too large"):
        fast(batch_of(torch.full((3, 2), 11.0, requires_grad=True)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("actor", [GaussianActor, TanhGaussianActor, CategoricalActor])
def test_a_policy_refuses_nan_as_eager_does(actor, backend):
    graph = actor(5, 3)
    fast = grl.compile(graph, observations(), backend=backend, strict=True)
    bad = observations()
    bad["observation"][2, 1] = float("nan")
    with torch.no_grad():
        torch.manual_seed(1)
        found = fast(observations())
        torch.manual_seed(1)
        torch.testing.assert_close(found["action"], graph(observations())["action"])
        with pytest.raises(GraphError, match="Expected parameter (loc|logits)"):
            fast(bad)


def negative_scale(x):
    return Normal(torch.zeros_like(x), x).rsample()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negative_scale_is_an_error_in_eager_and_compiled(backend):
    graph = graph_of(negative_scale)
    fast = grl.compile(graph, batch_of(torch.ones(3, 2)), backend=backend, strict=True)
    bad = torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    for run in (graph, fast):
        with pytest.raises(GraphError, match="Expected parameter scale"):
            run(batch_of(bad))


def test_torch_s_own_switch_turns_argument_checks_off():
    fast = grl.compile(graph_of(negative_scale), batch_of(torch.ones(3, 2)), backend="eager")
    bad = batch_of(-torch.ones(3, 2))
    Distribution.set_default_validate_args(False)  # the test's fixture puts it back
    assert fast(bad)["y"].shape == (3, 2)
    assert fast.entries()[-1].program.assumptions == ()
    Distribution.set_default_validate_args(True)
    with pytest.raises(GraphError):
        fast(bad)


def test_a_failed_check_leaves_statistics_as_they_were():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            assert (x > 0).all()
            return x + self.seen

    module = Counting()
    fast = grl.compile(graph_of(module), batch_of(torch.ones(2, 1)), backend="inductor")
    with torch.no_grad():
        fast(batch_of(torch.ones(2, 1)))
        assert module.seen == 1
        with pytest.raises(AssertionError):
            fast(batch_of(-torch.ones(2, 1)))  # eager counts before it asserts, once
    assert module.seen == 2


@pytest.mark.parametrize("backend", ["native", "inductor"])
def test_rows_of_a_collector_are_checked_one_by_one(backend):
    fast = grl.compile(graph_of(asserting), backend=backend, strict=True)
    inputs, outputs = torch.ones(5, 3, 2), torch.zeros(5, 3, 2)
    rows = [(x,) for x in inputs], [(y,) for y in outputs]
    with torch.no_grad():
        step = fast.bind_rows(*rows)
        step(0)
        inputs[1] = 11.0
        with pytest.raises(ValueError, match="x is too large"):
            step(1)
        step(2)
        with pytest.raises(ValueError, match="x is too large"):
            fast.call_into((inputs[1],), (outputs[1],))
    assert torch.equal(outputs[0], outputs[2]) and outputs[0].eq(2).all() and outputs[3:].eq(0).all()


def branching(x):
    if (x > 0).all():
        x = x + 1
    return x


def raising_one_way(x):
    if (x > 0).all():
        x = x + 1
    else:
        raise ValueError("not positive")
    return x


@pytest.mark.parametrize("function", [branching, raising_one_way])
def test_a_branch_is_no_check_and_the_error_names_node_key_line_and_ways_out(function):
    with pytest.raises(TraceError) as caught:
        grl.compile(graph_of(function), batch_of(torch.ones(2, 2)))
    line = function.__code__.co_firstlineno + 1
    for part in (f"node {function.__name__} (['x'] -> ['y'])", f"test_checks.py:{line}", "torch.where", "opaque"):
        assert part in str(caught.value)


def test_a_traced_program_states_what_it_took_for_granted():
    program = grl.trace(graph_of(asserting), batch_of(torch.ones(3, 2)))
    assert program.out_keys == ["y"]
    assert [line.split(": ")[1] for line in program.assumptions] == ["x.isfinite().all()", "(x.abs() > 10).any()"]
    assert "x.isfinite().all()" in str(grl.explain(grl.compile(graph_of(asserting), batch_of(torch.ones(3, 2)))))


def one_sign(x):
    noise = torch.randn_like(x)
    assert (x > 0).all() or (x < 0).all(), "x has both signs"
    return x + noise


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_a_check_that_comes_out_another_way_leaves_eagers_draws(backend, grad):
    graph = graph_of(one_sign)
    fast = grl.compile(graph, batch_of(torch.ones(4, 2)), backend=backend)
    x = -torch.ones(4, 2)
    fast.call(x.clone().requires_grad_(grad))
    for _ in range(2):
        drawn = []
        for g in (graph, fast):
            torch.manual_seed(1)
            drawn.append((g(batch_of(x.clone().requires_grad_(grad)))["y"], torch.rand(3)))
        assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    into = torch.empty(4, 2)
    torch.manual_seed(1)
    fast.call_into([x], [into])
    assert torch.equal(into, drawn[0][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_traces_and_keeps_its_own_error(backend):
    graph = graph_of(lambda x: torch.nn.functional.one_hot(x, 3).float() * 2.0)
    fast = grl.compile(graph, batch_of(torch.tensor([0, 2, 1])), backend=backend, strict=True)
    for x in (torch.tensor([1, 1, 0]), torch.tensor([2, 0, 0])):
        assert torch.equal(fast(batch_of(x))["y"], graph(batch_of(x))["y"])
    with pytest.raises(GraphError, match="Class values must be smaller than num_classes"):
        fast(batch_of(torch.tensor([0, 3, 1])))


def test_an_operator_that_takes_functions_is_refused_with_ways_out():
    graph = graph_of(lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)))
    with pytest.raises(TraceError, match="calls torch.cond, or another operator that takes functions.*torch.where"):
        grl.compile(graph, batch_of(torch.ones(2, 2)))
