"""``graphrl bisect FILE:OBJECT --example NAME``: find the pass that changes what an object computes."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from graphrl.cli.explain import load_file, made, named
from graphrl.errors import GraphRLError

__all__ = ["run"]


@dataclass(frozen=True)
class Bisect:
    """Run the compiler's passes one by one and compare each result, gradients included, with float64."""

    target: Annotated[str, tyro.conf.Positional]
    """FILE:OBJECT: a keyed graph, a compiled graph, or a function that returns one."""
    example: str
    """Name of a batch in the same file, or of a function that returns one."""
    backend: str | None = None
    """Lower the program after every pass as well, and compare what this backend computes."""
    deploy: bool = False
    """The passes of an export (weights become constants, no gradients) in place of those of training."""
    precision: Literal["bf16"] | None = None
    """As for compile: adds the pass that lowers products, judged by bfloat16's rounding."""


def run(arguments: list[str]) -> None:
    """Print a table of passes; raises :class:`GraphRLError`, exit code 2, where one changes a result."""
    options = tyro.cli(Bisect, prog="graphrl bisect", args=arguments)
    from rich.console import Console

    from graphrl.compiler.bisect import bisect_passes

    path, colon, name = options.target.rpartition(":")
    if not colon or not name:
        raise GraphRLError(f"bisect: expected FILE:OBJECT, found {options.target!r}")
    module = load_file(Path(path))
    graph, example = _graph(named(module, name, path)), named(module, options.example, path)
    example = example() if callable(example) else example
    stages = bisect_passes(graph, example, options.backend, options.deploy, options.precision)
    Console(width=None if sys.stdout.isatty() else 120).print(_table(stages, options.backend))
    if problem := stages[-1].problem:
        raise GraphRLError(f"{stages[-1].name} is the first to go wrong: {problem}")


def _graph(target: Any) -> Any:
    from tensordict.nn import TensorDictModuleBase

    from graphrl import CompiledGraph

    target = made(target) if inspect.isfunction(target) else target
    target = target.graph if isinstance(target, CompiledGraph) else target
    if not isinstance(target, TensorDictModuleBase):
        raise GraphRLError(f"bisect: the object is a {type(target).__name__}; expected a keyed graph or a compiled one")
    return target


def _table(stages: Any, backend: str | None) -> Any:
    from rich.table import Table

    table = Table("pass", "nodes", "error / allowed", *([f"on {backend}"] if backend else []), "verdict")
    for stage in stages:
        lowered = "" if stage.lowered is None else f"{stage.lowered:.2g}"
        verdict = f"[red]{stage.problem}[/red]" if stage.problem else "same"
        table.add_row(stage.name, str(stage.nodes), f"{stage.error:.2g}", *([lowered] if backend else []), verdict)
    return table
