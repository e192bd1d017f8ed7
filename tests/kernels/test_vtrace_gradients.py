"""V-trace's gradients, batching rule and operator under tracers: finite differences and the reference's autograd."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from trajectories import random_trajectory

from graphrl.kernels import vtrace
from graphrl.kernels.vtrace.reference import vtrace_reference

OP, BACKWARD = torch.ops.graphrl.vtrace.default, torch.ops.graphrl.vtrace_backward.default
CLIPS = {"rho_clip": 1.3, "c_clip": 0.8}


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def case(shape, kind="numbers", end=0.1):
    """A trajectory, a ratio around one, and gamma and lmbda."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"numbers": ((), ()), "per step": (shape, shape), "mixed": (shape[-2:], ())}[kind]
    coefficients = [torch.rand(s, generator=generator, dtype=torch.float64).mul(0.5).add(0.4) for s in shapes]
    return random_trajectory(shape, end=end), torch.rand(shape, generator=generator).double() * 2, coefficients


@pytest.mark.parametrize("kind", ["numbers", "per step", "mixed"])
@pytest.mark.parametrize(
    ("shape", "time_dim"), [((2, 7, 1), -2), ((1, 12, 1), -2), ((1, 4, 3, 1), -3), ((5, 8), 0)], ids=str
)
def test_first_and_second_derivatives_match_finite_differences(shape, time_dim, kind):
    t, ratio, coefficients = case(shape, kind)

    def run(reward, value, next_value, gamma, lmbda):
        data = (reward, value, next_value, t.done, t.terminated, ratio, gamma, lmbda)
        return vtrace(*data, **CLIPS, time_dim=time_dim)

    inputs = leaves(*t[:3], *coefficients)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", ["numbers", "per step", "mixed"])
@pytest.mark.parametrize(
    ("shape", "time_dim"), [((13, 600, 1), -2), ((1, 1300, 1), -2), ((50, 300), 0), ((9, 130, 5, 1), 1)], ids=str
)
def test_gradients_equal_the_references(shape, time_dim, kind):
    t, ratio, coefficients = case(shape, kind, end=0.02)
    weights = random_trajectory(shape, seed=2)[:2]
    grads = []
    for function in (vtrace, vtrace_reference):
        inputs = leaves(*t[:3], *coefficients)
        out = function(*inputs[:3], *t[3:], ratio, *inputs[3:], **CLIPS, time_dim=time_dim)
        grads.append(torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def test_ratio_counts_as_a_constant():
    t, ratio, _ = case((2, 7, 1))
    ratio.requires_grad_()
    value = t.value.clone().requires_grad_()
    advantage, value_target = vtrace(t.reward, value, *t[2:], ratio, 0.9)
    found = torch.autograd.grad((advantage + value_target).sum(), [value, ratio], allow_unused=True)
    assert found[0].abs().sum() > 0 and found[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_keep_the_dtype_of_their_inputs(dtype):
    t = random_trajectory((4, 30, 1), dtype)
    inputs, gamma = leaves(*t[:3]), torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    advantage, value_target = vtrace(*inputs, t.done, t.terminated, torch.ones_like(t.reward), gamma)
    grads = torch.autograd.grad((advantage + value_target).float().square().sum(), [*inputs, gamma])
    assert [g.dtype for g in grads] == [dtype] * 3 + [torch.float64]
    exact = leaves(*(x.double() for x in t[:3]), torch.tensor(0.9))
    expected = vtrace_reference(*exact[:3], *t[3:], torch.ones_like(t.reward), exact[3])
    expected = torch.autograd.grad((expected[0] + expected[1]).square().sum(), exact)
    for found, y in zip(grads, expected, strict=True):
        scale = y.abs().max().item()
        torch.testing.assert_close(found.double(), y.double(), rtol=0, atol=scale * (0.02 if dtype != torch.float32 else 1e-5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_behind_a_cut_reaches_no_gradient(bad):
    t, ratio, coefficients = case((4, 40, 1))
    t.done[:, 19] = True
    lost = [x.clone() for x in (*t[:3], ratio)]
    for x in lost:
        x[:, 20] = bad
    lost[2].masked_fill_(t.terminated, bad)
    inputs, gamma = leaves(*lost[:3]), torch.full((4, 40, 1), 0.9).double().requires_grad_()
    out = vtrace(*inputs, *t[3:], lost[3], gamma, coefficients[1])
    weight = torch.ones_like(t.reward)
    weight[:, 20:] = 0
    loss = (torch.where(weight == 1, out[0], 0) + torch.where(weight == 1, out[1], 0).square()).sum()
    for g in torch.autograd.grad(loss, [*inputs, gamma]):
        assert g[:, :20].isfinite().all()
    assert (torch.autograd.grad(vtrace(*inputs, *t[3:], ratio, gamma)[0].nansum(), inputs[2])[0][t.terminated] == 0).all()


def test_empty_trajectories_have_empty_gradients():
    for shape in ((0, 5, 1), (5, 0, 1)):
        t = random_trajectory(shape)
        inputs = leaves(*t[:3], torch.tensor(0.9))
        advantage, _ = vtrace(*inputs[:3], *t[3:], torch.ones(shape), inputs[3])
        grads = torch.autograd.grad(advantage.sum(), inputs, create_graph=True)
        assert [g.shape for g in grads] == [x.shape for x in inputs] and grads[3].item() == 0


def test_vmap_equals_a_loop():
    t, ratio, _ = case((6, 4, 20, 1))
    gamma = torch.rand(6).double()

    def loss(reward, value, next_value, done, terminated, ratio, gamma):
        advantage, value_target = vtrace(reward, value, next_value, done, terminated, ratio, gamma, 0.9)
        return advantage.square().sum() + value_target.sum()

    arguments = (*t, ratio, gamma)
    gradient = torch.func.grad(loss, argnums=(1, 6))
    mapped, mapped_gradient = torch.vmap(vtrace)(*arguments), torch.vmap(gradient)(*arguments)
    for i in range(6):
        row = [x[i] for x in arguments]
        for found, expected in zip(mapped + mapped_gradient, vtrace(*row) + gradient(*row), strict=True):
            torch.testing.assert_close(found[i], expected)


# --- tracers ---


def count(program, target):
    return sum(node.target is target for node in program.graph.nodes)


def loss_and_gradient(reward, value, next_value, done, terminated, ratio):
    value = value.detach().requires_grad_()
    advantage, value_target = vtrace(reward, value, next_value, done, terminated, ratio, 0.99)
    loss = advantage.square().sum() + value_target.sum()
    return loss, torch.autograd.grad(loss, value)[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_trace_has_one_node_and_one_more_for_the_gradient(mode):
    t, ratio, _ = case((4, 20, 1))
    program = make_fx(loss_and_gradient, tracing_mode=mode)(*t, ratio)
    assert count(program, OP) == 1 and count(program, BACKWARD) == 1
    other, ratio, _ = case((4, 20, 1) if mode != "symbolic" else (7, 33, 1), end=0.2)
    for found, expected in zip(program(*other, ratio), loss_and_gradient(*other, ratio), strict=True):
        torch.testing.assert_close(found, expected)


def test_compiles_without_graph_breaks():
    t, ratio, _ = case((4, 20, 1))
    compiled = torch.compile(lambda *x: vtrace(*x, 0.99), backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*t, ratio), vtrace(*t, ratio, 0.99), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["numbers", "per step"])
def test_registration_passes_torchs_own_checks(kind):
    t, ratio, coefficients = case((3, 9, 1), kind)
    inputs = leaves(*t[:3], *coefficients)
    torch.library.opcheck(OP, (*inputs[:3], ratio, *t[3:], *inputs[3:], -2, 1.3, 0.8))
    detached = [x.detach() for x in inputs]
    for wants in (False, True):
        read = detached[:2] + detached[1:3] + detached[:1]
        arguments = (*read, ratio, *t[3:], *detached[3:], -2, 1.3, 0.8, wants)
        torch.library.opcheck(BACKWARD, arguments, test_utils=("test_schema", "test_faketensor"))
