"""Cut a program into parts, so that each backend runs what it can.

Every operation is labelled: the wanted backend takes it, or not. Operations alternate between the two kinds along each
path, and all that stand at the same alternation form one part; each is moved as late as its readers allow, so that a
weight's view is made where it is read. Writes into state happen after the last part.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.base import Backend, Lowered, written_input
from graphrl.compiler.program import Port, Program

__all__ = ["MAX_PARTS", "MIN_OPERATIONS", "Part", "SplitProgram", "cut", "unsupported_nodes"]

aten = torch.ops.aten

MAX_PARTS = 8
"""More parts than this cost more in calls than they save."""

MIN_OPERATIONS = 8
"""The wanted backend gets a part only if it has a matrix product, or this many operations: each part is a call."""

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}


@dataclass(frozen=True)
class Part:
    """One part: its program, whether it is for the wanted backend, and the whole's nodes that it reads and makes."""

    program: Program
    wanted: bool
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]


class SplitProgram:
    """Runs the parts in order, then writes state. Values that cross from one part to another are contiguous."""

    def __init__(self, program: Program, parts: Sequence[Part], lowered: Sequence[Lowered]) -> None:
        at = {node: i for i, node in enumerate(program.placeholders())}
        self._first = len(at)
        for part in parts:
            at |= {node: len(at) + i for i, node in enumerate(part.makes)}
        self._steps = [(run, [at[n] for n in part.reads]) for part, run in zip(parts, lowered, strict=True)]
        self._outputs = [at[n] for n in _outputs(program)]
        self._writes = [(at[n.args[0]], at[n.args[1]]) for n in _writes(program)]

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run on all placeholder values: inputs, state, draws."""
        values, first = list(arguments), self._first
        for run, reads in self._steps:
            values += run([values[i] if i < first else values[i].contiguous() for i in reads])
        for target, source in self._writes:
            values[target].copy_(values[source])
        return [values[i] for i in self._outputs]


def unsupported_nodes(backend: Backend, program: Program) -> dict[fx.Node, str]:
    """The operations that ``backend`` cannot take, each with the reason: asked one by one, as programs of their own.

    A backend that recognises groups of operations says it itself, by a method ``unsupported(program)``.
    """
    own = getattr(backend, "unsupported", None)
    if own is not None:
        return own(program)
    feeds: dict[fx.Node, Any] = {n: port.key for n, port in zip(_outputs(program), program.outputs, strict=True)}
    written = dict(zip(program.placeholders()[len(program.inputs) :], program.state, strict=False))
    feeds |= {n: written[n.args[0]].name for n in _writes(program) if n.args[0] in written}
    refused: dict[fx.Node, str] = {}
    for node in reversed(program.graph_module.graph.nodes):
        for source in node.all_input_nodes:
            if node in feeds:
                feeds.setdefault(source, feeds[node])
    for node in _operations(program):
        if node.target is not operator.getitem:
            made = [node] if isinstance(node.meta.get("val"), Tensor) else [u for u in node.users]
            probe = _extract(program, {node, *made}, made[:1], set()).program
            probe = replace(probe, outputs=tuple(replace(p, key=feeds.get(node, p.key)) for p in probe.outputs))
            if (refusal := backend.supports(probe)) is not None:
                refused[node] = refusal.reason
    return refused


def cut(program: Program, refused: Collection[fx.Node]) -> list[Part]:
    """The parts of ``program`` in the order to run them; empty where it should not be cut.

    That is where the wanted backend would get nothing worth a call of its own, where there would be over
    :data:`MAX_PARTS`, and for programs that write into an input or address memory by strides.
    """
    nodes = _operations(program)
    strided = any(n.target is aten.as_strided.default for n in nodes)
    if strided or written_input(program) is not None or any(n.users for n in _writes(program)):
        return []
    outside = {n for n in nodes if _owner(n) in refused}
    needed = {*_outputs(program), *(n.args[1] for n in _writes(program))}
    free = {n for n in nodes if not n.all_input_nodes and n not in outside and n not in needed}
    nodes = [n for n in nodes if n not in free]
    while True:
        levels = _levels(nodes, outside, free)
        groups = [(k, {n for n in nodes if levels[n] == k}) for k in sorted(set(levels.values()))]
        trivial = [group for k, group in groups if k % 2 == 0 and not _worth_a_call(group)]
        if not trivial:
            break
        outside.update(*trivial)
    if len(groups) > MAX_PARTS or all(k % 2 for k, _ in groups):
        return []
    parts: list[Part] = []
    for k, group in groups:
        made = [n for n in nodes if n in group and (n in needed or any(u not in group for u in n.users))]
        made = [n for n in made if isinstance(n.meta.get("val"), Tensor)]
        if made:
            part = _extract(program, group, made, free)
            name = f"{program.name}_{len(parts)}"
            parts.append(replace(part, program=replace(part.program, name=name), wanted=k % 2 == 0))
    return parts


def _levels(nodes: Sequence[fx.Node], outside: Collection[fx.Node], free: Collection[fx.Node]) -> dict[fx.Node, int]:
    """How often the kind alternates before each node, even for the wanted backend, and each as late as can be."""
    kind = {n: int(n in outside) for n in nodes}
    level: dict[fx.Node, int] = {}
    for node in nodes:
        before = [level[n] + (kind[n] != kind[node]) for n in node.all_input_nodes if n in level]
        level[node] = max([kind[node], *before])
    last = {k: max((level[n] for n in nodes if kind[n] == k), default=0) for k in (0, 1)}
    for node in reversed(nodes):
        readers = [u for user in node.users for u in ([user] if user.target is not operator.getitem else user.users)]
        after = [level[u] - (kind[u] != kind[node]) for u in readers if u in level]
        level[node] = min([last[kind[node]], *after])
        level[node] -= (level[node] - kind[node]) % 2
    for node in nodes:
        if node.target is operator.getitem:
            level[node] = level[_owner(node)]
    return level


def _worth_a_call(group: Collection[fx.Node]) -> bool:
    return any(n.target in _PRODUCTS for n in group) or len(group) >= MIN_OPERATIONS


def _extract(program: Program, group: Collection[fx.Node], made: Sequence[fx.Node], free: Collection[fx.Node]) -> Part:
    """The operations in ``group`` as a program, with those of the ``free`` ones, which read nothing, that it reads."""
    order = [n for n in program.graph_module.graph.nodes if n in group or (n in free and not group.isdisjoint(n.users))]
    read = {n: None for node in order for n in node.all_input_nodes if n not in group and n not in free}
    places = program.placeholders()
    first, last = len(program.inputs), len(program.inputs) + len(program.state)
    inputs = [(n, port) for n, port in zip(places[:first], program.inputs, strict=True) if n in read]
    state = [(n, slot) for n, slot in zip(places[first:last], program.state, strict=True) if n in read]
    noise = [(n, draw) for n, draw in zip(places[last:], program.noise, strict=True) if n in read]
    crossing = [n for n in read if n.op != "placeholder"]
    reads = [*(n for n, _ in inputs), *crossing, *(n for n, _ in state), *(n for n, _ in noise)]
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in reads:
        values[node] = graph.placeholder(node.name)
        values[node].meta.update(node.meta)
    turned = False
    for node in crossing:
        value = node.meta["val"]
        turned = turned or not value.is_contiguous()
        values[node].meta["val"] = value.new_empty(value.shape)
    for node in order:
        values[node] = graph.node_copy(node, lambda n: values[n])
        if turned and node.target is aten.view.default:  # its operand may no longer lie as it was traced
            values[node].target = aten.reshape.default
    graph.output(tuple(values[n] for n in made))
    graph.lint()
    part = replace(
        program,
        graph_module=fx.GraphModule(program.graph_module, graph),
        inputs=(*(port for _, port in inputs), *(Port.of(("part", n.name), n.meta["val"]) for n in crossing)),
        outputs=tuple(Port.of(("part", n.name), n.meta["val"]) for n in made),
        state=tuple(replace(slot, mutated=False) for _, slot in state),
        noise=tuple(draw for _, draw in noise),
        history=(),
    )
    return Part(part, True, tuple(reads), tuple(made))


def _operations(program: Program) -> list[fx.Node]:
    """All operations but the writes at the end."""
    nodes = program.graph_module.graph.nodes
    return [n for n in nodes if n.op == "call_function" and n.target is not aten.copy_.default]


def _writes(program: Program) -> list[fx.Node]:
    return [n for n in program.graph_module.graph.nodes if n.target is aten.copy_.default]


def _outputs(program: Program) -> list[fx.Node]:
    (output,) = (n for n in program.graph_module.graph.nodes if n.op == "output")
    return list(output.args[0])


def _owner(node: fx.Node) -> fx.Node:
    """The operation that computes ``node``: for ``getitem``, the one with several results."""
    return node.args[0] if node.target is operator.getitem else node
