"""Backends: one file each. A backend's optional packages are imported when it is first asked for, not before."""

from __future__ import annotations

import importlib

from graphrl.compiler.backends.base import Backend, Lowered, Refusal
from graphrl.errors import CompileError, did_you_mean

__all__ = ["BACKENDS", "Backend", "Lowered", "Refusal", "get_backend"]

BACKENDS = ("eager", "inductor", "aot", "native", "triton", "onnx")
"""Backends that run a program in this process. The ``c99`` generator writes files for a robot: see ``export``."""


def get_backend(name: str) -> Backend:
    """The backend called ``name``. Raises :class:`CompileError` for an unknown name."""
    if name not in BACKENDS:
        raise CompileError(f"no backend {name!r}; there are {', '.join(BACKENDS)}.{did_you_mean(name, BACKENDS)}")
    return importlib.import_module(f"graphrl.compiler.backends.{name}").BACKEND
