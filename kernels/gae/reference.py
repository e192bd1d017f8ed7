"""The recurrence as the paper states it, in float64 and one step at a time: the judge of the other versions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gae_reference"]


def gae_reference(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    *,
    time_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, eqs. 11 to 16 of Schulman et al. 2016 (arXiv:1506.02438), in float64.

        delta_t = r_t + gamma_t (1 - terminated_t) V'_t - V_t
        A_t     = delta_t + gamma_t lmbda_t (1 - done_t) A_{t+1},    value_target_t = A_t + V_t

    All tensors share one shape; time runs along ``time_dim``; gamma and lmbda broadcast to that shape. Plain torch
    operations, so autograd gives the reference gradients. What a cut hides is selected away, not multiplied by zero.
    """
    if time_dim is None:
        time_dim = -2 if reward.dim() >= 2 and reward.shape[-1] == 1 else -1
    reward, value, next_value = (x.double().movedim(time_dim, 0) for x in (reward, value, next_value))
    over, terminated = ((x != 0).movedim(time_dim, 0) for x in (done.bool() | terminated.bool(), terminated))
    shape = done.shape
    gamma, lmbda = (
        torch.as_tensor(x, dtype=torch.float64).broadcast_to(shape).movedim(time_dim, 0) for x in (gamma, lmbda)
    )
    zero = reward.new_zeros(())
    carry = torch.zeros_like(reward.sum(0))
    advantage = []
    for t in reversed(range(reward.shape[0])):
        bootstrap = torch.where(terminated[t], zero, next_value[t])
        coefficient = torch.where(over[t], zero, gamma[t] * lmbda[t])
        delta = reward[t] + gamma[t] * bootstrap - value[t]
        carry = delta + coefficient * torch.where(coefficient == 0, zero, carry)
        advantage.append(carry)
    stacked = torch.stack(advantage[::-1]) if advantage else torch.zeros_like(reward)
    return stacked.movedim(0, time_dim), (stacked + value).movedim(0, time_dim)
