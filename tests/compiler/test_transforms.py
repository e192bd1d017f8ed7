"""torch.func transforms, functional parameters and inference mode around a compiled graph."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.errors import CompileError


def policy():
    return KeyedGraph((nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), ["x"], ["y"]))


def pair(backend="eager"):
    graph = policy()
    return grl.compile(graph, TensorDict(x=torch.randn(4, 3), batch_size=[4]), backend=backend), graph


def batch(x):
    return TensorDict(x=x, batch_size=x.shape[:1])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: grad(lambda v: f(batch(v))["y"].square().sum())(x),
        lambda f, x: grad(lambda v: f(v).square().sum())(x),
        lambda f, x: vmap(lambda v: f(v))(x[:, None]),
        lambda f, x: vmap(lambda v: f(TensorDict(x=v, batch_size=[]))["y"])(x),
        lambda f, x: jacrev(lambda v: f(v))(x),
        lambda f, x: jacrev(jacrev(lambda v: f(v).sum()))(x[:1]),
        lambda f, x: vmap(grad(lambda v: f(v).sum()))(x),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_transforms_over_inputs_equal_eager(transform, backend):
    fast, graph = pair(backend)
    x = torch.randn(4, 3)
    torch.testing.assert_close(transform(fast, x), transform(graph, x))


def test_gradients_of_functional_parameters_equal_eager():
    fast, graph = pair()
    x, parameters = torch.randn(4, 3), {k: v.detach() for k, v in graph.named_parameters()}

    def loss(module):
        return lambda p: functional_call(module, p, (batch(x),))["y"].square().sum()

    found, expected = grad(loss(fast))(parameters), grad(loss(graph))(parameters)
    for name in parameters:
        torch.testing.assert_close(found[name], expected[name])


def test_a_functional_call_uses_the_parameters_given_and_only_for_that_call():
    fast, graph = pair("inductor")
    x = torch.randn(4, 3)
    zeros = {k: torch.zeros_like(v) for k, v in graph.named_parameters()}
    with torch.no_grad():
        before = fast.call(x)[0]
        assert (functional_call(fast, zeros, (batch(x),))["y"] == 0).all()
        assert torch.equal(fast.call(x)[0], before)


def test_gradients_reach_functional_parameters_outside_a_transform():
    fast, graph = pair()
    x = torch.randn(4, 3)
    own = {k: v.detach().clone().requires_grad_() for k, v in graph.named_parameters()}

    def gradients(module):
        scaled = {k: 2 * v for k, v in own.items()}
        return torch.autograd.grad(functional_call(module, scaled, (batch(x),))["y"].sum(), list(own.values()))

    for a, b in zip(gradients(fast), gradients(graph), strict=True):
        torch.testing.assert_close(a, b)


def test_an_ensemble_under_vmap_equals_eager():
    fast, _ = pair()
    members = [policy() for _ in range(3)]
    parameters, buffers = stack_module_state(members)
    x = torch.randn(4, 3)
    found = vmap(lambda p, b: functional_call(fast, (p, b), (batch(x),))["y"])(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([m(x) for m in members]))


def test_parameters_of_a_tensordict_in_a_context_and_stacked():
    fast, graph = pair("inductor")
    x = torch.randn(4, 3)
    members = [TensorDict.from_module(policy()) for _ in range(2)]
    with torch.no_grad():
        before = fast.call(x)[0]
        for parameters in (members[0], members[1], members[0].apply(torch.zeros_like)):
            with parameters.to_module(graph):
                expected = graph(x)
                torch.testing.assert_close(fast.call(x)[0], expected)
        assert (expected == 0).all()
        torch.testing.assert_close(fast.call(x)[0], before)

        def run(parameters):
            with parameters.to_module(graph):
                return fast(batch(x))["y"]

        found = vmap(run)(torch.stack([m.data for m in members]))
        for i, member in enumerate(members):
            with member.to_module(graph):
                torch.testing.assert_close(found[i], graph(x))
    assert fast.retraces == []


def test_second_derivatives_are_refused_under_autograd_and_right_under_transforms():
    fast, graph = pair()
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(CompileError, match="first derivatives only"):
        torch.autograd.grad(fast(batch(x))["y"].square().sum(), x, create_graph=True)
    (first,) = torch.autograd.grad(fast(batch(x))["y"].square().sum(), x)
    torch.testing.assert_close(first, torch.autograd.grad(graph(batch(x))["y"].square().sum(), x)[0])
    twice = grad(lambda v: grad(lambda w: fast.call(w)[0].square().sum())(v).square().sum())
    assert twice(x.detach()).abs().sum() > 0


# ---- no gradients


@pytest.mark.parametrize("backend", ["eager", "inductor", "native"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_output_requires_grad(mode, backend):
    fast, _ = pair(backend)
    with mode():
        for x in (torch.randn(4, 3), torch.randn(6, 3), torch.randn(4, 3)):
            y = fast.call(x)[0]
            assert not y.requires_grad and y.grad_fn is None
            assert not fast(batch(x))["y"].requires_grad
    assert not any(e.differentiable for e in fast.entries())


@pytest.mark.parametrize("backend", ["eager", "inductor", "native"])
def test_a_program_compiled_in_inference_mode_does_for_gradients_after(backend):
    graph = policy()
    fast = grl.compile(graph, backend=backend)
    with torch.inference_mode():
        inside = torch.randn(4, 3)
        fast.call(inside), fast.call(torch.randn(6, 3))
    x = torch.randn(4, 3, requires_grad=True)
    for n in (4, 6, 4):
        x = torch.randn(n, 3, requires_grad=True)
        found = torch.autograd.grad(fast.call(x)[0].square().sum(), [x, *graph.parameters()])
        expected = torch.autograd.grad(graph(x).square().sum(), [x, *graph.parameters()])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(fast.call(inside)[0], graph(inside))  # an inference tensor as input


@pytest.mark.parametrize("backend", ["eager", "inductor", "native"])
def test_weights_made_in_inference_mode(backend):
    with torch.inference_mode():
        graph = policy()
        fast = grl.compile(graph, backend=backend)
        x = torch.randn(4, 3)
        torch.testing.assert_close(fast.call(x)[0], graph(x))
    with torch.no_grad():
        torch.testing.assert_close(fast.call(torch.ones(4, 3))[0], graph(torch.ones(4, 3)))
        torch.testing.assert_close(fast.call(torch.ones(7, 3))[0], graph(torch.ones(7, 3)))
