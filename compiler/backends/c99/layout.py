"""Scratch memory: each value gets a place for as long as somebody still reads it; places are reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphrl.compiler.backends.c99.values import Buffer

__all__ = ["Layout", "Step", "plan"]

ALIGN = 16
"""Places start at multiples of this many elements: 64 bytes for floats, a cache line and the widest vector."""


@dataclass
class Step:
    """A piece of C text with the buffers it touches."""

    lines: list[str]
    reads: set[Buffer] = field(default_factory=set)
    writes: set[Buffer] = field(default_factory=set)


@dataclass(frozen=True)
class Layout:
    """Offset of each scratch buffer inside the arena of its C type, and the arena sizes in elements."""

    offsets: dict[Buffer, int]
    sizes: dict[str, int]


def plan(steps: Sequence[Step], type_of: dict[Buffer, str]) -> Layout:
    """Place every scratch buffer of ``steps``: first fit among those alive at the same time.

    A buffer lives from the step that first writes it to the last step that reads it, both included, so no step
    ever reads and writes the same place through two names. ``type_of``: the C type of each scratch buffer.
    """
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for at, step in enumerate(steps):
        for buffer in (*step.writes, *step.reads):
            if buffer in type_of:
                first.setdefault(buffer, at)
                last[buffer] = at
    offsets: dict[Buffer, int] = {}
    sizes: dict[str, int] = {}
    for buffer in sorted(first, key=lambda b: (first[b], _number(b))):
        rivals = sorted(
            (offsets[other], offsets[other] + _room(other))
            for other in offsets
            if type_of[other] == type_of[buffer] and first[other] <= last[buffer] and first[buffer] <= last[other]
        )
        place = 0
        for start, end in rivals:
            if place + _room(buffer) <= start:
                break
            place = max(place, end)
        offsets[buffer] = place
        kind = type_of[buffer]
        sizes[kind] = max(sizes.get(kind, 0), place + _room(buffer))
    return Layout(offsets, sizes)


def _room(buffer: Buffer) -> int:
    return -(-max(buffer.size, 1) // ALIGN) * ALIGN


def _number(buffer: Buffer) -> int:
    return int("".join(c for c in buffer.name if c.isdigit()) or 0)
