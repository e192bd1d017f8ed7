"""A program: one flat graph of core ATen operations with a keyed signature, free of TensorDict and Python."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.shapes import sizes
from graphrl.errors import SpecError
from graphrl.keys import Key, encode_key

__all__ = ["Fixed", "Noise", "PassRecord", "Port", "Program", "StateSlot"]


@dataclass(frozen=True)
class Port:
    """One input or output of a program: its key, shape, dtype and device."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Key, tensor: Tensor) -> Port:
        return cls(key, sizes(tensor), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{encode_key(self.key)}: {_dtype(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class Fixed:
    """Reads one tensor that stays where it is."""

    tensor: Tensor

    def __call__(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class StateSlot:
    """A tensor the program reads, and perhaps writes, that is not an input: a weight, a buffer, an optimiser moment.

    ``read()`` returns the live tensor, so a weight that was replaced is seen at the next call.
    """

    name: str
    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str = "parameter"  # "parameter", "buffer", "optimizer", or "constant" (never changes)
    mutated: bool = False

    @classmethod
    def of(cls, name: str, read: Callable[[], Tensor], kind: str) -> StateSlot:
        tensor = read()
        return cls(name, read, tuple(tensor.shape), tensor.dtype, tensor.device, kind)

    def __str__(self) -> str:
        return f"{self.name}: {_dtype(self.dtype)}{list(self.shape)}{' (written)' if self.mutated else ''}"


@dataclass(frozen=True)
class Noise:
    """A random draw the program takes as an input, made by torch's own generator as eager would make it.

    ``kind``: ``"normal"`` (mean 0, variance 1), ``"uniform"`` ([0, 1)), or the name and the ``options`` of another
    draw: ``bernoulli (0.5,)``, ``random (low, high)`` for integers, ``exponential (1.0,)``, ``randperm``.
    ``strides``: of eager's tensor where that is not contiguous, since a draw fills memory in order.
    ``per_row``: in a program for any batch size, how often the batch size goes into each dim; 0 for a fixed dim.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    options: tuple[Any, ...] = ()
    strides: tuple[int, ...] | None = None
    per_row: tuple[int, ...] | None = None

    def draw(self, rows: int | None = None) -> Tensor:
        """A fresh draw; ``rows``: the batch size of this call, in a program for any."""
        return self.redraw(self.empty(rows))

    def empty(self, rows: int | None = None) -> Tensor:
        """Memory for a draw."""
        if rows is not None and self.per_row is not None:
            shape = [n * rows or size for n, size in zip(self.per_row, self.shape, strict=True)]
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def redraw(self, into: Tensor) -> Tensor:
        """Draw into an existing tensor: 1.7 us where ``torch.randn`` takes 5.9."""
        if self.kind == "normal":
            into.normal_()
        elif self.kind == "randperm":
            torch.randperm(into.shape[0], out=into)
        else:
            getattr(into, f"{self.kind}_")(*self.options)
        return into if self.strides is None else into.contiguous()


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its name, its wall time, the node counts around it, and the program it was given."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    before: Program | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Program:
    """One traced computation.

    ``graph_module`` takes, in this order, the inputs (``in_keys`` order), the state tensors, the random draws, and
    returns a tuple in ``out_keys`` order. State that it writes appears as ``copy_`` into a state placeholder after
    everything else. Printing a program gives runnable Python with shapes as comments.

    ``dynamic``: the program takes any batch size from 2, the first dim of every input; the shapes in its ports are
    those of the example it was traced on. ``assumptions``: the checks on values that the traced code made.
    ``branched``: a library's code chose between two ways to go on, and this program is one of them.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    state: tuple[StateSlot, ...]
    noise: tuple[Noise, ...] = ()
    name: str = "program"
    assumptions: tuple[str, ...] = ()
    history: tuple[PassRecord, ...] = field(default=())
    dynamic: bool = False
    branched: bool = False

    @property
    def in_keys(self) -> list[Key]:
        return [port.key for port in self.inputs]

    @property
    def out_keys(self) -> list[Key]:
        return [port.key for port in self.outputs]

    @property
    def signature(self) -> tuple[Port | StateSlot | Noise, ...]:
        """Everything that enters or leaves: inputs, outputs, state, draws, each with its shape, dtype and device."""
        return (*self.inputs, *self.outputs, *self.state, *self.noise)

    @property
    def code(self) -> str:
        """The program as Python text."""
        return print_program(self)

    def __str__(self) -> str:
        return self.code

    def with_graph(self, graph: fx.Graph, **changes: Any) -> Program:
        """A copy of this program around another graph; the attribute tensors of the module come along."""
        graph.lint()
        return replace(self, graph_module=fx.GraphModule(self.graph_module, graph), **changes)

    def copy_graph(self) -> fx.Graph:
        """A fresh graph equal to this program's, for a pass to edit."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph_module.graph, values)
        graph.output(result)
        return graph

    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]

    def state_values(self) -> dict[str, Tensor]:
        """Live state tensors by name."""
        return {slot.name: slot.read() for slot in self.state}

    def arguments(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All placeholder values for one call: the inputs given, the live state, fresh random draws."""
        rows = inputs[0].shape[0] if self.dynamic else None
        return [*inputs, *(slot.read() for slot in self.state), *(n.draw(rows) for n in self.noise)]

    def check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Raise :class:`SpecError` naming the first input that does not fit the signature."""
        if len(inputs) != len(self.inputs):
            raise SpecError(f"got {len(inputs)} tensors, expected {len(self.inputs)}: {[str(p) for p in self.inputs]}")
        for port, tensor in zip(self.inputs, inputs, strict=True):
            found = Port.of(port.key, tensor)
            wanted = replace(port, shape=(*found.shape[:1], *port.shape[1:])) if self.dynamic else port
            if found != wanted:
                raise SpecError(f"{port.key!r} is {found}, but this program was traced for {port}")

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Interpret the program on plain tensors (the judge every backend is compared with)."""
        self.check_inputs(inputs)
        return tuple(self.graph_module(*self.arguments(inputs)))

    def node_count(self) -> int:
        """Number of operations, placeholders and the output left out."""
        return sum(n.op in ("call_function", "call_method", "call_module") for n in self.graph_module.graph.nodes)


def node_value(node: fx.Node) -> Any:
    """The (fake) tensor a node stands for: shape, dtype and device of its result."""
    return node.meta.get("val")


def placeholder_names(program: Program) -> Mapping[fx.Node, str]:
    """A readable, unique Python name for each placeholder: its key or state name."""
    wanted = [
        *(encode_key(p.key) for p in program.inputs),
        *(s.name for s in program.state),
        *(f"{n.kind}_{i}" for i, n in enumerate(program.noise)),
    ]
    names: dict[fx.Node, str] = {}
    for node, name in zip(program.placeholders(), wanted, strict=True):
        clean = re.sub(r"\W", "_", name).strip("_") or "x"
        clean = f"x_{clean}" if clean[0].isdigit() or keyword.iskeyword(clean) or clean in _TAKEN else clean
        while clean in names.values():
            clean += "_"
        names[node] = clean
    return names


_TAKEN = ("torch", "device", "inf", "nan")
"""Names a printed program uses itself."""


def print_program(program: Program) -> str:
    """Python source of ``program``: a function of its inputs, state and draws; each line carries its result's shape."""
    names = dict(placeholder_names(program))
    taken = set(names.values())
    lines = [f"# {line}" for line in _header(program)]
    arguments = ", ".join(names[n] for n in program.placeholders())
    lines += [
        *["import operator"] * program.dynamic,
        "import torch",
        "from torch import device, inf, nan  # noqa: F401",
        "",
        f"def {program.name}({arguments}):",
    ]
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"    return {_text(node.args[0], names)}")
            continue
        name = node.name
        while name in taken:
            name += "_"
        names[node] = name
        taken.add(name)
        value = node_value(node)
        shape = f"  # {_dtype(value.dtype)}{list(value.shape)}" if isinstance(value, Tensor) else ""
        lines.append(f"    {name} = {_call(node, names)}{shape}")
    return "\n".join(lines) + "\n"


def _header(program: Program) -> list[str]:
    lines = [f"{program.name}: {len(program.inputs)} inputs, {len(program.state)} state tensors, "
             f"{program.node_count()} operations"]  # fmt: skip
    lines += ["  for any batch size from 2; the shapes are the example's"] * program.dynamic
    lines += [f"  in    {port}" for port in program.inputs]
    lines += [f"  out   {port}" for port in program.outputs]
    lines += [f"  state {slot}" for slot in program.state]
    lines += [f"  draw  {n.kind} {_dtype(n.dtype)}{list(n.shape)}" for n in program.noise]
    return lines


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    args = [_text(a, names) for a in node.args] + [f"{k}={_text(v, names)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"{node.target}  # constant"
    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        return f"{args[0]}[{args[1]}]"
    if not isinstance(target, torch._ops.OpOverload) and callable(target):  # arithmetic on sizes
        module = "operator" if target.__module__ == "_operator" else "torch"
        return f"{module}.{target.__name__}({', '.join(args)})"
    return f"torch.ops.{target}({', '.join(args)})"


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_text(v, names) for v in value)
        if isinstance(value, tuple):
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return f"[{inner}]"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    return repr(value)


def _dtype(dtype: torch.dtype) -> str:
    short = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    text = str(dtype).removeprefix("torch.")
    return short.get(text, text)
