"""C51's projection against the float64 reference, its rules for what is not finite, gradients and registration."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphrl.errors import SpecError
from graphrl.kernels import categorical_projection
from graphrl.kernels.categorical_projection.reference import categorical_projection_reference

OP = torch.ops.graphrl.categorical_projection.default
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    ((), 51),
    ((1,), 2),
    ((7,), 51),
    ((3, 5), 21),
    ((300,), 51),
    ((9,), 255),
    ((2,), 700),
    ((0,), 51),
    ((3, 0), 5),
]


class Update(NamedTuple):
    next_probs: Tensor
    reward: Tensor
    terminated: Tensor
    discount: float | Tensor
    support: Tensor


def random_update(
    lead: tuple[int, ...], atoms: int, dtype=torch.float64, uniform=True, per_row=False, seed=0
) -> Update:
    """Probabilities, rewards that also leave the support, some terminated rows, discounts in [0, 1.2)."""
    generator = torch.Generator().manual_seed(seed)
    random = {"generator": generator, "dtype": torch.float64}
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    support = torch.linspace(-10, 10, atoms, dtype=exact)
    if not uniform:
        support = (torch.rand(atoms, **random) + 0.05).cumsum(0).sub(3).to(exact)
    reward = torch.randn(*lead, 1, **random).mul(4).to(exact)
    discount = torch.rand(*lead, 1, **random).mul(1.2).to(exact) if per_row else 0.97
    probs = torch.rand(*lead, atoms, **random).mul(3).softmax(-1).to(dtype)
    return Update(probs, reward, torch.rand(*lead, 1, **random) < 0.2, discount, support)


def rounding(u: Update) -> float:
    """What the position's dtype can miss of the smallest gap, and the result's of one."""
    positions = torch.finfo(u.support.dtype).eps * u.support.abs().max() / u.support.diff().min()
    return 4 * float(positions) + torch.finfo(u.next_probs.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lead", "atoms"), SHAPES, ids=str)
def test_equals_the_reference_and_keeps_the_mass(lead, atoms, dtype):
    for uniform, per_row in ((True, False), (True, True), (False, True)):
        u = random_update(lead, atoms, dtype, uniform, per_row)
        found = categorical_projection(*u)
        assert found.dtype == dtype and found.shape == (*lead, atoms) and found.is_contiguous()
        expected, tolerance = categorical_projection_reference(*u), rounding(u)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        mass = torch.where(u.terminated, 1.0, u.next_probs.double().sum(-1, keepdim=True))
        torch.testing.assert_close(found.double().sum(-1, keepdim=True), mass, rtol=3 * tolerance, atol=3 * tolerance)


def test_large_batch_on_several_threads_equals_the_reference():
    u = random_update((4000,), 51, torch.float32, per_row=True)
    torch.testing.assert_close(
        categorical_projection(*u).double(), categorical_projection_reference(*u), rtol=0, atol=2e-6
    )


SUPPORT = torch.linspace(-2, 2, 5)
UNIFORM = torch.full((1, 5), 0.2)
GOES_ON, ENDS = torch.tensor([False]), torch.tensor([True])


def test_mass_that_lands_on_an_atom_is_all_kept():
    assert torch.equal(categorical_projection(UNIFORM, torch.zeros(1), GOES_ON, 1.0, SUPPORT), UNIFORM)
    for atoms in (2, 51, 101, 255):  # supports that no float32 spacing reproduces
        u = random_update((20,), atoms, torch.float32)
        found = categorical_projection(u.next_probs, torch.zeros(20, 1), torch.zeros(20, 1).bool(), 1.0, u.support)
        assert torch.equal(found, u.next_probs)


@pytest.mark.parametrize(
    ("reward", "expected"), [(10.0, [0, 0, 0, 0, 1]), (-10.0, [1, 0, 0, 0, 0]), (-1.75, [0.75, 0.25, 0, 0, 0])]
)
def test_a_terminated_step_is_its_reward_alone(reward, expected):
    for probs in (UNIFORM, torch.full((1, 5), float("nan"))):
        found = categorical_projection(probs, torch.tensor([reward]), ENDS, float("nan"), SUPPORT)
        assert torch.equal(found, torch.tensor([expected], dtype=torch.float32))


def test_discount_per_row():
    expected = torch.tensor([[0, 0.1, 0.4, 0.4, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
    arguments = torch.tensor([0.5, 0.0]), torch.tensor([False, False]), torch.tensor([0.5, 1.0])
    probs = UNIFORM.expand(2, 5)
    torch.testing.assert_close(categorical_projection(probs, *arguments, SUPPORT), expected)
    columns = [x.unsqueeze(-1) for x in arguments]
    torch.testing.assert_close(categorical_projection(probs, *columns, SUPPORT), expected)
    torch.testing.assert_close(categorical_projection(probs[0], *(x[0] for x in arguments), SUPPORT), expected[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 40), st.booleans())
def test_the_mean_moves_as_bellman_says_unless_clipped(seed, atoms, uniform):
    u = random_update((6,), atoms, uniform=uniform, per_row=True, seed=seed)
    target = categorical_projection(*u)
    assert (target >= 0).all()
    moved = u.reward + torch.where(u.terminated, 0.0, u.discount) * u.support
    inside = ((moved >= u.support[0]) & (moved <= u.support[-1])).all(-1)
    mean = u.reward + torch.where(u.terminated, 0.0, u.discount) * (u.next_probs * u.support).sum(-1, keepdim=True)
    torch.testing.assert_close((target * u.support).sum(-1)[inside], mean.squeeze(-1)[inside])


@pytest.mark.parametrize(("name", "lost"), [("reward", [1, 4]), ("discount", [1]), ("next_probs", [1])])
def test_what_is_not_finite_stays_in_its_row(name, lost):
    u = random_update((6,), 51, per_row=True)
    u = u._replace(terminated=torch.tensor([[False]] * 4 + [[True]] * 2))  # row 4 ends: only its reward counts
    clean = categorical_projection(*u)
    broken = getattr(u, name).clone()
    broken[[1, 4]] = float("nan")
    found = categorical_projection(*u._replace(**{name: broken}))
    others = [i for i in range(6) if i not in lost]
    assert torch.equal(found[others], clean[others])
    assert found[lost].isnan().any(-1).all() and (name == "next_probs" or found[lost].isnan().all())


def test_an_infinite_reward_is_clipped():
    reward = torch.tensor([float("inf"), -float("inf")])
    found = categorical_projection(UNIFORM.expand(2, 5), reward, GOES_ON.expand(2), 0.9, SUPPORT)
    assert torch.equal(found, torch.eye(5)[[4, 0]])


@pytest.mark.parametrize(
    "support", [[2.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, float("nan"), 1.0], [0.0, 1.0, float("inf")]]
)
def test_a_support_that_does_not_increase_gives_nan(support):
    assert (
        categorical_projection(torch.ones(2, 3), torch.zeros(2), ENDS.expand(2), 0.9, torch.tensor(support))
        .isnan()
        .all()
    )


def test_inputs_of_any_layout_and_flag_dtype_give_the_same():
    u = random_update((12,), 21, torch.float32, per_row=True)
    strided = [x[::2] for x in u[:4]]
    dense = categorical_projection(*(x.contiguous() for x in strided), u.support)
    assert torch.equal(categorical_projection(*strided, u.support), dense)
    wide = torch.stack([u.support, u.support], -1)[:, 0]
    assert torch.equal(categorical_projection(*u[:4], wide), categorical_projection(*u))
    transposed = u.next_probs.t().contiguous().t()
    assert torch.equal(categorical_projection(transposed, *u[1:]), categorical_projection(*u))
    assert torch.equal(categorical_projection(*u[:2], u.terminated.long() * 3, *u[3:]), categorical_projection(*u))


def test_positions_keep_their_precision_beside_half_probabilities():
    u = random_update((50,), 51, torch.float32)
    half = categorical_projection(u.next_probs.bfloat16(), *u[1:])
    expected = categorical_projection_reference(u.next_probs.bfloat16(), *u[1:])
    assert torch.equal(half, expected.bfloat16()) or (half - expected).abs().max() < 2e-3
    assert categorical_projection(u.next_probs, u.reward.double(), *u[2:]).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_probs": lambda x: x[..., :-1]}, r"next_probs is \[4, 4\], expected \[\*B, 5\], one per atom"),
        ({"next_probs": lambda x: x.long()}, r"next_probs is torch.int64, expected float32"),
        ({"next_probs": lambda x: x.tolist()}, r"next_probs is a list, expected a torch.Tensor"),
        ({"reward": lambda x: x[:1]}, r"reward is \[1, 1\], but next_probs is \[4, 5\]: expected \[4, 1\] or \[4\]"),
        ({"reward": lambda x: x.expand(4, 5)}, r"reward is \[4, 5\].*Nothing is broadcast"),
        ({"reward": lambda x: x.squeeze(-1)}, r"terminated is \[4, 1\], but reward is \[4\].*reward.unsqueeze"),
        ({"terminated": lambda x: x.float()}, r"terminated is torch.float32, expected bool"),
        ({"discount": lambda x: torch.ones(4)}, r"discount is \[4\], but reward is \[4, 1\].*discount.unsqueeze\(-1\)"),
        ({"discount": lambda x: torch.ones(1, 1)}, r"discount is \[1, 1\], but reward is \[4, 1\]"),
        ({"discount": lambda x: torch.tensor(True)}, r"discount is torch.bool, expected a float"),
        ({"support": lambda x: x[None]}, r"support is \[1, 5\], expected \[N\] with two atoms"),
        ({"support": lambda x: x[:1]}, r"support is \[1\], expected \[N\] with two atoms"),
        ({"support": lambda x: x.to("meta")}, r"support is on meta, but next_probs is on cpu"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_wrong_arguments_are_refused(change, message):
    arguments = random_update((4,), 5)._asdict()
    arguments |= {name: edit(arguments[name]) for name, edit in change.items()}
    with pytest.raises(SpecError, match=message):
        categorical_projection(**arguments)


# --- gradients ---


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
def test_first_and_second_derivatives_match_finite_differences(uniform, per_row):
    u = random_update((2, 3), 7, uniform=uniform, per_row=per_row)
    assert u.terminated.any() and not u.terminated.all()

    def run(next_probs):
        return categorical_projection(next_probs, *u[1:])

    probs = u.next_probs.requires_grad_()
    assert torch.autograd.gradcheck(run, probs)
    assert torch.autograd.gradgradcheck(run, probs)
    assert torch.autograd.gradcheck(lambda x: OP(x, *_operator_arguments(u), True), probs)  # the transpose alone
    assert torch.autograd.gradgradcheck(lambda x: OP(x, *_operator_arguments(u), True), probs)


def _operator_arguments(u: Update) -> list[Tensor]:
    return [u.reward, u.terminated, torch.as_tensor(u.discount, dtype=u.reward.dtype), u.support]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradient_equals_the_references(dtype):
    u = random_update((40,), 51, dtype, per_row=True)
    weight = torch.randn(40, 51).to(dtype)
    grads = []
    for function in (categorical_projection, categorical_projection_reference):
        probs = u.next_probs.clone().requires_grad_()
        (function(probs, *u[1:]) * weight).sum().backward()
        grads.append(probs.grad)
    assert grads[0].dtype == dtype and (grads[0][u.terminated.squeeze(-1)] == 0).all()
    torch.testing.assert_close(*grads, rtol=rounding(u), atol=4 * rounding(u))


def test_the_target_is_a_constant_to_reward_discount_and_support():
    u = random_update((4,), 5, per_row=True)
    for x in (u.reward, u.discount, u.support):
        x.requires_grad_()
    assert not categorical_projection(*u).requires_grad
    u.next_probs.requires_grad_()
    categorical_projection(*u).square().sum().backward()
    assert u.next_probs.grad is not None and u.reward.grad is u.discount.grad is u.support.grad is None


def test_nan_behind_a_terminal_step_reaches_no_gradient():
    u = random_update((40,), 11)
    probs = u.next_probs.masked_fill(u.terminated, float("nan")).requires_grad_()
    categorical_projection(probs, *u[1:]).square().sum().backward()
    assert probs.grad.isfinite().all() and (probs.grad[u.terminated.squeeze(-1)] == 0).all()


# --- transforms, traces and registration ---


@pytest.mark.parametrize("dims", [(0, 0, 0, 0, None), (0, 0, 0, None, None), (1, None, None, 0, None), (0, 0, 0, 0, 0)])
def test_vmap_equals_a_loop(dims):
    rows = [random_update((4,), 7, per_row=dims[3] is not None and dims[1] is not None, seed=i) for i in range(3)]
    columns = []
    for d, values in zip(dims, zip(*rows, strict=True), strict=True):
        values = [torch.as_tensor(x, dtype=torch.float64) if not isinstance(x, Tensor) else x for x in values]
        columns.append(values[0] if d is None else torch.stack(values, d))

    def loss(*args):
        return categorical_projection(*args).square().sum()

    gradient = torch.func.grad(loss)
    mapped = torch.vmap(categorical_projection, dims)(*columns), torch.vmap(gradient, dims)(*columns)
    for i in range(3):
        row = [x if d is None else x.select(d, i) for x, d in zip(columns, dims, strict=True)]
        torch.testing.assert_close(mapped[0][i], categorical_projection(*row))
        torch.testing.assert_close(mapped[1][i], gradient(*row))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_trace_sees_one_node(mode):
    u = random_update((4,), 7, torch.float32)

    def run(next_probs, reward, terminated, support):
        return categorical_projection(next_probs, reward, terminated, 0.9, support)

    program = make_fx(run, tracing_mode=mode)(*u[:3], u.support)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.full.default", "graphrl.categorical_projection.default"]
    other = random_update((9,) if mode == "symbolic" else (4,), 7, torch.float32, seed=3)
    assert torch.equal(program(*other[:3], other.support), run(*other[:3], other.support))


def test_compiles_without_graph_breaks_gradient_included():
    u = random_update((4,), 7, per_row=True)
    results = []
    for function in (
        categorical_projection,
        torch.compile(categorical_projection, backend="aot_eager", fullgraph=True),
    ):
        probs = u.next_probs.clone().requires_grad_()
        target = function(probs, *u[1:])
        results.append((target, *torch.autograd.grad(target.square().sum(), probs)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_registration_passes_torchs_own_checks(per_row, transpose):
    u = random_update((3,), 6, per_row=per_row)
    torch.library.opcheck(OP, (u.next_probs.requires_grad_(), *_operator_arguments(u), transpose))


def test_meta_tensors_give_meta_results():
    u = [x.to("meta") if isinstance(x, Tensor) else x for x in random_update((3,), 6, torch.bfloat16)]
    found = categorical_projection(*u)
    assert found.device.type == "meta" and found.shape == (3, 6) and found.dtype == torch.bfloat16
