"""Reading and writing at indices in ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from graphrl.compiler.backends.c99.nodes import Unsupported, op_name, value_of

if TYPE_CHECKING:
    from graphrl.compiler.backends.onnx_graph import Writer

__all__ = ["INDEX_HANDLERS"]


def _gather(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dim = args["dim"] % len(value_of(args["self"]).shape)
    w.fixes_batch(node, [dim])
    kind = "GatherElements" if op_name(node).startswith("gather") else "Gather"
    return w.op(kind, w.names[args["self"]], w.names[args["index"]], axis=dim)


def _index(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """One tensor of indices is a Gather; several meet as [..., n] rows, each the place of what is read."""
    dims, indices = _used(w, node, args)
    if len(dims) == 1:
        return w.op("Gather", w.names[args["self"]], indices[0], axis=dims[0])
    rank, shape = len(value_of(args["self"]).shape), _meeting(args)
    rest = [d for d in range(rank) if d not in dims]
    front = w.op("Transpose", w.names[args["self"]], perm=[*dims, *rest])
    found = w.op("GatherND", front, _rows(w, indices, shape))
    n, first = len(shape), dims[0]
    if dims != list(range(first, first + len(dims))) or not first:  # indices apart: their dims come first
        return found
    order = [*range(n, n + first), *range(n), *range(n + first, n + len(rest))]
    return w.op("Transpose", found, perm=order)


def _index_put(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    dims, indices = _used(w, node, args)
    if dims != list(range(len(dims))):
        raise Unsupported("writing at indices of other dims than the first has no ONNX form here", node)
    source, shape = value_of(args["self"]), _meeting(args)
    values = w.op("Expand", w.read(args["values"], source.dtype), w.ints([*shape, *source.shape[len(dims) :]]))
    more: dict[str, Any] = {"reduction": "add"} if args["accumulate"] else {}
    return w.op("ScatterND", w.names[args["self"]], _rows(w, indices, shape), values, **more)


def _used(w: Writer, node: fx.Node, args: dict[str, Any]) -> tuple[list[int], list[str]]:
    """The indexed dims, and their indices' names."""
    used = [(d, i) for d, i in enumerate(args["indices"]) if i is not None]
    if any(i.meta["val"].dtype == torch.bool for _, i in used):
        raise Unsupported("indexing by a mask has no ONNX form here", node)
    w.fixes_batch(node, [0] if len(used) > 1 else [used[0][0]])
    return [d for d, _ in used], [w.names[i] for _, i in used]


def _meeting(args: dict[str, Any]) -> list[int]:
    """The common shape of all indices."""
    return list(torch.broadcast_shapes(*(i.meta["val"].shape for i in args["indices"] if i is not None)))


def _rows(w: Writer, indices: Sequence[str], shape: Sequence[int]) -> str:
    last = w.ints([-1])
    return w.op("Concat", *(w.op("Unsqueeze", w.op("Expand", i, w.ints(shape)), last) for i in indices), axis=-1)


def _scatter(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """``scatter`` and ``scatter_add``: torch reads as much of the source as there are indices."""
    source, shape = value_of(args["self"]), list(value_of(args["index"]).shape)
    dim = args["dim"] % max(len(shape), 1)
    w.fixes_batch(node)
    if "src" in args:
        values = w.names[args["src"]]
        if list(value_of(args["src"]).shape) != shape:
            dims = range(len(shape))
            values = w.op("Slice", values, w.ints([0 for _ in dims]), w.ints(shape), w.ints(dims))
    else:
        values = w.op("Expand", w.number(args["value"], source.dtype), w.ints(shape))
    more: dict[str, Any] = {"reduction": "add"} if op_name(node).startswith("scatter_add") else {}
    return w.op("ScatterElements", w.names[args["self"]], w.names[args["index"]], values, axis=dim, **more)


def _scatter_slice(w: Writer, node: fx.Node, args: dict[str, Any]) -> str:
    """``self`` with a slice, or one position, of a dim replaced."""
    source, name = value_of(args["self"]), w.read(args["src"], value_of(args["self"]).dtype)
    dim = args["dim"] % len(source.shape)
    size = source.shape[dim]
    w.fixes_batch(node)
    if "index" in args:
        name, places = w.op("Unsqueeze", name, w.ints([dim])), [args["index"] % size]
    else:
        places = list(range(*slice(args["start"], args["end"], args["step"]).indices(size)))
    shape = [len(places) if d == dim else n for d, n in enumerate(source.shape)]
    column = np.reshape(np.array(places, np.int64), [-1 if d == dim else 1 for d in range(len(shape))])
    indices = w.op("Expand", w.const(column), w.ints(shape))
    return w.op("ScatterElements", w.names[args["self"]], indices, name, axis=dim)


INDEX_HANDLERS: dict[str, Callable[[Writer, fx.Node, dict[str, Any]], Any]] = {
    **dict.fromkeys(("gather", "index_select"), _gather),
    **dict.fromkeys(("scatter", "scatter_add"), _scatter),
    **dict.fromkeys(("slice_scatter", "select_scatter"), _scatter_slice),
    "index": _index,
    "index_put": _index_put,
    "embedding": lambda w, node, args: w.op("Gather", w.names[args["weight"]], w.names[args["indices"]], axis=0),
}
"""By operation: what writes it, as in ``onnx_ops``."""
