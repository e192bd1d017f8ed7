"""Elementwise operations: the C expression of one, and the loop that computes a run of them together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import index, loop_nest, merge_dims
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, c_type, op_name, value_of
from graphrl.compiler.backends.c99.ops import ELEMENTWISE
from graphrl.compiler.backends.c99.values import View, contiguous_strides

__all__ = ["Group", "expression", "is_elementwise", "literal"]

Read = Callable[[Any, torch.dtype], str]
"""``read(argument, dtype)``: C text of a node or number, converted to ``dtype``."""


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A number as C text that gives back exactly the same value."""
    if not dtype.is_floating_point:
        return str(int(value)) if abs(int(value)) < 2**31 else f"INT64_C({int(value)})"
    single = dtype != torch.float64
    with np.errstate(over="ignore"):
        number = float(np.float32(value)) if single else float(value)
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    text = f"{number:.9g}" if single else f"{number:.17g}"
    text = (text if any(c in text for c in ".e") else f"{text}.0") + ("f" if single else "")
    return f"({text})" if text.startswith("-") else text


def convert(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """``text`` of C type ``source`` as a value of ``target``."""
    if source == target:
        return text
    if target == torch.bool:
        return f"({text} != 0)"
    return f"({c_type(target)}){text}" if text.isidentifier() else f"({c_type(target)})({text})"


def is_elementwise(node: fx.Node) -> bool:
    """Whether :func:`expression` knows this operation."""
    name = op_name(node)
    return name in ELEMENTWISE or name in _SPECIAL


def expression(node: fx.Node, read: Read) -> str:
    """The value of an elementwise node at one position."""
    name = op_name(node)
    dtype = value_of(node).dtype
    c_type(dtype, node)
    if name not in _IN_DOUBLE and any(v.meta["val"].dtype == torch.float64 for v in (node, *node.all_input_nodes)):
        raise Unsupported(f"{name} in float64 is not supported, generated C computes in float32", node)
    if name in _SPECIAL:
        return _SPECIAL[name](node, read, dtype)
    op = ELEMENTWISE[name]
    args = [arguments(node)[key] for key in op.inputs]
    if op.kind == "compare":
        dtype = _common_dtype(args)
    elif op.kind == "logic":
        dtype = torch.bool
    if not dtype.is_floating_point and not op.integer:
        raise Unsupported(f"{name} on {str(dtype).removeprefix('torch.')} is not supported", node)
    text = op.text.replace("1.0f", "1.0").replace("sqrtf", "sqrt") if dtype == torch.float64 else op.text
    return text.format(*(read(a, dtype) for a in args))


def _common_dtype(args: list[Any]) -> torch.dtype:
    tensors = [a.meta["val"] for a in args if isinstance(a, fx.Node)]
    dtype = tensors[0].dtype
    for other in tensors[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    if any(isinstance(a, float) for a in args) and not dtype.is_floating_point:
        dtype = torch.float32
    return dtype


# ---- operations with arguments of their own


def _sum(sign: str) -> Callable[[fx.Node, Read, torch.dtype], str]:
    def write(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
        args = arguments(node)
        left, right = read(args["self"], dtype), read(args["other"], dtype)
        alpha = args.get("alpha", 1)
        if dtype == torch.bool:
            return f"({left} | {right})"  # torch's sum of flags is a flag
        if op_name(node).startswith("rsub"):
            left, right = right, left
        return f"({left} {sign} {right})" if alpha == 1 else f"({left} {sign} {literal(alpha, dtype)} * {right})"

    return write


def _where(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    args = arguments(node)
    condition, yes, no = read(args["condition"], torch.bool), read(args["self"], dtype), read(args["other"], dtype)
    return f"k_select({condition}, {yes}, {no})" if dtype == torch.float32 else f"({condition} ? {yes} : {no})"


def _clamp(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    args = arguments(node)
    text = read(args["self"], dtype)
    if not dtype.is_floating_point:
        for key, sign in (("max", ">"), ("min", "<")):
            if args.get(key) is not None:
                bound = read(args[key], dtype)
                text = f"({text} {sign} {bound} ? {bound} : {text})"
        return text
    if args.get("max") is not None:
        text = f"k_minf({text}, {read(args['max'], dtype)})"
    if args.get("min") is not None:
        text = f"k_maxf({read(args['min'], dtype)}, {text})"
    return text


def _pow(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    args = arguments(node)
    if not dtype.is_floating_point:
        raise Unsupported("pow on integers is not supported", node)
    base, power = read(args["self"], dtype), args["exponent"]
    known = {1: "{0}", 2: "({0} * {0})", 3: "({0} * {0} * {0})", 0.5: "sqrtf({0})", -0.5: "(1.0f / sqrtf({0}))",
             -1: "(1.0f / {0})", -2: "(1.0f / ({0} * {0}))"}  # fmt: skip
    if not isinstance(power, fx.Node) and power in known:
        return known[power].format(base)
    return f"powf({base}, {read(power, dtype)})"


def _gelu(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    args = arguments(node)
    helper = "k_gelu_tanhf" if args["approximate"] == "tanh" else "k_geluf"
    return f"{helper}({read(args['self'], dtype)})"


def _cast(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    return read(arguments(node)["self"], dtype)


def _rounded_division(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    args = arguments(node)
    if not dtype.is_floating_point:
        raise Unsupported("div with rounding on integers is not supported", node)
    left, right = read(args["self"], dtype), read(args["other"], dtype)
    text = {"floor": "k_floor_dividef({0}, {1})", "trunc": "truncf({0} / {1})", None: "({0} / {1})"}
    return text[args["rounding_mode"]].format(left, right)


def _remainder(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
    args = arguments(node)
    divisor = args["other"]
    if dtype.is_floating_point:
        return f"k_remainderf({read(args['self'], dtype)}, {read(divisor, dtype)})"
    if isinstance(divisor, fx.Node) or divisor == 0:
        raise Unsupported("remainder of integers is supported by a number other than 0 only", node)
    by = literal(divisor, dtype)
    return f"(({read(args['self'], dtype)} % {by} + {by}) % {by})"  # C's remainder has the dividend's sign


def _bitwise(sign: str) -> Callable[[fx.Node, Read, torch.dtype], str]:
    def write(node: fx.Node, read: Read, dtype: torch.dtype) -> str:
        if dtype != torch.bool:
            raise Unsupported(f"{op_name(node)} on integers is not supported", node)
        args = arguments(node)
        if sign == "!":
            return f"(!{read(args['self'], dtype)})"
        return f"({read(args['self'], dtype)} {sign} {read(args['other'], dtype)})"

    return write


_SPECIAL: dict[str, Callable[[fx.Node, Read, torch.dtype], str]] = {
    **{f"add.{o}": _sum("+") for o in ("Tensor", "Scalar")},
    **{f"sub.{o}": _sum("-") for o in ("Tensor", "Scalar")},
    **{f"rsub.{o}": _sum("-") for o in ("Tensor", "Scalar")},
    **{f"where.{o}": _where for o in ("self", "ScalarSelf", "ScalarOther", "Scalar")},
    **{f"clamp.{o}": _clamp for o in ("default", "Tensor")},
    **{f"clamp_{m}.{o}": _clamp for m in ("min", "max") for o in ("default", "Tensor")},
    **{f"pow.{o}": _pow for o in ("Tensor_Scalar", "Scalar")},
    "gelu.default": _gelu,
    "_to_copy.default": _cast,
    "clone.default": _cast,
    "copy.default": lambda node, read, dtype: read(arguments(node)["src"], dtype),
    "div.Tensor_mode": _rounded_division,
    **{f"remainder.{o}": _remainder for o in ("Tensor", "Scalar")},
    "bitwise_and.Tensor": _bitwise("&"),
    "bitwise_or.Tensor": _bitwise("|"),
    "bitwise_xor.Tensor": _bitwise("^"),
    "bitwise_not.default": _bitwise("!"),
}


_IN_DOUBLE = frozenset(
    "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default sqrt.default "
    "rsqrt.default reciprocal.default gt.Tensor gt.Scalar ge.Tensor ge.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar "
    "eq.Tensor eq.Scalar _to_copy.default clone.default copy.default".split()
)
"""What statistics kept in float64 need before they meet a float32 network."""


class Group:
    """A run of elementwise nodes of one shape, computed by one loop; only values read elsewhere are stored.

    ``order``: the dims from the slowest to the fastest in memory, of what is stored.
    """

    def __init__(self, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
        self.shape = shape
        self.order = order
        self.members: dict[fx.Node, View] = {}
        self._locals: dict[fx.Node, tuple[str, torch.dtype]] = {}
        self._loads: dict[View, str] = {}
        self._lines: list[str] = []

    def holds(self, view: View) -> fx.Node | None:
        """The member that computes this view's buffer, if any."""
        return next((n for n, v in self.members.items() if v.buffer is view.buffer), None)

    def add(self, node: fx.Node, result: View, view_of: Callable[[fx.Node], View]) -> None:
        """Append ``node``; ``result`` is where it would be stored."""

        def read(argument: Any, dtype: torch.dtype) -> str:
            if not isinstance(argument, fx.Node):
                return literal(argument, dtype)
            return self._read(view_of(argument), dtype)

        text = expression(node, read)
        dtype = result.dtype
        name = f"t{len(self._locals)}"
        kind = "int" if dtype == torch.bool else c_type(dtype, node)
        self._lines.append(f"const {kind} {name} = {_bare(text)};")
        self._locals[node] = (name, dtype)
        self.members[node] = result

    def _read(self, view: View, dtype: torch.dtype) -> str:
        member = self.holds(view)
        if member is not None:
            name, source = self._locals[member]
            return convert(name, source, dtype)
        if view.buffer.kind == "literal":
            return literal(view.buffer.literal, dtype)
        if view.size == 1 and view.buffer.data is not None:
            return literal(view.as_torch().item(), dtype)
        full = view.expand(self.shape)
        full = replace(full, strides=tuple(0 if n == 1 else s for n, s in zip(full.shape, full.strides, strict=True)))
        name = self._loads.setdefault(full, f"a{len(self._loads)}")
        return convert(name, view.dtype, dtype)

    def step(self, stored: list[fx.Node]) -> Step:
        """The loop, storing the values of ``stored``."""
        loads = list(self._loads.items())
        targets = [self.members[n] for n in stored]
        shape = tuple(self.shape[d] for d in self.order)
        steps = [tuple(v.strides[d] for d in self.order) for v, _ in loads]
        sizes, merged = merge_dims(shape, [*steps, *[contiguous_strides(shape)] * len(targets)])

        def body(names: list[str]) -> list[str]:
            lines = []
            for (view, local), strides in zip(loads, merged, strict=False):
                kind = c_type(view.dtype)
                lines.append(f"const {kind} {local} = {view.buffer.name}[{index(view.offset, strides, names)}];")
            lines += self._lines
            for node, strides in zip(stored, merged[len(loads) :], strict=True):
                name, dtype = self._locals[node]
                value = f"(unsigned char){name}" if dtype == torch.bool else name
                lines.append(f"{self.members[node].buffer.name}[{index(0, strides, names)}] = {value};")
            return lines

        lines = loop_nest(sizes if 0 not in self.shape else self.shape, body)
        return Step(lines, {v.buffer for v, _ in loads}, {v.buffer for v in targets})


def _bare(text: str) -> str:
    """``text`` without one pair of parentheses around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]
