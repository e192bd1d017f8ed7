"""What a backend is: something that says whether it can lower a program, and lowers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphrl.compiler.program import Program

__all__ = ["Backend", "Lowered", "Refusal", "written_input"]

Lowered = Callable[[list[Tensor]], Sequence[Tensor]]
"""A lowered program: takes the values of all placeholders (inputs, state, draws) in one list, returns the outputs."""


@dataclass(frozen=True)
class Refusal:
    """Why a backend will not lower a program, in one line for ``explain``."""

    reason: str


def written_input(program: Program) -> Refusal | None:
    """A refusal where the program writes into one of its inputs, as ``x.add_(1)`` on a batch entry does."""
    places = program.placeholders()[: len(program.inputs)]
    for port, place in zip(program.inputs, places, strict=True):
        if any(user.target is torch.ops.aten.copy_.default and user.args[0] is place for user in place.users):
            return Refusal(f"the graph writes into its input {port.key!r}: compute a new tensor instead")
    return None


class Backend(Protocol):
    """One way to run a program."""

    name: str
    dynamic: bool
    """Whether it takes programs for any batch size; if not, each batch size gets its own."""

    def supports(self, program: Program) -> Refusal | None:
        """``None`` when this backend can lower ``program``; otherwise the reason it cannot."""

    def lower(self, program: Program) -> Lowered:
        """Lower ``program``. Raises :class:`graphrl.errors.CompileError` when that fails after all."""
