import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.errors import CompileError


def gradients(graph, call, x, weights=None):
    """Outputs, then the gradients of a weighted sum of them with respect to the input and every parameter."""
    x = x.clone().requires_grad_()
    graph.zero_grad()
    outputs = call(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y * torch.linspace(-1, 2, y.numel()).reshape(y.shape).to(y)).sum() for y in outputs if y.requires_grad)
    loss.backward()
    return [y.detach() for y in outputs], [x.grad, *(p.grad for p in graph.parameters())]


def assert_gradients_equal(graph, x, backend="eager"):
    graph = graph.double()
    other = copy.deepcopy(graph)
    fast = grl.compile(graph, backend=backend, strict=True)
    found, expected = gradients(graph, fast.call, x), gradients(other, other, x)
    for a, b in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return fast


class Reverse(torch.autograd.Function):
    """The identity, with its gradient turned round."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -2 * gradient


def without_gradient(x):
    with torch.no_grad():
        y = x.exp()
    return x * y


def shared(layer):
    return KeyedGraph((layer, ["x"], ["h"]), (torch.tanh, ["h"], ["h"]), (layer, ["h"], ["y"]))


def frozen():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    return KeyedGraph((layer, ["x"], ["y"]))


GRAPHS = {
    "two layers": lambda: KeyedGraph(
        (nn.Linear(3, 4), ["x"], ["h"]), (torch.tanh, ["h"], ["h"]), (nn.Linear(4, 2), ["h"], ["y"])
    ),
    "a shared layer": lambda: shared(nn.Linear(3, 3)),
    "a frozen parameter": frozen,
    "detach": lambda: KeyedGraph((nn.Linear(3, 3), ["x"], ["h"]), (lambda h, x: h.detach() * x + h, ["h", "x"], ["y"])),
    "no_grad inside": lambda: KeyedGraph((nn.Linear(3, 3), ["x"], ["h"]), (without_gradient, ["h"], ["y"])),
    "a custom function": lambda: KeyedGraph((nn.Linear(3, 3), ["x"], ["h"]), (Reverse.apply, ["h"], ["y"])),
    "an output that carries none": lambda: KeyedGraph(
        (nn.Linear(3, 3), ["x"], ["y"]), (lambda y: (y.argmax(-1), y.detach().exp()), ["y"], ["index", "z"])
    ),
    "an input as output": lambda: KeyedGraph((lambda x: (x, x.sin()), ["x"], ["same", "y"])),
    "a parameter as output": lambda: KeyedGraph((Scaled(), ["x"], ["scale", "y"])),
    "batch norm": lambda: KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"])),
    "layer norm and softmax": lambda: KeyedGraph(
        (nn.LayerNorm(3), ["x"], ["h"]), (lambda h: h.log_softmax(-1), ["h"], ["y"])
    ),
    "a value saved in another layout": lambda: KeyedGraph(
        (lambda x: (x.tanh() * 2).t().contiguous().t(), ["x"], ["h"]),
        (lambda h: (h.exp().t().view(15) * h.t().sin().view(15)).view(3, 5).t(), ["h"], ["y"]),
        (lambda x: x.t().contiguous().sin().t(), ["x"], ["z"]),
    ),
    "a saved value whose layout a view relies on": lambda: KeyedGraph(
        (lambda x: (x * 2).view(15).view(3, 5).t().exp().sum(-1), ["x"], ["y"])
    ),
    "an activation checkpoint": lambda: KeyedGraph(
        (nn.Linear(3, 3), ["x"], ["h"]), (lambda h: checkpoint(torch.exp, h.tanh(), use_reentrant=False), ["h"], ["y"])
    ),
    "indexing": lambda: KeyedGraph((nn.Linear(3, 4), ["x"], ["h"]), (lambda h: h[:, [2, 0]].cumsum(0), ["h"], ["y"])),
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, 3))

    def forward(self, x):
        return self.scale, x * self.scale.exp()


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
def test_gradients_equal_eager(make):
    fast = assert_gradients_equal(make(), torch.randn(5, 3, dtype=torch.float64))
    assert fast.entries()[0].differentiable


@pytest.mark.parametrize("n", [0, 1])
def test_batches_of_no_and_one_row(n):
    assert_gradients_equal(GRAPHS["two layers"](), torch.randn(n, 3, dtype=torch.float64))


@pytest.mark.parametrize("name", ["two layers", "a value saved in another layout"])
def test_gradients_through_inductor(name):
    assert_gradients_equal(GRAPHS[name](), torch.randn(5, 3, dtype=torch.float64), backend="inductor")


def test_a_parameter_only_a_custom_backward_knows_gets_its_gradient():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient, 5 * gradient.sum(0)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Straight.apply(x, self.p)

    assert_gradients_equal(KeyedGraph((Module(), ["x"], ["y"])), torch.randn(5, 3, dtype=torch.float64))


def test_gradients_accumulate_and_follow_the_weights():
    graph = GRAPHS["two layers"]()
    fast, other = grl.compile(graph, backend="eager"), copy.deepcopy(graph)
    x = torch.randn(5, 3)
    for _ in range(3):
        for g, call in ((graph, fast), (other, other)):
            call(x)[1].square().mean().backward()
            with torch.no_grad():
                [p.sub_(0.1 * p.grad) for p in g.parameters()]
    for a, b in zip(graph.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert fast.retraces == []


def test_unfreezing_a_parameter_takes_effect():
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    fast = grl.compile(KeyedGraph((layer, ["x"], ["y"])), backend="eager")
    fast(torch.randn(2, 3)).sum().backward()
    assert layer.bias.grad is None
    layer.bias.requires_grad_(True)
    fast(torch.randn(2, 3)).sum().backward()
    assert (layer.bias.grad == 2).all()


def test_two_calls_before_one_backward_keep_apart():
    graph = GRAPHS["two layers"]()
    fast = grl.compile(graph, backend="eager")
    a, b = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    (fast(a)[1] + 2 * fast(b)[1]).sum().backward()
    expected = torch.autograd.grad((graph(a)[1] + 2 * graph(b)[1]).sum(), [a, b])
    torch.testing.assert_close((a.grad, b.grad), expected)


def test_random_draws_under_gradients_are_eager_s():
    layer = nn.Linear(3, 3)
    graph = KeyedGraph((lambda x: layer(x) * torch.randn_like(x), ["x"], ["y"]))
    graph[0].layer = layer
    x = torch.randn(5, 3)
    results = []
    for call in (graph, grl.compile(graph, backend="eager")):
        layer.zero_grad()
        torch.manual_seed(7)
        y = call(x)
        y.sum().backward()
        results.append((y.detach(), layer.weight.grad.clone()))
    torch.testing.assert_close(results[0], results[1])


def test_without_gradients_nothing_is_differentiable():
    graph = GRAPHS["two layers"]()
    fast = grl.compile(graph, backend="eager")
    with torch.no_grad():
        assert not fast(torch.randn(2, 3))[1].requires_grad
    assert not fast.entries()[0].differentiable
    assert fast(torch.randn(2, 3))[1].requires_grad
    [p.requires_grad_(False) for p in graph.parameters()]
    assert not fast(torch.randn(2, 3))[1].requires_grad
    assert len(fast.entries()) == 2, "no gradient to carry: the program without gradients serves"


def test_second_derivatives_are_refused_not_zero():
    fast = grl.compile(GRAPHS["two layers"](), backend="eager")
    x = torch.randn(5, 3, requires_grad=True)
    with pytest.raises(CompileError, match="create_graph"):
        torch.autograd.grad(fast(x)[1].sum(), x, create_graph=True)


def test_the_loss_of_a_compiled_graph_trains():
    torch.manual_seed(0)
    graph = GRAPHS["two layers"]()
    fast = grl.compile(graph, backend="eager")
    td = TensorDict(x=torch.randn(64, 3), batch_size=[64])
    target = td["x"][:, :2] * 0.5
    optimizer = torch.optim.Adam(graph.parameters(), 0.05)
    losses = []
    for _ in range(60):
        loss = (fast(td.clone())["y"] - target).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
