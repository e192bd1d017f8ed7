"""The operator under tracers and compilers: one node, one shape rule, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from trajectories import random_trajectory

from graphrl.kernels import gae

OP = torch.ops.graphrl.gae.default
BACKWARD = torch.ops.graphrl.gae_backward.default


def count(graph_module, target):
    return sum(node.target is target for node in graph_module.graph.nodes)


def run(reward, value, next_value, done, terminated):
    return gae(reward, value, next_value, done, terminated, 0.99, 0.95)


def loss_and_gradient(reward, value, next_value, done, terminated):
    value = value.detach().requires_grad_()
    advantage, value_target = gae(reward, value, next_value, done, terminated, 0.99, 0.95)
    loss = advantage.square().sum() + value_target.sum()
    return loss, torch.autograd.grad(loss, value)[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_node(mode):
    t = random_trajectory((4, 20, 1), torch.float32)
    program = make_fx(run, tracing_mode=mode)(*t)
    assert count(program, OP) == 1
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert calls <= {"graphrl.gae.default", "aten.full.default", "<built-in function getitem>"}, calls
    other = random_trajectory((4, 20, 1) if mode != "symbolic" else (7, 33, 1), torch.float32, seed=5)
    for found, expected in zip(program(*other), run(*other), strict=True):
        assert torch.equal(found, expected)


def test_pre_dispatch_trace_sees_one_node():
    t = random_trajectory((4, 20, 1), torch.float32)
    assert count(make_fx(run, pre_dispatch=True)(*t), OP) == 1


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_gradient_is_one_node_more(mode):
    t = random_trajectory((4, 20, 1), torch.float32)
    program = make_fx(loss_and_gradient, tracing_mode=mode)(*t)
    assert count(program, OP) == 1 and count(program, BACKWARD) == 1
    for found, expected in zip(program(*t), loss_and_gradient(*t), strict=True):
        torch.testing.assert_close(found, expected)


def test_compiles_without_graph_breaks():
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    t = random_trajectory((4, 20, 1), torch.float32)
    for found, expected in zip(compiled(*t), run(*t), strict=True):
        assert torch.equal(found, expected)


def test_compiled_gradient_equals_eager():
    def loss(reward, value, next_value, done, terminated, gamma):
        advantage, value_target = gae(reward, value, next_value, done, terminated, gamma, 0.9)
        return advantage.square().sum() + value_target.sum()

    t = random_trajectory((4, 20, 1))
    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        value, gamma = t.value.clone().requires_grad_(), torch.tensor(0.9).double().requires_grad_()
        function(t.reward, value, *t[2:], gamma).backward()
        results += [(value.grad, gamma.grad)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["numbers", "per step"])
def test_registration_passes_torchs_own_checks(kind):
    t = random_trajectory((3, 9, 1))
    shape = () if kind == "numbers" else (3, 9, 1)
    tensors = [x.requires_grad_() for x in (*t[:3], torch.full(shape, 0.9).double(), torch.full(shape, 0.8).double())]
    torch.library.opcheck(OP, (*tensors[:3], t.done, t.terminated, *tensors[3:], -2))
    detached = [x.detach() for x in tensors]
    for flag in (False, True):
        arguments = (*detached[:3], detached[0], t.done, t.terminated, *detached[3:], -2, flag)
        torch.library.opcheck(BACKWARD, arguments, test_utils=("test_schema", "test_faketensor"))


def test_meta_tensors_give_meta_results():
    t = [x.to("meta") for x in random_trajectory((3, 9, 1), torch.bfloat16)]
    for x in gae(*t, 0.9, 0.9):
        assert x.device.type == "meta" and x.shape == (3, 9, 1) and x.dtype == torch.bfloat16


def test_eager_short_cut_and_operator_agree_to_the_bit():
    t = random_trajectory((9, 700, 1), torch.float32)
    through_operator = gae(*t, torch.tensor(0.99), torch.tensor(0.95))
    for found, expected in zip(gae(*t, 0.99, 0.95), through_operator, strict=True):
        assert torch.equal(found, expected)
