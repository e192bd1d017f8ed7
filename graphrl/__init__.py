"""Reinforcement learning as keyed graphs: compiled policies, compiled training updates, C for the robot."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphrl._version import __version__
from graphrl.errors import GraphRLError

if TYPE_CHECKING:
    from graphrl.compiler.benchmark import benchmark
    from graphrl.compiler.bundle import (
        ActionContract,
        Contract,
        Normalizer,
        ObservationTerm,
        RecurrentState,
        export,
    )
    from graphrl.compiler.compiled import CompiledGraph, compile
    from graphrl.compiler.explain import explain
    from graphrl.compiler.program import Program
    from graphrl.compiler.trace import trace
    from graphrl.compiler.update import CompiledUpdate, compile_update
    from graphrl.graph import KeyedGraph
    from graphrl.opaque_nodes import opaque

__all__ = [
    "ActionContract",
    "CompiledGraph",
    "CompiledUpdate",
    "Contract",
    "GraphRLError",
    "KeyedGraph",
    "Normalizer",
    "ObservationTerm",
    "Program",
    "RecurrentState",
    "__version__",
    "benchmark",
    "compile",
    "compile_update",
    "explain",
    "export",
    "opaque",
    "trace",
]

# Names are imported when first used: `graphrl verify` runs on a robot without torch, and `graphrl --help` is quick.
_HOMES = {
    "ActionContract": "graphrl.compiler.bundle",
    "CompiledGraph": "graphrl.compiler.compiled",
    "CompiledUpdate": "graphrl.compiler.update",
    "Contract": "graphrl.compiler.bundle",
    "KeyedGraph": "graphrl.graph",
    "Normalizer": "graphrl.compiler.bundle",
    "ObservationTerm": "graphrl.compiler.bundle",
    "Program": "graphrl.compiler.program",
    "RecurrentState": "graphrl.compiler.bundle",
    "benchmark": "graphrl.compiler.benchmark",
    "compile": "graphrl.compiler.compiled",
    "compile_update": "graphrl.compiler.update",
    "explain": "graphrl.compiler.explain",
    "export": "graphrl.compiler.bundle",
    "opaque": "graphrl.opaque_nodes",
    "trace": "graphrl.compiler.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphrl' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
