"""Every kind of node that ``tensordict.nn`` offers, compiled and compared with eager: values, gradients, keys."""

import copy
import functools

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    EnsembleModule,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    set_interaction_type,
)
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph


class Two(nn.Module):
    """Several inputs, several outputs, one of them by keyword."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x, z, scale=1.0):
        h = self.a(x) + self.b(z) * scale
        return h.tanh(), h.sum(-1, keepdim=True)


class Own(TensorDictModuleBase):
    """A node that works on the batch itself."""

    in_keys, out_keys = ["x"], [("new", "y"), "rows"]

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, tensordict):
        tensordict["new", "y"] = self.layer(tensordict["x"])
        return tensordict.set("rows", torch.ones(tensordict.batch_size).unsqueeze(-1))


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, first, second=None):
        return self.layer(first) - second.sum(-1, keepdim=True)


def mod(fn, reads, writes, **options):
    return TensorDictModule(fn, in_keys=reads, out_keys=writes, **options)


def gaussian(**options):
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["a"], distribution_class=torch.distributions.Normal,
        return_log_prob=True, **options,
    )  # fmt: skip


def parameters():
    return mod(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["x"], ["loc", "scale"])


def shared():
    layer = nn.Linear(3, 3)
    return KeyedGraph((layer, ["x"], ["h"]), (torch.tanh, ["h"], ["h"]), (layer, ["h"], ["y"]))


def selected():
    nodes = TensorDictSequential(mod(nn.Linear(3, 2), ["x"], ["h"]), mod(torch.tanh, ["h"], ["y"]))
    return nodes.select_out_keys("y")


def composite():
    heads = {"u": torch.distributions.Normal, "v": torch.distributions.Normal}
    split = mod(
        lambda x: (x[..., :1], x[..., :1].exp(), x[..., 1:2], x[..., 1:2].exp()), ["x"],
        [("params", "u", "loc"), ("params", "u", "scale"), ("params", "v", "loc"), ("params", "v", "scale")],
    )  # fmt: skip
    draw = ProbabilisticTensorDictModule(
        in_keys=["params"], out_keys=["u", "v"], distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": heads},
    )  # fmt: skip
    return ProbabilisticTensorDictSequential(split, draw)


NODES = {
    "module": lambda: mod(nn.Linear(3, 2), ["x"], ["y"]),
    "module of several inputs and outputs": lambda: mod(Two(), ["x", "z"], ["h", "s"]),
    "keys by argument name": lambda: mod(Dictionary(), {"second": "z", "first": "x"}, ["y"]),
    "keys to argument names": lambda: mod(Dictionary(), {"x": "first", "z": "second"}, ["y"], out_to_in_map=False),
    "argument names to keys": lambda: mod(
        Dictionary(), {"first": "x", "second": ("deep", "z")}, ["y"], out_to_in_map=True
    ),
    "a discarded output": lambda: mod(Two(), ["x", "z"], ["_", "s"]),
    "written in place": lambda: mod(nn.Linear(3, 3), ["x"], ["old"], inplace=True),
    "not in place": lambda: mod(nn.Linear(3, 3), ["x"], ["old"], inplace=False),
    "into an empty batch": lambda: mod(nn.Linear(3, 2), ["x"], ["y"], inplace="empty"),
    "a batch of its own": lambda: mod(nn.Linear(3, 2), ["x"], ["y"], inplace=None),
    "function": lambda: KeyedGraph((torch.relu, ["x"], ["y"])),
    "lambda": lambda: KeyedGraph((lambda x, z: x[..., :2] * z, ["x", "z"], ["y"])),
    "partial": lambda: KeyedGraph((functools.partial(torch.clamp, min=-0.5, max=0.5), ["x"], ["y"])),
    "bound method": lambda: KeyedGraph((nn.Linear(3, 2).forward, ["x"], ["y"])),
    "operator": lambda: KeyedGraph((torch.mul, ["x", "old"], ["y"])),
    "a node on the batch": Own,
    "wrapped function of a batch": lambda: KeyedGraph(
        WrapModule(lambda td: td.set("y", td["x"] * 2), in_keys=["x"], out_keys=["y"])
    ),
    "sequence": lambda: TensorDictSequential(mod(nn.Linear(3, 2), ["x"], ["h"]), mod(torch.tanh, ["h"], ["y"])),
    "sequence in a sequence in a graph": lambda: KeyedGraph(
        TensorDictSequential(
            mod(nn.Linear(3, 2), ["x"], ["h"]), TensorDictSequential(mod(torch.tanh, ["h"], [("n", "h")]))
        ),
        (torch.exp, [("n", "h")], ["y"]),
    ),
    "selected out_keys": selected,
    "selected graph": lambda: KeyedGraph((nn.Linear(3, 2), ["x"], ["h"]), (torch.tanh, ["h"], ["y"])).select("y"),
    "renamed graph": lambda: KeyedGraph((nn.Linear(3, 2), ["o"], ["y"])).rename(o="x", y=("n", "y")),
    "tolerant of missing keys": lambda: TensorDictSequential(
        mod(nn.Linear(3, 2), ["x"], ["y"]), mod(torch.tanh, ["absent"], ["z2"]), partial_tolerant=True
    ),
    "distribution": lambda: ProbabilisticTensorDictSequential(parameters(), gaussian()),
    "distribution by default at random": lambda: ProbabilisticTensorDictSequential(
        parameters(), gaussian(default_interaction_type=InteractionType.RANDOM)
    ),
    "distribution at its mean": lambda: KeyedGraph(
        parameters(), gaussian(default_interaction_type=InteractionType.MEAN)
    ),
    "composite distribution": composite,
    "composite distribution in a graph": lambda: KeyedGraph(*composite().module),
    "ensemble": lambda: EnsembleModule(mod(nn.Linear(3, 2), ["x"], ["h"]), num_copies=3),
    "not in place in a graph": lambda: KeyedGraph(
        mod(nn.Linear(3, 2), ["x"], ["h"], inplace=False), (torch.tanh, ["h"], ["y"])
    ),
    "sequence not in place": lambda: TensorDictSequential(mod(nn.Linear(3, 2), ["x"], ["y"]), inplace=False),
    "one layer at two nodes": shared,
    "a key read, overwritten and read again": lambda: KeyedGraph(
        (nn.Linear(3, 3), ["x"], ["h"]),
        (torch.tanh, ["h"], ["h"]),
        (torch.mul, ["h", "x"], ["y"]),
        (torch.exp, ["h"], ["h"]),
        (torch.add, ["h", "y"], ["y"]),
    ),  # fmt: skip
    "an input overwritten": lambda: KeyedGraph((nn.Linear(3, 3), ["x"], ["x"]), (torch.tanh, ["x"], ["y"])),
    "a dotted key beside a nested one": lambda: KeyedGraph(
        (torch.sin, ["x"], ["a.b"]), (torch.cos, ["x"], [("a", "b")]), (torch.sub, ["a.b", ("a", "b")], ["y"])
    ),
    "nested keys in and out": lambda: KeyedGraph((nn.Linear(2, 2), [("deep", "z")], [("next", "deep", "y")])),
    "gradients stopped within": lambda: KeyedGraph(
        (nn.Linear(3, 2), ["x"], ["h"]), (lambda h: h.detach() * h, ["h"], ["y"])
    ),
}


def batch(n):
    return TensorDict(
        {"x": torch.randn(n, 3), "z": torch.randn(n, 2), "old": torch.randn(n, 3), ("deep", "z"): torch.randn(n, 2)},
        batch_size=[n],
    )


def outcome(module, td, grad):
    """Keys, values and gradients of one seeded call, and what it did to the batch."""
    td = td.clone()
    for key in td.keys(True, True):
        td.get(key).requires_grad_(grad)
    leaves = [td.get(key) for key in sorted(td.keys(True, True), key=str)]
    torch.manual_seed(3)
    out = module(td)
    keys = sorted(map(str, out.keys(True, True)))
    values = {str(k): out.get(k) for k in module.out_keys if k in out.keys(True, True)}
    grads = []
    carrying = [v for v in values.values() if v.requires_grad]
    if carrying:
        weighted = sum((v * torch.linspace(-1, 1, v.numel()).view(v.shape)).sum() for v in carrying)
        wanted = [*leaves, *module.parameters()]
        found = torch.autograd.grad(weighted, wanted, allow_unused=True)
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    return keys, {k: v.detach() for k, v in values.items()}, grads, sorted(map(str, td.keys(True, True))), out is td


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("grad", [False, True])
def test_values_gradients_and_keys_equal_eager(name, grad):
    torch.manual_seed(0)
    module = NODES[name]()
    fast = grl.compile(module, backend="eager")
    inplace = name == "written in place"
    with torch.set_grad_enabled(grad and not inplace):
        for n in (4, 6, 1, 5):
            td = batch(n)
            found = outcome(fast, td, grad and not inplace)
            expected = outcome(module, td, grad and not inplace)
            assert found[0] == expected[0] and found[3:] == expected[3:]
            assert list(found[1]) == list(expected[1])
            for a, b in zip((*found[1].values(), *found[2]), (*expected[1].values(), *expected[2]), strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert list(fast.state_dict()) == list(module.state_dict())


@pytest.mark.parametrize("name", ["module", "distribution", "sequence", "one layer at two nodes"])
@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.DETERMINISTIC, InteractionType.MEAN])
def test_interaction_types_and_inductor(name, kind):
    module = NODES[name]()
    fast = grl.compile(module, backend="inductor" if kind is InteractionType.RANDOM else "eager", strict=True)
    with torch.no_grad(), set_interaction_type(kind):
        for n in (4, 6):
            td = batch(n)
            found, expected = outcome(fast, td, False), outcome(module, td, False)
            assert found[0] == expected[0]
            for key in expected[1]:
                torch.testing.assert_close(found[1][key], expected[1][key])


def test_selecting_out_keys_of_a_compiled_module_leaves_the_source():
    module = TensorDictSequential(mod(nn.Linear(3, 2), ["x"], ["h"]), mod(torch.tanh, ["h"], ["y"]))
    before = copy.copy(list(module.out_keys))
    fast = grl.compile(module, backend="eager")
    with torch.no_grad():
        fast(batch(3))
    assert list(module.out_keys) == before and fast.out_keys == before


def test_the_gradient_of_a_layer_at_two_nodes_is_the_sum():
    graph = shared()
    layer = graph[0].module
    x = torch.randn(4, 3)
    grl.compile(graph, backend="eager")(TensorDict(x=x, batch_size=[4]))["y"].sum().backward()
    one, two = copy.deepcopy(layer), copy.deepcopy(layer)
    one.zero_grad(), two.zero_grad()
    two(torch.tanh(one(x))).sum().backward()
    torch.testing.assert_close(layer.weight.grad, one.weight.grad + two.weight.grad)
    assert len(list(graph.parameters())) == 2
