"""The interpreter: runs a program's operations one by one. Always there; every other backend is judged by it."""

from __future__ import annotations

from graphrl.compiler.backends.base import Lowered, Refusal
from graphrl.compiler.program import Program

__all__ = ["BACKEND", "Eager"]


class Eager:
    """Runs the program's own Python, with torch's eager kernels."""

    name = "eager"
    dynamic = True

    def supports(self, program: Program) -> Refusal | None:
        return None

    def lower(self, program: Program) -> Lowered:
        module = program.graph_module
        return lambda arguments: module(*arguments)


BACKEND = Eager()
