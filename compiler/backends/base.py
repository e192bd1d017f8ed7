"""What a backend is: something that says whether it can lower a program, and lowers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphrl.compiler.program import Program

__all__ = ["Backend", "Lowered", "Refusal", "written_input", "written_inputs"]

Lowered = Callable[[list[Tensor]], Sequence[Tensor]]
"""A lowered program: takes the values of all placeholders (inputs, state, draws) in one list, returns the outputs."""


@dataclass(frozen=True)
class Refusal:
    """Why a backend will not lower a program, in one line for ``explain``."""

    reason: str


def written_input(program: Program) -> Refusal | None:
    """A refusal where the program writes into one of its inputs, as ``x.add_(1)`` on a batch entry does."""
    for i in written_inputs(program):
        return Refusal(f"the graph writes into its input {program.inputs[i].key!r}: compute a new tensor instead")
    return None


def written_inputs(program: Program) -> list[int]:
    """The positions of the inputs that the program writes into."""
    writes = [n.args[0] for n in program.graph_module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    return [i for i, place in enumerate(program.placeholders()[: len(program.inputs)]) if place in writes]


class Backend(Protocol):
    """One way to run a program."""

    name: str
    dynamic: bool
    """Whether it takes programs for any batch size; if not, each batch size gets its own."""

    def supports(self, program: Program) -> Refusal | None:
        """``None`` when this backend can lower ``program``; otherwise the reason it cannot."""

    def lower(self, program: Program) -> Lowered:
        """Lower ``program``. Raises :class:`graphrl.errors.CompileError` when that fails after all."""
