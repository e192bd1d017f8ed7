"""What runs where a program's checks fail: eager, or a program for the other branch of a library's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from graphrl.compiler.guards import Bound

__all__ = ["OtherBranches"]

LIMIT = 3
"""Programs kept beside the first. A library that branches on more than two conditions runs eagerly for the rest."""


class OtherBranches:
    """Programs for inputs on which a library's code goes another way than it went when the first one was traced.

    They are traced when such inputs come, on these inputs, and tried in the order they were made. ``eager`` runs where
    none fits: a check fails, and the code raises its own error.
    """

    def __init__(
        self, build: Callable[[Sequence[Tensor]], Bound], eager: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    ) -> None:
        self._build, self._eager = build, eager
        self._programs: list[Bound] = []

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        for program in self._programs:
            if (outputs := program.attempt(inputs)) is not None:
                return outputs
        if len(self._programs) < LIMIT:
            self._programs.append(self._build(inputs))
            if (outputs := self._programs[-1].attempt(inputs)) is not None:
                return outputs
        return self._eager(inputs)
