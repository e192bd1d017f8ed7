"""The terms of policy-gradient losses as pure functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, smooth_l1_loss

from graphrl.errors import SpecError
from graphrl.losses.common import require_same_shape

__all__ = [
    "approximate_kl",
    "clipped_surrogate",
    "effective_sample_size",
    "entropy_bonus",
    "explained_variance",
    "joint_log_prob",
    "normalize_advantage",
    "value_error",
]

Heads = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""A log-probability [*B], or one for each head of a composite action."""


def joint_log_prob(log_prob: Heads) -> Tensor:
    """The log-probability of a composite action: the sum over its independent heads.

        log pi(a | s) = sum_h log pi_h(a_h | s)

    log_prob: [*B] nats, or a list or mapping of such. Gradient flows. Raises :class:`SpecError` for heads of
    different shapes.
    """
    if isinstance(log_prob, Tensor):
        return log_prob
    heads = dict(log_prob) if isinstance(log_prob, Mapping) else {f"head {i}": x for i, x in enumerate(log_prob)}
    require_same_shape(**heads)
    return torch.stack(list(heads.values())).sum(0)


def clipped_surrogate(
    action_log_prob: Heads, sample_log_prob: Heads, advantage: Tensor, *, clip_epsilon: float | Tensor = 0.2
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, eq. 7 of Schulman et al. 2017 (arXiv:1707.06347).

        r = exp(log pi(a|s) - log pi_old(a|s));   L = -mean(min(r A, clip(r, 1 - eps, 1 + eps) A))

    action_log_prob, sample_log_prob: [*B] nats, gradient flows to the first only; the heads of a composite action are
    summed before clipping. advantage: [*B, 1], no gradient.
    Returns loss_objective: [] and clip_fraction: [] in [0, 1], the share of ratios outside the interval.
    Raises :class:`SpecError` when the shapes do not pair up: nothing is broadcast.
    """
    new, old = joint_log_prob(action_log_prob), joint_log_prob(sample_log_prob).detach()
    require_same_shape(action_log_prob=new, sample_log_prob=old)
    if advantage.shape != (*new.shape, 1):
        raise SpecError(
            f"advantage is {list(advantage.shape)}, but action_log_prob {list(new.shape)} needs {[*new.shape, 1]}: "
            "one log-probability a step, summed over the action's dimensions, and one advantage with a trailing 1"
        )
    ratio = (new - old).unsqueeze(-1).exp()
    low: Any = 1 - clip_epsilon
    high: Any = 1 + clip_epsilon
    clipped = ratio.clamp(low, high)
    gain = torch.minimum(ratio * advantage.detach(), clipped * advantage.detach())
    return -gain.mean(), (clipped != ratio).detach().to(ratio.dtype).mean()


def approximate_kl(action_log_prob: Heads, sample_log_prob: Heads) -> Tensor:
    """The divergence of the new policy from the one that acted, from its actions: never negative, low in variance.

        KL(pi_old || pi) ~ mean(exp(d) - 1 - d),   d = log pi(a|s) - log pi_old(a|s)

    Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), estimator k3. action_log_prob,
    sample_log_prob: [*B] nats. Returns kl_approx: [] nats, no gradient. Raises :class:`SpecError` for unequal shapes.
    """
    new, old = joint_log_prob(action_log_prob).detach(), joint_log_prob(sample_log_prob).detach()
    require_same_shape(action_log_prob=new, sample_log_prob=old)
    difference = new - old
    return (torch.expm1(difference) - difference).mean()


def effective_sample_size(action_log_prob: Heads, sample_log_prob: Heads) -> Tensor:
    """The share of a batch that its importance weights leave in effect.

        ESS = (sum r)^2 / (n sum r^2),   r = exp(log pi(a|s) - log pi_old(a|s))

    Kong 1992, "A Note on Importance Sampling using Standardized Weights". action_log_prob, sample_log_prob: [*B] nats.
    Returns ESS: [] in (0, 1], no gradient. Raises :class:`SpecError` for unequal shapes.
    """
    new, old = joint_log_prob(action_log_prob).detach(), joint_log_prob(sample_log_prob).detach()
    require_same_shape(action_log_prob=new, sample_log_prob=old)
    weight = (new - old).flatten()
    return (2 * weight.logsumexp(0) - (2 * weight).logsumexp(0)).exp() / weight.numel()


def value_error(
    state_value: Tensor,
    value_target: Tensor,
    old_state_value: Tensor | None = None,
    *,
    critic_coeff: float | Tensor = 1.0,
    loss_critic_type: str = "smooth_l1",
    clip_value: float | Tensor | None = None,
) -> Tensor:
    """The critic's regression loss, clipped around the value seen while acting when ``clip_value`` is given.

        L = c mean(l(V, R));   clipped:  L = c mean(max(l(V, R), l(V_old + clip(V - V_old, -clip, clip), R)))

    l is the squared error ("l2") or the Huber loss ("smooth_l1"). The clipped form is that of Schulman et al. 2017's
    code, described by Engstrom et al. 2020 (arXiv:2005.12729), section 3. state_value: [*B, 1], gradient flows.
    value_target, old_state_value: [*B, 1], no gradient. Returns loss_critic: [].
    Raises :class:`SpecError` for unequal shapes, ``ValueError`` for an unknown type or a clip without old values.
    """
    losses = {"l2": mse_loss, "smooth_l1": smooth_l1_loss}
    if loss_critic_type not in losses:
        raise ValueError(f"loss_critic_type is {loss_critic_type!r}: expected one of {list(losses)}")
    distance = losses[loss_critic_type]
    require_same_shape(state_value=state_value, value_target=value_target)
    target = value_target.detach()
    error = distance(state_value, target, reduction="none")
    if clip_value is not None:
        if old_state_value is None:
            raise ValueError("clip_value needs old_state_value, the value that the critic gave while acting")
        require_same_shape(state_value=state_value, old_state_value=old_state_value)
        old = old_state_value.detach()
        radius: Any = clip_value
        near = old + (state_value - old).clamp(-radius, radius)
        error = torch.maximum(error, distance(near, target, reduction="none"))
    return critic_coeff * error.mean()


def entropy_bonus(entropy: Tensor, *, entropy_coeff: float | Tensor = 0.01) -> tuple[Tensor, Tensor]:
    """The reward for staying random, the last term of eq. 9 of Schulman et al. 2017 (arXiv:1707.06347).

        L = -c mean(H(pi(. | s)))

    entropy: [*B] nats, gradient flows. Returns loss_entropy: [] and the mean entropy: [] nats, no gradient.
    """
    mean = entropy.mean()
    return -entropy_coeff * mean, mean.detach()


def explained_variance(state_value: Tensor, value_target: Tensor) -> Tensor:
    """How much of the return's variance the critic predicts: 1 is all, 0 is no better than its mean.

        1 - Var(R - V) / Var(R), and 0 for a constant R

    state_value, value_target: [*B, 1]. Returns: [], no gradient. Raises :class:`SpecError` for unequal shapes.
    """
    require_same_shape(state_value=state_value, value_target=value_target)
    target = value_target.detach()
    total = target.var(correction=0)
    residual = (target - state_value.detach()).var(correction=0)
    return torch.where(total > 0, 1 - residual / torch.where(total > 0, total, 1.0), 0.0)


def normalize_advantage(advantage: Tensor, mask: Tensor | None = None) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over the whole batch, or over the steps that ``mask`` keeps.

        (A - mean(A)) / max(std(A), 1e-6),   std with n - 1, as PPO implementations have it; 0 for a lone
        advantage, and where all are one number but for rounding, std(A) <= 4 eps |mean(A)|

    advantage: [*B, 1]; returns the same shape, gradient flows. mask: bool of that shape; what it leaves out, NaN or
    not, takes no part and becomes 0. Raises :class:`SpecError` for a mask of another shape.
    """
    if not advantage.numel():
        return advantage
    if mask is None:
        mean, std = advantage.mean(), advantage.std(correction=1 if advantage.numel() > 1 else 0)
        return _scaled(advantage - mean, mean, std)
    require_same_shape(advantage=advantage, mask=mask)
    kept = torch.where(mask, advantage, 0.0)
    count = mask.sum()
    mean = kept.sum() / count.clamp_min(1)
    centred = torch.where(mask, kept - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp_min(1)
    return _scaled(centred, mean, variance.clamp_min(1e-12).sqrt())


def _scaled(centred: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    noise = 4 * torch.finfo(std.dtype).eps * mean.abs()  # what rounding leaves of equal numbers
    return torch.where(std <= noise, 0.0, centred / std.clamp_min(1e-6))
