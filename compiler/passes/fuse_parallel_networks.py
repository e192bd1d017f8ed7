"""Run equal networks that stand side by side, such as an ensemble of critics, as one batched network."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.passes.batch_operation import PRODUCTS, Operand, batch_operation, can_batch, emit, view_stacked
from graphrl.compiler.program import Program

__all__ = ["fuse_parallel_networks"]

aten = torch.ops.aten

MIN_LANES = 3
"""Two gain nothing: SAC's update (2 x 256-256, batch 256) took 0.68 of eager's time fused and 0.70 unfused."""

MIN_ROWS = 16
"""Below this, copying the weights into a stack costs more than the products: a policy's step has one row."""


def fuse_parallel_networks(program: Program) -> Program:
    """Compute N equal, independent chains of operations at once, on operands stacked along a new first dimension.

    before   p = addmm(b, x, w); h = relu(p);  q = addmm(c, x, v); k = relu(q)
    after    r = relu(bmm(expand(x), stack(w, v)) + stack(b, c));  h = r[0];  k = r[1]

    The modules keep their weights: they are stacked inside the program, which costs a copy. The search begins at
    matrix products of equal shapes that read the same input, and goes on to what reads their results: activations,
    later layers, losses, backward products, the optimiser's arithmetic. It stops where the chains differ.
    Results change by rounding only.
    """
    if program.dynamic:  # batching asks for shapes in numbers
        return program
    search = _Search(program)
    search.run()
    return _rebuilt(program, search.packs) if search.packs else program


@dataclass(eq=False)
class _Pack:
    """Equal operations (``lanes``), one of each network, to be computed at once; or, without ``operands``, a stack of
    values that exist on their own."""

    lanes: tuple[fx.Node, ...]
    operands: tuple[_Source, ...] | None


@dataclass(frozen=True)
class _Source:
    """Where a pack's argument comes from: one node for all lanes, or lanes ``[start, stop)`` of another pack."""

    node: fx.Node | None = None
    pack: _Pack | None = None
    start: int = 0
    stop: int = 0


class _Search:
    """Finds the packs of a program.

    Members of a pack have equal depth, the longest path from a placeholder. So no member can depend on another, and
    every dependence between packs goes from a smaller depth to a larger one: joining them never closes a cycle.
    """

    def __init__(self, program: Program) -> None:
        self.packs: list[_Pack] = []
        self.nodes = list(program.graph_module.graph.nodes)
        self._place: dict[fx.Node, tuple[_Pack, int]] = {}
        self._stacks: dict[tuple[fx.Node, ...], _Pack] = {}
        self._classify(program)

    def _classify(self, program: Program) -> None:
        """Number expressions so that two get one number where they differ in state tensors of equal shape alone."""
        numbers: dict[Hashable, int] = {}
        self._depth: dict[fx.Node, int] = {}
        self._class: dict[fx.Node, int] = {}
        first = len(program.inputs)
        state = set(program.placeholders()[first : first + len(program.state)])
        for node in self.nodes:
            self._depth[node] = 1 + max((self._depth[n] for n in node.all_input_nodes), default=-1)
            key: Hashable = node
            if node in state:
                key = ("state", *_signature(node))
            elif node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
                args = (_frozen(node.args, self._class), _frozen(node.kwargs, self._class))
                key = (node.target, args, *_signature(node))
            self._class[node] = numbers.setdefault(key, len(numbers))

    def run(self) -> None:
        levels: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            if can_batch(node):
                levels[self._depth[node]].append(node)
        for level in sorted(levels):
            groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
            for node in levels[level]:
                if node not in self._place and (key := self._key(node)) is not None:
                    groups[key].append(node)
            for nodes in groups.values():
                for run in self._runs(nodes):
                    if len(run) >= MIN_LANES:
                        self._pack(tuple(run))

    def _key(self, node: fx.Node) -> Hashable | None:
        """Equal for operations that may be lanes of one pack."""
        packed = {self._place[n] for n in node.all_input_nodes if n in self._place}
        if len({lane for _, lane in packed}) > 1:
            return None
        product = node.target in PRODUCTS
        if not packed and not (product and _rows(node) >= MIN_ROWS):
            return None

        def described(n: fx.Node) -> Hashable:
            if n in self._place:
                return id(self._place[n][0])
            return _signature(n) if packed and product else self._class[n]

        args = tuple(described(a) if isinstance(a, fx.Node) else _frozen(a, self._class) for a in node.args)
        return (node.target, args, _frozen(node.kwargs, self._class), *_signature(node))

    def _runs(self, nodes: list[fx.Node]) -> list[list[fx.Node]]:
        """The candidates in runs of consecutive lanes, in the order of the packs that they read."""
        lanes: dict[int, list[fx.Node]] = defaultdict(list)
        for position, node in enumerate(nodes):
            read = [self._place[n][1] for n in node.all_input_nodes if n in self._place]
            lanes[read[0] if read else position].append(node)
        runs: list[list[fx.Node]] = []
        while lanes:
            previous = None
            for lane in sorted(lanes):
                if previous is None or lane != previous + 1:
                    runs.append([])
                runs[-1].append(lanes[lane].pop(0))
                previous = lane
            lanes = {lane: rest for lane, rest in lanes.items() if rest}
        return runs

    def _pack(self, nodes: tuple[fx.Node, ...]) -> _Pack | None:
        columns = zip(*([a for a in n.args if isinstance(a, fx.Node)] for n in nodes), strict=True)
        sources = tuple(self._source(column) for column in columns)
        if any(source is None for source in sources):
            return None
        pack = _Pack(nodes, sources)  # type: ignore[arg-type]
        self._register(pack)
        return pack

    def _register(self, pack: _Pack) -> None:
        self.packs.append(pack)
        for lane, node in enumerate(pack.lanes):
            self._place[node] = (pack, lane)

    def _source(self, column: tuple[fx.Node, ...]) -> _Source | None:
        """Where the pack gets one argument of all its lanes."""
        if len(set(column)) == 1:
            return _Source(node=column[0])
        if all(n in self._place for n in column):
            packs = {self._place[n][0] for n in column}
            start = self._place[column[0]][1]
            if len(packs) == 1 and [self._place[n][1] for n in column] == list(range(start, start + len(column))):
                return _Source(pack=packs.pop(), start=start, stop=start + len(column))
        pack = self._stacks.get(column)
        free = not any(n in self._place for n in column) and len(set(column)) == len(column)
        if pack is None and free and len({self._class[n] for n in column}) == 1 and can_batch(column[0]):
            pack = self._pack(column)
        if pack is None:
            if len({_signature(n) for n in column}) > 1:
                return None
            pack = self._stacks[column] = _Pack(column, None)
            if free and len({self._depth[n] for n in column}) == 1:
                self._register(pack)
            else:
                self.packs.append(pack)
        return _Source(pack=pack, start=0, stop=len(column))


def _rebuilt(program: Program, packs: Sequence[_Pack]) -> Program:
    """The program with every pack computed once; original order where dependences allow it."""
    graph = fx.Graph()
    old = list(program.graph_module.graph.nodes)
    values: dict[fx.Node, fx.Node] = {}
    results: dict[_Pack, fx.Node] = {}
    home = {node: pack for pack in packs if pack.operands is not None for node in pack.lanes}
    outputs = old[-1].all_input_nodes

    def compute(pack: _Pack) -> None:
        lanes = len(pack.lanes)
        if pack.operands is None:
            results[pack] = _stack(graph, [values[n] for n in pack.lanes])
            return
        operands = [_operand(graph, source, values, results) for source in pack.operands]
        results[pack] = batch_operation(graph, pack.lanes[0], lanes, operands)
        for i, node in enumerate(pack.lanes):
            if any(user not in home for user in node.users) or node in stacked:
                values[node] = emit(graph, aten.select.int, results[pack], 0, i)
            if node in outputs:  # whoever gets an output gets a tensor of its own
                values[node] = emit(graph, aten.clone.default, values[node])

    stacked = {n for pack in packs if pack.operands is None for n in pack.lanes}
    for unit in _in_order(old, packs, home):
        if isinstance(unit, _Pack):
            compute(unit)
        elif (whole := _joined_again(unit, home)) is not None:  # cat of all lanes: they still lie side by side
            values[unit] = view_stacked(graph, results[whole], list(unit.meta["val"].shape))
        else:
            values[unit] = graph.node_copy(unit, lambda n: values[n])
    graph.eliminate_dead_code()
    return program.with_graph(graph)


def _joined_again(node: Any, home: dict[fx.Node, _Pack]) -> _Pack | None:
    """The pack whose lanes ``node`` concatenates, all of them and in order, along the first dimension."""
    if node.target is not aten.cat.default or any(node.args[1:]) or node.kwargs:
        return None
    pack = home.get(node.args[0][0])
    return pack if pack is not None and tuple(node.args[0]) == pack.lanes else None


def _operand(
    graph: fx.Graph, source: _Source, values: dict[fx.Node, fx.Node], results: dict[_Pack, fx.Node]
) -> Operand:
    if source.pack is None:
        assert source.node is not None
        return Operand(values[source.node], False, source.node.meta["val"].dim())
    node = results[source.pack]
    if source.stop - source.start < len(source.pack.lanes):
        node = emit(graph, aten.slice.Tensor, node, 0, source.start, source.stop)
    return Operand(node, True, source.pack.lanes[0].meta["val"].dim())


def _stack(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    shape = list(nodes[0].meta["val"].shape)
    if not shape:
        return emit(graph, aten.cat.default, [emit(graph, aten.view.default, n, [1]) for n in nodes])
    joined = emit(graph, aten.cat.default, nodes)
    return emit(graph, aten.view.default, joined, [len(nodes), *shape])


def _in_order(old: list[fx.Node], packs: Sequence[_Pack], home: dict[fx.Node, _Pack]) -> list[Any]:
    """Nodes and packs so that each comes after what it reads, otherwise as the program had them."""
    position = {node: i for i, node in enumerate(old)}
    units: dict[Any, tuple[int, list[Any]]] = {}
    for node in old:
        if node not in home:
            place = position[node] - len(old) * (node.op == "placeholder")  # all of them first
            units[node] = (place, [home.get(n, n) for n in node.all_input_nodes])
    for pack in packs:
        if pack.operands is None:
            needs: list[Any] = [home.get(n, n) for n in pack.lanes]
        else:
            needs = [s.pack if s.pack is not None else home.get(s.node, s.node) for s in pack.operands]  # type: ignore[arg-type]
        units[pack] = (max(position[n] for n in pack.lanes), needs)
    waiting = {unit: len(set(needs)) for unit, (_, needs) in units.items()}
    readers: dict[Any, list[Any]] = defaultdict(list)
    for unit, (_, needs) in units.items():
        for need in set(needs):
            readers[need].append(unit)
    ticket = {unit: i for i, unit in enumerate(units)}  # stacks and their last lane share a position
    rank = {unit: (place, ticket[unit]) for unit, (place, _) in units.items()}
    by_rank = {rank[unit]: unit for unit in units}
    writes = {n: None for n in old if n.target is aten.copy_.default or n.op == "output"}  # in order
    ready = [rank[unit] for unit, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        unit = by_rank[heapq.heappop(ready)]
        order.append(unit)
        for reader in readers[unit]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, rank[reader])
    return [unit for unit in order if unit not in writes] + list(writes)


def _signature(node: fx.Node) -> tuple[Hashable, ...]:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return (node,)
    return tuple(value.shape), value.dtype, value.device


def _rows(node: fx.Node) -> int:
    return int(node.meta["val"].shape[0])


def _frozen(value: Any, classes: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return ("node", classes[value])
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v, classes) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v, classes)) for k, v in sorted(value.items()))
    return (type(value).__name__, repr(value))
