"""The n-step return as its definition states it, in float64 and one window at a time: the judge of the other versions."""

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
    time_dim: int = -2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of up to n rewards, the discount behind them and the row whose next state bootstraps, in float64.

        k_t = min(n_t, steps up to and including the first done one, steps left in the batch)
        R_t = sum_{i<k} (prod_{j<i} gamma_{t+j}) r_{t+i},   discount_t = prod_{j<k} gamma_{t+j},   index_t = t + k - 1

    The discount is 0 where row t + k - 1 is terminated. Plain torch operations, so autograd gives the reference
    gradients. A horizon below one counts as one.
    """
    dim = time_dim % reward.dim()
    gamma, n = torch.as_tensor(gamma, dtype=torch.float64), torch.as_tensor(n)
    over, ended = done.bool() | terminated.bool(), terminated.bool()
    # [rows, T] each
    r, g, h, over, ended = (
        x.broadcast_to(reward.shape).movedim(dim, -1).flatten(0, -2) if reward.dim() > 1 else x.expand(1, len(reward))
        for x in (reward.double(), gamma, n, over, ended)
    )
    moved = reward.movedim(dim, -1).shape
    sums, discounts, index = [], [], []
    for row in range(r.shape[0]):
        for t in range(r.shape[1]):
            total, product, last = r[row, t], g[row, t], t
            while not over[row, last] and last + 1 < r.shape[1] and last + 1 - t < h[row, t]:
                last += 1
                total, product = total + product * r[row, last], product * g[row, last]
            sums.append(total)
            discounts.append(torch.zeros_like(product) if ended[row, last] else product)
            index.append(last)
    if not sums:
        return reward.double(), reward.double(), torch.zeros_like(reward, dtype=torch.int64)
    back = [torch.stack(x).view(moved).movedim(-1, dim) for x in (sums, discounts)]
    return back[0], back[1], torch.tensor(index).view(moved).movedim(-1, dim)
