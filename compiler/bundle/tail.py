"""The end of a program: what happens to an action after the last layer, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program
from graphrl.keys import Key

__all__ = ["CLIPS", "FAR", "SQUASHES", "clips", "constants", "factors", "reach", "squashes", "tail_steps"]

aten = torch.ops.aten
SQUASHES = {aten.tanh.default: "tanh", aten.sigmoid.default: "sigmoid"}
CLIPS = frozenset({
    aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default, aten.minimum.default, aten.maximum.default,
})  # fmt: skip
PASSED = frozenset({
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default, aten.view.default,
    aten._to_copy.default, aten.clone.default, aten.expand.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.slice.Tensor, aten.permute.default, *CLIPS,
})  # fmt: skip
FAR = 1e6


def constants(program: Program) -> dict[fx.Node, Tensor]:
    """The value of every node that depends on weights and buffers alone."""
    nodes = list(program.graph_module.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    first = len(program.inputs)
    values: dict[fx.Node, Any] = dict(
        zip(places[first : first + len(program.state)], (s.read().detach() for s in program.state), strict=True)
    )
    for node in nodes:
        read = node.all_input_nodes
        if node.op == "call_function" and read and all(n in values for n in read):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


def squashes(program: Program, action: Key) -> list[str]:
    """Names of the squashing functions between the last layer and the action, the first of them first."""
    return [SQUASHES[n.target] for n in _tail(program, action)[1] if n.target in SQUASHES]


def reach(program: Program, action: Key) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest action, entry by entry, whatever the layer before the tail says."""
    ends = [_evaluate(program, *_tail(program, action), value) for value in (-FAR, FAR)]
    return np.minimum(*ends), np.maximum(*ends)


def clips(program: Program, action: Key) -> bool:
    """Whether the action is clipped behind the last layer."""
    return any(n.target in CLIPS for n in _tail(program, action)[1])


def factors(program: Program, action: Key) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset behind the last squash, or behind the last layer where there is none, clips passed over."""
    root, nodes = _tail(program, action)
    at = max((i for i, n in enumerate(nodes) if n.target in SQUASHES), default=-1)
    root = nodes[at] if at >= 0 else root
    zero, half = (_evaluate(program, root, nodes[at + 1 :], value, clipped=False) for value in (0.0, 0.5))
    return 2 * (half - zero), zero


def tail_steps(program: Program, action: Key) -> dict[str, Any]:
    """Squash, scale, offset and clip as the program performs them, in the words of an ``ActionContract``.

    scale and offset: what comes behind the squash, an entry each, left out where they do nothing. clip: left out where
    entries are clipped differently. Without a squash, a factor behind the last layer is as good as part of it.
    """
    root, nodes = _tail(program, action)
    at = max((i for i, n in enumerate(nodes) if n.target in SQUASHES), default=-1)
    after, inside = nodes[at + 1 :], []
    stated: dict[str, Any] = {"squash": "none"}
    if at >= 0:
        stated["squash"] = SQUASHES[nodes[at].target]  # type: ignore[index]
        inside.append("squash")
        for name, numbers, idle in zip(("scale", "offset"), factors(program, action), (1.0, 0.0), strict=True):
            if not np.allclose(numbers, idle, rtol=0, atol=1e-7):
                inside.append(name)
                stated[name] = tuple(numbers.tolist())
    if any(n.target in CLIPS for n in after):
        inside.append("clip")
        low, high = reach(program, action)
        if np.ptp(low) == np.ptp(high) == 0 and low[0] < high[0]:
            stated["clip"] = (float(low[0]), float(high[0]))
    return {**stated, "inside": tuple(inside)}


def _evaluate(program: Program, root: fx.Node, nodes: list[fx.Node], value: float, clipped: bool = True) -> np.ndarray:
    """The action where ``root`` is ``value`` in each entry; without ``clipped`` as if no clip were there."""
    fixed = constants(program)
    like = root.meta["val"]
    values: dict[fx.Node, Any] = {**fixed, root: torch.full(like.shape, value, dtype=like.dtype)}
    for node in nodes:
        if node.target in CLIPS and not clipped:
            values[node] = next(values[n] for n in node.all_input_nodes if n not in fixed)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        operation: Any = node.target
        values[node] = operation(*args, **kwargs)
    return _numbers(values[nodes[-1]] if nodes else values[root])


def _numbers(value: Tensor) -> np.ndarray:
    return np.asarray(value.double().reshape(-1).numpy())


def _tail(program: Program, action: Key) -> tuple[fx.Node, list[fx.Node]]:
    """The node that the tail starts from, and the tail: operations on one entry, with weights at most beside it."""
    graph = program.graph_module.graph
    returned: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    fixed = constants(program)
    nodes: list[fx.Node] = []
    node: fx.Node = returned[list(program.out_keys).index(action)]
    while node.target in PASSED or node.target in SQUASHES:
        varying = [n for n in node.all_input_nodes if n not in fixed]
        if len(varying) != 1:
            break
        nodes.append(node)
        node = varying[0]
    return node, nodes[::-1]
