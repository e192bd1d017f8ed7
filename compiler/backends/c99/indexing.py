"""Operations that move elements to computed places: concatenation, padding, gathering by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphrl.compiler.backends.c99.elementwise import literal
from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import index, loop_nest
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name, value_of
from graphrl.compiler.backends.c99.values import View

__all__ = ["INDEXING", "emit_indexing"]

INDEXING = frozenset(
    ("cat.default", "index.Tensor", "index_select.default", "gather.default", "embedding.default",
     "constant_pad_nd.default", "repeat.default", "slice_scatter.default", "select_scatter.default", "scatter.value",
     "scatter.src")
)  # fmt: skip


def emit_indexing(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    """Emit one of :data:`INDEXING`; returns its value."""
    name, args = op_name(node), arguments(node)
    if name == "cat.default":
        return _cat(emitter, node)
    if name == "constant_pad_nd.default":
        return _pad(emitter, node)
    if name == "repeat.default":
        return _repeat(emitter, node)
    if name in ("slice_scatter.default", "select_scatter.default"):
        return _replaced(emitter, node)
    if name.startswith("scatter."):
        return _scatter(emitter, node)
    if name == "embedding.default":
        return _take(emitter, node, emitter.view(args["weight"]), 0, emitter.view(args["indices"]))
    if name == "index_select.default":
        return _take(emitter, node, emitter.view(args["self"]), args["dim"], emitter.view(args["index"]))
    if name == "gather.default":
        return _gather(emitter, node)
    used = [(d, i) for d, i in enumerate(args["indices"]) if i is not None]
    if len(used) != 1 or used[0][1].meta["val"].dtype == torch.bool:
        raise Unsupported("indexing by several tensors, or by a mask, is not supported", node)
    (dim, places) = used[0]
    return _take(emitter, node, emitter.view(args["self"]), dim, emitter.view(places), wraps=True)


def _cat(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    value = value_of(node)
    out = emitter.new_value(tuple(value.shape), value.dtype)
    args = arguments(node)
    dim = args["dim"] % max(len(value.shape), 1)
    start = 0
    for part in args["tensors"]:
        view = emitter.view(part)
        if view.shape == (0,):  # torch lets an empty vector stand for "nothing here"
            continue
        emitter.copy(out.narrow(dim, start, view.shape[dim]), view)
        start += view.shape[dim]
    return out


def _pad(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    args, value = arguments(node), value_of(node)
    source = emitter.view(args["self"])
    out = emitter.new_value(tuple(value.shape), value.dtype)
    emitter.copy(out, emitter.literal(args["value"], tuple(value.shape), value.dtype))
    inner, pad = out, list(args["pad"])
    for d, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(value.shape) - 1 - d
        skip, trim = max(before, 0), max(-before, 0)
        length = source.shape[dim] + min(before, 0) + min(after, 0)
        inner, source = inner.narrow(dim, skip, length), source.narrow(dim, trim, length)
    emitter.copy(inner, source)
    return out


def _repeat(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    args, value = arguments(node), value_of(node)
    times = list(args["repeats"])
    source = emitter.view(args["self"])
    source = source.reshape((1,) * (len(times) - len(source.shape)) + source.shape)
    wide = [n for pair in zip(times, source.shape, strict=True) for n in pair]
    thin = [n for size in source.shape for n in (1, size)]
    out = emitter.new_value(tuple(value.shape), value.dtype)
    emitter.copy(out.reshape(wide), source.reshape(thin).expand(wide))
    return out


def _replaced(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    """A copy with one slice, or one entry, of a dim replaced: what assigning to ``x[:, 1:3]`` becomes."""
    args = arguments(node)
    out = _copied(emitter, emitter.view(args["self"]))
    dim = args["dim"]
    if "index" in args:
        part = out.select(dim, args["index"])
    else:
        start, stop, step = slice(args["start"], args["end"], args["step"]).indices(out.shape[dim])
        part = out.narrow(dim, start, len(range(start, stop, step)), step)
    emitter.copy(part, emitter.view(args["src"]))
    return out


def _copied(emitter, source: View) -> View:  # type: ignore[no-untyped-def]
    """The values in memory of their own."""
    out = emitter.new_value(source.shape, source.dtype)
    emitter.copy(out, source)
    return out


def _scatter(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    """A copy with ``out[.., places[i], ..] = src[i]``; a place outside is skipped, and reported where somebody is."""
    args = arguments(node)
    places = emitter.in_memory(emitter.view(args["index"]))
    given: Any = args["src"] if "src" in args else args["value"]
    source = emitter.in_memory(emitter.view(given)) if isinstance(given, fx.Node) else None
    out = _copied(emitter, emitter.view(args["self"]))
    dim = args["dim"] % max(len(out.shape), 1)
    if not out.shape:
        raise Unsupported("scatter into a single number is not supported", node)

    def body(names: list[str]) -> list[str]:
        if source is None:
            value = literal(given, out.dtype)
        else:
            value = f"{source.buffer.name}[{index(source.offset, source.strides, names)}]"
        steps = out.strides[:dim] + out.strides[dim + 1 :]
        at = index(out.offset, steps, names[:dim] + names[dim + 1 :])
        return [
            f"const int64_t place = {places.buffer.name}[{index(places.offset, places.strides, names)}];",
            f"const int inside = place >= 0 && place < {out.shape[dim]};",
            *emitter.report_outside("!inside"),
            f"if (inside) {{ {out.buffer.name}[{at} + (int)place * {out.strides[dim]}] = {value}; }}",
        ]

    reads = {places.buffer} | ({source.buffer} if source is not None else set())
    emitter.add_step(Step(loop_nest(places.shape, body), reads, {out.buffer}))
    return out


def _take(  # type: ignore[no-untyped-def]
    emitter, node: fx.Node, source: View, dim: int, places: View, wraps: bool = False
) -> View:
    """``out[a, p, b] = source[a, places[p], b]``; with ``wraps`` a negative place counts from the end."""
    value = value_of(node)
    source, places = emitter.in_memory(source), emitter.in_memory(places)
    dim %= len(source.shape)
    out = emitter.new_value(tuple(value.shape), value.dtype)
    rank = len(places.shape)

    def body(names: list[str]) -> list[str]:
        inside = names[dim : dim + rank]
        others = names[:dim] + names[dim + rank :]
        steps = source.strides[:dim] + source.strides[dim + 1 :]
        position = f"{places.buffer.name}[{index(places.offset, places.strides, inside)}]"
        place = f"{position} < 0 ? {position} + {source.shape[dim]} : {position}" if wraps else position
        return _moved(emitter, out, source, names, place, dim, steps, others)

    emitter.add_step(Step(loop_nest(out.shape, body), {source.buffer, places.buffer}, {out.buffer}))
    return out


def _gather(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    args, value = arguments(node), value_of(node)
    source, places = emitter.in_memory(emitter.view(args["self"])), emitter.in_memory(emitter.view(args["index"]))
    out = emitter.new_value(tuple(value.shape), value.dtype)
    if not source.shape:
        emitter.copy(out, source)
        return out
    dim = args["dim"] % len(source.shape)

    def body(names: list[str]) -> list[str]:
        position = f"{places.buffer.name}[{index(places.offset, places.strides, names)}]"
        others = names[:dim] + names[dim + 1 :]
        steps = source.strides[:dim] + source.strides[dim + 1 :]
        return _moved(emitter, out, source, names, position, dim, steps, others)

    emitter.add_step(Step(loop_nest(out.shape, body), {source.buffer, places.buffer}, {out.buffer}))
    return out


def _moved(  # type: ignore[no-untyped-def]
    emitter, out: View, source: View, names: list[str], place: str, dim: int, steps: tuple[int, ...], others: list[str]
) -> list[str]:
    """One element taken from a computed place; a place outside the source gives NaN or 0, never foreign memory.

    Where somebody is there to raise an error, the emitter's flag is set as well.
    """
    size, stride = source.shape[dim], source.strides[dim]
    missing = literal(float("nan"), torch.float32) if source.dtype.is_floating_point else "0"
    if source.dtype == torch.bool:
        missing = "(unsigned char)0"
    return [
        f"const int64_t place = {place};",
        f"const int inside = place >= 0 && place < {size};",
        *emitter.report_outside("!inside"),
        f"{out.buffer.name}[{index(0, out.strides, names)}] = inside ? "
        f"{source.buffer.name}[{index(source.offset, steps, others)} + (int)place * {stride}] : {missing};",
    ]
