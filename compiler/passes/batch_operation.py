"""One operation on N stacked operands in place of N equal operations: the rules of ``fuse_parallel_networks``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["PRODUCTS", "Operand", "batch_operation", "can_batch", "emit", "view_stacked"]

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}


@dataclass(frozen=True)
class Operand:
    """An argument of a batched operation: ``node`` holds ``lanes`` values along a new first dimension, or one value
    that all lanes read. ``rank``: dimensions of one lane's value."""

    node: fx.Node
    stacked: bool
    rank: int


def can_batch(node: fx.Node) -> bool:
    """Whether :func:`batch_operation` knows this operation."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    if any(isinstance(a, (list, tuple)) and any(isinstance(n, fx.Node) for n in a) for a in node.args):
        return False
    if any(isinstance(a, fx.Node) for a in node.kwargs.values()):
        return False
    if node.target is aten.addmm.default and node.kwargs:  # alpha and beta
        return False
    if node.target is aten._to_copy.default and set(node.kwargs) != {"dtype"}:
        return False
    return node.target in _RULES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def batch_operation(graph: fx.Graph, like: fx.Node, lanes: int, operands: Sequence[Operand]) -> fx.Node:
    """Emit ``like``'s operation for all lanes at once; returns a node of shape ``[lanes, *like.shape]``.

    operands: one for each argument of ``like`` that is a node, in order.
    """
    rule = _RULES.get(like.target, _pointwise)
    return rule(graph, like, lanes, list(operands))


def emit(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call node that carries its value's shape, dtype and strides."""
    node = graph.create_node("call_function", target, args, kwargs, name=target._opname)
    values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*values, **named)
    return node


# ---- elementwise


def _pointwise(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    """Trailing dimensions align by broadcasting; a lane's missing dimensions go behind the first."""
    rank = like.meta["val"].dim()
    own = [n.meta["val"] for n in like.args if isinstance(n, fx.Node)]
    common = own[0].dtype if len(own) == 1 else _common_dtype(own)
    nodes = []
    for operand, value in zip(operands, own, strict=True):
        node = operand.node
        if operand.stacked:
            # a 0-d tensor takes the others' dtype; stacked it has dimensions and would impose its own
            if operand.rank == 0 and rank and value.dtype not in (common, torch.bool):
                node = emit(graph, aten._to_copy.default, node, dtype=common)
            node = _spread(graph, node, lanes, operand.rank, rank)
        nodes.append(node)
    rest = iter(nodes)
    args = [next(rest) if isinstance(a, fx.Node) else a for a in like.args]
    return emit(graph, like.target, *args, **like.kwargs)


def _common_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which an elementwise operation on these tensors computes; conditions count for nothing."""
    values = [v for v in values if v.dtype != torch.bool] or list(values)
    ranked = [v for v in values if v.dim()] or values
    found = ranked[0].dtype
    for value in ranked[1:]:
        found = torch.promote_types(found, value.dtype)
    return found


def _spread(graph: fx.Graph, node: fx.Node, lanes: int, rank: int, wanted: int) -> fx.Node:
    """``[lanes, *shape]`` with dimensions of one behind the first, so that a lane has ``wanted`` dimensions."""
    if rank == wanted:
        return node
    shape = node.meta["val"].shape[1:]
    return view_stacked(graph, node, [lanes, *([1] * (wanted - rank)), *shape])


# ---- products


def _mm(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    a, b = (_stacked_matrix(graph, operand, lanes) for operand in operands)
    if a.meta["val"].shape[2] == 1:  # an outer product, which fuses with its neighbours
        return emit(graph, aten.mul.Tensor, a, b)
    return emit(graph, aten.bmm.default, a, b)


def _addmm(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    bias, *factors = operands
    product = _mm(graph, like, lanes, factors)
    node = _spread(graph, bias.node, lanes, bias.rank, 2) if bias.stacked else bias.node
    return emit(graph, aten.add.Tensor, product, node)


def _stacked_matrix(graph: fx.Graph, operand: Operand, lanes: int) -> fx.Node:
    if operand.stacked:
        return operand.node
    one = emit(graph, aten.unsqueeze.default, operand.node, 0)
    return emit(graph, aten.expand.default, one, [lanes, -1, -1])


# ---- views and reductions


def view_stacked(graph: fx.Graph, node: fx.Node, shape: list[int]) -> fx.Node:
    """``node`` in another shape, copied first where its strides ask for it."""
    try:
        torch.empty_strided(node.meta["val"].shape, node.meta["val"].stride(), device="meta").view(shape)
    except RuntimeError:  # a view of one lane need not be one of all
        node = emit(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return emit(graph, aten.view.default, node, shape)


def _view(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    return view_stacked(graph, operands[0].node, [lanes, *like.meta["val"].shape])


def _expand(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    shape = like.meta["val"].shape
    node = _spread(graph, operands[0].node, lanes, operands[0].rank, len(shape))
    return emit(graph, aten.expand.default, node, [lanes, *shape])


def _permute(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    order = [d % operands[0].rank + 1 for d in like.args[1]]
    return emit(graph, aten.permute.default, operands[0].node, [0, *order])


def _along(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    """Operations whose second argument is a dimension, or several."""
    rank = max(operands[0].rank, like.meta["val"].dim() if like.target is aten.unsqueeze.default else 0)
    dims = like.args[1] if len(like.args) > 1 else []
    several = isinstance(dims, (list, tuple))
    shifted = [d % rank + 1 for d in (dims if several else [dims])] or list(range(1, rank + 1))
    return emit(graph, like.target, operands[0].node, shifted if several else shifted[0], *like.args[2:], **like.kwargs)


def _reduce_all(graph: fx.Graph, like: fx.Node, lanes: int, operands: list[Operand]) -> fx.Node:
    target = aten.sum.dim_IntList if like.target is aten.sum.default else aten.mean.dim
    return emit(graph, target, operands[0].node, list(range(1, operands[0].rank + 1)), **like.kwargs)


_Rule = Callable[[fx.Graph, fx.Node, int, list[Operand]], fx.Node]
_RULES: dict[Any, _Rule] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.view.default: _view,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten._to_copy.default: _pointwise,
    aten.sum.default: _reduce_all,
    aten.mean.default: _reduce_all,
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.select.int, aten.slice.Tensor,
         aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim),
        _along,
    ),
}  # fmt: skip
