"""What reinforcement learning says about GAE, whatever computes it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import random_trajectory

from graphrl.kernels import gae

unit = st.floats(0.0, 1.0)
seeds = st.integers(0, 2**31)
lengths = st.integers(1, 40)
batches = st.integers(1, 12)
few = settings(max_examples=30, deadline=None)


@few
@given(seeds, batches, lengths, unit)
def test_lambda_one_is_monte_carlo_return_minus_value(seed, batch, length, gamma):
    t = random_trajectory((batch, length, 1), seed=seed)
    expected = torch.zeros(batch, length, 1, dtype=torch.float64)
    running = t.next_value[:, -1]
    for k in reversed(range(length)):
        running = torch.where(t.done[:, k], t.next_value[:, k], running)
        running = t.reward[:, k] + gamma * torch.where(t.terminated[:, k], 0.0, running)
        expected[:, k] = running
    # Only a value estimate that is consistent within a trajectory telescopes: V'_t = V_{t+1} where the step goes on.
    shifted = torch.cat([t.value[:, 1:], t.next_value[:, -1:]], 1)
    next_value = torch.where(t.done, t.next_value, shifted)
    advantage, value_target = gae(t.reward, t.value, next_value, t.done, t.terminated, gamma, 1.0)
    torch.testing.assert_close(advantage, expected - t.value)
    torch.testing.assert_close(value_target, expected)


@few
@given(seeds, batches, lengths, unit)
def test_lambda_zero_is_the_td_error(seed, batch, length, gamma):
    t = random_trajectory((batch, length, 1), seed=seed)
    td_error = t.reward + gamma * torch.where(t.terminated, 0.0, t.next_value) - t.value
    torch.testing.assert_close(gae(*t, gamma, 0.0)[0], td_error)


@few
@given(seeds, batches, st.integers(2, 40), unit, unit, st.booleans(), st.data())
def test_a_cut_makes_two_independent_trajectories(seed, batch, length, gamma, lmbda, truncated, data):
    t = random_trajectory((batch, length, 1), seed=seed)
    at = data.draw(st.integers(1, length - 1))
    t.done[:, at - 1], t.terminated[:, at - 1] = True, not truncated
    whole = gae(*t, gamma, lmbda)[0]
    parts = [gae(*(x[:, part] for x in t), gamma, lmbda)[0] for part in (slice(at), slice(at, None))]
    torch.testing.assert_close(whole, torch.cat(parts, 1))


@few
@given(seeds, batches, lengths, unit, unit)
def test_truncation_bootstraps_and_termination_does_not(seed, batch, length, gamma, lmbda):
    t = random_trajectory((batch, length, 1), seed=seed)
    never = torch.zeros_like(t.done)
    truncated = gae(*t[:3], t.done, never, gamma, lmbda)[0]
    terminated = gae(*t[:3], t.done, t.done, gamma, lmbda)[0]
    torch.testing.assert_close((truncated - terminated)[t.done], (gamma * t.next_value)[t.done])


@few
@given(seeds, batches, lengths, unit, unit, st.floats(-3.0, 3.0))
def test_advantage_is_linear_in_rewards_and_values(seed, batch, length, gamma, lmbda, scale):
    t = random_trajectory((batch, length, 1), seed=seed)
    other = random_trajectory((batch, length, 1), seed=seed + 1)
    mixed = [scale * x + y for x, y in zip(t[:3], other[:3], strict=True)]
    found = gae(*mixed, *t[3:], gamma, lmbda)[0]
    torch.testing.assert_close(found, scale * gae(*t, gamma, lmbda)[0] + gae(*other[:3], *t[3:], gamma, lmbda)[0])
