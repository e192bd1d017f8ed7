"""Convolutions, as products of one gathered row: the inputs that an output position sees, times the weights.

The results of a position lie next to each other (channels last), so the inner loops run over contiguous outputs, and
the next convolution, pooling or activation finds its channels contiguous. No image of all rows is ever built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import indent, index, loop_nest, merge_dims
from graphrl.compiler.backends.c99.matmul import ROWS, Product, columns, in_groups
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, value_of
from graphrl.compiler.backends.c99.values import View

__all__ = ["CONVOLUTIONS", "emit_convolution", "outside"]

CONVOLUTIONS = frozenset(("convolution.default",))


def _as_planes(view: View) -> View:
    """[B, C, H, W] of a [B, C, W] or [B, C, H, W] value."""
    if len(view.shape) == 4:
        return view
    return View(view.buffer, (*view.shape[:2], 1, view.shape[2]), (*view.strides[:2], 0, view.strides[2]), view.offset)


def _pair(values: list[int], missing: int) -> tuple[int, int]:
    """A setting for H and W; ``missing`` is H's in one dimension."""
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def outside(name: str, size: int, low: bool, high: bool) -> list[str]:
    """The conditions under which position ``name`` lies outside ``size``, of the two that can hold."""
    return [f"{name} < 0"] * low + [f"{name} >= {size}"] * high


@dataclass(frozen=True)
class _Window:
    """What one output position sees: ``x`` [B, C, H, W] in G groups, walked by (kh, kw)."""

    x: View
    groups: int
    kernel: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def inputs(self) -> int:
        """Channels of one group."""
        return self.x.shape[1] // self.groups

    @property
    def channels_last(self) -> bool:
        """Whether the channels of a position lie next to each other."""
        return self.inputs > 1 and self.x.strides[1] == 1

    def leaves(self, d: int) -> tuple[bool, bool]:
        """Whether some window begins before, or ends behind, dim ``d`` (H, W)."""
        last = (self.out[d] - 1) * self.stride[d] + (self.kernel[d] - 1) * self.dilation[d] - self.padding[d]
        return self.padding[d] > 0, last >= self.x.shape[2 + d]

    def run(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides in memory of a row, in the order of the weights' rows."""
        sizes = (self.inputs, *self.kernel)
        strides = (self.x.strides[1], *(s * n for s, n in zip(self.x.strides[2:], self.dilation, strict=True)))
        order = (1, 2, 0) if self.channels_last else (0, 1, 2)
        return tuple(sizes[d] for d in order), tuple(strides[d] for d in order)

    @property
    def direct(self) -> bool:
        """Whether the row of each position lies in the image as one run."""
        sizes, (strides,) = merge_dims(self.run()[0], (self.run()[1],))
        return not any(self.leaves(0) + self.leaves(1)) and (not sizes or (len(sizes) == 1 and strides == (1,)))

    def start(self, left: str) -> str:
        """Where the row of position (image, top, ``left``), group b, begins: an index into the image."""
        moves = (self.x.strides[0], self.x.strides[1] * self.inputs if self.groups > 1 else 0)
        steps = (*moves, self.stride[0] * self.x.strides[2], self.stride[1] * self.x.strides[3])
        back = sum(p * s for p, s in zip(self.padding, self.x.strides[2:], strict=True))
        used = _used(steps, (self.x.shape[0], self.groups, *self.out))
        return index(self.x.offset - back, used, ("image", "b", "top", left))

    def gather(self, row: View, left: str) -> list[str]:
        """Code that copies the row of position (image, top, ``left``), group b, to ``row``."""
        sizes, strides = self.run()
        target = row.buffer.name
        if any(self.leaves(0) + self.leaves(1)):
            return self._gather_padded(row, left)
        sizes, (read, write) = merge_dims(sizes, (strides, row.strides))
        move = loop_nest(sizes, lambda i: [f"{target}[{index(row.offset, write, i)}] = from[{index(0, read, i)}];"])
        return ["{", *indent([f"const float *const from = {self.x.buffer.name} + {self.start(left)};", *move]), "}"]

    def _gather_padded(self, row: View, left: str) -> list[str]:
        """As :meth:`gather` where the window may reach outside: there the row is 0."""
        sizes, strides = self.run()
        c, i, j = (2, 0, 1) if self.channels_last else (0, 1, 2)
        names = ["", "", ""]
        names[c], names[i], names[j] = "c", "i", "j"
        tests, lines = [], []
        for d, (name, at) in enumerate((("i", "top"), ("j", left))):
            low, high = self.leaves(d)
            if low or high:
                move = f"{at} * {self.stride[d]}" if self.out[d] > 1 else "0"
                lines.append(f"const int {name}{name} = {move} + {name} * {self.dilation[d]} - {self.padding[d]};")
                tests += outside(name * 2, self.x.shape[2 + d], low, high)
        target = f"{row.buffer.name}[{index(row.offset, row.strides, names)}]"
        read = f"{self.x.buffer.name}[{self.start(left)} + {index(0, strides, names)}]"
        channels = f"for (int c = 0; c < {sizes[c]}; ++c) {{"
        lines += [f"if ({' || '.join(tests)}) {{", f"    {channels} {target} = 0.0f; }}", "} else {",
                  f"    {channels} {target} = {read}; }}", "}"]  # fmt: skip
        lines = [f"for (int j = 0; j < {sizes[j]}; ++j) {{", *indent(lines), "}"]
        return [f"for (int i = 0; i < {sizes[i]}; ++i) {{", *indent(lines), "}"]

    def walk(self, row: View, panel: Callable[[int], list[str]]) -> list[str]:
        """``panel`` at every position, some neighbours at a time: weights that are loaded serve them all."""
        high, wide = self.out

        def at(rows: int) -> list[str]:
            x = f"{self.x.buffer.name} + {self.start('left')}" if self.direct else row.buffer.name
            moves = []
            for r in range(0 if self.direct else rows):
                moves += self.gather(row.select(0, r), f"(left + {r})" if r else "left")
            place = index(0, _used((high * wide, wide, 1), (self.x.shape[0], high, wide)), ("image", "top", "left"))
            number = [f"const int m = {place};"] if self.x.shape[0] * high * wide > 1 else []
            return [*moves, *number, f"const float *const x = {x};", *panel(rows)]

        lines = in_groups("left", wide, at)
        for name, size in (("top", high), ("image", self.x.shape[0])):
            lines = [f"for (int {name} = 0; {name} < {size}; ++{name}) {{", *indent(lines), "}"] if size > 1 else lines
        return lines


def _used(steps: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for s, n in zip(steps, sizes, strict=True))


def emit_convolution(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    """Emit ``aten.convolution`` in one or two dimensions; returns its value, a view of memory with channels last."""
    args, value = arguments(node), value_of(node)
    if args["transposed"]:
        raise Unsupported("a transposed convolution is not supported", node)
    if not 3 <= len(value.shape) <= 4:
        raise Unsupported(f"a convolution in {len(value.shape) - 2} dimensions is not supported", node)
    if value.dtype != torch.float32:
        raise Unsupported(f"a convolution in {value.dtype} is not supported, generated C computes in float32", node)
    x, weight = _as_planes(emitter.in_memory(emitter.view(args["input"]))), _as_planes(emitter.view(args["weight"]))
    batch, channels = value.shape[:2]
    if (
        batch > 1 and not emitter.embed
    ):  # measured: one image 1 to 4 times as fast as the library, 16 up to 5 times slower
        raise Unsupported(f"a convolution over {batch} images is left to a library", node)
    out = (value.shape[-2] if len(value.shape) == 4 else 1, value.shape[-1])
    settings = (_pair(args["stride"], 1), _pair(args["padding"], 0), _pair(args["dilation"], 1))
    window = _Window(x, args["groups"], weight.shape[2:], out, *settings)  # type: ignore[arg-type]
    result = emitter.new_value((batch * math.prod(out), channels), torch.float32)
    if result.size:
        _emit(emitter, window, weight, args["bias"], result)
    strides = (math.prod(out) * channels, 1, out[1] * channels, channels)
    view = View(result.buffer, (batch, channels, *out), strides)
    return view if len(value.shape) == 4 else view.select(2, 0)


def _emit(emitter, window: _Window, weight: View, bias: fx.Node | None, result: View) -> None:  # type: ignore[no-untyped-def]
    """One step: for each group and panel of outputs, at each position, gather the row and multiply it."""
    groups, n = window.groups, result.shape[1] // window.groups
    positions, sizes = result.shape[0], window.run()[0]
    k = math.prod(sizes)
    row = emitter.new_value((min(ROWS, window.out[1]), *sizes), torch.float32)
    apart = window.stride[1] * window.x.strides[3] if window.direct else k
    offset = None
    if bias is not None:
        values = emitter.view(bias)
        step = values.strides[0]
        offset = View(values.buffer, (groups, positions, n), (n * step, 0, step), values.offset)
    product = Product(
        View(row.buffer, (groups, positions, k), (0, apart, 1)), _turned(emitter, window, weight, n), offset,
        View(result.buffer, (groups, positions, n), (n, result.shape[1], 1)),
    )  # fmt: skip
    lines, reads = columns(emitter, product, lambda panel: window.walk(row, panel))
    if groups > 1:
        lines = [f"for (int b = 0; b < {groups}; ++b) {{", *indent(lines), "}"]
    reads |= {window.x.buffer} | ({offset.buffer} if offset is not None else set())
    used = set() if window.direct else {row.buffer}
    emitter.add_step(Step(lines, (reads - {row.buffer}) | used, {result.buffer} | used))


def _turned(emitter, window: _Window, weight: View, n: int) -> View:  # type: ignore[no-untyped-def]
    """The weights as [groups, row, outputs of a group], outputs contiguous."""
    kernel, inputs = window.kernel, window.inputs
    grouped = weight.reshape((window.groups, n, inputs, *kernel))
    if grouped is None:
        grouped = emitter.materialize(weight).reshape((window.groups, n, inputs, *kernel))
    order = (0, 3, 4, 2, 1) if window.channels_last else (0, 2, 3, 4, 1)
    turned = emitter.materialize(grouped.permute(order)).reshape((window.groups, inputs * math.prod(kernel), n))
    assert turned is not None
    return turned
