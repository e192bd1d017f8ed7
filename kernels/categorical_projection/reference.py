"""The projection as the paper states it, in float64 and one output atom at a time: the judge of the other versions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["categorical_projection_reference"]


def categorical_projection_reference(
    next_probs: Tensor, reward: Tensor, terminated: Tensor, discount: float | Tensor, support: Tensor
) -> Tensor:
    """The projected Bellman update, eq. 7 of Bellemare et al. 2017 (arXiv:1707.06887), in float64.

        Tz_j     = clip(r + discount z_j, z_0, z_{N-1}),    Tz_j = clip(r, z_0, z_{N-1}) where terminated
        target_i = sum_j h_i(Tz_j) p_j,    h_i the hat that is 1 at z_i and falls to 0 at both neighbours

    Arguments as :func:`categorical_projection`. On a uniform support ``h_i(x) = [1 - |x - z_i| / dz]_0^1``, as the
    paper writes it. Plain torch operations, so autograd gives the reference gradient. Where terminated, ``p`` is one
    unit of mass: the next distribution is selected away, not multiplied by zero.
    """
    p, z = next_probs.double(), support.double()
    column = (*p.shape[:-1], 1)
    r, over = reward.double().reshape(column), terminated.bool().reshape(column)
    d = torch.as_tensor(discount, dtype=torch.float64).expand(reward.shape).reshape(column)
    at = torch.where(over, r, r + d * z).clamp(z[0], z[-1])
    unit = torch.zeros_like(z)
    unit[0] = 1.0
    p, zero = torch.where(over, unit, p), z.new_zeros(())
    target = []
    for i in range(len(z)):
        hat = torch.ones_like(at)
        if i > 0:
            hat = torch.minimum(hat, (at - z[i - 1]) / (z[i] - z[i - 1]))
        if i < len(z) - 1:
            hat = torch.minimum(hat, (z[i + 1] - at) / (z[i + 1] - z[i]))
        hat = hat.clamp(min=0) + 0 * at  # NaN stays
        target.append(torch.where(hat == 0, zero, hat * p).sum(-1))
    return torch.stack(target, -1)
