"""What reinforcement learning says about returns and advantages, whatever computes them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trajectories import random_trajectory

from graphrl.kernels import (
    discounted_sum,
    gae,
    lambda_return,
    n_step_return,
    td0,
    td1,
    td_lambda,
    vtrace,
)

unit = st.floats(0.0, 1.0)
seeds = st.integers(0, 2**31)
batches = st.integers(1, 12)
lengths = st.integers(1, 40)
few = settings(max_examples=15, deadline=None)


class Rollout(NamedTuple):
    reward: Tensor
    value: Tensor
    next_value: Tensor
    done: Tensor
    terminated: Tensor
    ratio: Tensor


def rollout(seed: int, batch: int, length: int) -> Rollout:
    """[batch, length, 1] in float64; the ratios lie on both sides of one."""
    t = random_trajectory((batch, length, 1), seed=seed)
    return Rollout(*t, random_trajectory((batch, length, 1), seed=seed + 1).reward.exp())


def consistent(x: Rollout, values: Tensor | None = None) -> Tensor:
    """next_value of a critic that is a function of the state: ``V'_t = V_{t+1}`` where the step goes on."""
    values = x.value if values is None else values
    return torch.where(x.done, x.next_value, torch.cat([values[:, 1:], x.next_value[:, -1:]], 1))


def _n_step(x, gamma, n, **where):
    """The n-step return with its bootstrap."""
    reward, discount, index = n_step_return(x.reward, x.done, x.terminated, gamma, n, **where)
    return reward + discount * x.next_value.gather(where.get("time_dim", 1), index)


def _lambda_return(x, gamma, lmbda, **where):
    """Flags as a world model has them: in the discount; a truncated step trusts its value."""
    discount, trust = gamma * (~x.terminated).double(), lmbda * (~x.done).double()
    return lambda_return(x.reward, x.next_value, discount, trust, **where)


# Each a function of (rollout, gamma, lmbda, time_dim=...), linear in reward, value and next_value together.
RETURNS = {
    "gae": lambda x, gamma, lmbda, **at: gae(*x[:5], gamma, lmbda, **at)[0],
    "gae target": lambda x, gamma, lmbda, **at: gae(*x[:5], gamma, lmbda, **at)[1],
    "td_lambda": lambda x, gamma, lmbda, **at: td_lambda(x.reward, *x[2:5], gamma, lmbda, **at),
    "td0": lambda x, gamma, lmbda, **at: td0(x.reward, x.next_value, x.terminated, gamma),
    "td1": lambda x, gamma, lmbda, **at: td1(x.reward, *x[2:5], gamma, **at),
    "lambda_return": _lambda_return,
    "discounted_sum": lambda x, gamma, lmbda, **at: discounted_sum(x.reward, x.done, gamma, **at),
    "three steps": lambda x, gamma, lmbda, **at: _n_step(x, gamma, 3, **at),
    "vtrace": lambda x, gamma, lmbda, **at: vtrace(*x, gamma, lmbda, **at)[0],
    "vtrace target": lambda x, gamma, lmbda, **at: vtrace(*x, gamma, lmbda, **at)[1],
}
every_return = pytest.mark.parametrize("name", RETURNS)


# --- laws that hold for all of them ---


@every_return
@few
@given(seeds, batches, st.integers(2, 40), unit, unit, st.booleans(), st.data())
def test_a_cut_makes_two_independent_trajectories(name, seed, batch, length, gamma, lmbda, truncated, data):
    x = rollout(seed, batch, length)
    at = data.draw(st.integers(1, length - 1))
    x.done[:, at - 1], x.terminated[:, at - 1] = True, not truncated
    parts = [RETURNS[name](Rollout(*(y[:, part] for y in x)), gamma, lmbda) for part in (slice(at), slice(at, None))]
    torch.testing.assert_close(RETURNS[name](x, gamma, lmbda), torch.cat(parts, 1))


@every_return
@few
@given(seeds, batches, lengths, unit, unit, st.floats(-3.0, 3.0))
def test_linear_in_rewards_and_values(name, seed, batch, length, gamma, lmbda, scale):
    x, y = rollout(seed, batch, length), rollout(seed + 2, batch, length)
    mixed = x._replace(**{k: scale * getattr(x, k) + getattr(y, k) for k in ("reward", "value", "next_value")})
    same_flags = Rollout(*y[:3], *x[3:])
    found = RETURNS[name](mixed, gamma, lmbda)
    expected = scale * RETURNS[name](x, gamma, lmbda) + RETURNS[name](same_flags, gamma, lmbda)
    torch.testing.assert_close(found, expected)


@every_return
@few
@given(seeds, batches, lengths, unit, unit)
def test_order_of_the_batch_and_layout_do_not_matter(name, seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    expected, order = RETURNS[name](x, gamma, lmbda), torch.arange(batch).flip(0)
    shuffled = RETURNS[name](Rollout(*(y[order] for y in x)), gamma, lmbda)
    torch.testing.assert_close(shuffled, expected[order])
    time_major = RETURNS[name](Rollout(*(y.squeeze(-1).t() for y in x)), gamma, lmbda, time_dim=0)
    torch.testing.assert_close(time_major.t().unsqueeze(-1), expected)


@every_return
@few
@given(seeds, batches, lengths, unit, unit)
def test_later_steps_alone_count(name, seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    at = length // 2
    tail = RETURNS[name](Rollout(*(y[:, at:] for y in x)), gamma, lmbda)
    torch.testing.assert_close(RETURNS[name](x, gamma, lmbda)[:, at:], tail)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_return
def test_mixed_dtypes_promote_as_torch_promotes(name, low):
    x = rollout(0, 3, 9)
    lowered = Rollout(*(y.to(low) if y.is_floating_point() else y for y in x))
    assert RETURNS[name](lowered, 0.9, 0.8).dtype == low
    mixed = RETURNS[name](lowered._replace(reward=x.reward), 0.9, 0.8)
    assert mixed.dtype == torch.float64


@pytest.mark.parametrize("name", [name for name in RETURNS if name not in ("discounted_sum", "three steps")])
@few
@given(seeds, batches, lengths, unit, unit)
def test_truncation_bootstraps_and_termination_does_not(name, seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    truncated = RETURNS[name](x._replace(terminated=torch.zeros_like(x.done)), gamma, lmbda)
    terminated = RETURNS[name](x._replace(terminated=x.done), gamma, lmbda)
    weight = x.ratio.clamp(max=1.0) if "vtrace" in name else torch.ones_like(x.ratio)
    torch.testing.assert_close((truncated - terminated)[x.done], (gamma * weight * x.next_value)[x.done])


@every_return
@few
@given(seeds, batches, lengths, unit, unit)
def test_where_every_step_is_done_there_is_one_step_to_look_at(name, seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    x = x._replace(done=torch.ones_like(x.done), ratio=torch.ones_like(x.ratio))
    expected = x.reward if name == "discounted_sum" else td0(x.reward, x.next_value, x.terminated, gamma)
    expected = expected - x.value if name in ("gae", "vtrace") else expected
    torch.testing.assert_close(RETURNS[name](x, gamma, lmbda), expected)


# --- lambda from zero to one ---


@few
@given(seeds, batches, lengths, unit)
def test_lambda_one_is_monte_carlo(seed, batch, length, gamma):
    x = rollout(seed, batch, length)
    expected, running = torch.zeros_like(x.reward), x.next_value[:, -1]
    for k in reversed(range(length)):
        running = torch.where(x.done[:, k], x.next_value[:, k], running)
        running = x.reward[:, k] + gamma * torch.where(x.terminated[:, k], 0.0, running)
        expected[:, k] = running
    torch.testing.assert_close(td1(x.reward, *x[2:5], gamma), expected)
    torch.testing.assert_close(td_lambda(x.reward, *x[2:5], gamma, 1.0), expected)
    torch.testing.assert_close(_n_step(x, gamma, length), expected)
    # With values of its own in between, only a consistent critic's telescope.
    x = x._replace(next_value=consistent(x), ratio=torch.ones_like(x.ratio))
    for advantage, value_target in (gae(*x[:5], gamma, 1.0), vtrace(*x, gamma)):
        torch.testing.assert_close(advantage, expected - x.value)
        torch.testing.assert_close(value_target, expected)


@few
@given(seeds, batches, lengths, unit)
def test_lambda_zero_is_one_step(seed, batch, length, gamma):
    x = rollout(seed, batch, length)
    one_step = x.reward + gamma * torch.where(x.terminated, 0.0, x.next_value)
    torch.testing.assert_close(td0(x.reward, x.next_value, x.terminated, gamma), one_step)
    torch.testing.assert_close(td_lambda(x.reward, *x[2:5], gamma, 0.0), one_step)
    torch.testing.assert_close(_n_step(x, gamma, 1), one_step)
    torch.testing.assert_close(gae(*x[:5], gamma, 0.0)[0], one_step - x.value)
    corrected = x.value + x.ratio.clamp(max=1.0) * (one_step - x.value)
    torch.testing.assert_close(vtrace(*x, gamma, 0.0)[1], corrected)


@few
@given(seeds, batches, lengths, unit, unit)
def test_lambda_between_weights_the_n_step_returns(seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    expected = sum((1 - lmbda) * lmbda ** (n - 1) * _n_step(x, gamma, n) for n in range(1, length))
    expected = expected + lmbda ** (length - 1) * _n_step(x, gamma, length)
    torch.testing.assert_close(td_lambda(x.reward, *x[2:5], gamma, lmbda), expected)


@few
@given(seeds, batches, lengths, unit, unit)
def test_td_lambda_is_gae_plus_value_for_a_consistent_critic(seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    x = x._replace(next_value=consistent(x))
    advantage, value_target = gae(*x[:5], gamma, lmbda)
    torch.testing.assert_close(value_target, advantage + x.value)
    torch.testing.assert_close(value_target, td_lambda(x.reward, *x[2:5], gamma, lmbda))


@few
@given(seeds, batches, lengths, unit, unit)
def test_flags_are_discounts_of_zero(seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    expected = td_lambda(x.reward, *x[2:5], gamma, lmbda)
    torch.testing.assert_close(_lambda_return(x, gamma, lmbda), expected)
    ended = x._replace(done=x.terminated)  # without truncation the discount alone says it
    found = lambda_return(x.reward, x.next_value, gamma * (~x.terminated).double(), lmbda)
    torch.testing.assert_close(found, td_lambda(x.reward, *ended[2:5], gamma, lmbda))


@few
@given(seeds, batches, lengths, unit, unit)
def test_shaping_by_a_potential_moves_targets_and_no_advantage(seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    x = x._replace(next_value=consistent(x))
    y = rollout(seed + 2, batch, length)._replace(done=x.done, terminated=x.terminated)
    potential, following = y.value, consistent(y)
    shaped = x._replace(
        reward=x.reward + gamma * torch.where(x.terminated, 0.0, following) - potential,
        value=x.value - potential,
        next_value=x.next_value - following,
    )
    for name in ("gae", "vtrace"):
        torch.testing.assert_close(RETURNS[name](shaped, gamma, lmbda), RETURNS[name](x, gamma, lmbda))
    for name in ("gae target", "vtrace target", "td_lambda", "td1", "td0", "three steps", "lambda_return"):
        expected = RETURNS[name](x, gamma, lmbda) - potential
        torch.testing.assert_close(RETURNS[name](shaped, gamma, lmbda), expected)


# --- windows of n steps ---


@few
@given(seeds, batches, lengths, unit, st.integers(0, 5))
def test_a_window_as_long_as_the_batch_is_the_reward_to_go(seed, batch, length, gamma, more):
    x = rollout(seed, batch, length)
    reward, _, _ = n_step_return(x.reward, x.done, x.terminated, gamma, length + more)
    torch.testing.assert_close(reward, discounted_sum(x.reward, x.done, gamma))


@few
@given(seeds, batches, lengths, unit, st.integers(1, 5))
def test_a_window_is_one_step_and_a_shorter_window(seed, batch, length, gamma, n):
    x = rollout(seed, batch, length)
    goes_on = ~x.done
    goes_on[:, -1] = False
    shorter = torch.cat([_n_step(x, gamma, n)[:, 1:], x.next_value[:, -1:]], 1)
    then = torch.where(goes_on, shorter, torch.where(x.terminated, 0.0, x.next_value))
    torch.testing.assert_close(_n_step(x, gamma, n + 1), x.reward + gamma * then)


@few
@given(seeds, batches, lengths, unit)
def test_one_horizon_per_row_equals_a_call_for_each(seed, batch, length, gamma):
    x = rollout(seed, batch, length)
    n = torch.randint(1, length + 1, (batch, 1, 1), generator=torch.Generator().manual_seed(seed))
    for row in range(batch):
        alone = Rollout(*(y[row : row + 1] for y in x))
        expected = _n_step(alone, gamma, int(n[row]))
        torch.testing.assert_close(_n_step(x, gamma, n)[row : row + 1], expected)


# --- off-policy corrections ---


@few
@given(seeds, batches, lengths, unit, unit, st.floats(1.0, 3.0))
def test_on_policy_vtrace_is_gae(seed, batch, length, gamma, lmbda, clip):
    x = rollout(seed, batch, length)._replace(ratio=torch.ones(batch, length, 1).double())
    _, value_target = vtrace(*x, gamma, lmbda, rho_clip=clip, c_clip=clip)
    torch.testing.assert_close(value_target, gae(*x[:5], gamma, lmbda)[1])


@few
@given(seeds, batches, lengths, unit, unit)
def test_actions_the_policy_never_takes_teach_nothing(seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)._replace(ratio=torch.zeros(batch, length, 1).double())
    advantage, value_target = vtrace(*x, gamma, lmbda)
    assert torch.equal(value_target, x.value) and not advantage.any()


@few
@given(seeds, batches, lengths, unit, unit)
def test_ratios_above_the_clip_count_as_the_clip(seed, batch, length, gamma, lmbda):
    x = rollout(seed, batch, length)
    clipped = vtrace(*x[:5], x.ratio.clamp(max=1.0), gamma, lmbda, rho_clip=float("inf"), c_clip=float("inf"))
    torch.testing.assert_close(vtrace(*x, gamma, lmbda), clipped)


# --- the discount ---


@few
@given(seeds, batches, lengths, unit, unit)
def test_without_foresight_only_the_reward_is_left(seed, batch, length, lmbda, scale):
    x = rollout(seed, batch, length)._replace(ratio=torch.ones(batch, length, 1).double())
    for name, function in RETURNS.items():
        expected = x.reward - x.value if name in ("gae", "vtrace") else x.reward
        torch.testing.assert_close(function(x, 0.0, lmbda), expected)


@few
@given(batches, lengths, st.floats(0.0, 0.99), st.floats(-3.0, 3.0))
def test_a_constant_reward_is_a_geometric_series(batch, length, gamma, reward):
    left = torch.arange(length, 0, -1, dtype=torch.float64).view(length, 1).expand(batch, length, 1)
    found = discounted_sum(torch.full_like(left, reward), torch.zeros_like(left).bool(), gamma)
    torch.testing.assert_close(found, reward * (1 - gamma**left) / (1 - gamma))
