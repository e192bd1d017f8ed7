import math

import pytest
import torch

from graphrl.errors import SpecError
from graphrl.losses import (
    approximate_kl,
    clipped_surrogate,
    effective_sample_size,
    entropy_bonus,
    explained_variance,
    joint_log_prob,
    normalize_advantage,
    value_error,
)


def surrogate_reference(new, old, advantage, eps):
    """Eq. 7 of the PPO paper, one sample at a time, in float64."""
    total, outside = 0.0, 0
    for n, o, a in zip(new.tolist(), old.tolist(), advantage.flatten().tolist(), strict=True):
        r = math.exp(n - o)
        total += min(r * a, min(max(r, 1 - eps), 1 + eps) * a)
        outside += not 1 - eps <= r <= 1 + eps
    return -total / len(new), outside / len(new)


def test_clipped_surrogate_is_equation_seven():
    new, old, advantage = torch.randn(50) * 0.3, torch.randn(50) * 0.3, torch.randn(50, 1)
    loss, fraction = clipped_surrogate(new, old, advantage, clip_epsilon=0.2)
    expected, outside = surrogate_reference(new, old, advantage, 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and fraction.item() == pytest.approx(outside)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [(0.1, 1.0, True), (0.5, 1.0, False), (0.5, -1.0, True), (-0.5, -1.0, False), (-0.5, 1.0, True), (0.0, 1.0, True)],
)
def test_surrogate_moves_the_policy_only_where_clipping_allows(log_ratio, advantage, moves):
    new = torch.tensor([log_ratio], requires_grad=True)
    old, advantage = torch.zeros(1, requires_grad=True), torch.tensor([[advantage]], requires_grad=True)
    clipped_surrogate(new, old, advantage)[0].backward()
    expected = -math.exp(log_ratio) * advantage.item() if moves else 0.0
    assert new.grad.item() == pytest.approx(expected, rel=1e-6) and old.grad is None and advantage.grad is None


@pytest.mark.parametrize("heads", [list, lambda pair: {"move": pair[0], "turn": pair[1]}])
def test_heads_of_a_composite_action_are_summed_before_clipping(heads):
    new = heads([torch.tensor([0.3]), torch.tensor([-0.3])])
    old = heads([torch.zeros(1), torch.zeros(1)])
    loss, fraction = clipped_surrogate(new, old, torch.ones(1, 1), clip_epsilon=0.2)
    assert -loss.item() == pytest.approx(1.0) and fraction.item() == 0
    assert approximate_kl(new, old).item() == pytest.approx(0.0, abs=1e-7)
    with pytest.raises(SpecError, match="not broadcast"):
        joint_log_prob([torch.zeros(3), torch.zeros(3, 1)])


def test_shapes_are_never_broadcast():
    flat, column = torch.zeros(3), torch.zeros(3, 1)
    for call in (
        lambda: clipped_surrogate(flat, flat, flat),
        lambda: clipped_surrogate(flat, column, column),
        lambda: clipped_surrogate(column, column, column),
        lambda: approximate_kl(flat, column),
        lambda: effective_sample_size(flat, column),
        lambda: value_error(flat, column),
        lambda: value_error(column, column, flat, clip_value=0.2),
        lambda: explained_variance(flat, column),
    ):
        with pytest.raises(SpecError, match=r"\[3\].*\[3, 1\]|\[3, 1\].*\[3\]|\[3, 1\].*\[3, 1, 1\]"):
            call()


@pytest.mark.parametrize(("target", "loss", "moves"), [(0.0, 4.0, True), (3.0, 7.84, False)])
def test_clipped_value_loss_takes_the_worse_of_both(target, loss, moves):
    value = torch.tensor([[2.0]], requires_grad=True)
    old = torch.zeros(1, 1, requires_grad=True)
    error = value_error(value, torch.tensor([[target]]), old, clip_value=0.2, loss_critic_type="l2")
    error.backward()
    assert error.item() == pytest.approx(loss, rel=1e-6)
    assert value.grad.item() == pytest.approx(2 * (2 - target) if moves else 0.0) and old.grad is None


def test_value_error_is_squared_or_huber():
    value, target = torch.tensor([[0.5], [3.0]]), torch.zeros(2, 1)
    assert value_error(value, target, loss_critic_type="l2").item() == pytest.approx((0.25 + 9) / 2)
    assert value_error(value, target, critic_coeff=2.0).item() == pytest.approx(0.125 + 2.5)
    with pytest.raises(ValueError, match="expected one of"):
        value_error(value, target, loss_critic_type="l1")
    with pytest.raises(ValueError, match="needs old_state_value"):
        value_error(value, target, clip_value=0.2)


def test_value_target_gets_no_gradient():
    value, target = torch.ones(3, 1, requires_grad=True), torch.zeros(3, 1, requires_grad=True)
    value_error(value, target).backward()
    assert value.grad is not None and target.grad is None


def test_entropy_bonus_rewards_entropy():
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    loss, mean = entropy_bonus(entropy, entropy_coeff=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-0.2) and mean.item() == 2.0 and not mean.requires_grad
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_approximate_kl_estimates_the_divergence():
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.2, 1.1)
    action = old.sample((400_000,))
    exact = torch.distributions.kl_divergence(old, new).item()
    assert approximate_kl(new.log_prob(action), old.log_prob(action)).item() == pytest.approx(exact, rel=0.05)
    assert approximate_kl(torch.randn(9), torch.randn(9)).item() > 0 == approximate_kl(action, action).item()


def test_effective_sample_size_counts_equal_weights():
    assert effective_sample_size(torch.zeros(8), torch.zeros(8)).item() == pytest.approx(1.0)
    one = torch.tensor([0.0] + [-1e4] * 7)
    assert effective_sample_size(one, torch.zeros(8)).item() == pytest.approx(1 / 8)


def test_explained_variance_of_perfect_useless_and_constant():
    target = torch.randn(20, 1)
    assert explained_variance(target, target).item() == 1.0
    assert explained_variance(torch.zeros(20, 1), target).item() == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(target, torch.ones(20, 1)).item() == 0.0


def test_normalized_advantage_has_mean_zero_and_unit_deviation():
    advantage = normalize_advantage(torch.randn(100, 1) * 7 + 3)
    assert advantage.mean().item() == pytest.approx(0, abs=1e-6) and advantage.std().item() == pytest.approx(
        1, rel=1e-5
    )
    assert normalize_advantage(torch.ones(1, 1)).item() == 0.0 and normalize_advantage(torch.ones(4, 1)).sum() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("constant", [3.3, -1234.567, 1e-3, 0.0])
def test_equal_advantages_are_worth_nothing_whatever_rounding_leaves(constant, dtype):
    advantage = torch.full((7, 13, 1), constant, dtype=dtype, requires_grad=True)
    for mask in (None, torch.rand(7, 13, 1) < 0.7):
        out = normalize_advantage(advantage, mask)
        assert out.abs().max() < 1e-6
        assert torch.autograd.grad(out.sum(), advantage)[0].isfinite().all()
