"""n-step returns in plain torch operations, which give the gradient of gamma and gradients of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["n_step_by_doubling"]

Window = tuple[Tensor, ...]
"""Discounted sum, product of gammas, and whether a cut closes it: of some steps in a row, from each step on."""


def n_step_by_doubling(
    reward: Tensor, done: Tensor, terminated: Tensor, gamma: Tensor, horizon: Tensor | None, n: int, time_dim: int
) -> tuple[Tensor, Tensor]:
    """n-step rewards and discounts of ``graphrl::n_step_return``, in O(T log n) work and any number of derivatives.

    A window of 2 m steps is a window of m steps and the one behind it, and a window of n steps is one of each size in
    n's binary digits. Steps behind the batch are empty windows that are closed.
    """
    dim, steps = time_dim % reward.dim(), reward.shape[time_dim]
    if steps == 0:
        return reward * 1, reward * 1
    bits = min(n, steps).bit_length()
    gamma = torch.where(terminated, gamma.new_zeros(()), gamma)
    window = tuple(_pad(x, dim, last) for x, last in ((reward.to(gamma.dtype), 0), (gamma, 1), (done | terminated, 1)))
    # [T] or [T, 1, ...], to broadcast along the dimensions behind time
    at = torch.arange(steps, device=reward.device).view(steps, *(1,) * (reward.dim() - dim - 1)).expand(reward.shape)
    length = torch.full_like(at, min(n, steps)) if horizon is None else horizon.long().clamp(1, steps)
    taken: Window = tuple(torch.full_like(x.narrow(dim, 0, steps), y) for x, y in zip(window, (0, 1, 0), strict=True))
    forward = torch.arange(steps + 1, device=reward.device)
    for bit in range(bits):
        chosen = (length >> bit) & 1
        longer = _join(taken, tuple(x.gather(dim, at) for x in window))
        taken = tuple(torch.where(chosen == 1, x, y) for x, y in zip(longer, taken, strict=True))
        at = (at + (chosen << bit)).clamp(max=steps)
        window = _join(window, tuple(x.index_select(dim, (forward + (1 << bit)).clamp(max=steps)) for x in window))
    return taken[0].to(reward.dtype), taken[1].to(reward.dtype)


def _join(first: Window, then: Window) -> Window:
    """``then`` behind ``first``, unless that is closed: no NaN of ``then`` may reach a value or a gradient then."""
    total, product, closed = first
    zero, one = total.new_zeros(()), total.new_ones(())
    further = torch.where(closed, zero, product) * torch.where(closed, zero, then[0])
    return total + further, product * torch.where(closed, one, then[1]), closed | then[2]


def _pad(x: Tensor, dim: int, last: int) -> Tensor:
    return torch.cat([x, torch.full_like(x.narrow(dim, 0, 1), last)], dim)
