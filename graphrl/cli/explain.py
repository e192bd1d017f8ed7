"""``graphrl explain FILE:OBJECT``: print what the compiler made of an object in a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from graphrl.errors import GraphError, GraphRLError, did_you_mean

__all__ = ["load_file", "made", "named", "run"]


@dataclass(frozen=True)
class Explain:
    """Draw a keyed graph, and tell passes, programs, backends and refusals of a compiled object."""

    target: Annotated[str, tyro.conf.Positional]
    """FILE:OBJECT, or FILE for a list of its objects.

    The object: a graph, a compiled graph or update, a program, or a function that returns one."""
    example: str | None = None
    """Name of a batch in the same file, to compile for."""
    backend: str = "inductor"
    """Backend to compile a plain graph with."""
    html: str | None = None
    """Write a page here instead: the graph drawn, the program after each pass, costs."""


def run(arguments: list[str]) -> None:
    """Print the explanation."""
    options = tyro.cli(Explain, prog="graphrl explain", args=arguments)
    if Path(options.target).is_file():
        print(contents(options.target))
        return
    path, colon, name = options.target.rpartition(":")
    if not colon or not name:
        raise GraphRLError(f"explain: expected FILE:OBJECT, found {options.target!r}")
    module = load_file(Path(path))
    target = named(module, name, path)
    example = None if options.example is None else named(module, options.example, path)
    explanation = describe(target, example, options.backend)
    if options.html is None:
        print(explanation)
    elif isinstance(explanation, str):
        raise GraphRLError("explain: --html needs a compiled object, or a batch named with --example to compile for")
    else:
        print(f"wrote {explanation.write_html(options.html)}")


def contents(path: str) -> str:
    """What a file holds that can be explained, one ``FILE:OBJECT`` a line; functions only where they need nothing."""
    module = load_file(Path(path))
    rows = []
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        factory = inspect.isfunction(value) and own and not _parameters(value)
        if not name.startswith("_") and (factory or isinstance(value, _explainable())):
            rows.append(f"graphrl explain {path}:{name}  # a {type(value).__name__}")
    return "\n".join(rows) or f"{path} holds no keyed graph, compiled object, program, or function without parameters"


def _explainable() -> tuple[type, ...]:
    from tensordict.nn import TensorDictModuleBase

    from graphrl import CompiledGraph, CompiledUpdate, Program

    return (CompiledGraph, CompiledUpdate, Program, TensorDictModuleBase)


def _parameters(function: Any) -> list[str]:
    """The parameters a call must give."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def made(factory: Any) -> Any:
    """What a function without parameters returns."""
    if lacking := _parameters(factory):
        raise GraphRLError(
            f"explain: {factory.__name__} needs {', '.join(lacking)}: name a function without parameters"
        )
    return factory()


def describe(target: Any, example: Any, backend: str) -> Any:
    """The explanation of one object, or the text of a plain graph. Raises :class:`GraphRLError` for anything else."""
    from tensordict.nn import TensorDictModuleBase
    from torch import nn

    from graphrl import CompiledGraph, CompiledUpdate, KeyedGraph, Program, compile, explain

    known = (CompiledGraph, CompiledUpdate, Program)
    if inspect.isroutine(target) and not isinstance(target, known):
        target = made(target)
    if isinstance(target, known):
        if example is not None and not isinstance(target, Program):
            target.warm_up(example() if callable(example) else example)
        return explain(target)
    if isinstance(target, TensorDictModuleBase):
        if example is not None:
            return explain(compile(target, example() if callable(example) else example, backend=backend))
        graph = target if isinstance(target, KeyedGraph) else KeyedGraph(target)
        return f"{graph.to_mermaid()}\n\nnot compiled: name a batch of the same file with --example to see its program"
    if isinstance(target, nn.Module):
        raise GraphError(
            f"explain: a {type(target).__name__} has no keys: wrap it,"
            " KeyedGraph((module, ['observation'], ['action']))"
        )
    raise GraphRLError(
        f"explain: the object is a {type(target).__name__}; expected a keyed graph, or what compile, compile_update or "
        "trace returned"
    )


def load_file(path: Path) -> Any:
    """A Python file as a module, run as any import would. Raises :class:`GraphRLError` for a missing file."""
    if not path.is_file():
        raise GraphRLError(f"explain: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise GraphRLError(f"explain: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def named(module: Any, name: str, path: str) -> Any:
    """The object of a file by its name. Raises :class:`GraphRLError` with the nearest name otherwise."""
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise GraphRLError(f"explain: {path} has no {name!r}.{did_you_mean(name, names)}")
    return getattr(module, name)
