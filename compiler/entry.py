"""What is known of one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphrl.compiler.program import Program

__all__ = ["Entry"]


@dataclass
class Entry:
    """One compiled specialisation: what it was compiled for, what runs it, and how it came about."""

    program: Program
    backend: str
    refusals: tuple[str, ...]
    seconds: float
    reason: str
    parity: float | None
    run: Callable[..., Any]
    differentiable: bool
