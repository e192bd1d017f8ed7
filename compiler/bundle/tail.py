"""The end of a program: what happens to an action after the last layer, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program
from graphrl.keys import Key

__all__ = ["reach", "squashes"]

aten = torch.ops.aten
SQUASHES = {aten.tanh.default: "tanh", aten.sigmoid.default: "sigmoid"}
PASSED = frozenset({
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default, aten.clamp.default,
    aten.clamp.Tensor, aten.view.default, aten._to_copy.default, aten.minimum.default, aten.maximum.default,
})  # fmt: skip
FAR = 1e6


def squashes(program: Program, action: Key) -> list[str]:
    """Names of the squashing functions between the last layer and the action, the first of them first."""
    return [SQUASHES[n.target] for n in _tail(program, action)[1] if n.target in SQUASHES]


def reach(program: Program, action: Key) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest action, entry by entry, whatever the layer before the tail says."""
    root, nodes = _tail(program, action)
    places = [n for n in program.graph_module.graph.nodes if n.op == "placeholder"]
    first = len(program.inputs)
    state = dict(zip(places[first:], (s.read().detach() for s in program.state), strict=False))
    ends, like = [], root.meta["val"]
    for value in (-FAR, FAR):
        values: dict[fx.Node, Any] = {**state, root: torch.full(like.shape, value, dtype=like.dtype)}
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            operation: Any = node.target
            values[node] = operation(*args, **kwargs)
        ends.append(_numbers(values[nodes[-1]] if nodes else values[root]))
    return np.minimum(*ends), np.maximum(*ends)


def _numbers(value: Tensor) -> np.ndarray:
    return np.asarray(value.double().reshape(-1).numpy())


def _tail(program: Program, action: Key) -> tuple[fx.Node, list[fx.Node]]:
    """The node that the tail starts from, and the tail: operations on one entry, with weights at most beside it."""
    graph = program.graph_module.graph
    returned: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    state = set([n for n in graph.nodes if n.op == "placeholder"][len(program.inputs) :])
    nodes: list[fx.Node] = []
    node: fx.Node = returned[list(program.out_keys).index(action)]
    while node.target in PASSED or node.target in SQUASHES:
        varying = [n for n in node.all_input_nodes if n not in state]
        if len(varying) != 1:
            break
        nodes.append(node)
        node = varying[0]
    return node, nodes[::-1]
