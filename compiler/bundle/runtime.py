"""Runs a policy bundle with numpy alone: no torch, no graphrl, no compiler.

This file is complete in itself: copy it beside a bundle, or use the copy inside one.

    policy = Policy.load("policy_bundle")
    policy.reset()                                            # the start of an episode
    action = policy.step({"observation": array})["action"]    # names, shapes and dtypes are checked
    python runtime.py policy_bundle                           # contract, self-test, 1000 timed steps; or a .zip

Every operation names its dtype, by torch's rules (``_common``): numpy 1 and 2 promote numbers differently.
Needs Python 3.9 and numpy 1.22, or newer.
"""
# ruff: noqa: B905 - zip has no strict before Python 3.10

from __future__ import annotations

import difflib
import hashlib
import io
import json
import math
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

__all__ = [
    "OPERATIONS", "Policy", "check_files", "hash_json", "main", "misfit", "read_graph", "read_manifest",
    "read_safetensors",
]  # fmt: skip

NON_FINITE_INPUT, NON_FINITE_OUTPUT, OUT_OF_RANGE, NON_FINITE_STATE = 1, 2, 4, 8
SCHEMA_VERSION = 3
F32, I64 = np.dtype("float32"), np.dtype("int64")


# ---- dtypes


def _promote(a: np.dtype, b: np.dtype) -> np.dtype:
    if (a.kind == "f") != (b.kind == "f"):
        return a if a.kind == "f" else b
    return np.promote_types(a, b)


def _common(*values: Any) -> np.dtype:
    """The dtype torch computes in: tensors decide; single numbers count only where their kind is a higher one."""
    found: list[Any] = [None, None, None]  # of arrays, of arrays without dims, of Python's numbers
    for value in values:
        if isinstance(value, (np.ndarray, np.generic)):
            level, dtype = (0 if value.ndim else 1), value.dtype
        else:
            level = 2
            dtype = np.dtype(bool) if isinstance(value, bool) else I64 if isinstance(value, int) else F32
        found[level] = dtype if found[level] is None else _promote(found[level], dtype)
    rank = {"b": 0, "u": 1, "i": 1, "f": 2}
    result: Any = None
    for dtype in found:
        if dtype is not None and (result is None or rank[dtype.kind] > rank[result.kind]):
            result = dtype
    return result  # type: ignore[no-any-return]


def _float(x: Any) -> Any:
    return x if x.dtype.kind == "f" else x.astype(F32)


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: function(_float(self))


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: function(self) if self.dtype.kind == "f" else self


def _binary(function: Callable[..., Any], lowest: np.dtype | None = None) -> Callable[..., Any]:
    def run(self: Any, other: Any) -> Any:
        dtype = _common(self, other)
        if lowest is not None and dtype.kind != "f":
            dtype = lowest
        return function(np.asarray(self, dtype), np.asarray(other, dtype))

    return run


def _logical(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*(np.asarray(v, bool) for v in values))


def _each(function: Callable[[float], float]) -> Callable[..., Any]:
    """One number at a time, for what numpy lacks."""
    return lambda self: np.array([function(v) for v in _float(self).ravel().tolist()], _float(self).dtype).reshape(
        self.shape
    )


# ---- elementwise operations


def _add(self: Any, other: Any, alpha: Any = 1, sign: int = 1) -> Any:
    dtype = _common(self, other)
    left, right = np.asarray(self, dtype), np.asarray(other, dtype)
    if alpha != 1:
        right = np.multiply(right, dtype.type(alpha))
    return np.add(left, right) if sign > 0 else np.subtract(left, right)


def _divide(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _binary(np.true_divide, F32)(self, other)
    if rounding_mode == "floor":
        return _binary(np.floor_divide)(self, other)
    exact = _binary(lambda a, b: (a - np.fmod(a, b)) // b if a.dtype.kind in "iu" else np.trunc(np.true_divide(a, b)))
    return exact(self, other)


def _power(self: Any, exponent: Any) -> Any:
    dtype = _common(self, exponent)
    base = np.asarray(self, dtype)
    if isinstance(exponent, (int, float)) and exponent in (2, 3):
        return base * base if exponent == 2 else base * base * base
    return np.power(base, np.asarray(exponent, dtype))


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    dtype = _common(*(v for v in (self, min, max) if v is not None))
    result = np.asarray(self, dtype)
    result = result if min is None else np.maximum(result, np.asarray(min, dtype))
    return result if max is None else np.minimum(result, np.asarray(max, dtype))


def _sigmoid(self: Any) -> Any:
    x = _float(self)
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def _sign(self: Any) -> Any:
    return self if self.dtype.kind == "b" else (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


def _elu(self: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    f = self.dtype.type
    return np.where(self > 0, self * f(scale), np.expm1(self * f(input_scale)) * f(alpha * scale))


def _leaky_relu(self: Any, negative_slope: float = 0.01) -> Any:
    return np.where(self > 0, self, self * self.dtype.type(negative_slope))


def _softplus(self: Any, beta: float = 1, threshold: float = 20) -> Any:
    f = self.dtype.type
    scaled = self * f(beta)
    return np.where(scaled > f(threshold), self, np.log1p(np.exp(scaled)) / f(beta))


def _gelu(self: Any, approximate: str = "none") -> Any:
    f = self.dtype.type
    if approximate == "tanh":
        inner = np.tanh((self + self * self * self * f(0.044715)) * f(math.sqrt(2 / math.pi)))
    else:
        inner = _each(math.erf)(self * f(math.sqrt(0.5)))
    return self * f(0.5) * (inner + f(1))


def _where(condition: Any, self: Any, other: Any) -> Any:
    dtype = _common(self, other)
    return np.where(condition, np.asarray(self, dtype), np.asarray(other, dtype))


# ---- shapes and indices


def _slice_of(self: Any, dim: int, where: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % max(self.ndim, 1)) + (where,)


def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return self[_slice_of(self, dim, slice(start, end, step))]


def _slice_scatter(self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    result = self.copy()
    result[_slice_of(self, dim, slice(start, end, step))] = src
    return result


def _select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    result = self.copy()
    result[_slice_of(self, dim, index)] = src
    return result


def _squeeze(self: Any, dim: Any = None) -> Any:
    dims = range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return np.squeeze(self, tuple(d % self.ndim for d in dims if self.shape[d] == 1)) if self.ndim else self


def _expand(self: Any, size: Sequence[int], implicit: bool = False) -> Any:
    lead = len(size) - self.ndim
    return np.broadcast_to(self, [self.shape[i - lead] if n == -1 else n for i, n in enumerate(size)])


def _transpose(self: Any, dim0: int = 0, dim1: int = 1) -> Any:
    return np.swapaxes(self, dim0, dim1) if self.ndim > 1 else self


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    dtype = _common(*tensors)
    return np.concatenate([np.asarray(t, dtype) for t in tensors if t.shape != (0,)] or tensors[:1], dim)


def _split(self: Any, sizes: Any, dim: int = 0) -> list[Any]:
    total = self.shape[dim]
    edges = range(sizes, total, sizes) if isinstance(sizes, int) else np.cumsum(sizes)[:-1]
    return np.split(self, list(edges), dim)


def _pad(self: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """``pad``: before and after, for the last dim first; a negative number cuts off."""
    lead = self.ndim - len(pad) // 2
    pairs = [(0, 0)] * lead + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    cut = tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(self.shape, pairs))
    wide = [(max(a, 0), max(b, 0)) for a, b in pairs]
    return np.pad(self[cut], wide, constant_values=self.dtype.type(value))


def _unfold(self: Any, dimension: int, size: int, step: int) -> Any:
    dimension %= self.ndim
    return _slice(sliding_window_view(self, size, dimension), dimension, None, None, step)


def _places(indices: Sequence[Any]) -> Any:
    return tuple(slice(None) if i is None else i for i in indices)


_MISSING = {"f": np.nan}


def _taken(self: Any, index: Any, axis: int = 0) -> Any:
    """A place outside, of a NaN say, gives NaN or 0, as in the C; the status tells."""
    axis, index = axis % self.ndim, np.asarray(index)
    inside = (index >= 0) & (index < self.shape[axis])
    found = np.take(self, np.where(inside, index, 0), axis)
    inside = inside.reshape(inside.shape + (1,) * (self.ndim - axis - 1))
    return found if inside.all() else np.where(inside, found, _MISSING.get(self.dtype.kind, 0)).astype(self.dtype)


def _index(self: Any, indices: Sequence[Any]) -> Any:
    given = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if len(given) == 1 and given[0][1].dtype.kind == "i":
        axis, i = given[0]
        return _taken(self, np.where(i < 0, i + self.shape[axis], i), axis)
    return self[_places(indices)]


def _index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    result, where = self.copy(), _places(indices)
    if accumulate:
        np.add.at(result, where, values)
    else:
        result[where] = values
    return result


def _grid(self: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """``index`` along ``dim``, and its own positions along the others."""
    grid = list(np.ogrid[tuple(slice(n) for n in index.shape)])
    grid[dim % self.ndim] = index
    return tuple(grid)


def _gather(self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if not self.ndim:
        return self
    inside = (index >= 0) & (index < self.shape[dim])
    found = self[_grid(self, dim, np.where(inside, index, 0))]
    return np.where(inside, found, _MISSING.get(self.dtype.kind, 0)).astype(self.dtype)


def _scatter(self: Any, dim: int, index: Any, src: Any) -> Any:
    result = self.copy()
    result[_grid(self, dim, index)] = src[tuple(map(slice, index.shape))] if np.ndim(src) else src
    return result


def _scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    result = self.copy()
    np.add.at(result, _grid(self, dim, index), src[tuple(map(slice, index.shape))])
    return result


def _filled(number: Any) -> Callable[..., Any]:
    """``full`` and its kin: of a size, or of another array's size and dtype."""

    def run(self: Any, *rest: Any, dtype: Any = None, **_: Any) -> Any:
        like = isinstance(self, (np.ndarray, np.generic))
        values = list(rest)
        size = values.pop(0) if like and values and isinstance(values[0], list) else self.shape if like else self
        value = values[0] if number is None else number
        dtype = dtype or (self.dtype if like else F32 if number is not None else _common(value))
        return np.full(tuple(size), value, dtype)

    return run


def _scalar_tensor(s: Any, dtype: Any = None, **_: Any) -> Any:
    return np.asarray(s, dtype or F32)


def _arange(*bounds: Any, dtype: Any = None, **_: Any) -> Any:
    return np.arange(*bounds, dtype=dtype or _common(*bounds))


# ---- reductions


def _dims(dim: Any, ndim: int) -> Any:
    if dim is None or dim == [] or not ndim:
        return None
    return (dim % ndim,) if isinstance(dim, int) else tuple(d % ndim for d in dim)


def _reduced(function: Callable[..., Any], kind: str = "same") -> Callable[..., Any]:
    """``kind``: "same" keeps the dtype, "sum" makes integers int64, "float" takes floats, "bool" truth values."""

    def run(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        given = dtype or (I64 if kind == "sum" and self.dtype.kind in "bui" else bool if kind == "bool" else self.dtype)
        x = np.asarray(self, given)
        return function(x, axis=_dims(dim, x.ndim), keepdims=keepdim, **({"dtype": given} if kind == "sum" else {}))

    return run


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, dtype=None: function(self, None, False, dtype)


def _index_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        return np.asarray(function(self, axis=dim if self.ndim else None, keepdims=keepdim), I64)

    return run


def _extreme(value: Callable[..., Any], index: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, dim: int, keepdim: bool = False) -> Any:
        return _reduced(value)(self, dim, keepdim), _index_of(index)(self, dim, keepdim)

    return run


def _variance(self: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    axis, correction = _dims(dim, self.ndim), 1 if correction is None else correction
    return np.var(self, axis=axis, ddof=correction, keepdims=keepdim, dtype=self.dtype)


def _variance_and_mean(self: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return _variance(self, dim, correction, keepdim), _reduced(np.mean)(self, dim, keepdim)


def _norm(self: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x, axis = np.abs(np.asarray(self, dtype or self.dtype)), _dims(dim, self.ndim)
    if math.isinf(ord):
        return (np.max if ord > 0 else np.min)(x, axis=axis, keepdims=keepdim)
    if ord in (0, 1):
        return np.sum(x if ord else (x != 0).astype(x.dtype), axis=axis, keepdims=keepdim, dtype=x.dtype)
    total = np.sum(_power(x, float(ord)), axis=axis, keepdims=keepdim, dtype=x.dtype)
    return np.sqrt(total) if ord == 2 else _power(total, 1 / ord)


def _running(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, dim: int, dtype: Any = None) -> Any:
        dtype = dtype or (self.dtype if self.dtype.kind == "f" else I64)
        return function(self, axis=dim, dtype=dtype) if self.ndim else np.asarray(self, dtype)

    return run


def _softmax(self: Any, dim: int, half_to_float: bool = False) -> Any:
    if not self.ndim:
        return np.ones_like(self)
    raised = np.exp(self - np.max(self, axis=dim, keepdims=True))
    return raised / np.sum(raised, axis=dim, keepdims=True, dtype=self.dtype)


def _log_softmax(self: Any, dim: int, half_to_float: bool = False) -> Any:
    if not self.ndim:
        return np.zeros_like(self)
    shifted = self - np.max(self, axis=dim, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=dim, keepdims=True, dtype=self.dtype))


def _sort(self: Any, dim: int = -1, descending: bool = False, **_: Any) -> Any:
    """Stable in both directions: a descending sort is an ascending one of the reversed row, read backwards."""
    if descending:
        order = np.flip(self.shape[dim] - 1 - np.argsort(np.flip(self, dim), axis=dim, kind="stable"), dim)
    else:
        order = np.argsort(self, axis=dim, kind="stable")
    return np.take_along_axis(self, order, dim), order


def _topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return tuple(_slice(part, dim, 0, k) for part in _sort(self, dim, largest))


def _normalized(x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    mean = np.mean(x, axis=axes, keepdims=True, dtype=x.dtype)
    centred = x - mean
    variance = np.mean(centred * centred, axis=axes, keepdims=True, dtype=x.dtype)
    rstd = x.dtype.type(1) / np.sqrt(variance + x.dtype.type(eps))
    return centred * rstd, mean, rstd


def _layer_norm(input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    result, mean, rstd = _normalized(input, tuple(range(-len(normalized_shape), 0)), eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd


def _group_norm(input: Any, weight: Any, bias: Any, n: int, c: int, hw: int, group: int, eps: float) -> Any:
    result, mean, rstd = _normalized(input.reshape(n, group, -1), (-1,), eps)
    result = _per_channel(result.reshape(input.shape), weight, bias)
    return result, mean.reshape(n, group), rstd.reshape(n, group)


def _per_channel(x: Any, weight: Any, bias: Any) -> Any:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float) -> Any:
    rstd = x.dtype.type(1) / np.sqrt(variance + x.dtype.type(eps))
    return (_per_channel(_per_channel(_per_channel(x, None, -mean), rstd, None), weight, bias),)


def _instance_norm(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    result, mean, rstd = _normalized(x, (0, *range(2, x.ndim)), eps)
    return _per_channel(result, weight, bias), mean.reshape(-1), rstd.reshape(-1)


# ---- products and windows


def _addmm(self: Any, mat1: Any, mat2: Any, beta: float = 1, alpha: float = 1) -> Any:
    product = np.matmul(mat1, mat2)
    f = product.dtype.type
    return (self if beta == 1 else self * f(beta)) + (product if alpha == 1 else product * f(alpha))


def _windows(x: Any, sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """[N, C, *in] -> [N, C, *out, *sizes]."""
    rank = len(sizes)
    view: Any = sliding_window_view(x, [d * (k - 1) + 1 for d, k in zip(dilation, sizes)], tuple(range(-rank, 0)))
    return view[(..., *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation))]


def _per_dim(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _convolution(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    rank, x, kernel = weight.ndim - 2, input, weight
    stride, padding, dilation, extra = (_per_dim(v, rank) for v in (stride, padding, dilation, output_padding))
    pairs = [(p, p) for p in padding]
    if transposed:  # the same as a convolution of the input spread out, by the kernel turned round
        x = np.zeros([*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride))], x.dtype)
        places: Any = (..., *(slice(None, None, s) for s in stride))
        x[places] = input
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        pairs = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra)]
        parts = weight.reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
        kernel = np.flip(parts, tuple(range(-rank, 0))).reshape(-1, parts.shape[2], *weight.shape[2:])
        stride = [1] * rank
    view = _windows(_pad(x, [n for pair in pairs[::-1] for n in pair]), kernel.shape[2:], stride, dilation)
    over = ([1, *range(2 + rank, 2 + 2 * rank)], list(range(1, 2 + rank)))
    made = [np.tensordot(v, k, over) for v, k in zip(np.split(view, groups, 1), np.split(kernel, groups))]
    return _per_channel(np.moveaxis(np.concatenate(made, -1), -1, 1), None, bias)


def _pooled(x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, fill: Any) -> Any:
    """Windows [..., *out, *size] over the last dims, ``fill`` outside the input."""
    rank = len(size) if isinstance(size, list) else 2
    size, padding, dilation = _per_dim(size, rank), _per_dim(padding, rank), _per_dim(dilation, rank)
    stride = _per_dim(stride, rank) if stride else size
    pad: list[int] = []
    for n, k, s, p, d in zip(x.shape[-rank:], size, stride, padding, dilation):
        reach = d * (k - 1) + 1
        spare = -(n + 2 * p - reach) % s if ceil else 0
        if spare and n + 2 * p + spare - reach >= n + p:  # a window may not start beyond the input
            spare = 0
        pad = [p, p + spare, *pad]
    return _windows(_pad(x, pad, fill), size, stride, dilation), tuple(range(-rank, 0))


def _max_pool(
    self: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    view, axes = _pooled(self, kernel_size, stride, padding, dilation, ceil_mode, -np.inf)
    return (np.max(view, axis=axes),)  # the positions that torch returns as well have no reader in a policy


def _avg_pool(
    self: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    view, axes = _pooled(self, kernel_size, stride, padding, 1, ceil_mode, 0)
    total = np.sum(view, axis=axes, dtype=self.dtype)
    if divisor_override is not None:
        return total / self.dtype.type(divisor_override)
    counted, inner = np.ones(self.shape[-len(axes) :], self.dtype), padding
    if count_include_pad:
        counted, inner = _pad(counted, [p for p in _per_dim(padding, len(axes))[::-1] for _ in (0, 1)], 1), 0
    view, axes = _pooled(counted, kernel_size, stride or kernel_size, inner, 1, ceil_mode, 0)
    return total / np.sum(view, axis=axes, dtype=self.dtype)


def _adaptive_avg_pool(self: Any, output_size: Sequence[int]) -> Any:
    for axis, n in zip(range(-len(output_size), 0), output_size):
        size = self.shape[axis]
        edges = [(i * size // n, -(-(i + 1) * size // n)) for i in range(n)]
        parts = [_slice(self, axis, a, b) for a, b in edges]
        self = np.stack([np.mean(p, axis=axis, dtype=self.dtype) for p in parts], axis)
    return self


# ---- the table


def _same(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _table(lines: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """``"name overload overload": function``; no overload stands for ``default``."""
    made = {}
    for line, function in lines.items():
        name, *overloads = line.split()
        made.update({f"aten.{name}.{overload}": function for overload in overloads or ["default"]})
    return made


_UNARY: dict[str, Callable[..., Any]] = {name: _unary(getattr(np, function)) for name, function in {
    "tanh": "tanh", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10",
    "log1p": "log1p", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan", "sinh": "sinh", "cosh": "cosh", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite",
}.items()}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {name: _binary(getattr(np, function)) for name, function in {
    "mul Tensor Scalar": "multiply", "maximum": "maximum", "minimum": "minimum", "fmod Tensor Scalar": "fmod",
    "remainder Tensor Scalar Scalar_Tensor": "remainder", "gt Tensor Scalar": "greater", "lt Tensor Scalar": "less",
    "ge Tensor Scalar": "greater_equal", "le Tensor Scalar": "less_equal", "eq Tensor Scalar": "equal",
    "ne Tensor Scalar": "not_equal", "bitwise_and Tensor Scalar": "bitwise_and",
    "bitwise_or Tensor Scalar": "bitwise_or", "bitwise_xor Tensor Scalar": "bitwise_xor",
    "__lshift__ Tensor Scalar": "left_shift", "__rshift__ Tensor Scalar": "right_shift",
}.items()}  # fmt: skip
_FILLED = {"full": None, "full_like": None, "new_full": None, "zeros": 0, "ones": 1, "empty memory_format": 0,
           "zeros_like": 0, "ones_like": 1, "empty_like": 0, "new_zeros": 0, "new_ones": 1}  # fmt: skip
_REDUCED: dict[str, Callable[..., Any]] = {
    "sum dim_IntList": _reduced(np.sum, "sum"), "mean dim": _reduced(np.mean), "amax": _reduced(np.max),
    "amin": _reduced(np.min), "prod dim_int": _reduced(np.prod, "sum"), "any dim dims": _reduced(np.any, "bool"),
    "all dim dims": _reduced(np.all, "bool"), "sum": _whole(_reduced(np.sum, "sum")), "mean": _whole(_reduced(np.mean)),
    "prod": _whole(_reduced(np.prod, "sum")), "any": _whole(_reduced(np.any, "bool")),
    "all": _whole(_reduced(np.all, "bool")), "max": _whole(_reduced(np.max)), "min": _whole(_reduced(np.min)),
    "max dim": _extreme(np.max, np.argmax), "min dim": _extreme(np.min, np.argmin), "argmax": _index_of(np.argmax),
    "argmin": _index_of(np.argmin), "var correction": _variance, "var_mean correction": _variance_and_mean,
    "linalg_vector_norm": _norm, "cumsum": _running(np.cumsum), "cumprod": _running(np.cumprod),
}  # fmt: skip
OPERATIONS: dict[str, Callable[..., Any]] = {"getitem": lambda self, index: self[index], **_table({
    **_UNARY, **_BINARY, **_REDUCED, **{name: _filled(number) for name, number in _FILLED.items()},
    "add Tensor Scalar": _add, "sub Tensor Scalar": lambda self, other, alpha=1: _add(self, other, alpha, -1),
    "rsub Tensor Scalar": lambda self, other, alpha=1: _add(other, self, alpha, -1),
    "div Tensor Scalar Tensor_mode Scalar_mode": _divide, "atan2": _binary(np.arctan2, F32),
    "hypot": _binary(np.hypot), "copysign Tensor Scalar": _binary(np.copysign, F32),
    "pow Tensor_Scalar Tensor_Tensor Scalar": _power, "reciprocal": lambda self: _divide(1.0, self),
    "rsqrt": lambda self: _divide(1.0, np.sqrt(_float(self))), "abs": np.abs, "neg": np.negative, "sign": _sign,
    "floor": _rounding(np.floor), "ceil": _rounding(np.ceil), "trunc": _rounding(np.trunc),
    "round": _rounding(np.rint), "round decimals": lambda self, decimals: np.round(self, decimals),
    "erf": _each(math.erf), "erfc": _each(math.erfc), "signbit": np.signbit, "bitwise_not": np.invert,
    "logical_not": _logical(np.logical_not), "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or), "logical_xor": _logical(np.logical_xor),
    "sigmoid": _sigmoid, "silu": lambda self: self * _sigmoid(self), "relu": lambda self: _clamp(self, 0),
    "elu": _elu, "leaky_relu": _leaky_relu, "softplus": _softplus, "gelu": _gelu,
    "hardtanh": lambda self, min_val=-1, max_val=1: _clamp(self, min_val, max_val), "clamp default Tensor": _clamp,
    "clamp_min default Tensor": _clamp, "clamp_max default Tensor": lambda self, max: _clamp(self, None, max),
    "where self ScalarSelf ScalarOther Scalar": _where,
    "_softmax": _softmax, "_log_softmax": _log_softmax, "sort default stable": _sort, "topk": _topk,
    "alias": _same, "detach": _same, "clone": _same, "lift_fresh_copy": _same,
    "_to_copy": lambda self, dtype=None, **_: np.asarray(self, dtype or self.dtype),
    "copy": lambda self, src, non_blocking=False: np.broadcast_to(np.asarray(src, self.dtype), self.shape),
    "view": np.reshape, "_unsafe_view": np.reshape, "reshape": np.reshape, "permute": np.transpose,
    "transpose int": _transpose, "t": _transpose, "unsqueeze": lambda self, dim: np.expand_dims(self, dim),
    "squeeze default dim dims": _squeeze, "expand": _expand, "cat": _cat, "split_with_sizes": _split,
    "split Tensor": _split, "slice Tensor": _slice, "slice_scatter": _slice_scatter,
    "select int": lambda self, dim, index: self[_slice_of(self, dim, index)], "select_scatter": _select_scatter,
    "unbind int": lambda self, dim=0: list(np.moveaxis(self, dim, 0)), "flip": np.flip,
    "roll": lambda self, shifts, dims=(): np.roll(self, shifts, tuple(dims) or None),
    "repeat": lambda self, repeats: np.tile(self, repeats), "diagonal": np.diagonal,
    "constant_pad_nd": _pad, "unfold": _unfold, "index Tensor": _index, "index_put": _index_put,
    "index_select": lambda self, dim, index: _taken(self, index, dim) if self.ndim else self, "gather": _gather,
    "scatter src value": _scatter, "scatter_add": _scatter_add,
    "embedding": lambda weight, indices, *_: _taken(weight, indices),
    "bucketize Tensor": lambda input, boundaries, out_int32=False, right=False: np.asarray(
        np.searchsorted(boundaries, input, "right" if right else "left"), "int32" if out_int32 else I64),
    "scalar_tensor": _scalar_tensor, "arange default start start_step": _arange,
    "mm": np.matmul, "bmm": np.matmul, "mv": np.matmul, "dot": np.dot, "matmul": np.matmul, "addmm": _addmm,
    "addmv": _addmm, "baddbmm": _addmm, "native_layer_norm": _layer_norm, "native_group_norm": _group_norm,
    "_native_batch_norm_legit_no_training": _batch_norm, "_native_batch_norm_legit no_stats": _instance_norm,
    "convolution": _convolution, "max_pool2d_with_indices": _max_pool, "max_pool3d_with_indices": _max_pool,
    "avg_pool1d": _avg_pool, "avg_pool2d": _avg_pool, "avg_pool3d": _avg_pool,
    "_adaptive_avg_pool2d": _adaptive_avg_pool, "_adaptive_avg_pool3d": _adaptive_avg_pool,
})}  # fmt: skip
"""What each operation of a ``graph.json`` computes, called with ATen's own arguments."""


# ---- the files


def read_safetensors(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors by name, and the metadata. Raises ``ValueError`` where a length, shape or offset is not sound."""
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
             "U8": "|u1", "BOOL": "|b1"}  # fmt: skip
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError(f"weights: a header of {size} bytes in a file of {len(data)}")
    try:
        header = json.loads(data[8 : 8 + size].decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"weights: the header is damaged: {error}") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    entry_kinds = {"dtype": str, "shape": [int], "data_offsets": [int]}
    problem = misfit(header, {str: entry_kinds}) or misfit(metadata, {str: str}, "__metadata__")
    if problem or any(len(e["data_offsets"]) != 2 for e in header.values()):
        raise ValueError(f"weights: the header is damaged: {problem or 'data_offsets are no pair'}")
    body, tensors, end = data[8 + size :], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if entry["dtype"] not in kinds:
            raise ValueError(f"weights: {name!r} is {entry['dtype']}; numpy has {', '.join(kinds)}")
        dtype = np.dtype(kinds[entry["dtype"]])
        if min(*shape, start, stop) < 0:
            raise ValueError(f"weights: {name!r} has shape {shape} at {start}:{stop}")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > len(body):
            raise ValueError(f"weights: {name!r}, {entry['dtype']}{shape}, does not fit bytes {start} to {stop} of "
                             f"{len(body)}, where the one before ends at {end}")  # fmt: skip
        end = stop
        tensors[name] = (
            np.frombuffer(body, dtype, math.prod(shape), start).astype(dtype.newbyteorder("=")).reshape(shape)
        )
    if end != len(body):
        raise ValueError(f"weights: {len(body) - end} bytes belong to no tensor")
    return tensors, metadata


LARGEST = 1 << 30
"""Bytes that a ``.zip`` may unpack to, unless it takes a quarter of them itself."""


class _Files:
    """The files of a bundle by name: those of a folder, or of a ``.zip``, which is read into memory."""

    def __init__(self, bundle: str | Path) -> None:
        self.where, self._archive = Path(bundle), None
        if self.where.is_file():
            try:
                self._archive = zipfile.ZipFile(io.BytesIO(self.where.read_bytes()))
            except zipfile.BadZipFile as error:
                raise ValueError(f"{self.where} is no bundle: {error}") from None
            size = sum(e.file_size for e in self._archive.infolist())
            if size > max(LARGEST, 4 * self.where.stat().st_size):
                raise ValueError(f"{self.where} unpacks to {size} bytes: more than {LARGEST}, and than four times it")

    def names(self) -> list[str]:
        if self._archive is not None:
            return self._archive.namelist()
        found = [p for p in sorted(self.where.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
        return [p.relative_to(self.where).as_posix() for p in found]

    def read(self, name: str) -> bytes:
        """Raises ``OSError`` for a file that is not there, ``ValueError`` for a damaged archive."""
        if self._archive is None:
            return (self.where / name).read_bytes()
        try:
            return self._archive.read(name)
        except KeyError:
            raise FileNotFoundError(2, "not in the archive", name) from None
        except (zipfile.BadZipFile, NotImplementedError, zlib.error) as error:
            raise ValueError(f"{self.where} is damaged: {error}") from None

    def checked(self, name: str, wanted: str | None) -> bytes:
        """The bytes of a file whose SHA-256 is ``wanted``."""
        try:
            data = self.read(name)
        except OSError as error:
            raise ValueError(f"{self.where / name} is missing: the manifest lists it ({error.strerror})") from None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise ValueError(f"{self.where / name} was changed or damaged: its SHA-256 is not the manifest's")
        return data


def _opened(bundle: str | Path | _Files) -> _Files:
    return bundle if isinstance(bundle, _Files) else _Files(bundle)


def check_files(bundle: str | Path) -> int:
    """Compare every file with the manifest; returns how many there are. Raises ``ValueError`` naming the first."""
    files = _opened(bundle)
    listed, present = read_manifest(files)["files"], files.names()
    for name, wanted in listed.items():
        files.checked(name, wanted)
    for name in present:
        if name != "manifest.json" and name not in listed:
            raise ValueError(f"{files.where / name} does not belong to this bundle: the manifest does not list it")
        if present.count(name) > 1:
            raise ValueError(f"{files.where} holds {name!r} twice")
    return len(listed)


_PORT = {"key": str, "shape": [int], "dtype": str}
_MANIFEST: dict[str, Any] = {
    "schema_version": int, "contract": dict, "contract_hash": str, "program_hash": str, "weight_hash": str,
    "inputs": [_PORT], "outputs": [_PORT], "targets": [str], "tolerance": float, "files": {str: str},
}  # fmt: skip
"""What a manifest holds, as :func:`misfit` reads it."""
_SLOT = {"name": str, "shape": [int], "dtype": str}
_NODE = {"name": str, "op": str, "args": list, "kwargs": dict}
_GRAPH = {"inputs": [_PORT], "outputs": [_PORT], "state": [_SLOT], "placeholders": [str], "nodes": [_NODE]}


def misfit(value: Any, wanted: Any, place: str = "it") -> str | None:
    """Where a value is not what ``wanted`` says: a type, ``[kind]``, ``{str: kind}`` or a dict of kinds by key."""
    if isinstance(wanted, type):
        fits = isinstance(value, (int, float) if wanted is float else wanted) and not isinstance(value, bool)
        return None if fits else f"{place} is {json.dumps(value)[:60]}, expected {wanted.__name__}"
    if not isinstance(value, type(wanted)):
        return f"{place} is {json.dumps(value)[:60]}, expected {type(wanted).__name__}"
    if isinstance(wanted, list):
        parts = [(f"{place}[{i}]", v, wanted[0]) for i, v in enumerate(value)]
    else:
        every = wanted.get(str)
        lacking = [] if every else [k for k in wanted if k not in value]
        if lacking:
            return f"{place} lacks {lacking}"
        parts = [(k, v, every or wanted[k]) for k, v in value.items() if every or k in wanted]
    return next((found for name, v, kind in parts if (found := misfit(v, kind, name))), None)


def read_manifest(bundle: str | Path | _Files) -> dict[str, Any]:
    """A bundle's manifest. Raises ``ValueError`` where it is not there, damaged, changed, or of another schema."""
    files = _opened(bundle)
    file = files.where / "manifest.json"
    try:
        manifest = json.loads(files.read("manifest.json"))
    except OSError as error:
        raise ValueError(f"{files.where} is no bundle: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    version = manifest.get("schema_version", SCHEMA_VERSION) if isinstance(manifest, dict) else SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        raise ValueError(f"{files.where} has schema version {version}, this runtime reads {SCHEMA_VERSION}")
    if problem := misfit(manifest, _MANIFEST):
        raise ValueError(f"{file} is damaged: {problem}")
    if hash_json(manifest["contract"]) != manifest["contract_hash"]:
        raise ValueError(f"{file}: the contract is not the one its hash was made of")
    rest = {name: value for name, value in manifest.items() if name != "manifest_hash"}
    if hash_json(rest) != manifest.get("manifest_hash"):
        raise ValueError(f"{file} was changed: it is not the one its manifest_hash was made of")
    return manifest  # type: ignore[no-any-return]


def read_graph(bundle: str | Path | _Files, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle's ``graph.json``. Raises ``ValueError`` where it is changed, damaged or of another policy."""
    files = _opened(bundle)
    place = files.where / "graph.json"
    try:
        data = json.loads(files.checked("graph.json", manifest["program_hash"]))
    except RecursionError as error:
        raise ValueError(f"{place} is damaged: {error}") from None
    if problem := misfit(data, _GRAPH):
        raise ValueError(f"{place} is damaged: {problem}")
    if any(data[side] != manifest[side] for side in ("inputs", "outputs")):
        raise ValueError(f"{place} has other inputs or outputs than the manifest")
    return data  # type: ignore[no-any-return]


def hash_json(data: Any) -> str:
    """SHA-256 of plain data, written with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---- running a graph


class _Slot(int):
    """Where a value of a node is kept during a run."""


class _Graph:
    """The operations of a ``graph.json``; what depends on weights alone is computed once, here."""

    def __init__(self, data: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        unknown = sorted({n["op"] for n in data["nodes"] if n["op"] not in OPERATIONS and n["op"] != "output"})
        if unknown:
            raise ValueError(f"this runtime has no {', '.join(unknown)}: run the bundle's C or ONNX")
        self.inputs, self.outputs = data["inputs"], data["outputs"]
        known = [np.zeros(p["shape"], p["dtype"]) for p in self.inputs]
        for slot in data["state"]:
            tensor = tensors.get(slot["name"])
            if tensor is None or list(tensor.shape) != slot["shape"] or tensor.dtype.name != slot["dtype"]:
                found = "missing" if tensor is None else f"{tensor.dtype.name}{list(tensor.shape)}"
                raise ValueError(f"weight {slot['name']!r} is {found}, expected {slot['dtype']}{slot['shape']}")
            known.append(tensor)
        self._slots = {name: _Slot(i) for i, name in enumerate(data["placeholders"])}
        self._values: list[Any] = known
        self._steps: list[tuple[_Slot, Callable[..., Any], list[Any], dict[str, Any]]] = []
        varying = set(range(len(self.inputs)))
        with np.errstate(all="ignore"):
            for node in data["nodes"]:
                self._add(node, varying)
        self._values = [None if i in varying else v for i, v in enumerate(self._values)]
        if len(self._returned) != len(self.outputs) or not all(type(v) is _Slot for v in self._returned):
            raise ValueError(f"the graph returns {len(self._returned)} values, expected {len(self.outputs)} of its own")

    def _add(self, node: Mapping[str, Any], varying: set[int]) -> None:
        """Plan one node, and try it on zeros: a shape or dtype that is not the graph's is found now."""
        reads: set[int] = set()
        args = self._decode(node["args"], reads)
        kwargs = {name: self._decode(value, reads) for name, value in node["kwargs"].items()}  # one is called "dtype"
        if node["op"] == "output":
            self._returned = args[0]
            return
        place, function = _Slot(len(self._values)), OPERATIONS[node["op"]]
        self._slots[node["name"]] = place
        try:
            value = function(*_filled_in(args, self._values), **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{node['op']} at node {node['name']!r} cannot run here: {error}") from error
        if not isinstance(value, (tuple, list)):
            found, wanted = f"{value.dtype.name}{list(value.shape)}", f"{node['dtype']}{node['shape']}"
            if found != wanted:
                raise ValueError(f"{node['op']} at node {node['name']!r} gives {found}, the graph says {wanted}")
        self._values.append(value)
        if reads & varying:
            varying.add(place)
            self._steps.append((place, function, args, kwargs))

    def _decode(self, value: Any, reads: set[int]) -> Any:
        if isinstance(value, list):
            return [self._decode(v, reads) for v in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"node"}:
            reads.add(self._slots[value["node"]])
            return self._slots[value["node"]]
        if set(value) == {"dtype"}:
            return np.dtype(value["dtype"])
        return None  # a device, a layout, a memory format

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs for inputs in the graph's order."""
        values = [*inputs, *self._values[len(inputs) :]]
        with np.errstate(all="ignore"):
            for place, function, args, kwargs in self._steps:
                values[place] = function(
                    *_filled_in(args, values), **(_filled_in(kwargs, values) if kwargs else kwargs)
                )
        return [np.array(values[place]) for place in self._returned]


def _filled_in(value: Any, values: Sequence[Any]) -> Any:
    if type(value) is _Slot:
        return values[value]
    if type(value) is list:
        return [values[v] if type(v) is _Slot else _filled_in(v, values) if type(v) is list else v for v in value]
    return value


class Policy:
    """A bundle's policy with its recurrent state: ``reset`` at the start of an episode, then ``step`` by ``step``.

    ``status`` of the last step: 1 non-finite observation, 2 non-finite output, 4 an observation beyond the contract's
    low or high, 8 non-finite state: reset before the next step. The action is computed either way. ``contract``: plain
    data, ``None`` where nothing is known.
    """

    def __init__(self, files: _Files, manifest: dict[str, Any], graph: _Graph) -> None:
        self._files, self.manifest, self._graph = files, manifest, graph
        self.contract: dict[str, Any] = manifest["contract"]
        self.status = 0
        self._carry = {s["key"]: s["next_key"] for s in self.contract["recurrent"] or ()}
        self._initial = {s["key"]: s["initial"] for s in self.contract["recurrent"] or ()}
        self._flags = first_step_flags(self.contract)
        self._ports = {p["key"]: p for p in graph.inputs}
        self._terms = {t["key"]: t for t in self.contract["observations"] or ()}
        self.observations = [key for key in self._ports if key not in self._carry]
        self.reset()

    @classmethod
    def load(cls, bundle: str | Path) -> Policy:
        """Open a bundle, a folder or a ``.zip``.

        Raises ``ValueError``: a file missing, changed or of another bundle; an operation that this runtime lacks.
        """
        files = _Files(bundle)
        manifest = read_manifest(files)
        data = read_graph(files, manifest)
        file = "weights.safetensors"
        tensors, metadata = read_safetensors(files.checked(file, manifest["weight_hash"]))
        for name, found in (("graph.json", data), (file, metadata)):
            if found.get("contract_hash") != manifest["contract_hash"]:
                raise ValueError(f"{files.where / name} belongs to another contract")
        try:
            return cls(files, manifest, _Graph(data, tensors))
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{files.where / 'graph.json'} is damaged: {error!r}") from error

    @property
    def state(self) -> dict[str, np.ndarray]:
        """A copy of the recurrent values the next step reads, by key."""
        return {key: value.copy() for key, value in self._state.items()}

    def reset(self, state: Mapping[str, Any] | None = None) -> None:
        """Start an episode: recurrent values as the contract puts them, or as given in ``state``.

        With ``state`` the next step goes on from it: it is no first step, on which the policy would begin by itself.
        """
        self._check_names(state or {}, list(self._carry), [], "state")
        self._state = {key: start_of(value, self._ports[key]) for key, value in self._initial.items()}
        if state:
            self._state.update({key: np.zeros_like(self._state[key]) for key in self._flags})
        self._state.update({key: self._take(key, value) for key, value in (state or {}).items()})

    def step(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The action, and what else the policy writes, for one observation: arrays by key, without the batch dim of 1.

        An entry may be a dict by the contract's names for it. Raises ``ValueError`` for a name, shape or dtype that
        does not fit.
        """
        self._check_names(observation, self.observations, self.observations, "observation")
        given = {key: self._take(key, observation[key]) for key in self.observations}
        read = {**given, **self._state}
        result = dict(zip((p["key"] for p in self._graph.outputs), self._graph.run([read[k] for k in self._ports])))
        following = {key: result[after] for key, after in self._carry.items()}
        result = {key: value for key, value in result.items() if key not in self._carry.values()}
        self.status = self._status(given, result, [*self._state.values(), *following.values()])
        self._state = following
        return {key: _row(value) for key, value in result.items()}

    def run_row(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The program itself: every input in the manifest's order, recurrent values among them, to every output."""
        return self._graph.run(inputs)

    def selftest(self) -> float:
        """Replay the golden vectors; the largest error, relative to each output's usual size. Resets the policy.

        Raises ``ValueError`` beyond the manifest's tolerance, naming row and output.
        """
        data = self._files.checked("golden.npz", self.manifest["files"].get("golden.npz"))
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                golden = {name: file[name] for name in file.files}
            return self._replay(golden)
        except (AttributeError, EOFError, LookupError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self._files.where / 'golden.npz'} is damaged: {error!r}") from error

    def _replay(self, golden: Mapping[str, Any]) -> float:
        if str(golden["contract_hash"]) != self.manifest["contract_hash"]:
            raise ValueError(f"{self._files.where / 'golden.npz'} belongs to another contract")
        if not len(golden["kind"]):
            raise ValueError(f"{self._files.where / 'golden.npz'} holds no row")
        worst = 0.0
        for row in range(len(golden["kind"])):
            found = self.run_row([golden[f"in/{p['key']}"][row] for p in self._graph.inputs])
            for port, value in zip(self._graph.outputs, found):
                worst = max(
                    worst, self._error(golden, f"row {row}", port["key"], value, golden[f"out/{port['key']}"][row])
                )
        for t, start in enumerate(golden.get("sequence/reset", ())):
            if start:
                self.reset()
            for key, value in self.step({k: golden[f"sequence/in/{k}"][t] for k in self.observations}).items():
                wanted = golden[f"sequence/out/{key}"][t]
                worst = max(worst, self._error(golden, f"step {t} of the sequence", key, value, wanted))
        self.reset()
        return worst

    def _error(self, golden: Mapping[str, Any], where: str, key: str, found: Any, wanted: Any) -> float:
        """Of one output, relative to the larger of its usual size and the row's own; a discrete one counts as 1."""
        size = max(float(golden[f"scale/{key}"]), float(np.abs(wanted).max(initial=0.0)))
        error = np.abs(found.reshape(wanted.shape).astype(np.float64) - wanted).max(initial=0.0)
        error = float(error) / (size if wanted.dtype.kind == "f" else 1.0)
        if not error <= self.manifest["tolerance"]:
            raise ValueError(f"{self._files.where}: {key!r} is off by {error:.2e} of its scale on golden {where}; "
                             f"{self.manifest['tolerance']:.0e} is allowed")  # fmt: skip
        return error

    def _check_names(self, given: Any, known: Sequence[str], needed: Iterable[str], what: str) -> None:
        if not isinstance(given, Mapping):
            raise ValueError(f"the {what} is a {type(given).__name__}; expected a dict with {list(known)}")
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"this policy has no {what} {key!r}; it reads {list(known)}.{hint}")
        for key in needed:
            if key not in given:
                raise ValueError(f"{what} {key!r} is missing: this policy reads {list(known)}, got {list(given)}")

    def _take(self, key: str, value: Any) -> np.ndarray:
        """One input in the graph's shape and dtype: any real numbers become float32, once; floats never integers."""
        port = self._ports[key]
        if isinstance(value, Mapping):
            names = self._terms.get(key, {}).get("names")
            if names is None:
                raise ValueError(f"{key!r} is a dict, but the contract has no names for its entries: pass an array")
            self._check_names(value, names, names, f"entry of {key!r}")
            value = [value[name] for name in names]
        if value is None:
            raise ValueError(f"{key!r} is None: no reading came? Expected an array of shape {port['shape'][1:]}")
        array, shape = np.asarray(value), tuple(port["shape"])
        if array.shape not in (shape, shape[1:] if shape[:1] == (1,) else shape):
            raise ValueError(f"{key!r} has shape {array.shape}, expected {shape[1:] if shape[:1] == (1,) else shape}")
        if array.dtype.kind not in ("fiub" if port["dtype"].startswith("float") else "iub"):
            raise ValueError(f"{key!r} is {array.dtype}, expected {port['dtype']}")
        with np.errstate(all="ignore"):
            taken = array.reshape(shape).astype(port["dtype"])
        if taken.dtype.kind != "f" and (taken != array.reshape(shape)).any():
            raise ValueError(f"{key!r} holds {array.min()} to {array.max()}, more than a {port['dtype']} can")
        return taken

    def _status(
        self, given: Mapping[str, np.ndarray], result: Mapping[str, np.ndarray], state: Sequence[np.ndarray]
    ) -> int:
        status, groups = 0, (given.values(), result.values(), state)
        for values, bit in zip(groups, (NON_FINITE_INPUT, NON_FINITE_OUTPUT, NON_FINITE_STATE)):
            if not all(np.isfinite(v).all() for v in values):
                status |= bit
        for key, term in self._terms.items():
            x = given[key].reshape(-1)
            if x.dtype.kind != "f":  # as in C
                continue
            for bound, sign in (("low", 1), ("high", -1)):
                if term[bound] is not None:  # null for an entry without: NaN, which nothing is below
                    limit = np.array([math.nan if v is None else v for v in term[bound]], x.dtype)
                    status |= OUT_OF_RANGE if (sign * x < sign * limit).any() else 0
        return status


def start_of(initial: Any, port: Mapping[str, Any]) -> np.ndarray:
    """A state as an episode starts with it: one number for all entries, or each of them."""
    value = np.asarray(initial, port["dtype"])
    return np.broadcast_to(value.reshape(port["shape"]) if value.ndim else value, port["shape"]).copy()


def first_step_flags(contract: Mapping[str, Any]) -> list[str]:
    """The states that are true on an episode's first step alone."""
    return [s["key"] for s in contract["recurrent"] or () if s["reset_rule"] == "first step"]


def _row(value: np.ndarray) -> np.ndarray:
    return value[0] if value.ndim > 1 and value.shape[0] == 1 else value


def main(arguments: Sequence[str]) -> int:
    """Print a bundle's contract, run its self-test, time 1000 steps; the exit status, 1 where something fails."""
    where = Path(arguments[0] if arguments else Path(__file__).parent)
    try:
        files = check_files(where)
        policy = Policy.load(where)
        for name, value in policy.contract.items():
            print(f"{name}: {json.dumps(value)}")
        print(f"{files} files intact; self-test: largest error {policy.selftest():.1e} of the output's scale")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    row = {k: np.zeros(policy._ports[k]["shape"], policy._ports[k]["dtype"]) for k in policy.observations}
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        policy.step(row)
        times.append(1e6 * (time.perf_counter() - start))
    print(f"1000 steps: p50 {np.percentile(times, 50):.0f} us, p99 {np.percentile(times, 99):.0f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
