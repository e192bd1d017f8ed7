"""Nodes that no program may contain: they stay plain Python calls between two programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["is_opaque", "opaque"]

_MARK = "_graphrl_opaque"


class _OpaqueFunction:
    """A function that is called as it is, never traced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = f"opaque {getattr(function, '__name__', type(function).__name__)}"
        setattr(self, _MARK, True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def opaque(node: Any) -> Any:
    """Mark a function, module or keyed node that must not be traced: it branches on values, logs, calls a simulator.

        graph = KeyedGraph(encoder, (grl.opaque(nearest_neighbour), ["feature"], ["index"]), head)
        fast = grl.compile(graph)   # program (encoder), plain call, program (head)

    node: a callable for a ``(callable, in_keys, out_keys)`` node, or a ``tensordict.nn`` module. Returns a marked copy
    that shares its weights under their own names; ``node`` itself is left alone. Gradients flow as they do in eager.
    A graph with opaque nodes compiles, but does not trace or export as one program, and has no place in an update.
    """
    if not isinstance(node, nn.Module):
        return _OpaqueFunction(node)
    marked = copy.copy(node)
    marked.__dict__[_MARK] = True
    return marked


def is_opaque(node: Any) -> bool:
    """Whether ``node``, or the callable inside it, was marked by :func:`opaque`."""
    return getattr(node, _MARK, False) or getattr(getattr(node, "module", None), _MARK, False)
