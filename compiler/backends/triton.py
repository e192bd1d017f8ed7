"""Multilayer perceptrons in one Triton launch; what else a program does goes to the next backend, part by part."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.base import Lowered, Refusal, written_input
from graphrl.compiler.program import Program
from graphrl.errors import CompileError, MissingExtraError, require_extra
from graphrl.kernels.mlp.op import MAX_WIDTH

__all__ = ["BACKEND", "Chain", "Triton", "find_chains"]

aten = torch.ops.aten

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_RESHAPES = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim)
_VIEWS = (*_RESHAPES, aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.select.int, operator.getitem)


@dataclass
class Chain:
    """A run of layers, each read by the next alone: the nodes, the input, and what the kernel takes for each layer."""

    nodes: list[fx.Node]
    source: fx.Node
    weights: list[fx.Node]
    biases: list[fx.Node | None]
    activations: list[str]


class Triton:
    """Runs programs that are nothing but MLPs, each of two layers at least, in one launch each."""

    name = "triton"
    dynamic = False

    def supports(self, program: Program) -> Refusal | None:
        if (refusal := _unavailable(program)) is not None:
            return refusal
        chains = find_chains(program.graph_module.graph)
        if not chains:
            return Refusal(
                f"there is no chain of two linear layers up to {MAX_WIDTH} wide, in float32, float16 or bfloat16, "
                "with a known activation between"
            )
        refused = _outside(program, chains)
        for node, reason in refused.items():
            return Refusal(f"{reason}, at node {node.name!r}")
        return written_input(program)

    def unsupported(self, program: Program) -> dict[fx.Node, str]:
        """The operations that are in no chain of layers."""
        if (refusal := _unavailable(program)) is not None:
            return {n: refusal.reason for n in program.graph_module.graph.nodes if n.op == "call_function"}
        return _outside(program, find_chains(program.graph_module.graph))

    def lower(self, program: Program) -> Lowered:
        """The program with a kernel for each chain. Raises :class:`CompileError` when it is refused."""
        if (refusal := self.supports(program)) is not None:
            raise CompileError(f"triton: {refusal.reason}")
        from graphrl.kernels.mlp.triton import mlp_forward

        graph = program.copy_graph()
        for chain in find_chains(graph):
            last = chain.nodes[-1]
            with graph.inserting_after(last):
                operands = (chain.source, chain.weights, chain.biases, chain.activations)
                fused = graph.call_function(mlp_forward, operands)
            with graph.inserting_after(fused):
                shaped = graph.call_function(aten.view.default, (fused, list(last.meta["val"].shape)))
            last.replace_all_uses_with(shaped)
        graph.eliminate_dead_code()
        module = fx.GraphModule(program.graph_module, graph)
        return lambda values: module(*values)


def find_chains(graph: fx.Graph) -> list[Chain]:
    """Every chain of at least two layers, as long as possible."""
    chains: list[Chain] = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in taken and _is_layer(node):
            chain = _follow(node)
            taken.update(chain.nodes)
            if len(chain.weights) > 1:
                chains.append(chain)
    return chains


def _is_layer(node: fx.Node) -> bool:
    """Whether ``node`` is ``x W^T + b`` or ``x W^T`` with W and b as ``nn.Linear`` has them."""
    if node.target not in (aten.addmm.default, aten.mm.default) or node.kwargs:
        return False
    *bias, x, matrix = node.args
    turned = matrix.target is aten.permute.default and list(matrix.args[1]) == [1, 0]
    return (
        turned
        and all(b.meta["val"].dim() == 1 and b.meta["val"].shape[0] == node.meta["val"].shape[1] for b in bias)
        and node.meta["val"].dtype in DTYPES
        and 0 not in x.meta["val"].shape
        and 0 < max(matrix.meta["val"].shape) <= MAX_WIDTH
    )


def _follow(first: fx.Node) -> Chain:
    """The chain that starts with the layer ``first``."""
    chain = Chain([], first.args[-2], [], [], [])
    layer: fx.Node | None = first
    while layer is not None:
        chain.nodes.append(layer)
        chain.weights.append(layer.args[-1].args[0])
        chain.biases.append(layer.args[0] if len(layer.args) == 3 else None)
        tail, between = _through_views(layer)
        activation, passed = _activation(tail)
        chain.activations.append(activation)
        if passed:
            chain.nodes += [*between, *passed]
            tail, between = _through_views(passed[-1])
        (reader,) = tail.users if len(tail.users) == 1 else (None,)
        layer = reader if reader is not None and _is_layer(reader) and reader.args[-2] is tail else None
        chain.nodes += between if layer is not None else []
    return chain


def _through_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Past the operations that only regroup leading dims, where nothing else reads what is between."""
    passed: list[fx.Node] = []
    width = node.meta["val"].shape[-1]
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.target not in _RESHAPES or reader.meta["val"].shape[-1:] != (width,):
            break
        passed.append(reader)
        node = reader
    return node, passed


def _activation(node: fx.Node) -> tuple[str, list[fx.Node]]:
    """The activation that alone reads ``node``, and its nodes; ``identity`` and none where there is no known one."""
    readers = list(node.users)
    if len(readers) == 1:
        (reader,) = readers
        rest, kwargs = reader.args[1:], dict(reader.kwargs)
        if reader.target is aten.gelu.default and not rest:
            kind = {"none": "gelu", "tanh": "gelu_tanh"}[kwargs.get("approximate", "none")]
            return kind, [reader]
        if reader.target is aten.elu.default and set(rest) <= {1} and not kwargs:
            return "elu", [reader]
        name = {aten.tanh.default: "tanh", aten.relu.default: "relu"}.get(reader.target)
        if name is not None:
            return name, [reader]
    if len(readers) == 2:  # silu is traced as x * sigmoid(x)
        gate, product = sorted(readers, key=lambda n: n.target is aten.mul.Tensor)
        if gate.target is aten.sigmoid.default and product.target is aten.mul.Tensor and list(gate.users) == [product]:
            if set(product.args) == {node, gate}:
                return "silu", [gate, product]
    return "identity", []


def _outside(program: Program, chains: Sequence[Chain]) -> dict[fx.Node, str]:
    inside = {n for chain in chains for n in chain.nodes}
    return {
        n: f"{n.target} is in no chain of two linear layers or more"
        for n in program.graph_module.graph.nodes
        if n.op == "call_function" and n not in inside and n.target not in (*_VIEWS, aten.copy_.default)
    }


def _unavailable(program: Program) -> Refusal | None:
    """Why no program could run here: no Triton, or no GPU under the tensors."""
    try:
        require_extra("triton", "triton")
    except MissingExtraError as missing:
        return Refusal(str(missing))
    from triton import knobs

    wanted = ("cuda", "cpu") if knobs.runtime.interpret else ("cuda",)
    for node in program.placeholders():
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.device.type not in wanted:
            return Refusal(
                f"Triton kernels run on a GPU, and {node.name} is on {value.device} (TRITON_INTERPRET=1 set before "
                "the start interprets them on the CPU, slowly, for tests)"
            )
    return None


BACKEND = Triton()
