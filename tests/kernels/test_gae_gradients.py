"""Gradients: finite differences, the reference's autograd, and what a cut must not let through."""

from __future__ import annotations

import pytest
import torch
from trajectories import random_trajectory

from graphrl.kernels import gae
from graphrl.kernels.gae.reference import gae_reference

LAYOUTS = [((3, 7, 1), -2), ((1, 20, 1), -2), ((2, 5, 3, 1), -3), ((6, 9), 0)]


def coefficients(kind, shape):
    generator = torch.Generator().manual_seed(1)
    shapes = {"numbers": ((), ()), "per step": (shape, shape), "mixed": (shape[-2:], ())}[kind]
    return [torch.rand(s, generator=generator, dtype=torch.float64).mul(0.5).add(0.4) for s in shapes]


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("kind", ["numbers", "per step", "mixed"])
@pytest.mark.parametrize(("shape", "time_dim"), LAYOUTS, ids=str)
def test_first_and_second_derivatives_match_finite_differences(shape, time_dim, kind):
    t = random_trajectory(shape)
    inputs = leaves(*t[:3], *coefficients(kind, shape))

    def run(reward, value, next_value, gamma, lmbda):
        return gae(reward, value, next_value, t.done, t.terminated, gamma, lmbda, time_dim=time_dim)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", ["numbers", "per step", "mixed"])
@pytest.mark.parametrize(
    ("shape", "time_dim"), [((13, 1100, 1), -2), ((1, 5000, 1), -2), ((50, 300), 0), ((9, 300, 5, 1), 1)], ids=str
)
def test_gradients_equal_the_references(shape, time_dim, kind):
    t = random_trajectory(shape, end=0.02)
    weights = random_trajectory(shape, seed=2)[:2]
    grads = []
    for function in (gae, gae_reference):
        inputs = leaves(*t[:3], *coefficients(kind, shape))
        out = function(*inputs[:3], t.done, t.terminated, *inputs[3:], time_dim=time_dim)
        grads.append(torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_keep_the_dtype_of_their_inputs(dtype):
    t = random_trajectory((4, 30, 1), dtype)
    inputs, gamma = leaves(*t[:3]), torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    advantage, _ = gae(*inputs, t.done, t.terminated, gamma, 0.9)
    grads = torch.autograd.grad(advantage.float().square().sum(), [*inputs, gamma])
    assert [g.dtype for g in grads] == [dtype] * 3 + [torch.float64]
    exact = leaves(*(x.double() for x in t[:3]))
    expected = torch.autograd.grad(gae_reference(*exact, t.done, t.terminated, 0.9, 0.9)[0].square().sum(), exact)
    for found, y in zip(grads, expected, strict=False):
        torch.testing.assert_close(found.double(), y, rtol=0.1, atol=0.3 if dtype != torch.float32 else 1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_behind_a_terminal_step_reaches_no_gradient(bad):
    t = random_trajectory((4, 40, 1))
    inputs = leaves(*t[:2], t.next_value.masked_fill(t.terminated, bad), *coefficients("numbers", ()))
    out = gae(*inputs[:3], t.done, t.terminated, *inputs[3:])
    grads = torch.autograd.grad(out[0].sum() + out[1].square().sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[2][t.terminated] == 0).all()


def test_nan_gradient_stays_in_its_trajectory():
    t = random_trajectory((1, 900, 1), end=0.0)
    t.done[:, 299] = True
    inputs = leaves(*t[:3])
    advantage, _ = gae(*inputs, t.done, t.terminated, 0.9, 0.9)
    weight = torch.ones_like(advantage)
    weight[:, 10] = float("nan")
    for g in torch.autograd.grad(advantage, inputs, weight):
        assert g[:, 300:].isfinite().all()


def test_advantage_of_detached_inputs_asks_for_no_gradient():
    t = random_trajectory((4, 40, 1))
    value = t.value.clone().requires_grad_()
    with torch.no_grad():
        assert not gae(t.reward, value, *t[2:], 0.9, 0.9)[0].requires_grad
    assert gae(t.reward, value, *t[2:], 0.9, 0.9)[0].requires_grad


def test_empty_trajectories_have_empty_gradients():
    for shape in ((0, 5, 1), (5, 0, 1)):
        t = random_trajectory(shape)
        inputs = leaves(*t[:3], torch.tensor(0.9))
        advantage, _ = gae(*inputs[:3], t.done, t.terminated, inputs[3], 0.9)
        grads = torch.autograd.grad(advantage.sum(), inputs)
        assert [g.shape for g in grads] == [x.shape for x in inputs] and grads[3].item() == 0


@pytest.mark.parametrize("coefficient_dims", [(None, None), (0, None), (0, 0)], ids=str)
def test_vmap_equals_a_loop(coefficient_dims):
    t = random_trajectory((6, 4, 20, 1))
    gamma, lmbda = (torch.rand(6).double() if d == 0 else torch.tensor(0.9).double() for d in coefficient_dims)

    def loss(reward, value, next_value, done, terminated, gamma, lmbda):
        return gae(reward, value, next_value, done, terminated, gamma, lmbda)[0].square().sum()

    dims = (0, 0, 0, 0, 0, *coefficient_dims)
    arguments = (*t, gamma, lmbda)
    gradient = torch.func.grad(loss, argnums=(1, 5))
    mapped = torch.vmap(gae, dims)(*arguments)
    mapped_gradient = torch.vmap(gradient, dims)(*arguments)
    for i in range(6):
        row = [x[i] if d == 0 else x for x, d in zip(arguments, dims, strict=True)]
        for found, expected in zip(mapped + mapped_gradient, gae(*row) + gradient(*row), strict=True):
            torch.testing.assert_close(found[i], expected)
