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

SHAPES = [
    ((1, 1, 1), -2),
    ((2, 3, 40, 1), -2),
    ((13, 600, 1), -2),  # more rows than lanes, several tiles
    ((1, 1300, 1), -2),  # one long row
    ((50,), -1),
    ((6, 50), -1),
    ((50, 300), 0),  # time-major: lanes along memory
    ((4, 60, 3, 1), -3),  # agents
    ((11, 200, 7, 1), -3),
    ((0, 5, 1), -2),
    ((5, 0, 1), -2),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 0.1, torch.float16: 0.015}
unit = st.floats(0.0, 1.0)
few = settings(max_examples=30, deadline=None)


def random_ratio(shape, dtype=torch.float64, seed=7):
    """Around one, from 0 to 4."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2).square().to(dtype)


@pytest.mark.parametrize(
    ("shape", "time_dim", "dtype"),
    [(*x, dtype) for dtype in TOLERANCE for x in (SHAPES if dtype == torch.float64 else SHAPES[1:9:3])],
    ids=str,
)
def test_equals_the_reference(shape, time_dim, dtype):
    t, ratio = random_trajectory(shape, dtype), random_ratio(shape, dtype)
    clips = {"rho_clip": 1.5, "c_clip": 0.9}
    for gamma, lmbda in ((0.99, 0.95), (torch.rand(shape).to(dtype), 0.9)):
        found = vtrace(*t, ratio, gamma, lmbda, **clips, time_dim=time_dim)
        expected = vtrace_reference(*t, ratio, gamma, lmbda, **clips, time_dim=time_dim)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == dtype and x.shape == shape and x.is_contiguous()
            torch.testing.assert_close(x.double(), y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_large_batch_on_several_threads_and_no_cut_equals_the_reference():
    for shape, time_dim, end in (((600, 500, 1), -2, 0.1), ((500, 600, 1), 0, 0.1), ((9, 1500, 1), -2, 0.0)):
        t, ratio = random_trajectory(shape, end=end), random_ratio(shape)
        for x, y in zip(
            vtrace(*t, ratio, 0.99, time_dim=time_dim), vtrace_reference(*t, ratio, 0.99, time_dim=time_dim), strict=True
        ):
            torch.testing.assert_close(x, y)


def test_non_contiguous_inputs_and_integer_flags_equal_contiguous_and_boolean_ones():
    t, ratio = random_trajectory((5, 30, 4, 1)), random_ratio((5, 30, 4, 1))
    views = [x.transpose(1, 2) for x in (*t, ratio)]
    expected = vtrace(*(x.contiguous() for x in views), 0.9)
    flags = [x.long() * 2 for x in views[3:5]]
    for x, y, z in zip(vtrace(*views, 0.9), vtrace(*views[:3], *flags, views[5], 0.9), expected, strict=True):
        assert torch.equal(x, z) and torch.equal(y, z) and x.is_contiguous()


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


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peer's own, at import
@pytest.mark.parametrize("end", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("shape", [(1, 30, 1), (5, 200, 1), (2, 3, 60, 1)], ids=str)
def test_equals_torchrl(shape, end):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    t, ratio = random_trajectory(shape, end=end), random_ratio(shape)
    expected = functional.vtrace_advantage_estimate(
        0.99, ratio.log(), torch.zeros_like(ratio), t.value, t.next_value, t.reward, t.done, t.terminated, 1.2, 0.8
    )
    for found, y in zip(vtrace(*t, ratio, 0.99, rho_clip=1.2, c_clip=0.8), expected, strict=True):
        torch.testing.assert_close(found, y)
