"""Find the modules, optimisers and tensors that a function, or a graph that holds functions, can reach."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from numbers import Number
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["find_reachable", "loose_tensors", "modules_of"]

T = TypeVar("T")

_DEPTH = 6
"""Steps from the function: a list in a dictionary of an object behind a partial method is as far as updates go."""

_LEAVES = (nn.Module, Optimizer, Tensor, TensorDictBase, ModuleType, type, Number, str, bytes)
_LIBRARIES = ("torch", "tensordict", "numpy", "builtins")


def find_reachable(function: Callable[..., Any], kind: type[T]) -> list[tuple[str, T]]:
    """Every object of ``kind`` that ``function`` can reach, with the name it is known by there.

    Looked through: closures and the globals a function names, functions it calls by name, bound objects and the plain
    objects, lists and dictionaries they hold, ``functools.partial``. Not looked into: modules, tensors, libraries.
    """
    found: list[tuple[str, T]] = []
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kind):
            found.append((name, value))
        elif depth and not isinstance(value, _LEAVES):
            for inner, part in _parts(name, value):
                visit(inner, part, depth - 1)

    roots = [("", function)]
    if isinstance(function, nn.Module):  # a step may be a module itself
        roots = [("self", function), *vars(function).items(), ("forward", type(function).forward)]
    for name, value in roots:
        visit(name, value, _DEPTH)
    return found


def modules_of(graph: nn.Module) -> list[tuple[str, nn.Module]]:
    """The graph itself, under no name, and modules it uses but does not hold: a network that a lambda node calls."""
    inside = set(graph.modules())
    found = [("", graph)]
    for name, module in _reached_from_inside(graph, nn.Module):
        if module not in inside:
            inside.update(module.modules())
            taken = sum(other == name or other.startswith(f"{name}_") for other, _ in found)
            found.append((f"{name}_{taken}" if taken else name, module))
    return found


def loose_tensors(graph: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that train though no module holds them, such as a parameter that a lambda node multiplies with."""
    held = {id(p) for _, root in modules_of(graph) for p in root.parameters()}
    found = {id(t): (name, t) for name, t in _reached_from_inside(graph, Tensor) if t.is_leaf and t.requires_grad}
    return [pair for key, pair in found.items() if key not in held]


def _reached_from_inside(graph: nn.Module, kind: type[T]) -> Iterator[tuple[str, T]]:
    """What the functions of a graph's nodes reach, and the plain attributes and methods of modules of one's own."""
    for module in graph.modules():
        if type(module).__module__.split(".")[0] not in (*_LIBRARIES, "torchrl", "graphrl"):
            yield from find_reachable(module.forward, kind)
        elif callable(function := vars(module).get("module")):
            yield from find_reachable(function, kind)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with names."""
    if isinstance(value, functools.partial):
        yield name, value.func
        yield from value.keywords.items()
        yield from ((f"argument_{i}", argument) for i, argument in enumerate(value.args))
    elif inspect.ismethod(value):
        yield name, value.__func__
        yield "self", value.__self__
    elif inspect.isfunction(value):
        if value.__module__ is None or value.__module__.split(".")[0] not in _LIBRARIES:
            yield from _variables(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}.{i}", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}.{key}", item) for key, item in value.items())
    elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _LIBRARIES:
        prefix = "" if name in ("", "self") else f"{name}."
        yield from ((f"{prefix}{key}", item) for key, item in vars(value).items())
        call = getattr(type(value), "__call__", None)  # noqa: B004
        if inspect.isfunction(call):
            yield name, call


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's free and global names stand for now, those of its inner functions and lambdas included."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell not yet filled
            yield name, cell.cell_contents
    codes = [function.__code__]
    for code in codes:  # grows while it runs
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        loads = (i for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        loaded = dict.fromkeys(i.argval for i in loads)  # not co_names: o.step() would lead to a function called step
        yield from ((name, function.__globals__[name]) for name in loaded if name in function.__globals__)
