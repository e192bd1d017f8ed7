"""Pooling: the largest or the mean value of each window. Channels that lie next to each other are the inner loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphrl.compiler.backends.c99.convolution import outside
from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import indent, index
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name
from graphrl.compiler.backends.c99.values import View

__all__ = ["POOLS", "emit_pool"]

POOLS = frozenset(("max_pool2d_with_indices.default", "adaptive_max_pool2d.default", "avg_pool2d.default",
                   "_adaptive_avg_pool2d.default"))  # fmt: skip


@dataclass(frozen=True)
class _Axis:
    """The windows along H or W: where one starts, its positions, where it ends, and by what a mean divides."""

    at: str  # name of the output position
    size: int
    out: int
    start: str
    count: int
    step: int = 1
    end: str | None = None  # positions from here on are not in the window
    low: bool = False  # whether some window starts before 0, or ends behind ``size``
    high: bool = False
    share: str = ""

    def tests(self, name: str) -> list[str]:
        """Conditions under which position ``name`` does not count."""
        return outside(name, self.size, self.low, self.high) + ([f"{name} >= {self.end}"] if self.end else [])


@dataclass(frozen=True)
class _Pool:
    """``x`` [B, C, H, W] pooled along ``axes`` into ``out`` [B, C, h, w] and, where somebody reads it, ``place``."""

    x: View
    axes: tuple[_Axis, _Axis]
    out: View
    place: View | None
    share: str | None  # what a mean divides by; None for the largest

    @property
    def lanes(self) -> int:
        """Channels that lie next to each other."""
        return self.x.shape[1] if self.x.strides[1] == 1 else 1

    def each(self, text: str) -> str:
        """``text`` for every lane ``c``."""
        return f"for (int c = 0; c < {self.lanes}; ++c) {{ {text} }}" if self.lanes > 1 else text.replace("[c]", "[0]")

    def lines(self) -> list[str]:
        """The loops over positions, and in them those over the window."""
        where, sizes = self._where(self.out)
        lines = [f"const int {n}0 = {axis.start};" for n, axis in zip("uv", self.axes, strict=True)]
        lines += [f"float *const y = {where};"]
        lines += [f"int64_t *const at = {self._where(self.place)[0]};"] if self.place is not None else []
        lines.append(self.each("y[c] = 0.0f;" if self.share else "y[c] = -INFINITY;"))
        lines += [self.each("at[c] = -1;")] if self.place is not None else []
        lines += self._window()
        if self.share:
            lines.append(self.each(f"y[c] = y[c] / {self.share};"))
        for name, size in reversed(sizes):
            lines = [f"for (int {name} = 0; {name} < {size}; ++{name}) {{", *indent(lines), "}"] if size > 1 else lines
        return lines if any(size > 1 for _, size in sizes) else ["{", *indent(lines), "}"]

    def _window(self) -> list[str]:
        """Take in each position of the window that lies inside."""
        high, wide = self.axes
        lines = [f"const int u = u0 + i * {high.step};", f"const int v = v0 + j * {wide.step};"]
        tests = high.tests("u") + wide.tests("v")
        lines += [f"if ({' || '.join(tests)}) {{ continue; }}"] if tests else []
        lead = [_used(self.x.strides[d], self.x.shape[d]) for d in (0, 1)]
        steps = (lead[0], 0 if self.lanes > 1 else lead[1], *self.x.strides[2:])
        start = index(self.x.offset, steps, ("image", "channel", "u", "v"))
        lines.append(f"const float *const x = {self.x.buffer.name} + {start};")
        if self.share:
            lines.append(self.each("y[c] += x[c];"))
        elif self.place is None:
            lines.append(self.each("y[c] = k_maxf(x[c], y[c]);"))
        else:
            better = "const int better = (x[c] > y[c]) | (x[c] != x[c]) | (at[c] < 0);"
            place = f"at[c] = better ? (int64_t)(u * {self.x.shape[3]} + v) : at[c];"
            lines.append(self.each(f"{better} y[c] = k_select(better, x[c], y[c]); {place}"))
        for name, axis in (("j", wide), ("i", high)):
            lines = [f"for (int {name} = 0; {name} < {axis.count}; ++{name}) {{", *indent(lines), "}"]
        return lines

    def _where(self, view: View) -> tuple[str, list[tuple[str, int]]]:
        """Address of the values of one position, and the loops over positions."""
        names = [("image", 0), ("channel", 1), ("top", 2), ("left", 3)]
        used = [(n, d) for n, d in names if not (d == 1 and self.lanes > 1)]
        steps = [_used(view.strides[d], view.shape[d]) for _, d in used]
        at = index(view.offset, steps, [n for n, _ in used])
        return f"{view.buffer.name} + {at}" if at != "0" else view.buffer.name, [(n, view.shape[d]) for n, d in used]


def _used(step: int, size: int) -> int:
    return step if size > 1 else 0


def emit_pool(emitter, node: fx.Node) -> View | tuple[View | None, View | None]:  # type: ignore[no-untyped-def]
    """Emit one of :data:`POOLS`; returns its value, or (value, indices) for the largest."""
    name, args = op_name(node), arguments(node)
    largest = "max" in name
    values = node.meta["val"]
    shape = tuple((values[0] if largest else values).shape)
    source = emitter.in_memory(emitter.view(args["self"]))
    if source.dtype != torch.float32:
        raise Unsupported(f"{name} on {source.dtype} is not supported", node)
    lead = 4 - len(shape)
    x = View(source.buffer, (1,) * lead + source.shape, (0,) * lead + source.strides, source.offset)
    axes = _axes(x, shape[-2:], args)
    share = None if largest else _share(axes, args.get("divisor_override"))
    wants_place = largest and any(user.args[1] == 1 and user.users for user in node.users)

    def result(dtype: torch.dtype) -> View:
        full = (1,) * lead + shape
        if x.strides[1] == 1 and x.shape[1] > 1:  # channels last, as they came
            return emitter.new_value((full[0], *full[2:], full[1]), dtype).permute([0, 3, 1, 2])
        return emitter.new_value(full, dtype)

    pool = _Pool(x, axes, result(torch.float32), result(torch.int64) if wants_place else None, share)
    made = [pool.out, pool.place]
    if pool.out.size:
        writes = {view.buffer for view in made if view is not None}
        emitter.add_step(Step(pool.lines(), {x.buffer}, writes))
    shown = [view.select(0, 0) if view is not None and lead else view for view in made]
    return (shown[0], shown[1]) if largest else shown[0]  # type: ignore[return-value]


def _axes(x: View, out: tuple[int, ...], args: dict[str, Any]) -> tuple[_Axis, _Axis]:
    made = []
    for d, (name, at) in enumerate((("u", "top"), ("v", "left"))):
        size, n = x.shape[2 + d], out[d]
        at = at if n > 1 else "0"
        if "output_size" in args:
            made.append(_adaptive(name, at, size, n))
            continue
        kernel = _setting(args["kernel_size"], d)
        stride = _setting(args["stride"], d) if args["stride"] else kernel
        padding, dilation = _setting(args["padding"], d), _setting(args.get("dilation", 1), d)
        first = f"{at} * {stride}" + (f" - {padding}" if padding else "")
        last = (n - 1) * stride - padding + (kernel - 1) * dilation
        axis = _Axis(at, size, n, first, kernel, dilation, None, padding > 0, last >= size)
        made.append(_with_share(axis, name, padding, args.get("count_include_pad", True), last))
    return made[0], made[1]


def _setting(value: Any, d: int) -> int:
    return value if isinstance(value, int) else value[d % len(value)]


def _adaptive(name: str, at: str, size: int, out: int) -> _Axis:
    """Windows from ``at * size / out``, rounded down, to ``(at + 1) * size / out``, rounded up."""
    if size % out == 0:
        return _Axis(at, size, out, f"{at} * {size // out}", size // out, share=str(size // out))
    spans = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
    end = f"(({at} + 1) * {size} + {out - 1}) / {out}"
    return _Axis(at, size, out, f"{at} * {size} / {out}", max(b - a for a, b in spans), end=end,
                 share=f"({end} - {name}0)")  # fmt: skip


def _with_share(axis: _Axis, name: str, padding: int, include_padding: bool, last: int) -> _Axis:
    """The axis with the positions that a mean counts: padding too where asked, but not what lies beyond it."""
    first, size = f"{name}0", axis.size
    share = str(axis.count)
    if include_padding and last >= size + padding:
        share = f"({first} + {axis.count} < {size + padding} ? {axis.count} : {size + padding} - {first})"
    elif not include_padding and (axis.low or axis.high):
        end = f"({first} + {axis.count} < {size} ? {first} + {axis.count} : {size})"
        share = f"({end} - ({first} > 0 ? {first} : 0))"
    return replace(axis, share=share)


def _share(axes: tuple[_Axis, _Axis], override: int | None) -> str:
    """C text of the number that a sum is divided by."""
    if override is not None:
        return f"{override}.0f"
    a, b = axes[0].share, axes[1].share
    return f"{int(a) * int(b)}.0f" if a.isdigit() and b.isdigit() else f"(float)({a} * {b})"
