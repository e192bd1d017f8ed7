"""Graphs with opaque nodes: a program for each stretch between them, a plain call for the node itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from graphrl.compiler.compiled import CompiledGraph
from graphrl.compiler.entry import Entry
from graphrl.compiler.undo import Undo
from graphrl.graph import KeyedGraph
from graphrl.keys import DISCARD, Key, normalize_keys
from graphrl.opaque_nodes import is_opaque

__all__ = ["CompiledChain"]


class CompiledChain(CompiledGraph):
    """A compiled graph whose opaque nodes run as plain calls, in order, between the programs around them."""

    def __init__(self, graph: TensorDictModuleBase, **options: Any) -> None:
        super().__init__(graph, **options)
        self.__dict__["parts"] = _parts(graph, options)  # not sub-modules: see CompiledGraph
        for part in self.parts:
            if isinstance(part, CompiledGraph):
                part.retraces = self.retraces

    def _run(self, inputs: Sequence[Tensor], batch_size: torch.Size | None) -> Sequence[Tensor]:
        # plain tensors: no batch dim, since finding out which they share would call the opaque nodes
        td = TensorDict({}, batch_size=[] if batch_size is None else batch_size)
        for key, tensor in zip(self.in_keys, inputs, strict=True):
            td.set(key, tensor)
        for part in self.parts:
            part(td)
        return [td.get(key) for key in self.out_keys]

    def call_into(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Like :meth:`call`, but leaves the results in ``outputs``."""
        for target, value in zip(outputs, self.call(*inputs), strict=True):
            target.copy_(value)

    def bind_rows(
        self, inputs: Sequence[Sequence[Tensor]], outputs: Sequence[Sequence[Tensor]]
    ) -> Callable[[int], None]:
        """``step(t)`` that computes ``outputs[t]`` from ``inputs[t]``."""
        return lambda t: self.call_into(inputs[t], outputs[t])

    def warm_up(self, example: TensorDictBase) -> CompiledChain:
        """Compile every part for batches like ``example``. Opaque nodes run once; what they write is put back."""
        td = example.copy()
        for part in self.parts:
            if isinstance(part, CompiledGraph):
                part.warm_up(td)
            undo = Undo()
            try:
                with torch.no_grad(), undo:
                    part(td)
            finally:
                undo.restore()
        return self

    def entries(self) -> list[Entry]:
        """The programs compiled so far, part by part."""
        return [entry for part in self.parts if isinstance(part, CompiledGraph) for entry in part.entries()]


def _parts(graph: TensorDictModuleBase, options: dict[str, Any]) -> list[nn.Module]:
    """``graph`` cut at its opaque nodes: compiled stretches and plain nodes, in order."""
    nodes = (graph if isinstance(graph, KeyedGraph) else KeyedGraph(graph)).flat_nodes()
    parts: list[nn.Module] = []
    stretch: list[TensorDictModuleBase] = []
    for i, node in enumerate([*nodes, None]):
        inside = node is not None and any(is_opaque(m) for m in node.modules())
        if node is not None and not inside:
            stretch.append(node)
            continue
        later = {k for n in nodes[i:] for k in normalize_keys(n.in_keys)} | set(normalize_keys(graph.out_keys))
        shown = _written(stretch, later)
        if shown:
            parts.append(CompiledGraph(KeyedGraph(*stretch, out_keys=shown), **options))
        stretch = []
        if node is not None:
            parts.append(node if is_opaque(node) else CompiledChain(node, **options))
    return parts


def _written(nodes: Sequence[TensorDictModuleBase], wanted: set[Key]) -> list[Key]:
    """Which of the ``wanted`` keys these nodes write."""
    keys = [k for n in nodes for k in normalize_keys(n.out_keys) if k != DISCARD and k in wanted]
    return list(dict.fromkeys(keys))
