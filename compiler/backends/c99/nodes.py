"""Reading a program's nodes: operation names, arguments by name, C types, and what to say when one is not supported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program
from graphrl.keys import Key

__all__ = ["C_TYPES", "Unsupported", "arguments", "c_type", "keys_fed", "op_name", "value_of"]

C_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.int32: "int32_t",
           torch.bool: "unsigned char", torch.uint8: "unsigned char"}  # fmt: skip


class Unsupported(Exception):
    """An operation, dtype or layout that generated code does not cover. Becomes a refusal at the public boundary."""

    def __init__(self, what: str, node: fx.Node | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.node = node

    def explain(self, program: Program) -> str:
        """One line: what is missing, at which node, on the way to which key."""
        if self.node is None:
            return self.what
        keys = keys_fed(program, self.node)
        return f"{self.what}, at node {self.node.name!r} on the way to {', '.join(repr(k) for k in keys) or 'no key'}"


def op_name(node: fx.Node) -> str:
    """``"tanh.default"`` for ``aten.tanh.default``; ``"getitem"`` for tuple access."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name.removeprefix("aten.")
    return getattr(target, "__name__", str(target))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by schema name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def value_of(node: fx.Node) -> Tensor:
    """The fake tensor a node stands for."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise Unsupported(f"{op_name(node)} has no single tensor as its value", node)
    if any(not isinstance(n, int) for n in value.shape):
        raise Unsupported(f"{op_name(node)} has a symbolic shape {list(value.shape)}: sizes must be fixed", node)
    return value


def c_type(dtype: torch.dtype, node: fx.Node | None = None) -> str:
    """The C type that holds one element."""
    if dtype not in C_TYPES:
        name = str(dtype).removeprefix("torch.")
        raise Unsupported(f"{name} is not supported, generated C computes in float32", node)
    return C_TYPES[dtype]


def keys_fed(program: Program, node: fx.Node) -> list[Key]:
    """The out_keys whose value depends on ``node``."""
    reached = {node}
    for other in program.graph_module.graph.nodes:
        if any(n in reached for n in other.all_input_nodes):
            reached.add(other)
    (output,) = (n for n in program.graph_module.graph.nodes if n.op == "output")
    return [port.key for port, value in zip(program.outputs, output.args[0], strict=False) if value in reached]
