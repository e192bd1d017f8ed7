"""The sum as its definition states it, in float64 and one step at a time: the judge of the other versions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["discounted_sum_reference"]


def discounted_sum_reference(
    reward: Tensor, done: Tensor, gamma: float | Tensor, *, time_dim: int | None = None
) -> Tensor:
    """Discounted reward-to-go, eq. 3.9 of Sutton and Barto 2018, in float64.

        x_t = r_t + gamma_t (1 - done_t) x_{t+1},    x = 0 after the last step

    Both tensors share one shape; gamma broadcasts to it. Plain torch operations, so autograd gives the reference
    gradients. What a cut hides is selected away, not multiplied by zero.
    """
    if time_dim is None:
        time_dim = -2 if reward.dim() >= 2 and reward.shape[-1] == 1 else -1
    gamma = torch.as_tensor(gamma, dtype=torch.float64).broadcast_to(reward.shape).movedim(time_dim, 0)
    reward, over = reward.double().movedim(time_dim, 0), done.bool().movedim(time_dim, 0)
    carry = torch.zeros_like(reward.sum(0))
    zero, sums = reward.new_zeros(()), []
    for t in reversed(range(reward.shape[0])):
        # Where a finite x is multiplied by zero it stays, so that the gradient of gamma = 0 is x and not zero.
        hidden = over[t] | ((gamma[t] == 0) & ~carry.isfinite())
        carry = reward[t] + gamma[t] * torch.where(hidden, zero, carry)
        sums.append(carry)
    stacked = torch.stack(sums[::-1]) if sums else torch.zeros_like(reward)
    return stacked.movedim(0, time_dim)
