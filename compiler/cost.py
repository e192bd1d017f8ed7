"""Estimated work of a program: floating-point operations and bytes touched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program
from graphrl.compiler.shapes import sizes

__all__ = ["Cost", "estimate_cost"]

aten = torch.ops.aten
_VIEWS = {
    aten.view.default,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}


@dataclass(frozen=True)
class Cost:
    """``flops``: multiplications and additions, each counted once. ``bytes``: inputs, state and outputs, once each."""

    flops: int
    bytes: int


def estimate_cost(program: Program) -> Cost:
    """Estimate a program's work from its shapes: ``2 M N K`` for a matrix product, one per element otherwise."""
    flops = sum(_flops(node) for node in program.graph_module.graph.nodes if node.op == "call_function")
    ports = (*program.inputs, *program.outputs, *program.state)
    moved = sum(math.prod(p.shape) * p.dtype.itemsize for p in ports)
    return Cost(flops, moved)


def _flops(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or node.target in _VIEWS:
        return 0
    operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if node.target in (aten.mm.default, aten.bmm.default):
        return 2 * _numel(value) * sizes(operands[0])[-1]
    if node.target is aten.addmm.default:
        return 2 * _numel(value) * sizes(node.args[1].meta["val"])[-1]
    if node.target is aten.convolution.default:
        weight = node.args[1].meta["val"]
        return 2 * _numel(value) * math.prod(sizes(weight)[1:])
    return max(_numel(t) for t in (value, *operands))


def _numel(tensor: Tensor) -> int:
    return math.prod(sizes(tensor))
