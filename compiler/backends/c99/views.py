"""Operations that only look at their operand another way: no code unless the elements must move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name, value_of
from graphrl.compiler.backends.c99.values import View

__all__ = ["view_of"]

Materialize = Callable[[View], View]


def view_of(node: fx.Node, source: Any, materialize: Materialize) -> View | tuple[View, ...]:
    """The value of a view operation on ``source`` (a :class:`View`, or the tuple that ``getitem`` picks from)."""
    name = op_name(node)
    if name == "getitem":
        return source[node.args[1]]
    return _TABLE[name](node, source, materialize)


def _reshape(node: fx.Node, source: View, materialize: Materialize) -> View:
    shape = tuple(value_of(node).shape)
    view = source.reshape(shape)
    if view is None:
        view = materialize(source).reshape(shape)
        assert view is not None
    return view


def _slice(node: fx.Node, source: View, materialize: Materialize) -> View:
    args = arguments(node)
    size = source.shape[args["dim"]]
    start, _, step = slice(args["start"], args["end"], args["step"]).indices(size)
    return source.narrow(args["dim"], start, value_of(node).shape[args["dim"]], step)


def _split(node: fx.Node, source: View, sizes: Sequence[int]) -> tuple[View, ...]:
    dim = arguments(node)["dim"]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(source.narrow(dim, start, n) for start, n in zip(starts, sizes, strict=True))


def _even_split(node: fx.Node, source: View, materialize: Materialize) -> tuple[View, ...]:
    args = arguments(node)
    total, step = source.shape[args["dim"]], args["split_size"]
    return _split(node, source, [min(step, total - i) for i in range(0, total, step)])


def _transpose(node: fx.Node, source: View, materialize: Materialize) -> View:
    args = arguments(node)
    dims = list(range(len(source.shape)))
    a, b = (args["dim0"], args["dim1"]) if "dim0" in args else (0, len(dims) - 1)
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return source.permute(dims)


def _squeeze(node: fx.Node, source: View, materialize: Materialize) -> View:
    view = source.reshape(tuple(value_of(node).shape))
    if view is None:
        raise Unsupported(f"{op_name(node)} of this layout", node)
    return view


_TABLE: dict[str, Callable[[fx.Node, View, Materialize], View | tuple[View, ...]]] = {
    **dict.fromkeys(("view.default", "_unsafe_view.default", "reshape.default"), _reshape),
    **dict.fromkeys(("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default"), _squeeze),
    **dict.fromkeys(("transpose.int", "t.default"), _transpose),
    **dict.fromkeys(("alias.default", "detach.default", "lift_fresh_copy.default"), lambda n, v, m: v),
    "permute.default": lambda n, v, m: v.permute(arguments(n)["dims"]),
    "expand.default": lambda n, v, m: v.expand(value_of(n).shape),
    "slice.Tensor": _slice,
    "select.int": lambda n, v, m: v.select(arguments(n)["dim"], arguments(n)["index"]),
    "flip.default": lambda n, v, m: v.flip(arguments(n)["dims"]),
    "split_with_sizes.default": lambda n, v, m: _split(n, v, arguments(n)["split_sizes"]),
    "split.Tensor": _even_split,
    "unbind.int": lambda n, v, m: tuple(v.select(arguments(n)["dim"], i) for i in range(v.shape[arguments(n)["dim"]])),
}
