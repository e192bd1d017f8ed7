"""Gradients of every recurrence: finite differences, the reference's autograd, and what a cut must not let through."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, as_tuple

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def draw_coefficients(kind, shape, count):
    generator = torch.Generator().manual_seed(1)
    shapes = {"numbers": ((), ()), "per step": (shape, shape), "mixed": (shape[-2:], ()), "zeros and ones": (shape, ())}
    drawn = [torch.rand(s, generator=generator, dtype=torch.float64).mul(0.5).add(0.4) for s in shapes[kind]]
    if kind == "zeros and ones":
        drawn = [x.mul(2).round().clamp(max=1) * (torch.rand(shape, generator=generator) < 0.7).double() for x in drawn]
    return drawn[:count]


def with_coefficients(family, arguments, kind):
    values = draw_coefficients(kind, arguments["reward"].shape, len(family.coefficients))
    return arguments | dict(zip(family.coefficients, values, strict=True))


def weighted(out, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in out)


@every_family
@pytest.mark.parametrize(
    ("shape", "time_dim", "kind"),
    [
        ((2, 4, 1), -2, "numbers"),
        ((1, 17, 1), -2, "per step"),
        ((2, 3, 2, 1), -3, "mixed"),
        ((2, 8), 0, "per step"),
        ((1, 6, 1), -2, "zeros and ones"),
    ],
    ids=str,
)
def test_first_and_second_derivatives_match_finite_differences(family, shape, time_dim, kind):
    arguments = with_coefficients(family, family.draw(shape, end=0.15), kind)
    leaves = family.leaves(arguments)
    names = (*family.differentiable, *family.coefficients)

    def run(*tensors):
        return family(arguments | dict(zip(names, tensors, strict=True)), time_dim)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@every_family
def test_third_derivatives_match_finite_differences(family):
    arguments = family.draw((1, 5, 1), end=0.15)
    gamma = torch.tensor([[0.9]], dtype=torch.float64, requires_grad=True)

    def slope(x):
        out = family(arguments | {"gamma": x})
        return torch.autograd.grad(weighted(out), x, create_graph=True)

    assert torch.autograd.gradgradcheck(slope, gamma)


@every_family
def test_nested_transforms_give_second_derivatives(family):
    arguments = family.draw((2, 6, 1))

    def loss(x):
        return weighted(y.square() for y in family(arguments | {"gamma": x}))

    gamma = torch.tensor(0.9, dtype=torch.float64)
    found = torch.func.jacrev(torch.func.jacrev(loss))(gamma)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(loss, gamma))
    torch.testing.assert_close(torch.func.grad(torch.func.grad(loss))(gamma), found)


@every_family
@pytest.mark.parametrize("kind", ["numbers", "per step", "zeros and ones"])
@pytest.mark.parametrize(
    ("shape", "time_dim"), [((13, 530, 1), -2), ((1, 600, 1), -2), ((20, 300), 0), ((9, 110, 5, 1), 1)], ids=str
)
def test_gradients_equal_the_references(family, shape, time_dim, kind):
    drawn = with_coefficients(family, family.draw(shape, end=0.02), kind)
    grads = []
    for function in (family, family.judge):
        leaves = family.leaves(arguments := dict(drawn))
        grads.append(torch.autograd.grad(weighted(function(arguments, time_dim)), leaves))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_keep_the_dtype_of_their_inputs(family, dtype):
    drawn = family.draw((4, 30, 1), dtype)
    results = []
    for function in (family, family.judge):
        leaves = family.leaves(arguments := dict(drawn))
        results.append(torch.autograd.grad(sum(x.double().square().sum() for x in function(arguments)), leaves))
    assert [g.dtype for g in results[0]] == [dtype] * len(family.differentiable) + [torch.float64] * len(
        family.coefficients
    )
    for found, expected in zip(*results, strict=True):
        scale = expected.double().abs().max()
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(found.double() / scale, expected.double() / scale, rtol=0, atol=tolerance)


@every_family
def test_one_gamma_per_trajectory_gets_its_gradient(family):
    drawn = family.draw((4, 30, 1)) | {"gamma": torch.rand(4, 1, 1).double()}
    grads = []
    for function in (family, family.judge):
        family.leaves(arguments := dict(drawn))
        grads.append(torch.autograd.grad(weighted(function(arguments)), arguments["gamma"])[0])
    assert grads[0].shape == (4, 1, 1)
    torch.testing.assert_close(*grads)


@every_family
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_behind_a_terminal_step_reaches_no_gradient(family, bad, create_graph):
    arguments = family.draw((4, 40, 1))
    if "next_value" not in arguments:
        pytest.skip("no bootstrap")
    arguments["next_value"].masked_fill_(arguments["terminated"], bad)
    leaves = family.leaves(arguments)
    out = family(arguments)
    grads = torch.autograd.grad(sum(x.square().sum() for x in out), leaves, create_graph=create_graph)
    assert all(g.isfinite().all() for g in grads)
    by_next_value = grads[family.differentiable.index("next_value")]
    assert (by_next_value[arguments["terminated"]] == 0).all()


@every_family
@pytest.mark.parametrize("create_graph", [False, True])
def test_nan_gradient_stays_in_its_trajectory(family, create_graph):
    arguments = family.draw((1, 900, 1), end=0.0)
    arguments["done"][:, 299] = True
    leaves = family.leaves(arguments)[: len(family.differentiable)]
    out = family(arguments)[0]
    weight = torch.ones_like(out)
    weight[:, 10] = float("nan")
    for g in torch.autograd.grad(out, leaves, weight, create_graph=create_graph):
        assert g[:, 300:].isfinite().all()


@every_family
def test_results_of_detached_inputs_ask_for_no_gradient(family):
    arguments = family.draw((4, 40, 1))
    arguments["reward"].requires_grad_()
    with torch.no_grad():
        assert not family(arguments)[0].requires_grad
    assert family(arguments)[0].requires_grad


@every_family
@pytest.mark.parametrize("create_graph", [False, True])
def test_empty_trajectories_have_empty_gradients(family, create_graph):
    for shape in ((0, 5, 1), (5, 0, 1)):
        arguments = family.draw(shape)
        leaves = family.leaves(arguments)
        grads = torch.autograd.grad(family(arguments)[0].sum(), leaves, create_graph=create_graph)
        assert [g.shape for g in grads] == [x.shape for x in leaves]
        assert all(g.item() == 0 for g in grads[len(family.differentiable) :])


@every_family
@pytest.mark.parametrize("mapped", [(), ("gamma",), ("gamma", "lmbda"), "all but reward"], ids=str)
def test_vmap_equals_a_loop(family, mapped):
    arguments = family.draw((6, 4, 20, 1)) | {x: torch.tensor(0.9).double() for x in family.coefficients}
    if mapped == "all but reward":
        arguments["reward"], mapped = arguments["reward"][0], ()
    for name in set(mapped) & set(family.coefficients):
        arguments[name] = torch.rand(6).double()
    dims = tuple(0 if x.dim() in (1, 4) else None for x in arguments.values())
    names = list(arguments)

    def loss(*values):
        return as_tuple(family.function(*values))[0].square().sum()

    gradient = torch.func.grad(loss, argnums=(0, names.index("gamma")))
    found = (
        *as_tuple(torch.vmap(family.function, dims)(*arguments.values())),
        *torch.vmap(gradient, dims)(*arguments.values()),
    )
    for i in range(6):
        row = [x[i] if d == 0 else x for x, d in zip(arguments.values(), dims, strict=True)]
        for x, expected in zip(found, (*as_tuple(family.function(*row)), *gradient(*row)), strict=True):
            torch.testing.assert_close(x[i], expected)
