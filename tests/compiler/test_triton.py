"""The triton backend: which programs it takes, and, interpreted, that they equal eager."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.compiler import parts
from graphrl.compiler.backends import triton
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def mlp(*sizes, act=nn.Tanh, bias=True):
    torch.manual_seed(0)
    made = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b, bias=bias), act())]
    return nn.Sequential(*made[:-1])


def traced(net, *lead, width=5, dtype=torch.float32):
    graph = KeyedGraph((net, ["x"], ["y"]))
    return run_passes(trace(graph, TensorDict(x=torch.zeros(*lead, width, dtype=dtype), batch_size=list(lead))))


def chains(program):
    return triton.find_chains(program.graph_module.graph)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.Tanh, "tanh"), (nn.ReLU, "relu"), (nn.ELU, "elu"), (nn.SiLU, "silu"), (nn.GELU, "gelu"),
        (lambda: nn.GELU("tanh"), "gelu_tanh"), (nn.Identity, "identity"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lead", [(3,), (2, 3), ()], ids=str)
def test_an_mlp_is_one_chain(act, name, lead):
    (chain,) = chains(traced(mlp(5, 8, 7, 2, act=act), *lead))
    assert chain.activations == [name, name, "identity"] and None not in chain.biases


def test_layers_without_bias_and_a_last_activation_belong_to_the_chain():
    (chain,) = chains(traced(nn.Sequential(mlp(5, 8, 2, bias=False), nn.Tanh()), 3))
    assert chain.biases == [None, None] and chain.activations == ["tanh", "tanh"]


@pytest.mark.parametrize(
    "net",
    [
        nn.Linear(5, 2),
        mlp(5, 600, 2),
        mlp(5, 8, 2).double(),
        nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(5, 8), nn.ELU(0.5), nn.Linear(8, 2)),
    ],
)
def test_what_is_no_chain(net):
    dtype = next(net.parameters()).dtype
    assert not chains(traced(net, 3, dtype=dtype))


def test_a_value_that_others_read_ends_the_chain():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.a, self.b = mlp(5, 8, 8), mlp(8, 8, 1), nn.Linear(8, 1)

        def forward(self, x):
            h = self.trunk(x).tanh()
            return self.a(h), self.b(h)

    graph = KeyedGraph((Heads(), ["x"], ["a", "b"]))
    program = run_passes(trace(graph, TensorDict(x=torch.zeros(3, 5), batch_size=[3])))
    assert [len(c.weights) for c in chains(program)] == [2, 2]
    names = {n.name for c in chains(program) for n in c.nodes}
    assert sum("mm" in n for n in names) == 4


@needs_triton
def test_without_a_gpu_the_reason_is_given_and_the_next_backend_runs():
    fast = grl.compile(KeyedGraph((mlp(5, 8, 2), ["x"], ["y"])), {"x": torch.zeros(3, 5)}, backend="triton")
    (entry,) = fast.entries()
    assert entry.backend == "inductor"
    assert "run on a GPU, and" in entry.refusals[0] and "is on cpu (TRITON_INTERPRET=1" in entry.refusals[0]


class Policy(nn.Module):
    """Normaliser, two towers, a sampling head: MLPs with other work before, between and after."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(7, 24, 17, 4), mlp(7, 24, 1, act=nn.SiLU)
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("std", torch.rand(7) + 0.5)

    def forward(self, x, goal):
        x = ((torch.cat([x, goal], -1) - self.mean) / self.std).clamp(-5, 5)
        mean, log_std = self.actor(x).chunk(2, -1)
        return (mean + log_std.exp() * torch.randn_like(mean)).tanh(), self.critic(x)


def compare_interpreted() -> None:
    """Runs in a subprocess: TRITON_INTERPRET must be set before triton is imported."""
    for lead in ((3,), (2, 3), ()):
        for act in (nn.Tanh, nn.SiLU):
            net = mlp(5, 8, 7, 2, act=act)
            td = TensorDict(x=torch.randn(*lead, 5), batch_size=list(lead))
            fast = grl.compile(KeyedGraph((net, ["x"], ["y"])), td, backend="triton", strict=True)
            for _ in range(2):
                with torch.no_grad():
                    torch.testing.assert_close(fast(td.clone())["y"], net(td["x"]), rtol=1e-5, atol=1e-6)
                    net[0].weight.mul_(1.5)  # weights are live
    graph = KeyedGraph((Policy(), ["x", "goal"], ["action", "value"]))
    td = TensorDict(x=torch.randn(6, 4), goal=torch.randn(6, 3), batch_size=[6])
    parts.MIN_OPERATIONS = 100
    fast = grl.compile(graph, td, backend="triton")
    (entry,) = fast.entries()
    assert entry.backend == "inductor (2 parts), triton (1 part)", entry.backend
    results = []
    for call in (graph, fast):
        torch.manual_seed(5)
        with torch.no_grad():
            out = call(td.clone())
        results.append((out["action"], out["value"]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    graph.zero_grad()
    leaf = td["x"].clone().requires_grad_()
    fast(TensorDict(x=leaf, goal=td["goal"], batch_size=[6]))["value"].sum().backward()  # gradients by the others
    wanted = td["x"].clone().requires_grad_()
    graph(TensorDict(x=wanted, goal=td["goal"], batch_size=[6]))["value"].sum().backward()
    torch.testing.assert_close(leaf.grad, wanted.grad, rtol=1e-5, atol=1e-6)


@needs_triton
def test_interpreted_programs_equal_eager():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_policy_equals_eager():
    graph = KeyedGraph((Policy(), ["x", "goal"], ["action", "value"])).cuda()
    td = TensorDict(x=torch.randn(600, 4), goal=torch.randn(600, 3), batch_size=[600]).cuda()
    fast = grl.compile(graph, td, backend="triton")
    assert "triton (1 part)" in fast.entries()[0].backend
    with torch.no_grad():
        torch.testing.assert_close(fast(td.clone())["value"], graph(td.clone())["value"], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    compare_interpreted()
