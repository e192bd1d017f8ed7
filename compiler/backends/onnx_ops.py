"""How each ATen operation is said in ONNX: tables for those with a direct counterpart, small functions for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, fx

from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name, value_of
from graphrl.compiler.backends.onnx_index import INDEX_HANDLERS
from graphrl.compiler.backends.onnx_pool import POOL_HANDLERS

if TYPE_CHECKING:
    from graphrl.compiler.backends.onnx_graph import Writer

__all__ = ["DTYPES", "emit"]

DTYPES = {torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.int64: TensorProto.INT64,
          torch.int32: TensorProto.INT32, torch.bool: TensorProto.BOOL}  # fmt: skip

UNARY = {
    "tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "abs": "Abs",
    "reciprocal": "Reciprocal", "neg": "Neg", "floor": "Floor", "ceil": "Ceil", "round": "Round",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf", "isnan": "IsNaN",
    "isinf": "IsInf", "logical_not": "Not",
    "bitwise_not": "Not",
}  # fmt: skip
BINARY = {
    "add": "Add", "sub": "Sub", "rsub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "maximum": "Max",
    "minimum": "Min", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual", "eq": "Equal",
    "ne": "Equal", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor", "bitwise_and": "And",
    "bitwise_or": "Or", "bitwise_xor": "Xor",
}  # fmt: skip
COMPARISONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne"))
SAME = frozenset(("alias", "detach", "clone", "lift_fresh_copy"))
RESHAPES = frozenset(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"))
FILLED = {"full": "fill_value", "full_like": "fill_value", "scalar_tensor": "s", "zeros": 0, "ones": 1, "zeros_like": 0,
          "ones_like": 1, "empty": 0, "empty_like": 0, "new_zeros": 0, "new_ones": 1,
          "new_full": "fill_value"}  # fmt: skip
REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd",
              "linalg_vector_norm": "ReduceL2"}  # fmt: skip


def emit(w: Writer, node: Any) -> Any:
    """Write ``node``'s operations; the name of its value, or a list of names for an operation with several."""
    name = op_name(node)
    if name == "getitem":
        return w.names[node.args[0]][node.args[1]]
    base = name.split(".")[0]
    values = node.meta.get("val")
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor) and value.dtype not in DTYPES:
            raise Unsupported(f"{name} in {value.dtype} is not supported in ONNX export", node)
    if base in SAME:
        return w.names[node.args[0]]
    if base in _HANDLERS:
        return _HANDLERS[base](w, node, arguments(node))
    if name == "div.Tensor_mode":
        return _rounded_division(w, node, arguments(node))
    if base in UNARY:
        return w.op(UNARY[base], w.names[node.args[0]])
    if base in BINARY:
        return _binary(w, node, arguments(node), base)
    if base in FILLED:
        return _filled(w, node, FILLED[base])
    if base in REDUCTIONS:
        return _reduction(w, node, arguments(node), REDUCTIONS[base])
    raise Unsupported(f"operation {name} has no ONNX form here", node)


_LOGICAL = {"add": "Or", "maximum": "Or", "mul": "And", "minimum": "And"}
"""What arithmetic on truth values is; ONNX has it for numbers only."""


def _binary(w: Writer, node: fx.Node, args: dict[str, Any], base: str) -> str:
    left, right = args["self"], args["other"] if "other" in args else args["exponent"]
    dtype = value_of(node).dtype
    if base in COMPARISONS:
        found = [a.meta["val"].dtype for a in (left, right) if isinstance(a, fx.Node)]
        dtype = found[0] if len(found) == 1 else torch.promote_types(*found)
        dtype = torch.float32 if isinstance(right, float) and not dtype.is_floating_point else dtype
        dtype = torch.int64 if dtype == torch.bool else dtype  # ONNX orders numbers only
    if base == "rsub":
        left, right = right, left
    if base == "pow" and right in (0.5, -0.5):  # a root of -inf is NaN, its power 0.5 is not
        root = w.op("Sqrt", w.read(left, dtype))
        return root if right > 0 else w.op("Reciprocal", root)
    second = w.read(right, dtype)
    if args.get("alpha", 1) != 1:
        second = w.op("Mul", second, w.number(args["alpha"], dtype))
    kind = _LOGICAL.get(base, BINARY[base]) if dtype == torch.bool else BINARY[base]
    result = w.op(kind, w.read(left, dtype), second)
    return w.op("Not", result) if base == "ne" else result


def _rounded_division(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dtype = value_of(node).dtype
    if not dtype.is_floating_point:
        raise Unsupported("div with rounding on integers has no ONNX form here", node)
    left, right = w.read(args["self"], dtype), w.read(args["other"], dtype)
    ratio = w.op("Div", left, right)
    if args["rounding_mode"] != "floor":
        return _truncate(w, ratio)
    # what is left is taken off first, as in torch: 1 / 0.1f rounds to 10, but 0.1f goes into 1 only nine times
    rest, zero, one = w.op("Mod", left, right, fmod=1), w.number(0, dtype), w.number(1, dtype)
    less = w.op("Where", _signs_differ(w, rest, right, zero), one, zero)
    whole = w.op("Sub", w.op("Div", w.op("Sub", left, rest), right), less)
    return w.op("Where", w.op("Equal", right, zero), ratio, w.op("Round", whole))


def _signs_differ(w: Writer, left: str, right: str, zero: str) -> str:
    return w.op("Less", w.op("Mul", w.op("Sign", left), w.op("Sign", right)), zero)


def _truncate(w: Writer, name: str) -> str:
    return w.op("Mul", w.op("Sign", name), w.op("Floor", w.op("Abs", name)))


def _filled(w: Writer, node: fx.Node, number: Any) -> str:
    value = value_of(node)
    number = arguments(node)[number] if isinstance(number, str) else number
    if value.shape:
        w.fixes_batch(node, [0] if value.shape[0] == w.batch else [])
    return w.const(torch.full(value.shape, number, dtype=value.dtype).numpy())


def _dims(args: dict[str, Any], rank: int) -> list[int]:
    dims = args.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims)) if rank else []


def _reduction(w: Writer, node: fx.Node, args: dict[str, Any], kind: str) -> str:
    source = value_of(args["self"])
    if kind == "ReduceL2" and args["ord"] != 2:
        raise Unsupported(f"a vector norm of order {args['ord']} has no ONNX form here", node)
    dims = _dims(args, len(source.shape))
    w.fixes_batch(node, dims)
    name = w.read(args["self"], value_of(node).dtype)
    return w.op(kind, name, w.ints(dims), keepdims=int(bool(args.get("keepdim", False)))) if dims else name


def _reshape(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    source, shape = value_of(args["self"]).shape, list(value_of(node).shape)
    if w.symbolic:
        if not shape or not source or shape[0] != source[0] or source[0] != w.batch:
            w.fixes_batch(node)
        shape[0] = 0  # ONNX: as the input has it
    return w.op("Reshape", w.names[args["self"]], w.ints(shape), **({} if w.symbolic else {"allowzero": 1}))


def _transpose(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    rank = len(value_of(node).shape)
    dims = list(range(rank))
    if "dims" in args:
        dims = [d % rank for d in args["dims"]]
    elif rank > 1:
        a, b = (args["dim0"], args["dim1"]) if "dim0" in args else (0, 1)
        dims[a], dims[b] = dims[b], dims[a]
    return w.op("Transpose", w.names[args["self"]], perm=dims) if rank else w.names[args["self"]]


def _expand(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    shape = list(value_of(node).shape)
    source = value_of(args["self"]).shape
    if w.symbolic and shape and shape[0] == w.batch:
        if len(source) < len(shape) or source[0] != w.batch:
            w.fixes_batch(node)
        shape[0] = 1  # broadcasting keeps the input's size
    return w.op("Expand", w.names[args["self"]], w.ints(shape))


def _slice(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    shape = value_of(args["self"]).shape
    dim = args["dim"] % len(shape)
    start, end, step = slice(args["start"], args["end"], args["step"]).indices(shape[dim])
    if (start, end, step) == (0, shape[dim], 1):
        return w.names[args["self"]]
    w.fixes_batch(node, [dim])
    return w.op("Slice", w.names[args["self"]], w.ints([start]), w.ints([end]), w.ints([dim]), w.ints([step]))


def _select(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dim = args["dim"] % len(value_of(args["self"]).shape)
    w.fixes_batch(node, [dim])
    return w.op("Gather", w.names[args["self"]], w.const(np.int64(args["index"])), axis=dim)


def _unbind(w: Writer, node: fx.Node, args: dict[str, Any]) -> list[str]:
    shape = value_of(args["self"]).shape
    dim = args["dim"] % len(shape)
    w.fixes_batch(node, [dim])
    return [w.op("Gather", w.names[args["self"]], w.const(np.int64(i)), axis=dim) for i in range(shape[dim])]


def _split(w: Writer, node: fx.Node, args: dict[str, Any]) -> list[str]:
    shape = value_of(args["self"]).shape
    dim = args["dim"] % len(shape)
    w.fixes_batch(node, [dim])
    sizes = args.get("split_sizes") or [v.shape[dim] for v in node.meta["val"]]
    made = w.op("Split", w.names[args["self"]], w.ints(sizes), outputs=len(sizes), axis=dim)
    return [made] if len(sizes) == 1 else made


def _flip(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    rank = len(value_of(node).shape)
    dims = [d % rank for d in args["dims"]]
    w.fixes_batch(node, dims)
    n, ends = len(dims), [-(2**62)] * len(dims)
    return w.op("Slice", w.names[args["self"]], w.ints([-1] * n), w.ints(ends), w.ints(dims), w.ints([-1] * n))


def _cat(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    value = value_of(node)
    dim = args["dim"] % max(len(value.shape), 1)
    w.fixes_batch(node, [dim])
    parts = [t for t in args["tensors"] if t.meta["val"].shape != (0,)]
    return w.op("Concat", *(w.read(t, value.dtype) for t in parts), axis=dim)


def _pad(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    rank, pad = len(value_of(node).shape), list(args["pad"])
    before, after = [0] * rank, [0] * rank
    for d, (a, b) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        before[rank - 1 - d], after[rank - 1 - d] = a, b
    w.fixes_batch(node, [d for d in range(rank) if before[d] or after[d]])
    return w.op("Pad", w.names[args["self"]], w.ints(before + after), w.number(args["value"], value_of(node).dtype))


def _repeat(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    w.fixes_batch(node)
    shape, times = list(value_of(args["self"]).shape), list(args["repeats"])
    wide = w.op("Reshape", w.names[args["self"]], w.ints([1] * (len(times) - len(shape)) + shape))
    return w.op("Tile", wide, w.ints(times))


def _where(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dtype = value_of(node).dtype
    return w.op(
        "Where", w.read(args["condition"], torch.bool), w.read(args["self"], dtype), w.read(args["other"], dtype)
    )


def _clamp(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dtype = value_of(node).dtype
    name = w.read(args["self"], dtype)
    low, high = args.get("min", args.get("min_val")), args.get("max", args.get("max_val"))
    name = name if high is None else w.op("Min", name, w.read(high, dtype))
    return name if low is None else w.op("Max", name, w.read(low, dtype))


def _product(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    base = op_name(node).split(".")[0]
    if args.get("beta", 1) != 1 or args.get("alpha", 1) != 1:
        raise Unsupported(f"{base} with alpha or beta other than 1 has no ONNX form here", node)
    tensors = [w.names[a] for a in args.values() if isinstance(a, fx.Node)]
    if base == "addmm":
        return w.op("Gemm", tensors[1], tensors[2], tensors[0])
    if base in ("addmv", "baddbmm"):
        return w.op("Add", w.op("MatMul", tensors[1], tensors[2]), tensors[0])
    return w.op("MatMul", *tensors)


def _elu(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    if args["input_scale"] != 1:
        raise Unsupported("elu with an input scale has no ONNX form here", node)
    name = w.op("Elu", w.names[args["self"]], alpha=float(args["alpha"]))
    return name if args["scale"] == 1 else w.op("Mul", name, w.number(args["scale"], value_of(node).dtype))


def _gelu(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dtype, x = value_of(node).dtype, w.names[args["self"]]

    def number(value: float) -> str:
        return w.number(value, dtype)

    if args["approximate"] == "tanh":
        cube = w.op("Mul", w.op("Mul", w.op("Mul", x, x), x), number(0.044715))
        inner = w.op("Tanh", w.op("Mul", w.op("Add", x, cube), number(math.sqrt(2 / math.pi))))
    else:
        inner = w.op("Erf", w.op("Mul", x, number(math.sqrt(0.5))))
    return w.op("Mul", w.op("Mul", x, number(0.5)), w.op("Add", inner, number(1.0)))


def _silu(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.op("Mul", w.names[args["self"]], w.op("Sigmoid", w.names[args["self"]]))


def _log1p(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.op("Log", w.op("Add", w.names[args["self"]], w.number(1, value_of(node).dtype)))


def _expm1(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.op("Sub", w.op("Exp", w.names[args["self"]]), w.number(1, value_of(node).dtype))


def _rsqrt(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.op("Reciprocal", w.op("Sqrt", w.names[args["self"]]))


def _leaky_relu(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.op("LeakyRelu", w.names[args["self"]], alpha=float(args["negative_slope"]))


def _cast(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.read(args["self"], value_of(node).dtype)


def _read_source(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    w.fixes_batch(node)
    return w.read(args["src"], value_of(node).dtype)


def _arange(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    return w.const(torch.arange(args["start"], args["end"], args["step"], dtype=value_of(node).dtype).numpy())


def _fmod(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dtype = value_of(node).dtype
    return w.op("Mod", w.read(args["self"], dtype), w.read(args["other"], dtype), fmod=1)


def _remainder(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """With the sign of the divisor, as in Python; ONNX has that for integers only."""
    dtype = value_of(node).dtype
    left, right = w.read(args["self"], dtype), w.read(args["other"], dtype)
    if not dtype.is_floating_point:
        return w.op("Mod", left, right)
    rest, zero = w.op("Mod", left, right, fmod=1), w.number(0, dtype)
    return w.op("Where", _signs_differ(w, rest, right, zero), w.op("Add", rest, right), rest)


def _atan2(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """From the angle of the absolute values, which lies between 0 and pi / 2."""
    dtype = value_of(node).dtype
    y, x, zero = w.read(args["self"], dtype), w.read(args["other"], dtype), w.number(0, dtype)
    rise, run, one = w.op("Abs", y), w.op("Abs", x), w.number(1, dtype)
    same = w.op("Where", w.op("Equal", rise, zero), zero, one)  # 0 / 0 and inf / inf have an angle
    angle = w.op("Atan", w.op("Where", w.op("Equal", rise, run), same, w.op("Div", rise, run)))
    left, down = (w.op("Or", w.op("Less", v, zero), w.op("Less", w.op("Div", one, v), zero)) for v in (x, y))  # -0 too
    angle = w.op("Where", left, w.op("Sub", w.number(math.pi, dtype), angle), angle)
    return w.op("Where", down, w.op("Neg", angle), angle)


def _sign(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """0 of NaN, as torch has it."""
    name, dtype = w.names[args["self"]], value_of(node).dtype
    made = w.op("Sign", name)
    return w.op("Where", w.op("IsNaN", name), w.number(0, dtype), made) if dtype.is_floating_point else made


def _softmax(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dim = args["dim"] % max(len(value_of(node).shape), 1)
    w.fixes_batch(node, [dim])
    kind = "Softmax" if op_name(node).startswith("_softmax") else "LogSoftmax"
    return w.op(kind, w.names[args["self"]], axis=dim)


def _cumsum(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dim = args["dim"] % max(len(value_of(node).shape), 1)
    w.fixes_batch(node, [dim])
    return w.op("CumSum", w.read(args["self"], value_of(node).dtype), w.const(np.int64(dim)))


def _arg_extreme(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    kind = "ArgMax" if op_name(node).startswith("argmax") else "ArgMin"
    name = w.names[args["self"]]
    if args["dim"] is None:
        w.fixes_batch(node)
        flat = w.op(kind, w.op("Reshape", name, w.ints([-1])), axis=0, keepdims=0)
        return w.op("Reshape", flat, w.ints(value_of(node).shape))
    dim = args["dim"] % max(len(value_of(args["self"]).shape), 1)
    w.fixes_batch(node, [dim])
    return w.op(kind, name, axis=dim, keepdims=int(args["keepdim"]))


def _extreme(w: Writer, node: fx.Node, args: dict[str, Any]) -> Any:
    base = op_name(node).split(".")[0]
    rank = len(value_of(args["self"]).shape)
    dims = _dims(args, rank)
    w.fixes_batch(node, dims)
    name, keep = w.names[args["self"]], int(bool(args.get("keepdim", False)))
    value = w.op("ReduceMax" if base == "max" else "ReduceMin", name, w.ints(dims), keepdims=keep) if rank else name
    if op_name(node).endswith("default"):
        return value
    return value, w.op("ArgMax" if base == "max" else "ArgMin", name, axis=dims[0], keepdims=keep)


def _any(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    source = value_of(args["self"])
    dims = _dims(args, len(source.shape))
    w.fixes_batch(node, dims)
    name = w.cast(w.read(args["self"], torch.bool), torch.bool, torch.int32)
    kind = "ReduceMax" if op_name(node).startswith("any") else "ReduceMin"
    name = w.op(kind, name, w.ints(dims), keepdims=int(bool(args.get("keepdim", False))))
    return w.cast(name, torch.int32, torch.bool)


def _variance(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    source = value_of(args["self"])
    dims = _dims(args, len(source.shape))
    w.fixes_batch(node, dims)
    n = math.prod(source.shape[d] for d in dims)
    correction = 1 if args["correction"] is None else args["correction"]
    name = w.names[args["self"]]
    centred = w.op("Sub", name, w.op("ReduceMean", name, w.ints(dims), keepdims=1))
    total = w.op("ReduceSumSquare", centred, w.ints(dims), keepdims=int(bool(args["keepdim"])))
    return w.op("Div", total, w.number(n - correction, source.dtype))


def _layer_norm(w: Writer, node: fx.Node, args: dict[str, Any]) -> list[str]:
    shape = list(args["normalized_shape"])
    scale = w.names[args["weight"]] if args["weight"] is not None else w.const(np.ones(shape, np.float32))
    inputs = [w.names[args["input"]], scale, *([w.names[args["bias"]]] if args["bias"] is not None else [])]
    return w.op("LayerNormalization", *inputs, outputs=3, axis=-len(shape), epsilon=float(args["eps"]))


_HANDLERS: dict[str, Callable[[Writer, fx.Node, dict[str, Any]], Any]] = {
    **INDEX_HANDLERS,
    **POOL_HANDLERS,
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(("permute", "transpose", "t"), _transpose),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm"), _product),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "hardtanh"), _clamp),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("argmax", "argmin"), _arg_extreme),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("any", "all"), _any),
    **dict.fromkeys(("split_with_sizes", "split"), _split),
    "expand": _expand, "slice": _slice, "select": _select, "unbind": _unbind, "flip": _flip, "cat": _cat,
    "constant_pad_nd": _pad, "repeat": _repeat, "where": _where, "elu": _elu, "gelu": _gelu,
    "silu": _silu, "log1p": _log1p, "expm1": _expm1, "rsqrt": _rsqrt, "leaky_relu": _leaky_relu, "_to_copy": _cast,
    "arange": _arange, "fmod": _fmod, "remainder": _remainder, "atan2": _atan2, "sign": _sign, "sgn": _sign,
    "cumsum": _cumsum, "var": _variance, "native_layer_norm": _layer_norm,
    "trunc": lambda w, node, args: _truncate(w, w.names[args["self"]]),
    "copy": lambda w, node, args: w.op("Expand", _read_source(w, node, args), w.ints(value_of(node).shape)),
}  # fmt: skip
