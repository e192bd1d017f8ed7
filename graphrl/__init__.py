"""Reinforcement learning as keyed graphs: compiled policies, compiled training updates, C for the robot."""

from graphrl._version import __version__
from graphrl.compiler.benchmark import benchmark
from graphrl.compiler.compiled import CompiledGraph, compile
from graphrl.compiler.explain import explain
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.compiler.update import CompiledUpdate, compile_update
from graphrl.errors import GraphRLError
from graphrl.graph import KeyedGraph

__all__ = [
    "CompiledGraph",
    "CompiledUpdate",
    "GraphRLError",
    "KeyedGraph",
    "Program",
    "__version__",
    "benchmark",
    "compile",
    "compile_update",
    "explain",
    "trace",
]
