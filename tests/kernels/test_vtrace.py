"""V-trace against the float64 reference, the paper's identities, TorchRL, and the numbers of a known defect."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import random_trajectory, steps

from graphrl.errors import SpecError
from graphrl.kernels import gae, vtrace
from graphrl.kernels.vtrace.reference import vtrace_reference

CLIPS = {"rho_clip": 1.5, "c_clip": 0.75}
unit = st.floats(0.0, 1.0)
few = settings(max_examples=30, deadline=None)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def random_ratio(shape, dtype=torch.float64, seed=7):
    """Around one, from 0 to 4."""
    return (
        (torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2).square().to(dtype)
    )


@pytest.mark.parametrize(
    ("shape", "time_dim"), [((2, 40, 1), -2), ((13, 600, 1), -2), ((1, 700, 1), -2), ((60, 9), 0)], ids=str
)
def test_values_and_gradients_under_other_clips_equal_the_references(shape, time_dim):
    t, ratio, results = random_trajectory(shape), random_ratio(shape), []
    weights = random_trajectory(shape, seed=2)[:2]
    for function in (vtrace, vtrace_reference):
        inputs = leaves(*t[:3], torch.full(shape, 0.9).double(), torch.tensor(0.8).double())
        out = function(*inputs[:3], *t[3:], ratio, *inputs[3:], **CLIPS, time_dim=time_dim)
        grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs)
        results.append([*out, *grads])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_derivatives_under_other_clips_match_finite_differences():
    t, ratio = random_trajectory((2, 5, 1)), random_ratio((2, 5, 1))
    inputs = leaves(*t[:3], torch.rand(2, 5, 1).double(), torch.tensor(0.8).double())

    def run(reward, value, next_value, gamma, lmbda):
        return vtrace(reward, value, next_value, t.done, t.terminated, ratio, gamma, lmbda, **CLIPS)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_default_lambda_is_one():
    t, ratio = random_trajectory((2, 40, 1)), random_ratio((2, 40, 1))
    for x, y in zip(vtrace(*t, ratio, 0.9), vtrace(*t, ratio, 0.9, 1.0), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": lambda x: x.squeeze(-1)}, r"ratio is \[4, 9\], but reward is \[4, 9, 1\].*ratio.unsqueeze\(-1\)"),
        ({"ratio": lambda x: x.long()}, r"ratio is torch.int64, expected float32"),
        ({"rho_clip": lambda x: 0.0}, r"rho_clip=0.0, expected a positive number; float\('inf'\) clips nothing"),
        ({"c_clip": lambda x: float("nan")}, r"c_clip=nan, expected a positive number"),
        ({"c_clip": lambda x: torch.ones(4, 9, 1)}, r"c_clip is a Tensor, expected a positive number"),
        ({"gamma": lambda x: torch.ones(5, 1)}, r"gamma is \[5, 1\] and does not broadcast to reward \[4, 9, 1\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(change, message):
    arguments = random_trajectory((4, 9, 1))._asdict() | {"ratio": random_ratio((4, 9, 1)), "gamma": 0.9}
    arguments |= {name: edit(arguments.get(name)) for name, edit in change.items()}
    with pytest.raises(SpecError, match=message):
        vtrace(**arguments)


# --- what the paper says ---


def consistent(t):
    """Next values that agree with values within a trajectory: V'_t = V_{t+1} where the step goes on."""
    shifted = torch.cat([t.value[:, 1:], t.next_value[:, -1:]], 1)
    return torch.where(t.done, t.next_value, shifted)


@few
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 40), unit, unit)
def test_on_policy_targets_are_those_of_gae(seed, batch, length, gamma, lmbda):
    t = random_trajectory((batch, length, 1), seed=seed)
    _, value_target = vtrace(*t, torch.ones_like(t.reward), gamma, lmbda)
    torch.testing.assert_close(value_target, gae(*t, gamma, lmbda)[1])


@few
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 40), unit)
def test_on_policy_target_is_the_return_of_the_trajectory(seed, batch, length, gamma):
    t = random_trajectory((batch, length, 1), seed=seed)
    expected, running = torch.zeros_like(t.reward), t.next_value[:, -1]
    for k in reversed(range(length)):
        running = torch.where(t.done[:, k], t.next_value[:, k], running)
        running = t.reward[:, k] + gamma * torch.where(t.terminated[:, k], 0.0, running)
        expected[:, k] = running
    advantage, value_target = vtrace(t.reward, t.value, consistent(t), *t[3:], torch.ones_like(t.reward), gamma)
    torch.testing.assert_close(value_target, expected)
    torch.testing.assert_close(advantage, expected - t.value)


@few
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 40), unit)
def test_lambda_zero_is_the_weighted_td_error(seed, batch, length, gamma):
    t, ratio = random_trajectory((batch, length, 1), seed=seed), random_ratio((batch, length, 1), seed=seed)
    td_error = t.reward + gamma * torch.where(t.terminated, 0.0, t.next_value) - t.value
    torch.testing.assert_close(vtrace(*t, ratio, gamma, 0.0)[1] - t.value, ratio.clamp(max=1) * td_error)


@few
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(2, 40), unit, st.booleans(), st.data())
def test_a_cut_makes_two_independent_trajectories(seed, batch, length, gamma, truncated, data):
    t, ratio = random_trajectory((batch, length, 1), seed=seed), random_ratio((batch, length, 1), seed=seed)
    at = data.draw(st.integers(1, length - 1))
    t.done[:, at - 1], t.terminated[:, at - 1] = True, not truncated
    whole = vtrace(*t, ratio, gamma)
    parts = [vtrace(*(x[:, part] for x in (*t, ratio)), gamma) for part in (slice(at), slice(at, None))]
    for x, y in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(x, torch.cat(y, 1))


def test_truncation_inside_the_batch_does_not_read_the_next_episode():
    value = [1.0, 1.0, 100.0, 100.0]
    t = steps([0, 0, 0, 0], value, value, [0, 1, 0, 0], [0, 0, 0, 0])
    advantage, _ = vtrace(*t, torch.ones(4, 1).double(), 1.0)
    assert advantage[1].item() == 0.0  # 99 where the next state's value is taken from the next episode


def test_clips_bound_the_ratio_and_infinity_clips_nothing():
    t, ratio = random_trajectory((4, 30, 1)), random_ratio((4, 30, 1))
    for x, y in zip(vtrace(*t, ratio, 0.9), vtrace(*t, ratio.clamp(max=1.0), 0.9, rho_clip=2.0), strict=True):
        assert torch.equal(x, y)
    unclipped = {"rho_clip": float("inf"), "c_clip": float("inf")}
    for x, y in zip(
        vtrace(*t, ratio, 0.9, **unclipped), vtrace_reference(*t, ratio, 0.9, rho_clip=4.0, c_clip=4.0), strict=True
    ):
        torch.testing.assert_close(x, y)
    infinite, clipped = (ratio.masked_fill(ratio > 1.0, x) for x in (float("inf"), 1.0))
    for x, y in zip(vtrace(*t, infinite, 0.9), vtrace(*t, clipped, 0.9), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("shape", "time_dim"), [((9, 600, 1), -2), ((1, 900, 1), -2), ((600, 40, 1), 0)], ids=str)
def test_non_finite_values_stay_on_their_side_of_a_cut(shape, time_dim, bad):
    t, ratio = random_trajectory(shape), random_ratio(shape)
    t.done.select(time_dim, 299).fill_(True)
    clean = vtrace(*t, ratio, 0.9, time_dim=time_dim)
    hidden = t._replace(next_value=t.next_value.masked_fill(t.terminated, bad))
    assert torch.equal(vtrace(*hidden, ratio, 0.9, time_dim=time_dim)[0], clean[0])
    # The next trajectory is lost, all of it: the steps before its start keep what they had.
    lost = [x.clone() for x in (*t[:3], ratio)]
    for x in lost:
        x.narrow(time_dim, 300, 1).fill_(bad)
    found = vtrace(*lost[:3], *t[3:], lost[3], 0.9, time_dim=time_dim)
    for x, y in zip(found, clean, strict=True):
        assert torch.equal(x.narrow(time_dim, 0, 300), y.narrow(time_dim, 0, 300))


def test_a_lost_ratio_is_not_clipped_but_seen():
    t, ratio = random_trajectory((1, 5, 1), end=0.0), torch.ones(1, 5, 1).double()
    ratio[:, 2] = float("nan")
    for x in vtrace(*t, ratio, 0.9):
        assert x.isnan().flatten().tolist() == [True, True, True, False, False]


def test_ratio_counts_as_a_constant():
    t, ratio = random_trajectory((2, 7, 1)), random_ratio((2, 7, 1))
    ratio.requires_grad_()
    value = t.value.clone().requires_grad_()
    advantage, value_target = vtrace(t.reward, value, *t[2:], ratio, 0.9)
    found = torch.autograd.grad((advantage + value_target).sum(), [value, ratio], allow_unused=True)
    assert found[0].abs().sum() > 0 and found[1] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_behind_a_cut_reaches_no_gradient(bad):
    t, ratio = random_trajectory((4, 40, 1)), random_ratio((4, 40, 1))
    t.done[:, 19] = True
    lost = [x.clone() for x in (*t[:3], ratio)]
    for x in lost:
        x[:, 20] = bad
    lost[2].masked_fill_(t.terminated, bad)
    inputs, gamma = leaves(*lost[:3]), torch.full((4, 40, 1), 0.9).double().requires_grad_()
    out = vtrace(*inputs, *t[3:], lost[3], gamma, 0.9)
    weight = torch.ones_like(t.reward)
    weight[:, 20:] = 0
    loss = (torch.where(weight == 1, out[0], 0) + torch.where(weight == 1, out[1], 0).square()).sum()
    for g in torch.autograd.grad(loss, [*inputs, gamma]):
        assert g[:, :20].isfinite().all()
    assert (
        torch.autograd.grad(vtrace(*inputs, *t[3:], ratio, gamma)[0].nansum(), inputs[2])[0][t.terminated] == 0
    ).all()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peer's own, at import
@pytest.mark.parametrize("end", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("shape", [(1, 30, 1), (5, 200, 1), (2, 3, 60, 1)], ids=str)
def test_equals_torchrl(shape, end):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    t, ratio = random_trajectory(shape, end=end), random_ratio(shape)
    expected = functional.vtrace_advantage_estimate(
        0.99, ratio.log(), torch.zeros_like(ratio), t.value, t.next_value, t.reward, t.done, t.terminated, 1.25, 0.75
    )
    for found, y in zip(vtrace(*t, ratio, 0.99, rho_clip=1.25, c_clip=0.75), expected, strict=True):
        torch.testing.assert_close(found, y)
