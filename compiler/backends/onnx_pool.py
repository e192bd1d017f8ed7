"""Convolutions and poolings in ONNX, their windows as traced: rounding up, padding and uneven windows are constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from graphrl.compiler.backends.c99.nodes import Unsupported, op_name, value_of

if TYPE_CHECKING:
    from graphrl.compiler.backends.onnx_graph import Writer

__all__ = ["POOL_HANDLERS"]


def _convolution(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    inputs = [w.names[args[name]] for name in ("input", "weight", "bias") if args[name] is not None]
    rank = len(value_of(node).shape) - 2
    padding = _each(args["padding"], rank)
    more: dict[str, Any] = {}
    if args["transposed"]:
        more["output_padding"] = _each(args["output_padding"], rank)
    return w.op(
        "ConvTranspose" if args["transposed"] else "Conv", *inputs, group=args["groups"], pads=padding * 2,
        strides=_each(args["stride"], rank), dilations=_each(args["dilation"], rank),
        kernel_shape=list(value_of(args["weight"]).shape[2:]), **more,
    )  # fmt: skip


@dataclass(frozen=True)
class _Axis:
    """The windows along H or W. ``before`` and ``after``: positions outside ``size`` that they reach."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def after(self) -> int:
        last = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation - self.padding
        return max(last + 1 - self.size, 0)

    def counts(self, include_padding: bool) -> np.ndarray:
        """How many positions of each window a mean divides by: those beyond the padding never count."""
        start = np.arange(self.out) * self.stride - self.padding
        low, high = (start, self.size + self.padding) if include_padding else (np.maximum(start, 0), self.size)
        return np.minimum(start + self.kernel, high) - low


def _each(value: Any, rank: int = 2) -> list[int]:
    """A setting for each dim."""
    return [value] * rank if isinstance(value, int) else list(value) * (rank if len(value) == 1 else 1)


def _axes(node: fx.Node, args: dict[str, Any]) -> list[_Axis]:
    value = node.meta["val"]
    out = (value[0] if isinstance(value, (tuple, list)) else value).shape[-2:]
    kernel = _each(args["kernel_size"])
    columns = (value_of(args["self"]).shape[-2:], out, kernel, _each(args["stride"] or kernel),
               _each(args["padding"]), _each(args.get("dilation", 1)))  # fmt: skip
    return [_Axis(*column) for column in zip(*columns, strict=True)]


def _as_images(w: Writer, node: fx.Node, args: dict[str, Any]) -> tuple[str, Callable[[str], str]]:
    """The value as [B, C, H, W], and what takes a result back to the rank it came with."""
    name = w.names[args["self"]]
    if len(value_of(args["self"]).shape) == 4:
        return name, lambda result: result
    w.fixes_batch(node)
    first = w.ints([0])
    return w.op("Unsqueeze", name, first), lambda result: w.op("Squeeze", result, first)


def _max_pool(w: Writer, node: fx.Node, args: dict[str, Any]) -> list[str]:
    return _largest(w, node, args, _axes(node, args))


def _largest(w: Writer, node: fx.Node, args: dict[str, Any], axes: Sequence[_Axis]) -> list[str]:
    """Values and places of the largest; torch counts places within a plane, ONNX through the whole tensor."""
    name, back = _as_images(w, node, args)
    value, place = w.op(
        "MaxPool", name, outputs=2, kernel_shape=[a.kernel for a in axes], strides=[a.stride for a in axes],
        dilations=[a.dilation for a in axes], pads=[*(a.padding for a in axes), *(a.after for a in axes)],
    )  # fmt: skip
    if _places_are_read(node):
        place = back(w.op("Mod", place, w.const(np.int64(math.prod(a.size for a in axes)))))
    return [back(value), place]


def _places_are_read(node: fx.Node) -> bool:
    return any(user.args[1] == 1 and user.users for user in node.users)


def _mean_pool(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """A mean over windows of the padded image, times what it should have been divided by instead."""
    axes, dtype = _axes(node, args), value_of(node).dtype
    name, back = _as_images(w, node, args)
    before, after = [a.padding for a in axes], [a.after for a in axes]
    if any(before + after):
        name = w.op("Pad", name, w.ints([0, 0, *before, 0, 0, *after]), w.number(0, dtype))
    name = w.op("AveragePool", name, kernel_shape=[a.kernel for a in axes], strides=[a.stride for a in axes])
    full = math.prod(a.kernel for a in axes)
    high, wide = (a.counts(args["count_include_pad"]) for a in axes)
    counts = np.full((len(high), len(wide)), args["divisor_override"]) if args["divisor_override"] else (
        high[:, None] * wide)  # fmt: skip
    if (counts != full).any():
        name = w.op("Mul", name, w.number(full / counts, dtype))
    return back(name)


def _spans(node: fx.Node, args: dict[str, Any]) -> list[list[range]]:
    """The windows of adaptive pooling along H and W."""
    sizes = value_of(args["self"]).shape[-2:]
    return [
        [range(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]
        for n, out in zip(sizes, args["output_size"], strict=True)
    ]


def _adaptive_mean(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """Means of uneven windows, along W and along H, each a product with a constant matrix."""
    dtype = value_of(node).dtype
    high, wide = (
        np.array([[(i in span) / len(span) for i in range(n)] for span in spans])
        for n, spans in zip(value_of(args["self"]).shape[-2:], _spans(node, args), strict=True)
    )
    rows = w.op("MatMul", w.names[args["self"]], w.number(wide.T.copy(), dtype))
    return w.op("MatMul", w.number(high, dtype), rows)


def _adaptive_max(w: Writer, node: fx.Node, args: dict[str, Any]) -> list[str]:
    """Even windows are a plain pooling; uneven ones are gathered, the short ones with their last position twice."""
    sizes, spans = value_of(args["self"]).shape[-2:], _spans(node, args)
    if all(n % len(s) == 0 for n, s in zip(sizes, spans, strict=True)):
        return _largest(w, node, args, [_Axis(n, len(s), len(s[0]), len(s[0]), 0)
                                        for n, s in zip(sizes, spans, strict=True)])  # fmt: skip
    if _places_are_read(node):
        raise Unsupported(f"the places that {op_name(node)} finds in uneven windows have no ONNX form here", node)
    name, rank = w.names[args["self"]], len(value_of(args["self"]).shape)
    for axis, windows in ((rank - 1, spans[1]), (rank - 2, spans[0])):
        longest = max(map(len, windows))
        places = [[*span, *[span[-1]] * (longest - len(span))] for span in windows]
        gathered = w.op("Gather", name, w.const(places, np.int64), axis=axis)
        name = w.op("ReduceMax", gathered, w.ints([axis + 1]), keepdims=0)
    return [name, ""]


POOL_HANDLERS: dict[str, Callable[[Writer, fx.Node, dict[str, Any]], Any]] = {
    "convolution": _convolution,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _mean_pool,
    "adaptive_max_pool2d": _adaptive_max,
    "_adaptive_avg_pool2d": _adaptive_mean,
}
"""By operation: what writes it, as in ``onnx_ops``."""
