"""What makes a program legal, as a check that a pass's result can be put to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program
from graphrl.compiler.shapes import same_sizes, sizes
from graphrl.errors import CompileError

__all__ = ["check_program"]

COPY = torch.ops.aten.copy_.default


def check_program(program: Program, after: str = "") -> Program:
    """Return ``program`` if it is legal; raise :class:`CompileError` naming ``after``, the pass that made it.

    Legal: the graph is well formed; placeholders come first, one for each input, state tensor and draw, in that order
    and of their shapes and dtypes; each operation carries its value in ``meta["val"]``; nothing is done in place but
    ``copy_`` into a placeholder, behind all else and once for each; the written state is what the slots say; the
    outputs are the ports, of their shapes and dtypes.
    """
    found = next(_faults(program), None)
    if found is not None:
        raise CompileError(f"{program.name} is not a legal program{after and f' after {after}'}: {found}")
    return program


def _faults(program: Program) -> Any:
    graph = program.graph_module.graph
    try:
        graph.lint()
    except RuntimeError as error:
        yield str(error).splitlines()[0]
    yield from _signature_faults(program)
    yield from _node_faults(list(graph.nodes))
    yield from _write_faults(program)


def _signature_faults(program: Program) -> Any:
    nodes = list(program.graph_module.graph.nodes)
    places = program.placeholders()
    if nodes[: len(places)] != places:
        yield "a placeholder stands behind an operation"
    wanted: list[Any] = [*program.inputs, *program.state, *program.noise]
    if len(places) != len(wanted):
        counts = f"{len(program.inputs)} inputs, {len(program.state)} state tensors and {len(program.noise)} draws"
        yield f"{len(places)} placeholders for {counts}"
    outputs = nodes[-1].args[0] if nodes and nodes[-1].op == "output" else None
    if not isinstance(outputs, (tuple, list)) or len(outputs) != len(program.outputs):
        yield f"the output does not return {len(program.outputs)} values"
        return
    for node, slot in [*zip(places, wanted, strict=False), *zip(outputs, program.outputs, strict=True)]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or sizes(value) != tuple(slot.shape) or value.dtype != slot.dtype:
            yield f"{node} holds {_described(value)}, its signature says {_described(slot)}"


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "shape") else repr(value)


def _node_faults(nodes: list[fx.Node]) -> Any:
    """Operations are ATen's, pure, and say what they return."""
    for node in nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            yield f"{node} is a {node.op}"
        elif node.op == "call_function" and node.target is not COPY:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                yield f"{node} works in place: {node.target}"
            if node.users and "val" not in node.meta:
                yield f"{node} does not say what it returns (meta['val'])"


def _write_faults(program: Program) -> Any:
    nodes = [n for n in program.graph_module.graph.nodes if n.op != "output"]
    writes = [n for n in nodes if n.target is COPY]
    if nodes[len(nodes) - len(writes) :] != writes:
        yield "an operation stands behind a write"
    targets = [n.args[0] for n in writes]
    places = program.placeholders()
    if any(t not in places for t in targets) or len(set(targets)) != len(targets):
        yield "a write goes to something else than a placeholder, or twice to one"
    for write in writes:
        into, new = (n.meta.get("val") for n in write.args[:2])  # type: ignore[union-attr]
        if not same_sizes(into.shape, new.shape) or into.dtype != new.dtype:
            yield f"{write} writes {_described(new)} into {_described(into)}"
    first = len(program.inputs)
    for slot, place in zip(program.state, places[first:], strict=False):
        if slot.mutated != (place in targets):
            yield f"state {slot.name} is {'not ' if slot.mutated else ''}written, its slot says otherwise"
