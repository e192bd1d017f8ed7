"""Choose the backend that runs a program."""

from __future__ import annotations

from graphrl.compiler.backends import Lowered, get_backend
from graphrl.compiler.program import Program
from graphrl.errors import CompileError

__all__ = ["lower_with_fallback"]


def lower_with_fallback(program: Program, backend: str, strict: bool) -> tuple[Lowered, str, tuple[str, ...]]:
    """Lower with ``backend``, or with the next best that takes the program; returns it, its name and the refusals."""
    refusals: list[str] = []
    order = [backend, *(b for b in ("inductor", "eager") if b != backend)]
    for name in order:
        candidate = get_backend(name)
        refusal = candidate.supports(program)
        if refusal is None:
            return candidate.lower(program), name, tuple(refusals)
        refusals.append(f"{name}: {refusal.reason}")
        if strict:
            raise CompileError(f"{name} refuses {program.name}: {refusal.reason}. strict=False falls back to another")
    raise CompileError(f"no backend takes {program.name}: {'; '.join(refusals)}")
