"""Whatever way weights change, the next call of a compiled graph uses them."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph

BACKENDS = ["eager", "inductor", "native"]


def policy():
    layers = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    return KeyedGraph((layers, ["observation"], ["action"]))


def rows(n=4, dtype=torch.float32):
    return TensorDict(observation=torch.randn(n, 3, dtype=dtype), batch_size=[n])


def zeroed(module):
    return {name: torch.zeros_like(value) for name, value in module.state_dict().items()}


def load(graph, fast):
    graph.load_state_dict(zeroed(graph), strict=True)


def load_through_the_compiled(graph, fast):
    fast.load_state_dict(zeroed(fast), strict=True)


def load_assigned(graph, fast):
    graph.load_state_dict(zeroed(graph), strict=True, assign=True)


def in_place(graph, fast):
    for p in graph.parameters():
        p.zero_()


def by_data(graph, fast):
    for p in graph.parameters():
        p.data = torch.zeros_like(p)


def new_parameters(graph, fast):
    layers = graph[0].module
    for layer in (layers[0], layers[1], layers[3]):
        layer.weight, layer.bias = (
            nn.Parameter(torch.zeros_like(layer.weight)),
            nn.Parameter(torch.zeros_like(layer.bias)),
        )


def swapped_with_another(graph, fast):
    other = policy()
    other.load_state_dict(zeroed(other))
    for p, q in zip(graph.parameters(), other.parameters(), strict=True):
        p.data, q.data = q.data, p.data


def double(graph, fast):
    fast.double()
    load(graph, fast)
    fast.float()


def bfloat16_and_back(graph, fast):
    graph.to(torch.bfloat16).to(torch.float32)
    load_assigned(graph, fast)


def an_optimiser_step(graph, fast):
    optimiser = torch.optim.SGD(fast.parameters(), lr=1.0)
    for p in graph.parameters():
        p.grad = p.detach().clone()
    optimiser.step()


def averaging_all_the_way(graph, fast):
    source = policy()
    source.load_state_dict(zeroed(source))
    for p, q in zip(graph.parameters(), source.parameters(), strict=True):
        p.lerp_(q, 1.0)


def a_tensordict_of_weights(graph, fast):
    TensorDict.from_module(graph).data.zero_()


CHANGES = [load, load_through_the_compiled, load_assigned, in_place, by_data, new_parameters, swapped_with_another,
           double, bfloat16_and_back, an_optimiser_step, averaging_all_the_way, a_tensordict_of_weights]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_weights_give_exactly_zero_after(change, backend):
    graph = policy()
    fast = grl.compile(graph, rows(), backend=backend)
    with torch.no_grad():
        assert (fast(rows())["action"] != 0).any()
        change(graph, fast)
        assert (fast(rows())["action"] == 0).all()
        assert (fast.call(torch.randn(4, 3))[0] == 0).all()
        if backend != "inductor":  # another size, another program
            assert (fast(rows(7))["action"] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_graphs_that_exchange_weights_for_a_while(backend):
    graph, average = policy(), policy()
    fast = grl.compile(graph, rows(), backend=backend)
    x = torch.randn(4, 3)
    with torch.no_grad():
        own, other = graph(x), average(x)
        for expected in (other, own, other, own):
            for p, q in zip(graph.parameters(), average.parameters(), strict=True):
                p.data, q.data = q.data, p.data
            torch.testing.assert_close(fast.call(x)[0], expected)
        for expected in (other, own):
            for m, n in zip(graph.modules(), average.modules(), strict=True):
                for name in m._parameters:
                    m._parameters[name], n._parameters[name] = n._parameters[name], m._parameters[name]
            torch.testing.assert_close(fast.call(x)[0], expected)
    assert fast.retraces == []


def test_gradients_go_to_the_weights_of_the_moment():
    graph = policy()
    fast = grl.compile(graph, rows(), backend="eager")
    fast(rows())["action"].sum().backward()
    before = graph[0].module[3].weight
    graph.load_state_dict(policy().state_dict(), assign=True)
    fast(rows())["action"].sum().backward()
    after = graph[0].module[3].weight
    assert after is not before and after.grad is not None and (after.grad != before.grad).any()


def test_buffers_are_live_as_well():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.ones(3))

        def forward(self, x):
            return x + self.by

    graph = KeyedGraph((Shift(), ["observation"], ["y"]))
    fast, td = grl.compile(graph, rows(), backend="inductor"), rows()
    with torch.no_grad():
        for value in (torch.zeros(3), torch.full((3,), 5.0)):
            graph[0].module.by = value
            assert torch.equal(fast(td.clone())["y"], td["observation"] + value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_have_the_names_of_the_plain_graph_and_load_both_ways(backend, tmp_path):
    graph, other, td = policy(), policy(), rows()
    fast = grl.compile(graph, rows(), backend=backend)
    assert list(fast.state_dict()) == list(other.state_dict())
    torch.save(fast.state_dict(), tmp_path / "compiled.pt")
    other.load_state_dict(torch.load(tmp_path / "compiled.pt"), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(td.clone())["action"], other(td.clone())["action"])
        third = policy()
        torch.save(third.state_dict(), tmp_path / "plain.pt")
        fast.load_state_dict(torch.load(tmp_path / "plain.pt"), strict=True)
        torch.testing.assert_close(fast(td.clone())["action"], third(td.clone())["action"])
    names = [name for name, _ in fast.named_parameters()]
    assert names == [name for name, _ in graph.named_parameters()]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fast.load_state_dict({**zeroed(fast), "extra": torch.zeros(1)}, strict=True)


def test_an_averaged_copy_follows_only_when_told():
    graph = policy()
    fast = grl.compile(graph, rows(), backend="eager")
    target = copy.deepcopy(fast)
    x = torch.randn(4, 3)
    with torch.no_grad():
        before = target.call(x)[0]
        load(graph, fast)
        assert torch.equal(target.call(x)[0], before) and (fast.call(x)[0] == 0).all()
        for p, q in zip(target.parameters(), fast.parameters(), strict=True):
            p.lerp_(q, 1.0)
        assert (target.call(x)[0] == 0).all()
