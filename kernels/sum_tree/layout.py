"""Where the numbers of a sum tree lie. ``cpu.cpp`` and ``triton.py`` count on this.

    leaves  [capacity]   the priorities
    inner   [3, width]   of every inner node the sum of its leaves, the smallest above zero (or 0) and the largest

The FANOUT children of a node are neighbours. Levels stand in ``inner`` from the root down, the root at 0, each padded
to whole nodes with zeros.
"""

from __future__ import annotations

from functools import cache

__all__ = ["FANOUT", "level_offsets"]

FANOUT = 8  # equal to kFan in cpu.cpp


@cache
def level_offsets(capacity: int) -> tuple[tuple[int, ...], int]:
    """Where each level begins in ``inner``, from the one above the leaves to the root, and the width of ``inner``."""
    sizes: list[int] = []
    size = capacity
    while not sizes or size > 1:
        size = -(-size // FANOUT)
        sizes.append(size)
    offsets, at = [], 0
    for size in reversed(sizes):
        offsets.append(at)
        at += -(-size // FANOUT) * FANOUT
    return tuple(offsets[::-1]), at
