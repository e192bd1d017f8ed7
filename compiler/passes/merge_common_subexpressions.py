"""Compute equal expressions once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from graphrl.compiler.program import Program

__all__ = ["merge_common_subexpressions"]


def merge_common_subexpressions(program: Program) -> Program:
    """Give two operations with the same target and arguments one result.

    before   a = tanh(x);  b = tanh(x);  return (a + 1, b + 2)
    after    a = tanh(x);                return (a + 1, a + 2)

    This is what shares the trunk of an actor and a critic, and of a loss and its metrics. Draws and writes are never
    merged, and two outputs stay two tensors: whoever gets them may write one of them.
    """
    graph = program.copy_graph()
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs = set(output.all_input_nodes)
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _has_effect(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        known = first.setdefault(key, node)
        if known is not node and not (node in outputs and known in outputs):
            node.replace_all_uses_with(known)
            outputs.update({known} & {n for n in output.all_input_nodes})
            graph.erase_node(node)
    return program.with_graph(graph)


def _has_effect(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.is_impure() or torch.Tag.nondeterministic_seeded in tags


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, (bool, int, float)):
        return (type(value), repr(value))  # 1, 1.0 and True are equal in Python but not in a program
    return value if isinstance(value, fx.Node) else (type(value).__name__, str(value))
