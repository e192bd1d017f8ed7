"""Where the numbers of a sum tree lie. ``cpu.cpp`` and ``triton.py`` count on this.

    leaves  [capacity]   the priorities
    inner   [3, width]   of every inner node the sum of its leaves, the smallest above zero, and the largest

The FANOUT children of a node are neighbours. Levels stand in ``inner`` from the root down, the root at 0, each padded
to whole nodes with what changes no result: 0, infinity, 0.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["FANOUT", "empty_inner", "level_offsets"]

FANOUT = 8  # equal to kFan in cpu.cpp


@cache
def level_offsets(capacity: int) -> tuple[tuple[int, ...], int]:
    """Where each level begins in ``inner``, from the one above the leaves up to the root, and the width of ``inner``."""
    sizes, size = [], capacity
    while not sizes or size > 1:
        size = -(-size // FANOUT)
        sizes.append(size)
    offsets, at = [], 0
    for size in reversed(sizes):
        offsets.append(at)
        at += -(-size // FANOUT) * FANOUT
    return tuple(offsets[::-1]), at


def empty_inner(capacity: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """``inner`` of a tree whose leaves are all zero."""
    inner = torch.zeros(3, level_offsets(capacity)[1], dtype=dtype, device=device)
    inner[1] = torch.inf
    return inner
