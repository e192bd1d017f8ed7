"""Random trajectories for the kernel tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Trajectory(NamedTuple):
    reward: Tensor
    value: Tensor
    next_value: Tensor
    done: Tensor
    terminated: Tensor


def random_trajectory(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, end: float = 0.1, seed: int = 0
) -> Trajectory:
    """Normal rewards and values; each step terminates with probability ``end`` and is truncated with ``end``."""
    generator = torch.Generator().manual_seed(seed)
    floats = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    terminated, truncated = (torch.rand(shape, generator=generator) < end for _ in range(2))
    return Trajectory(*floats, terminated | truncated, terminated)


def steps(*columns: list[float]) -> list[Tensor]:
    """Lists of numbers as ``[T, 1]``: float64 for the first three, bool for the flags."""
    return [torch.tensor(x, dtype=torch.float64 if i < 3 else torch.bool).unsqueeze(-1) for i, x in enumerate(columns)]
