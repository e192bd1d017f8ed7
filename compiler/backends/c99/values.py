"""Buffers, and the strided views of them that stand for a program's values. Reshaping is free until it must copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Buffer", "View", "contiguous_strides"]


@dataclass(eq=False)
class Buffer:
    """Memory with a C name: an argument, a constant, or a piece of scratch. ``literal`` buffers are one number."""

    name: str
    dtype: torch.dtype
    size: int
    kind: str  # "input", "state", "noise", "output", "constant", "scratch", "literal"
    data: Tensor | None = None  # constants
    literal: float | int | bool = 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


@dataclass(frozen=True)
class View:
    """A tensor laid over a buffer."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def whole(cls, buffer: Buffer, shape: Sequence[int]) -> View:
        """All of ``buffer``, in order."""
        strides = (0,) * len(shape) if buffer.kind == "literal" else contiguous_strides(shape)
        return cls(buffer, tuple(shape), strides)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The buffer's dtype."""
        return self.buffer.dtype

    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another from ``offset``."""
        return all(n == 1 or s == c for n, s, c in zip(self.shape, self.strides, contiguous_strides(self.shape)))  # noqa: B905

    def is_whole(self) -> bool:
        """Whether this is all of its buffer, in order."""
        return self.offset == 0 and self.is_contiguous() and self.size == self.buffer.size

    # ---- reshaping without a copy

    def permute(self, dims: Sequence[int]) -> View:
        """The dims in another order."""
        dims = [d % len(self.shape) for d in dims] if self.shape else []
        return replace(self, shape=tuple(self.shape[d] for d in dims), strides=tuple(self.strides[d] for d in dims))

    def expand(self, shape: Sequence[int]) -> View:
        """Broadcast to ``shape``."""
        extra = len(shape) - len(self.shape)
        old = (1,) * extra + self.shape
        steps = (0,) * extra + self.strides
        strides = tuple(0 if o == 1 and n != 1 else s for n, o, s in zip(shape, old, steps, strict=True))
        return replace(self, shape=tuple(shape), strides=strides)

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> View:
        """``length`` entries of ``dim`` from ``start`` on, every ``step``-th."""
        dim %= len(self.shape)
        shape = list(self.shape)
        strides = list(self.strides)
        offset = self.offset + start * strides[dim]
        shape[dim], strides[dim] = length, strides[dim] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def select(self, dim: int, index: int) -> View:
        """One entry of ``dim``, which goes away."""
        dim %= len(self.shape)
        index %= self.shape[dim]
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        return replace(self, shape=shape, strides=strides, offset=self.offset + index * self.strides[dim])

    def flip(self, dims: Sequence[int]) -> View:
        """``dims`` walked backwards."""
        view = self
        for dim in dims:
            d = dim % len(self.shape)
            strides = list(view.strides)
            offset = view.offset + (view.shape[d] - 1) * strides[d]
            strides[d] = -strides[d]
            view = replace(view, strides=tuple(strides), offset=offset)
        return view

    def reshape(self, shape: Sequence[int]) -> View | None:
        """The view with another shape, or ``None`` where only a copy can have it."""
        shape = tuple(shape)
        if self.buffer.kind == "literal":
            return replace(self, shape=shape, strides=(0,) * len(shape))
        if self.is_contiguous():
            return replace(self, shape=shape, strides=contiguous_strides(shape))
        groups = _mergeable(self.shape, self.strides)
        strides: list[int] = []
        wanted = list(shape)
        for size, step in groups:
            taken: list[int] = []
            while math.prod(taken) != size:
                if not wanted:
                    return None
                taken.append(wanted.pop(0))
                if math.prod(taken) > size:
                    return None
            strides += [step * s for s in contiguous_strides(taken)]
        strides += [0] * len(wanted)  # trailing ones
        return replace(self, shape=shape, strides=tuple(strides)) if all(n == 1 for n in wanted) else None

    def as_torch(self) -> Tensor:
        """The values of a view over a constant."""
        assert self.buffer.data is not None
        flat = self.buffer.data.detach().reshape(-1)
        if any(s < 0 for s in self.strides):  # torch has no negative strides
            index = torch.zeros(self.shape, dtype=torch.int64) + self.offset
            for d, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
                index = index + (torch.arange(n) * s).view([-1 if i == d else 1 for i in range(len(self.shape))])
            return flat[index]
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset).contiguous()


def _mergeable(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of dims that act as one: ``[(size, stride of the innermost)]``, dims of size one dropped."""
    groups: list[tuple[int, int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if groups and groups[-1][1] == n * s:
            groups[-1] = (groups[-1][0] * n, s)
        else:
            groups.append((n, s))
    return groups
