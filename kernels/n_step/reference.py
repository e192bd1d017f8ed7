"""n-step returns as their definition states them, in float64 and one window at a time: the judge of the others."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["n_step_reference"]


def n_step_reference(
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    n: int | Tensor,
    *,
    time_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of up to n rewards, the discount behind them and the row whose next state bootstraps, in float64.

        k_t = min(n_t, steps up to and including the first done one, steps left in the batch)
        R_t = sum_{i<k} (prod_{j<i} gamma_{t+j}) r_{t+i},   discount_t = prod_{j<k} gamma_{t+j},   index_t = t + k - 1

    The discount is 0 where row t + k - 1 is terminated. Plain torch operations, so autograd gives the reference
    gradients. A horizon below one counts as one.
    """
    if time_dim is None:
        time_dim = -2 if reward.dim() >= 2 and reward.shape[-1] == 1 else -1
    gamma, n = torch.as_tensor(gamma, dtype=torch.float64), torch.as_tensor(n)
    r, over, ended, g, h = (
        x.broadcast_to(reward.shape).movedim(time_dim, 0)
        for x in (reward.double(), done.bool() | terminated.bool(), terminated.bool(), gamma, n)
    )
    zero, steps = r.new_zeros(()), r.shape[0]
    rows = []
    for t in range(steps):
        total, product, last, open_ = r[t], g[t], torch.full_like(over[t], t, dtype=torch.int64), ~over[t]
        dropped = ended[t]
        for i in range(1, steps - t):
            open_ = open_ & (i < h[t])
            if not open_.any():
                break
            # A closed window multiplies by what it may not see: NaN there must reach no gradient either.
            total = total + torch.where(open_, product, zero) * torch.where(open_, r[t + i], zero)
            product = product * torch.where(open_, g[t + i], zero + 1)
            last, dropped = last + open_, dropped | (open_ & ended[t + i])
            open_ = open_ & ~over[t + i]
        rows.append((total, torch.where(dropped, zero, product), last))
    if not rows:
        return reward.double(), reward.double(), torch.zeros_like(reward, dtype=torch.int64)
    total, discount, last = (torch.stack(x).movedim(0, time_dim) for x in zip(*rows, strict=True))
    return total, discount, last
