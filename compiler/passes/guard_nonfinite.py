"""Keep every state tensor as it was when a result of an update is not finite, or a check fails."""

from __future__ import annotations

import torch
from torch import fx

from graphrl.compiler.checks import CHECKED
from graphrl.compiler.program import Port, Program

__all__ = ["FINITE", "guard_nonfinite", "guard_writes"]

aten = torch.ops.aten

FINITE = ("graphrl", "finite")
"""Key of the added last output: a 0-d flag, true when every floating-point output is finite."""


def guard_nonfinite(program: Program) -> Program:
    """Write new state only where all floating-point outputs are finite; say so in a last output.

    before   copy_(w, w_new);                                      return (loss,)
    after    ok = isfinite(loss);  copy_(w, where(ok, w_new, w));  return (loss, ok)

    So a NaN in a batch costs one update and an error, not the weights.
    """
    graph = program.copy_graph()
    (output,) = (n for n in graph.nodes if n.op == "output")
    writes = [n for n in graph.nodes if n.target is aten.copy_.default]
    checked = [n for n in output.args[0] if n.meta["val"].is_floating_point()]
    if not checked or not writes:
        return guard_writes(program)
    with graph.inserting_before(writes[0]):
        flags = []
        for node in checked:
            value = node.meta["val"]
            magnitude = _call(graph, aten.abs.default, (node,), value)
            like = value.new_empty(value.shape, dtype=torch.bool)
            flag = _call(graph, aten.lt.Scalar, (magnitude, float("inf")), like)
            if value.dim():
                flag = _call(graph, aten.all.default, (flag,), value.new_empty((), dtype=torch.bool))
            flags.append(flag)
        ok = _all(graph, flags)
    output.args = ((*output.args[0], ok),)
    outputs = (*program.outputs, Port.of(FINITE, ok.meta["val"]))
    return guard_writes(program.with_graph(graph, outputs=outputs))


def guard_writes(program: Program) -> Program:
    """Write new state only where the program's flags, ``FINITE`` and ``CHECKED``, hold.

    before   copy_(w, w_new);                 return (y, ok)
    after    copy_(w, where(ok, w_new, w));   return (y, ok)
    """
    flagged = [i for i, port in enumerate(program.outputs) if port.key in (FINITE, CHECKED)]
    graph = program.copy_graph()
    (output,) = (n for n in graph.nodes if n.op == "output")
    writes = [n for n in graph.nodes if n.target is aten.copy_.default]
    if not flagged or not writes:
        return program
    with graph.inserting_before(writes[0]):
        ok = _all(graph, [output.args[0][i] for i in flagged])
        for write in writes:
            old, new = write.args[:2]
            write.args = (old, _call(graph, aten.where.self, (ok, new, old), new.meta["val"]))
    return program.with_graph(graph)


def _all(graph: fx.Graph, flags: list[fx.Node]) -> fx.Node:
    ok = flags[0]
    for flag in flags[1:]:
        ok = _call(graph, aten.logical_and.default, (ok, flag), ok.meta["val"])
    return ok


def _call(graph: fx.Graph, target: object, args: tuple[object, ...], value: torch.Tensor) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = value
    return node
