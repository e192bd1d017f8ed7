"""The recurrence as the book states it, in float64 and one step at a time: the judge of the other versions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["td_lambda_reference"]


def td_lambda_reference(
    reward: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    *,
    time_dim: int | None = None,
) -> Tensor:
    """TD(lambda) returns, eq. 12.18 of Sutton and Barto 2018, in float64.

        G_t = r_t + gamma_t (1 - terminated_t) [(1 - lmbda_t) V'_t + lmbda_t G_{t+1}],
        G_{t+1} := V'_t where done_t and at the last step

    All tensors share one shape; gamma and lmbda broadcast to it. Plain torch operations, so autograd gives the
    reference gradients. What a cut hides is selected away, not multiplied by zero.
    """
    if time_dim is None:
        time_dim = -2 if reward.dim() >= 2 and reward.shape[-1] == 1 else -1
    reward, next_value = (x.double().movedim(time_dim, 0) for x in (reward, next_value))
    done, terminated = (x.bool().movedim(time_dim, 0) for x in (done.bool() | terminated.bool(), terminated))
    gamma, lmbda = (
        torch.as_tensor(x, dtype=torch.float64).broadcast_to(done.movedim(0, time_dim).shape).movedim(time_dim, 0)
        for x in (gamma, lmbda)
    )
    zero, one, targets = reward.new_zeros(()), reward.new_ones(()), []
    for t in reversed(range(reward.shape[0])):
        bootstrap = torch.where(terminated[t], zero, next_value[t])
        over = done[t] if targets else torch.ones_like(done[t])
        own, later = torch.where(over, one, 1 - lmbda[t]), torch.where(over, zero, lmbda[t])
        mixed = _times(own, bootstrap) + _times(later, targets[-1] if targets else zero)
        targets.append(reward[t] + _times(torch.where(terminated[t], zero, gamma[t]), mixed))
    stacked = torch.stack(targets[::-1]) if targets else torch.zeros_like(reward)
    return stacked.movedim(0, time_dim)


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """``weight * x``, where a zero weight hides a NaN or inf. A finite x stays: it is the derivative by the weight."""
    return weight * torch.where((weight == 0) & ~x.isfinite(), x.new_zeros(()), x)
