"""Reductions, softmax and layer normalisation: each works on rows of numbers that lie one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from graphrl.compiler.backends.c99.elementwise import literal
from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import indent, index
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name, value_of
from graphrl.compiler.backends.c99.values import View

__all__ = ["REDUCTIONS", "emit_reduction"]

_ROW_VALUE = {
    "sum": "k_sumf(x, {n})",
    "mean": "k_sumf(x, {n}) / {n}.0f",
    "amax": "x[k_arg_maxf(x, {n})]",
    "amin": "x[k_arg_minf(x, {n})]",
    "argmax": "k_arg_maxf(x, {n})",
    "argmin": "k_arg_minf(x, {n})",
    "prod": "k_productf(x, {n})",
    "var": "k_varf(x, {n}, {correction})",
    "linalg_vector_norm": "sqrtf(k_sum_squaresf(x, 0.0f, {n}))",
    "any": "k_any(x, {n})",
    "all": "k_all(x, {n})",
}
"""C expression of one output from its row ``x`` of ``n`` numbers."""

REDUCTIONS = frozenset(
    "sum.dim_IntList sum.default mean.dim mean.default amax.default amin.default argmax.default argmin.default "
    "prod.dim_int prod.default var.correction linalg_vector_norm.default any.dim any.default any.dims "
    "all.dim all.default "
    "max.dim min.dim max.default min.default _softmax.default _log_softmax.default native_layer_norm.default "
    "cumsum.default".split()
)


def emit_reduction(emitter, node: fx.Node) -> View | tuple[View | None, ...]:  # type: ignore[no-untyped-def]
    """Emit a reduction node; returns its value, or values for operations that have several."""
    name = op_name(node).split(".")[0]
    args = arguments(node)
    source = emitter.view(args.get("self", args.get("input")))
    if name == "native_layer_norm":
        return _layer_norm(emitter, node, source)
    if name in ("any", "all"):
        if source.dtype != torch.bool:
            raise Unsupported(f"{op_name(node)} on {source.dtype} is not supported", node)
    elif source.dtype != torch.float32:
        raise Unsupported(f"{op_name(node)} on {source.dtype} is not supported", node)
    if name in ("_softmax", "_log_softmax", "cumsum"):
        return _along_row(emitter, node, name, source, args["dim"])
    dims = _dims(args.get("dim"), len(source.shape))
    if name in ("max", "min"):
        value = _reduce(emitter, node, source, dims, _ROW_VALUE[f"a{name}"], torch.float32)
        if op_name(node).endswith("default"):
            return value
        return value, _reduce(emitter, node, source, dims, _ROW_VALUE[f"arg{name}"], torch.int64)
    if name == "linalg_vector_norm" and args["ord"] != 2:
        raise Unsupported(f"a vector norm of order {args['ord']} is not supported", node)
    return _reduce(emitter, node, source, dims, _ROW_VALUE[name], value_of(node).dtype)


def _dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(rank))
    return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims)) if rank else []


def _rows(emitter, source: View, dims: Sequence[int]) -> tuple[View, tuple[int, ...], int]:  # type: ignore[no-untyped-def]
    """The source as contiguous ``[*kept, n]``, copied only where it lies otherwise; kept shape and ``n``."""
    kept = [d for d in range(len(source.shape)) if d not in dims]
    shape = tuple(source.shape[d] for d in kept)
    n = math.prod(source.shape[d] for d in dims)
    moved = source.permute([*kept, *dims])
    flat = moved.reshape((*shape, n))
    if flat is None or not flat.is_contiguous() or flat.buffer.kind == "literal":
        flat = emitter.materialize(moved).reshape((*shape, n))
    return flat, shape, n


def _over_rows(rows: View, count: int, body: list[str]) -> list[str]:
    kind = "unsigned char" if rows.dtype == torch.bool else "float"
    n = rows.shape[-1]
    start = index(rows.offset, (n if count > 1 else 0,), ("r",))
    lines = [f"const {kind} *const x = {rows.buffer.name}{'' if start == '0' else ' + ' + start};", *body]
    return [f"for (int r = 0; r < {count}; ++r) {{" if count > 1 else "{", *indent(lines), "}"]


def _target(out: View, count: int, n: int) -> tuple[str, list[str]]:
    """The name that row ``r`` of ``out`` is written by, and the line that declares it.

    One row goes by the buffer's own name: static analysers lose sight of what is written through a second one.
    """
    return ("y", [f"float *const y = {out.buffer.name} + r * {n};"]) if count > 1 else (out.buffer.name, [])


def _reduce(emitter, node: fx.Node, source: View, dims: list[int], text: str, dtype: torch.dtype) -> View:  # type: ignore[no-untyped-def]
    rows, kept, n = _rows(emitter, source, dims)
    if n == 0:
        raise Unsupported(f"{op_name(node)} over no elements is not supported", node)
    count = math.prod(kept)
    out = emitter.new_value(kept, dtype)
    correction = arguments(node).get("correction", 1)
    value = text.format(n=n, correction=literal(1 if correction is None else correction, torch.float32))
    at = "r" if count > 1 else "0"
    if count:
        lines = _over_rows(rows, count, [f"{out.buffer.name}[{at}] = {value};"])
        emitter.add_step(Step(lines, {rows.buffer}, {out.buffer}))
    values = node.meta["val"]
    shape = (values[0] if isinstance(values, (tuple, list)) else values).shape
    result = out.reshape(tuple(shape))
    assert result is not None
    return result


def _along_row(emitter, node: fx.Node, name: str, source: View, dim: int) -> View:  # type: ignore[no-untyped-def]
    """Softmax, log-softmax and cumulative sum: one number out for each number in."""
    rank = len(source.shape)
    dim = dim % rank if rank else 0
    rows, kept, n = _rows(emitter, source, [dim] if rank else [])
    count = math.prod(kept)
    out = emitter.new_value((*kept, n), torch.float32)
    y, head = _target(out, count, n)
    if name == "cumsum":
        body = ["float s = 0.0f;", f"for (int i = 0; i < {n}; ++i) {{ s += x[i]; {y}[i] = s; }}"]
    else:
        body = [
            f"const float top = x[k_arg_maxf(x, {n})];",
            f"for (int i = 0; i < {n}; ++i) {{ {y}[i] = k_expf(x[i] - top); }}",
            f"const float s = k_sumf({y}, {n});",
            f"for (int i = 0; i < {n}; ++i) {{ {y}[i] = {y}[i] / s; }}"
            if name == "_softmax"
            else f"const float logs = k_logf(s);\nfor (int i = 0; i < {n}; ++i) {{ {y}[i] = (x[i] - top) - logs; }}",
        ]
        body = [line for text in body for line in text.split("\n")]
    if count and n:
        lines = _over_rows(rows, count, [*head, *body])
        emitter.add_step(Step(lines, {rows.buffer}, {out.buffer}))
    if not rank:
        return out.reshape(())  # type: ignore[return-value]
    order = list(range(rank - 1))
    order.insert(dim, rank - 1)
    return out.permute(order)


def _layer_norm(emitter, node: fx.Node, source: View) -> tuple[View | None, ...]:  # type: ignore[no-untyped-def]
    """(value, mean, reciprocal deviation) of ``(x - mean) / sqrt(var + eps) * weight + bias``."""
    args = arguments(node)
    if source.dtype != torch.float32:
        raise Unsupported(f"native_layer_norm on {source.dtype} is not supported", node)
    inner = len(args["normalized_shape"])
    dims = list(range(len(source.shape) - inner, len(source.shape)))
    rows, kept, n = _rows(emitter, source, dims)
    count = math.prod(kept)
    out = emitter.new_value((*kept, n), torch.float32)
    mean, scale = emitter.new_value(kept, torch.float32), emitter.new_value(kept, torch.float32)
    reads, terms = {rows.buffer}, ["(x[i] - mean) * scale", ""]
    for position, sign in (("weight", " * "), ("bias", " + ")):
        if args[position] is not None:
            view = emitter.unit_stride(emitter.view(args[position]).reshape((n,)) or emitter.view(args[position]))
            reads.add(view.buffer)
            terms[1] += f"{sign}{view.buffer.name}[{index(view.offset, (1,), ('i',))}]"
    at = "r" if count > 1 else "0"
    epsilon = literal(args["eps"], torch.float32)
    y, head = _target(out, count, n)
    body = [
        *head,
        f"const float mean = k_sumf(x, {n}) / {n}.0f;",
        f"const float scale = 1.0f / sqrtf(k_sum_squaresf(x, mean, {n}) / {n}.0f + {epsilon});",
        f"for (int i = 0; i < {n}; ++i) {{ {y}[i] = {''.join(terms)}; }}",
        f"{mean.buffer.name}[{at}] = mean;",
        f"{scale.buffer.name}[{at}] = scale;",
    ]
    if count and n:
        emitter.add_step(Step(_over_rows(rows, count, body), reads, {out.buffer, mean.buffer, scale.buffer}))
    shapes = [v.shape for v in node.meta["val"]]
    return tuple(v.reshape(tuple(s)) for v, s in zip((out, mean, scale), shapes, strict=True))
