"""What a backend is: something that says whether it can lower a program, and lowers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graphrl.compiler.program import Program

__all__ = ["Backend", "Lowered", "Refusal"]

Lowered = Callable[[list[Tensor]], Sequence[Tensor]]
"""A lowered program: takes the values of all placeholders (inputs, state, draws) in one list, returns the outputs."""


@dataclass(frozen=True)
class Refusal:
    """Why a backend will not lower a program, in one line for ``explain``."""

    reason: str


class Backend(Protocol):
    """One way to run a program."""

    name: str

    def supports(self, program: Program) -> Refusal | None:
        """``None`` when this backend can lower ``program``; otherwise the reason it cannot."""

    def lower(self, program: Program) -> Lowered:
        """Lower ``program``. Raises :class:`graphrl.errors.CompileError` when that fails after all."""
