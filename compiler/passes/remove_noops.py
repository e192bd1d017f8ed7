"""Remove operations that return their input unchanged."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program
from graphrl.compiler.shapes import same_sizes

__all__ = ["remove_noops"]

aten = torch.ops.aten
_ALWAYS = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_IF_SAME_SHAPE = {aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.reshape.default}
_IF_SAME_TENSOR = {aten._to_copy.default, aten.slice.Tensor, aten.permute.default}


def remove_noops(program: Program) -> Program:
    """Let readers of an alias, or of a view, slice, permutation or cast that changes nothing, read its source.

    before   y = alias(x);  z = view(y, [5, 3]);  return tanh(z)     x: [5, 3]
    after    return tanh(x)

    ``clone`` stays: its source may be written at the end of the program. So does a cast that is an output, which
    eager returns as a tensor of its own.
    """
    graph = program.copy_graph()
    (output,) = (n for n in graph.nodes if n.op == "output")
    copies = {n for n in output.all_input_nodes if n.target is aten._to_copy.default}
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in copies and _is_noop(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return program.with_graph(graph)


def _is_noop(node: fx.Node) -> bool:
    if node.target in _ALWAYS:
        return True
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if node.target in _IF_SAME_SHAPE:
        return same_sizes(before.shape, after.shape)
    if node.target in _IF_SAME_TENSOR:
        order = node.args[1] if node.target is aten.permute.default else None
        return (
            same_sizes(before.shape, after.shape)
            and before.dtype == after.dtype
            and before.device == after.device
            and same_sizes(before.stride(), after.stride())
            and (order is None or list(order) == sorted(order))
            and (node.target is not aten._to_copy.default or not _may_be_written(node.args[0]))
        )
    return False


def _may_be_written(node: fx.Node) -> bool:
    return any(user.target is aten.copy_.default and user.args[0] is node for user in node.users)
