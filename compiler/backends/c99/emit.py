"""From a program to C: walks the nodes once, gathers loops as steps, places scratch memory, prints one function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.c99.convolution import CONVOLUTIONS, emit_convolution
from graphrl.compiler.backends.c99.elementwise import Group, convert, is_elementwise, literal
from graphrl.compiler.backends.c99.indexing import INDEXING, emit_indexing
from graphrl.compiler.backends.c99.layout import Layout, Step, plan
from graphrl.compiler.backends.c99.loops import indent, index, loop_nest, merge_dims
from graphrl.compiler.backends.c99.mathlib import helpers_text
from graphrl.compiler.backends.c99.matmul import MATMULS, emit_matmul
from graphrl.compiler.backends.c99.nodes import C_TYPES, Unsupported, arguments, c_type, op_name, value_of
from graphrl.compiler.backends.c99.ops import VIEWS
from graphrl.compiler.backends.c99.pool import POOLS, emit_pool
from graphrl.compiler.backends.c99.reduce import REDUCTIONS, emit_reduction
from graphrl.compiler.backends.c99.values import Buffer, View
from graphrl.compiler.backends.c99.views import view_of
from graphrl.compiler.program import Program

__all__ = ["OUTSIDE", "SCRATCH", "Argument", "Generated", "generate"]

OUTSIDE = "graphrl_outside"
"""The variable that code with live weights sets where an index is out of range; whoever compiles it defines it."""

_FILLED = {"full.default": "fill_value", "full_like.default": "fill_value", "scalar_tensor.default": "s",
           "zeros.default": 0, "ones.default": 1, "zeros_like.default": 0, "ones_like.default": 1,
           "empty.memory_format": 0, "empty_like.default": 0, "new_zeros.default": 0, "new_ones.default": 1,
           "new_full.default": "fill_value"}  # fmt: skip
"""Operations whose every element is one number: the argument that holds it, or the number."""

SCRATCH = {"float": "scratch", "double": "scratch_f64", "int64_t": "scratch_i64", "int32_t": "scratch_i32",
            "unsigned char": "scratch_u8"}  # fmt: skip
"""Name of the scratch memory for each C type."""

_WIDTH = {text: torch.empty(0, dtype=dtype).element_size() for dtype, text in C_TYPES.items()}

_EMITTERS: tuple[tuple[frozenset[str], Any], ...] = (
    (MATMULS, emit_matmul),
    (REDUCTIONS, emit_reduction),
    (INDEXING, emit_indexing),
    (CONVOLUTIONS, emit_convolution),
    (POOLS, emit_pool),
)
"""Operations with loops of their own: their names, and the function of (emitter, node) that writes them."""


@dataclass(frozen=True)
class Argument:
    """One pointer parameter of the generated function."""

    name: str
    c_type: str
    kind: str  # "input", "state", "noise" or "output"
    index: int  # position among the program's inputs, state, noise or outputs
    size: int
    written: bool


@dataclass(frozen=True)
class Generated:
    """C text of one program: ``helpers`` and ``tables`` first, then ``function``, which ``arguments`` describes.

    scratch: working memory as (name, C type, elements); parameters behind ``arguments`` where weights are embedded.
    """

    helpers: str
    tables: str
    function: str
    arguments: tuple[Argument, ...]
    scratch: tuple[tuple[str, str, int], ...]
    weight_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """Bytes of working memory."""
        return sum(n * _WIDTH[kind] for _, kind, n in self.scratch)

    @property
    def code(self) -> str:
        """The whole text, in the order a compiler needs it."""
        return "\n\n".join(part for part in (self.helpers, self.tables, self.function) if part) + "\n"


def generate(
    program: Program, *, embed: bool, name: str = "run", scratch: str = "", weights: str = "float32"
) -> Generated:
    """Generate ``static void name(...)`` for ``program``.

    embed: write state that the program does not change into the text as constants (for a robot), and take scratch
    memory as parameters, because a robot's thread may have a small stack. Otherwise every state tensor is a pointer
    parameter, read in PyTorch's own layout at each call, so weights stay live.
    scratch: storage class of the scratch arrays of code with live weights; on the stack by default.
    weights: one of ``weights.FORMATS``, for embedded matrices that it holds exactly.
    Raises :class:`Unsupported` naming the operation and node that generated C does not cover.
    """
    return Emitter(program, embed, weights).run(name, scratch)


class Emitter:
    """The state of one walk over a program."""

    def __init__(self, program: Program, embed: bool, weights: str = "float32") -> None:
        self.program = program
        self.embed = embed
        self.weights = weights
        self.values: dict[Any, Any] = {}  # a View, or a tuple of them
        self.steps: list[Step] = []
        self.tables: dict[Buffer, Tensor] = {}
        self.parameters: list[tuple[Buffer, Argument]] = []
        self.group: Group | None = None
        self.count = 0
        self.checks = False  # whether an index may turn out to be out of range

    # ---- what operations use

    def view(self, node: fx.Node) -> View:
        """The value of ``node``, in memory that later steps may read."""
        value = self.values[node]
        if not isinstance(value, View):
            raise Unsupported(f"{op_name(node)} has several values where one is needed", node)
        if self.group is not None and self.group.holds(value) is not None:
            self.flush()
        return value

    def new_value(self, shape: Sequence[int], dtype: torch.dtype) -> View:
        """A fresh contiguous value in scratch memory."""
        size = 1
        for n in shape:
            size *= n
        buffer = Buffer(f"b{self.count}", dtype, size, "scratch")
        self.count += 1
        return View.whole(buffer, shape)

    def literal(self, number: float | int | bool, shape: Sequence[int], dtype: torch.dtype) -> View:
        """A value that is one number everywhere; it takes no memory."""
        buffer = Buffer("", dtype, 1, "literal", literal=number)
        return View.whole(buffer, tuple(shape))

    def constant(self, tensor: Tensor) -> Buffer:
        """A table of numbers that cannot change."""
        buffer = Buffer(f"c{self.count}", tensor.dtype, tensor.numel(), "constant", data=tensor.detach().contiguous())
        self.count += 1
        self.tables[buffer] = buffer.data  # type: ignore[assignment]
        return buffer

    def add_step(self, step: Step) -> None:
        """Append a piece of code."""
        if step.lines:
            self.steps.append(step)

    def copy(self, target: View, source: View) -> None:
        """Copy ``source`` into ``target``, same shapes."""
        sizes, (to, of) = merge_dims(target.shape, (target.strides, source.strides))
        kind = c_type(target.dtype)

        def body(names: list[str]) -> list[str]:
            if source.buffer.kind == "literal":
                value = literal(source.buffer.literal, target.dtype)
            else:
                value = f"{source.buffer.name}[{index(source.offset, of, names)}]"
                value = convert(value, source.dtype, target.dtype)
            value = f"({kind}){value}" if target.dtype == torch.bool else value
            return [f"{target.buffer.name}[{index(target.offset, to, names)}] = {value};"]

        lines = loop_nest(sizes if 0 not in target.shape else target.shape, body)
        reads = set() if source.buffer.kind == "literal" else {source.buffer}
        self.add_step(Step(lines, reads, {target.buffer}))

    def materialize(self, view: View) -> View:
        """The same values, contiguous. A constant is rearranged here and now."""
        if view.buffer.data is not None:
            return View.whole(self.constant(view.as_torch()), view.shape)
        if self.group is not None and self.group.holds(view) is not None:
            self.flush()
        out = self.new_value(view.shape, view.dtype)
        self.copy(out, view)
        return out

    def unit_stride(self, view: View) -> View:
        """``view``, or a copy, whose last dim has stride one."""
        if view.buffer.kind != "literal" and (view.strides[-1] == 1 or view.shape[-1] == 1):
            return view
        return self.materialize(view)

    def in_memory(self, view: View) -> View:
        """``view``, written out when it is only a number."""
        return self.materialize(view) if view.buffer.kind == "literal" else view

    def report_outside(self, condition: str) -> list[str]:
        """Code that sets :data:`OUTSIDE` where an index is out of range; none on a robot, which has nobody to tell."""
        self.checks = not self.embed
        return [f"{OUTSIDE} |= {condition};"] if self.checks else []

    # ---- the walk

    def run(self, name: str, storage: str) -> Generated:
        """Walk the program and print it."""
        places = self.program.placeholders()
        self._bind_placeholders(places)
        writes: list[tuple[View, fx.Node]] = []
        for node in self.program.graph_module.graph.nodes:
            if node.op == "get_attr":
                tensor = getattr(self.program.graph_module, node.target)
                c_type(tensor.dtype, node)
                self.values[node] = View.whole(self.constant(tensor), tensor.shape)
            elif node.op == "call_function":
                if op_name(node) == "copy_.default":
                    writes.append((self.values[node.args[0]], node.args[1]))
                    self.values[node] = self.values[node.args[1]]
                else:
                    self.values[node] = self._emit(node)
            elif node.op == "output":
                self._finish(node, writes)
            elif node.op != "placeholder":
                raise Unsupported(f"{node.op} {node.target} is not an ATen operation", node)
        return self._print(name, storage)

    def _bind_placeholders(self, places: list[fx.Node]) -> None:
        program = self.program
        groups: Any = (("input", program.inputs), ("state", program.state), ("noise", program.noise))
        kinds = [(kind, i, item) for kind, items in groups for i, item in enumerate(items)]
        for (kind, i, item), node in zip(kinds, places, strict=True):
            written = kind == "state" and item.mutated
            if kind == "state" and self.embed and not written:
                if node.users:
                    c_type(item.dtype, node)
                    self.values[node] = View.whole(self.constant(item.read().cpu()), item.shape)
                continue
            size = 1
            for n in item.shape:
                size *= n
            buffer = Buffer(f"{kind}{i}", item.dtype, size, kind)
            argument = Argument(buffer.name, c_type(item.dtype, node), kind, i, size, written)
            self.parameters.append((buffer, argument))
            self.values[node] = View.whole(buffer, item.shape)

    def _emit(self, node: Any) -> Any:
        name = op_name(node)
        if name in VIEWS:
            return view_of(node, self.values[node.args[0]], self.materialize)
        if name in _FILLED:
            value = value_of(node)
            c_type(value.dtype, node)
            number: Any = _FILLED[name]
            number = arguments(node)[number] if isinstance(number, str) else number
            return self.literal(number, tuple(value.shape), value.dtype)
        if name == "arange.start_step":
            args, value = arguments(node), value_of(node)
            table = torch.arange(args["start"], args["end"], args["step"], dtype=value.dtype)
            return View.whole(self.constant(table), tuple(value.shape))
        known = self._evaluate(node)
        if known is not None:
            return View.whole(self.constant(known), known.shape)
        if is_elementwise(node):
            return self._elementwise(node)
        for names, emit in _EMITTERS:
            if name in names:
                for value in (node, *node.all_input_nodes):
                    if isinstance(value.meta.get("val"), Tensor) and value.meta["val"].dtype == torch.float64:
                        raise Unsupported(f"{name} in float64 is not supported, generated C computes in float32", node)
                self.flush()
                return emit(self, node)
        raise Unsupported(f"operation {name} is not supported in generated C", node)

    def _evaluate(self, node: fx.Node) -> Tensor | None:
        """The value of a node all of whose operands are constants."""
        known: dict[fx.Node, Tensor] = {}
        for operand in node.all_input_nodes:
            view = self.values[operand]
            if not isinstance(view, View):
                return None
            if view.buffer.kind == "literal":
                known[operand] = torch.full(view.shape, view.buffer.literal, dtype=view.dtype)
            elif view.buffer.data is not None:
                known[operand] = view.as_torch()
            else:
                return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
        value = node.target(*args, **kwargs) if known else None  # type: ignore[operator]
        return value if isinstance(value, Tensor) and value.dtype in C_TYPES else None

    def _elementwise(self, node: fx.Node) -> View:
        value = value_of(node)
        shape = tuple(value.shape)
        if self.group is None or self.group.shape != shape or not self._joins(node):
            self.flush()
            self.group = Group(shape, self._order(node, shape))
        order = self.group.order
        result = self.new_value([shape[d] for d in order], value.dtype).permute(
            [order.index(d) for d in range(len(order))]
        )
        self.group.add(node, result, lambda n: self.values[n])  # type: ignore[arg-type, return-value]
        return result

    def _order(self, node: fx.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The order in memory of the first operand of this shape, where its last dim is not the fastest."""
        ranks = range(len(shape))
        for operand in node.all_input_nodes:
            view = self.values[operand]
            if shape and view.shape == shape and view.buffer.kind != "literal":
                order = tuple(sorted(ranks, key=lambda d: (-view.strides[d], d)))
                packed = view.offset == 0 and view.permute(order).is_whole()
                return order if packed and view.strides[-1] != 1 and shape[-1] > 1 else tuple(ranks)
        return tuple(ranks)

    def _joins(self, node: fx.Node) -> bool:
        """Whether every operand of ``node`` that the open group computes is used position by position."""
        assert self.group is not None
        for operand in node.all_input_nodes:
            view = self.values[operand]
            if isinstance(view, View) and self.group.holds(view) is not None:
                if view.shape != self.group.shape or view.offset or not view.permute(self.group.order).is_whole():
                    return False
        return True

    def flush(self) -> None:
        """Close the open group: emit its loop, storing what is read outside it."""
        group, self.group = self.group, None
        if group is None:
            return
        stored = [n for n in group.members if any(user not in group.members for user in n.users)]
        if stored:
            self.add_step(group.step(stored))

    def _finish(self, node: Any, writes: list[tuple[View, fx.Node]]) -> None:
        """Outputs first, then state writes, so that an output that shows a state shows its old value."""
        self.flush()
        taken: set[Buffer] = set()
        written = {view.buffer for view, _ in writes}
        for i, result in enumerate(node.args[0]):
            view = self.view(result)
            port = self.program.outputs[i]
            kind = c_type(view.dtype, result)
            if view.buffer.kind == "scratch" and view.is_whole() and view.buffer not in taken:
                view.buffer.kind = "output"
                buffer = view.buffer
            else:
                buffer = Buffer(f"output{i}", view.dtype, view.size, "output")
                self.copy(View.whole(buffer, port.shape), view)
            taken.add(buffer)
            self.parameters.append((buffer, Argument(buffer.name, kind, "output", i, view.size, True)))
        sources = [self.view(source) for _, source in writes]
        sources = [self.materialize(s) if s.buffer in written else s for s in sources]
        if self.checks and writes:  # as in eager, where the error comes before the write
            self.add_step(Step([f"if ({OUTSIDE}) return;"], set(), set()))
        for (target, _), source in zip(writes, sources, strict=True):
            self.copy(target, source.expand(target.shape))

    def _print(self, name: str, storage: str) -> Generated:
        scratch = {b: C_TYPES[b.dtype] for s in self.steps for b in (*s.reads, *s.writes) if b.kind == "scratch"}
        layout = plan(self.steps, scratch)
        arenas = tuple((SCRATCH[kind], kind, size) for kind, size in sorted(layout.sizes.items()))
        body = [] if self.embed else [f"{storage}{kind} {arena}[{size}];" for arena, kind, size in arenas]
        body += _places(layout, scratch)
        for step in self.steps:
            body += step.lines
        used = {b for s in self.steps for b in (*s.reads, *s.writes)}
        arguments_ = [replace(a, name=b.name) for b, a in self.parameters]
        body = [f"(void){b.name};" for b, _ in self.parameters if b not in used] + body
        parameters = [f"{'' if a.written else 'const '}{a.c_type} *const restrict {a.name}" for a in arguments_]
        parameters += [f"{kind} *const restrict {arena}" for arena, kind, _ in arenas] if self.embed else []
        text = "\n".join(body)
        tables = {b: t for b, t in self.tables.items() if b in used or f"{b.name}" in _words(text)}
        return Generated(
            helpers_text([text]),
            "\n\n".join(_table(b, t) for b, t in tables.items()),
            "\n".join([f"static void {name}(", *_joined(parameters or ["void"]), ")", "{", *indent(body), "}"]),
            tuple(arguments_),
            arenas,
            sum(t.numel() * t.element_size() for t in tables.values()),
        )


def _words(text: str) -> set[str]:
    return set(text.replace("[", " ").replace(";", " ").replace("+", " ").split())


def _joined(parameters: list[str]) -> list[str]:
    return [f"    {p}{',' if i < len(parameters) - 1 else ''}" for i, p in enumerate(parameters)]


def _places(layout: Layout, types: dict[Buffer, str]) -> list[str]:
    """A pointer to each value in its arena."""
    lines = []
    for buffer, offset in layout.offsets.items():
        kind = types[buffer]
        lines.append(f"{kind} *const {buffer.name} = {SCRATCH[kind]}{f' + {offset}' if offset else ''};")
    return lines


def _table(buffer: Buffer, tensor: Tensor) -> str:
    """A constant as a C array."""
    values = tensor.reshape(-1).tolist()
    if tensor.dtype == torch.float32 and bool(tensor.isfinite().all()):  # literal() takes a microsecond a number
        numbers = [f"{text}f" if "." in text or "e" in text else f"{text}.0f" for text in map("{:.9g}".format, values)]
    else:
        numbers = [literal(v, tensor.dtype).strip("()") for v in values]
    kind = {torch.int8: "int8_t", torch.uint16: "uint16_t"}.get(tensor.dtype) or C_TYPES[tensor.dtype]
    numbers = numbers or ["0"]
    rows = [", ".join(numbers[i : i + 8]) for i in range(0, len(numbers), 8)]
    body = ",\n".join(f"    {row}" for row in rows)
    return f"static const {kind} {buffer.name}[{len(numbers)}] = {{\n{body}\n}};"
