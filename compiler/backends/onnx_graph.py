"""From a program to an ONNX model: each ATen operation as the ONNX operations that say the same, sizes as traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, fx

from graphrl._version import __version__
from graphrl.compiler.backends.c99.nodes import Unsupported, op_name, value_of
from graphrl.compiler.backends.onnx_ops import DTYPES, emit
from graphrl.compiler.program import Program
from graphrl.keys import encode_key

__all__ = ["IR_VERSION", "OPSET", "build_model", "input_names", "output_names"]

OPSET = 18
IR_VERSION = 8
"""Read by every ONNX Runtime since 1.14."""


def build_model(program: Program, *, embed: bool = True, symbolic_batch: bool = False) -> onnx.ModelProto:
    """The ONNX model of ``program``: opset 18, inputs and outputs named by their keys, no external data.

    embed: write state that the program does not change into the file; otherwise it is an input ``state/NAME``.
    State that the program changes is always explicit: input ``state/NAME``, output ``next_state/NAME``. Draws are
    inputs ``noise/I``. symbolic_batch: leave dim 0 open; refused where an operation fixes it.
    Raises :class:`Unsupported` naming the operation and node without an ONNX form.
    """
    writer = Writer(program, embed, symbolic_batch)
    writer.run()
    graph = helper.make_graph(
        writer.nodes, program.name, writer.inputs, writer.outputs, [*writer.constants.values()],
    )  # fmt: skip
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="graphrl",
        producer_version=__version__,
    )
    onnx.checker.check_model(model)
    return model


def input_names(program: Program, *, embed: bool = True) -> list[str]:
    """Names of the model's inputs, in the order of the program's placeholders (embedded weights left out)."""
    state = [f"state/{s.name}" for s in program.state if not embed or s.mutated]
    return [*(encode_key(p.key) for p in program.inputs), *state, *(f"noise/{i}" for i in range(len(program.noise)))]


def output_names(program: Program) -> list[str]:
    """Names of the model's outputs: keys, then written state. A key that is also an input gets ``~out`` behind it."""
    taken = {encode_key(p.key) for p in program.inputs}
    names = [encode_key(p.key) for p in program.outputs]
    names = [f"{n}~out" if n in taken else n for n in names]
    return names + [f"next_state/{s.name}" for s in program.state if s.mutated]


class Writer:
    """The state of one walk over a program."""

    def __init__(self, program: Program, embed: bool, symbolic: bool) -> None:
        self.program, self.embed, self.symbolic = program, embed, symbolic
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.names: dict[fx.Node, Any] = {}
        self._by_value: dict[bytes, str] = {}
        self._count = 0
        self.batch = program.inputs[0].shape[0] if symbolic and program.inputs and program.inputs[0].shape else None

    # ---- writing

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Append an ONNX operation; the name of its result, or a list of names."""
        made = [f"v{self._count + i}" for i in range(outputs)]
        self._count += outputs
        self.nodes.append(helper.make_node(kind, list(inputs), made, name=f"{kind}_{len(self.nodes)}", **attributes))
        return made[0] if outputs == 1 else made

    def const(self, value: Any, dtype: Any = None, name: str = "") -> str:
        """The name of a constant; equal constants are stored once."""
        array = np.ascontiguousarray(np.asarray(value, dtype=dtype)).reshape(np.shape(value))
        key = repr((array.dtype.str, array.shape)).encode() + array.tobytes()
        if key not in self._by_value:
            label = name or f"k{len(self.constants)}"
            self.constants[label] = numpy_helper.from_array(array, label)
            self._by_value[key] = label
        return self._by_value[key]

    def ints(self, values: Sequence[int]) -> str:
        """A constant list of integers."""
        return self.const(list(values), np.int64)

    def number(self, value: Any, dtype: torch.dtype) -> str:
        """A constant scalar."""
        return self.const(torch.tensor(value, dtype=dtype).numpy())

    def cast(self, name: str, source: torch.dtype, target: torch.dtype) -> str:
        """``name`` converted where the dtypes differ."""
        return name if source == target else self.op("Cast", name, to=DTYPES[target])

    def read(self, value: Any, dtype: torch.dtype) -> str:
        """The name of a node's value or of a number, converted to ``dtype``."""
        if isinstance(value, fx.Node):
            return self.cast(self.names[value], value_of(value).dtype, dtype)
        return self.number(value, dtype)

    def fixes_batch(self, node: fx.Node, dims: Sequence[int] | None = None) -> None:
        """Refuse ``node`` when dim 0 must stay open and the node works along it (or on sizes, for ``dims=None``)."""
        if self.symbolic and (dims is None or 0 in dims):
            raise Unsupported(f"{op_name(node)} fixes the batch size, which symbolic_batch leaves open", node)

    # ---- the walk

    def run(self) -> None:
        """Write every node, input and output."""
        writes: list[tuple[fx.Node, fx.Node]] = []
        self._placeholders()
        for node in self.program.graph_module.graph.nodes:
            if node.op == "get_attr":
                self.names[node] = self._tensor(getattr(self.program.graph_module, node.target), node)
            elif node.op == "call_function" and op_name(node) == "copy_.default":
                writes.append((node.args[0], node.args[1]))
                self.names[node] = self.names[node.args[1]]
            elif node.op == "call_function":
                self.names[node] = emit(self, node)
            elif node.op == "output":
                results = [*node.args[0], *(source for _, source in writes)]
                order: list[Any] = [*self.program.outputs, *(s for s in self.program.state if s.mutated)]
                for name, result, port in zip(output_names(self.program), results, order, strict=True):
                    self.nodes.append(helper.make_node("Identity", [self.names[result]], [name], name=f"output/{name}"))
                    self.outputs.append(self._info(name, port.dtype, port.shape, result))

    def _placeholders(self) -> None:
        program = self.program
        ports: list[Any] = [*program.inputs, *program.state, *program.noise]
        names = iter(input_names(program, embed=self.embed))
        first, last = len(program.inputs), len(program.inputs) + len(program.state)
        for i, (node, port) in enumerate(zip(program.placeholders(), ports, strict=True)):
            slot = program.state[i - first] if first <= i < last else None
            if slot is not None and self.embed and not slot.mutated:
                if node.users:
                    self.names[node] = self._tensor(slot.read(), node, f"weight/{slot.name}")
                continue
            self.names[node] = name = next(names)
            self.inputs.append(self._info(name, port.dtype, port.shape, node, open_batch=slot is None))

    def _tensor(self, tensor: Tensor, node: fx.Node, name: str = "") -> str:
        if tensor.dtype not in DTYPES:
            raise Unsupported(f"{tensor.dtype} is not supported in ONNX export", node)
        return self.const(tensor.detach().cpu().contiguous().numpy(), name=name)

    def _info(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], node: fx.Node, open_batch: bool = True
    ) -> onnx.ValueInfoProto:
        if dtype not in DTYPES:
            raise Unsupported(f"{dtype} is not supported in ONNX export", node)
        sizes: list[Any] = list(shape)
        if self.symbolic and open_batch and sizes and sizes[0] == self.batch:
            sizes[0] = "batch"
        return helper.make_tensor_value_info(name, DTYPES[dtype], sizes)
