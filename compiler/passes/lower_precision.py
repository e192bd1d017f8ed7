"""Multiply matrices in bfloat16, keep everything else in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphrl.compiler.passes.batch_operation import emit
from graphrl.compiler.program import Program
from graphrl.errors import CompileError, SpecError

__all__ = ["PRECISIONS", "check_precision", "lower_precision"]

aten = torch.ops.aten
PRECISIONS = ("bf16",)
_VIEWS = {aten.permute.default, aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.select.int}
_FACTORS = {  # positions of the factors, behind an optional summand
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}


def check_precision(precision: str | None) -> str | None:
    """``precision``, where it is ``None`` or in ``PRECISIONS``; raises :class:`SpecError` otherwise."""
    if precision is not None and precision not in PRECISIONS:
        raise SpecError(f"precision is {precision!r}: expected None, as the program is written, or 'bf16'")
    return precision


def lower_precision(program: Program) -> Program:
    """Round the factors of float32 matrix products and convolutions to bfloat16; the results are float32 again.

    before   y = addmm(b, x, w)
    after    y = f32(mm(bf16(x), bf16(w))) + b

    Sums inside a product run in float32. Weights, biases, losses, reductions and the optimiser stay in float32, so
    that small steps are not lost: a bfloat16 weight does not change when less than 1/256 of it is added. A factor
    that two products read is rounded once. Raises :class:`CompileError` for a product in float64, which would lose
    more than its user can want.
    """
    graph = program.copy_graph()
    low: dict[fx.Node, fx.Node] = {}

    def rounded(node: fx.Node) -> fx.Node:
        """``node`` in bfloat16, made where it was computed; views are taken of the rounded source."""
        if node not in low:
            source = rounded(node.args[0]) if node.target in _VIEWS else None  # type: ignore[arg-type]
            with graph.inserting_after(_behind(node)):
                if source is None:
                    low[node] = emit(graph, aten._to_copy.default, node, dtype=torch.bfloat16)
                else:
                    low[node] = emit(graph, node.target, source, *node.args[1:], **node.kwargs)
        return low[node]

    for node in list(graph.nodes):
        if node.target in _FACTORS and node.op == "call_function":
            factors = [node.args[i] for i in _FACTORS[node.target]]
            dtypes = {f.meta["val"].dtype for f in factors}
            if torch.float64 in dtypes:
                raise CompileError(
                    f"precision='bf16': {node.name} of {program.name} multiplies float64: use float32 modules, inputs"
                )
            if dtypes == {torch.float32}:
                args = list(node.args)
                for i in _FACTORS[node.target]:
                    args[i] = rounded(node.args[i])
                with graph.inserting_before(node):
                    _REPLACE.get(node.target, _product)(graph, node, args)
    graph.eliminate_dead_code()
    return program.with_graph(graph)


def _behind(node: fx.Node) -> fx.Node:
    """Where new nodes may stand: placeholders come first, all of them."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _widened(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return emit(graph, aten._to_copy.default, node, dtype=torch.float32)


def _product(graph: fx.Graph, node: fx.Node, args: list[Any]) -> None:
    _replace(node, _widened(graph, emit(graph, node.target, *args)))


def _with_summand(graph: fx.Graph, node: fx.Node, args: list[Any]) -> None:
    plain = aten.mm.default if node.target is aten.addmm.default else aten.bmm.default
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    result = _widened(graph, emit(graph, plain, *args[1:]))
    result = result if alpha == 1 else emit(graph, aten.mul.Tensor, result, alpha)
    summand = args[0] if beta == 1 else emit(graph, aten.mul.Tensor, args[0], beta)
    _replace(node, emit(graph, aten.add.Tensor, result, summand))


def _convolution(graph: fx.Graph, node: fx.Node, args: list[Any]) -> None:
    bias, args[2] = args[2], None
    result = _widened(graph, emit(graph, node.target, *args))
    if bias is not None:
        shape = [-1, *([1] * (result.meta["val"].dim() - 2))]
        result = emit(graph, aten.add.Tensor, result, emit(graph, aten.view.default, bias, shape))
    _replace(node, result)


def _convolution_backward(graph: fx.Graph, node: fx.Node, args: list[Any]) -> None:
    """Gradients of input and weight are products; the bias's is a sum, and stays in float32."""
    gradient: fx.Node = node.args[0]  # type: ignore[assignment]
    args[10] = [*args[10][:2], False]
    new = emit(graph, node.target, *args)
    for getitem in list(node.users):
        i = getitem.args[1]
        if i == 2:
            dims = [d for d in range(gradient.meta["val"].dim()) if d != 1]
            part = emit(graph, aten.sum.dim_IntList, gradient, dims)
        else:
            part = graph.call_function(getitem.target, (new, i))  # type: ignore[arg-type]
            part.meta["val"] = new.meta["val"][i]
            part = _widened(graph, part)
        _replace(getitem, part)
    graph.erase_node(node)


_REPLACE = {
    aten.addmm.default: _with_summand,
    aten.baddbmm.default: _with_summand,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
