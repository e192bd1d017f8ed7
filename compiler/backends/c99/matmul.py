"""Matrix products. Three loops, chosen by where the weights lie in memory.

*packed*: constant weights, stored input-major in panels of columns. ``acc += x[i] * w[i, :]`` keeps a panel of sums in
registers and vectorises under strict IEEE rules, because no sum is reordered.
*dot*: weights by pointer in PyTorch's [out, in] order, read where they lie; several outputs at once share each ``x``.
*rows*: weights by pointer, contiguous in the outputs: the packed loop without the packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.c99.elementwise import literal
from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import indent, index
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name, value_of
from graphrl.compiler.backends.c99.values import View

__all__ = ["MATMULS", "emit_matmul"]

PANEL = 64
"""Columns of a panel: 4 AVX-512 or 8 AVX2 registers of sums."""

MATMULS = frozenset(("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "mv.default", "addmv.default",
                     "dot.default"))  # fmt: skip


@dataclass(frozen=True)
class _Product:
    """``out[b, m, n] = bias + sum_k x[b, m, k] w[b, k, n]``; every view has these dims."""

    x: View
    w: View
    bias: View | None
    out: View

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        b, m, k = self.x.shape
        return b, m, k, self.w.shape[2]

    def store(self, value: str, m: str, n: str) -> str:
        """The statement that adds the bias and stores output ``[b, m, n]``."""
        where = ["b", m, n]
        bias = self.bias
        if bias is not None and bias.buffer.kind != "literal":
            value = f"{value} + {bias.buffer.name}[{index(bias.offset, _steps(bias), where)}]"
        elif bias is not None:
            value = f"{value} + {literal(bias.buffer.literal, torch.float32)}"
        return f"{self.out.buffer.name}[{index(self.out.offset, _steps(self.out), where)}] = {value};"


def emit_matmul(emitter, node: fx.Node) -> View:  # type: ignore[no-untyped-def]
    """Emit a matrix product node; returns its value."""
    product = _as_product(emitter, node)
    b, m, k, n = product.sizes
    if 0 in (b, m, n):
        return _result(product, node)
    if product.w.buffer.kind == "constant":
        lines, reads = _packed(emitter, product), {product.x.buffer}
    elif product.w.strides[1] == 1 and k > 1 and n > 1 or (n == 1 and product.w.strides[1] == 1):
        product = _replace_x(product, emitter.unit_stride(product.x))
        lines, reads = _dot(product), {product.x.buffer, product.w.buffer}
    else:
        w = product.w if product.w.strides[2] == 1 else emitter.materialize(product.w)
        product = _Product(product.x, w, product.bias, product.out)
        lines, reads = _rows(product), {product.x.buffer, w.buffer}
    reads |= {product.bias.buffer} if product.bias is not None else set()
    if b > 1:
        lines = [f"for (int b = 0; b < {b}; ++b) {{", *indent(lines), "}"]
    emitter.add_step(Step(lines, reads, {product.out.buffer}))
    return _result(product, node)


def _result(product: _Product, node: fx.Node) -> View:
    view = product.out.reshape(tuple(value_of(node).shape))
    assert view is not None
    return view


def _as_product(emitter, node: fx.Node) -> _Product:  # type: ignore[no-untyped-def]
    name, args = op_name(node), arguments(node)
    if value_of(node).dtype != torch.float32:
        raise Unsupported(f"{name} in {value_of(node).dtype} is not supported, generated C computes in float32", node)
    if args.get("beta", 1) != 1 or args.get("alpha", 1) != 1:
        raise Unsupported(f"{name} with alpha or beta other than 1 is not supported", node)
    left = next(
        args[key]
        for key in ("batch1", "mat1", "mat", "self", "tensor")
        if key in args and (key != "self" or not name.startswith(("addmm", "addmv", "baddbmm")))
    )
    right = next(args[key] for key in ("batch2", "mat2", "vec2", "vec", "tensor") if key in args)
    x, w = emitter.view(left), emitter.view(right)
    if len(w.shape) == 1:
        w = _insert(w, 1)
    if len(x.shape) == 1:
        x = _insert(x, 0)
    if len(x.shape) == 2:
        x, w = _insert(x, 0), _insert(w, 0)
    if x.buffer.kind == "literal":
        x = emitter.materialize(x)
    if w.buffer.kind == "literal":
        w = emitter.materialize(w)
    shape = (x.shape[0], x.shape[1], w.shape[2])
    bias = None
    if name.startswith("add") or name.startswith("baddbmm"):
        bias = emitter.view(args["self"])
        bias = _insert(bias, len(bias.shape)) if name.startswith("addmv") else bias
        bias = bias.expand(shape)
    return _Product(x, w, bias, emitter.new_value(shape, torch.float32))


def _insert(view: View, dim: int) -> View:
    return View(view.buffer, (*view.shape[:dim], 1, *view.shape[dim:]), (*view.strides[:dim], 0, *view.strides[dim:]),
                view.offset)  # fmt: skip


def _replace_x(product: _Product, x: View) -> _Product:
    return _Product(x, product.w, product.bias, product.out)


def _steps(view: View) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True))


def _over_rows(product: _Product, body: list[str]) -> list[str]:
    m = product.sizes[1]
    if m == 1:
        return body
    return [f"for (int m = 0; m < {m}; ++m) {{", *indent(body), "}"]


def _row(product: _Product) -> str:
    """Declaration of ``x``, the row of inputs at ``b, m``."""
    m = "m" if product.sizes[1] > 1 else "0"
    x = product.x
    return f"const float *const x = {_at(x.buffer.name, index(x.offset, _steps(x)[:2], ['b', m]))};"


def _at(name: str, where: str) -> str:
    return name if where == "0" else f"{name} + {where}"


# ---- constant weights


def _packed(emitter, product: _Product) -> list[str]:  # type: ignore[no-untyped-def]
    b, _, k, n = product.sizes
    weights = product.w.as_torch()
    panels = [(c, min(PANEL, n - c), min(PANEL, -(-(n - c) // 8) * 8)) for c in range(0, n, PANEL)]
    table = emitter.constant(_pack(weights, panels))
    per_batch = sum(k * padded for _, _, padded in panels)
    lines = [_row(product)]
    full = [p for p in panels if p[1] == PANEL]
    steps = [(0, len(full), PANEL, PANEL)] if full else []
    steps += [(c, 1, valid, padded) for c, valid, padded in panels if valid < PANEL]
    for column, count, valid, padded in steps:
        start = index(column * k, (per_batch if b > 1 else 0, k * PANEL if count > 1 else 0), ("b", "p"))
        body = [
            f"const float *const w = {_at(table.name, start)};",
            *_panel(product, column, valid, padded, padded, count),
        ]
        head = f"for (int p = 0; p < {count}; ++p) {{" if count > 1 else "{"
        lines += [head, *indent(body), "}"]
    return _scope(_over_rows(product, lines), product)


def _scope(lines: list[str], product: _Product) -> list[str]:
    return lines if product.sizes[1] > 1 else ["{", *indent(lines), "}"]


def _pack(weights: Tensor, panels: list[tuple[int, int, int]]) -> Tensor:
    """[B, K, N] weights as one flat table: a panel after another, each [K, padded] with zeros in the padding."""
    parts = []
    for batch in weights:
        for column, valid, padded in panels:
            block = torch.zeros(batch.shape[0], padded)
            block[:, :valid] = batch[:, column : column + valid]
            parts.append(block.reshape(-1))
    return torch.cat(parts)


def _panel(product: _Product, column: int, valid: int, width: int, stride: int, count: int) -> list[str]:
    """Sums of one panel of ``width`` columns, weights at ``w`` with ``stride`` between inputs; narrow panels keep
    several partial sums, since one chain of additions would wait on itself."""
    k = product.sizes[2]
    step = product.x.strides[2] if k > 1 else 1
    parts = 1 if width > 32 or k < 8 else 2 if width > 16 else 4
    total = parts * width
    lines = [f"float acc[{total}];", f"for (int j = 0; j < {total}; ++j) {{ acc[j] = 0.0f; }}"]

    def update(i: str, part: int) -> list[str]:
        here = f"{part * width} + j" if part else "j"
        return [
            f"const float xi = x[{index(0, (step,), (i,))}];",
            f"for (int j = 0; j < {width}; ++j) {{ acc[{here}] += xi * w[{i} * {stride} + j]; }}",
        ]

    main = k - k % parts
    if parts == 1:
        lines += [f"for (int i = 0; i < {main}; ++i) {{", *indent(update("i", 0)), "}"]
    else:
        blocks = [["{", *indent(update(f"(i + {q})" if q else "i", q)), "}"] for q in range(parts)]
        lines += [f"for (int i = 0; i < {main}; i += {parts}) {{", *indent(sum(blocks, [])), "}"]
    for i in range(main, k):
        lines += ["{", *indent(update(str(i), 0)), "}"]
    value = " + ".join(f"acc[{p * width} + j]" if p else "acc[j]" for p in range(parts))
    m = "m" if product.sizes[1] > 1 else "0"
    n = "j" if column == 0 and count == 1 else f"({column} + p * {PANEL} + j)" if count > 1 else f"({column} + j)"
    value = f"({value})" if parts > 1 else value
    lines.append(f"for (int j = 0; j < {valid}; ++j) {{ {product.store(value, m, n)} }}")
    return lines


# ---- weights by pointer


def _rows(product: _Product) -> list[str]:
    _, _, k, n = product.sizes
    w = product.w
    lines = [_row(product)]
    full = n // PANEL
    for column, count, width in ((0, full, PANEL), (full * PANEL, 1, n % PANEL)):
        if not width or not count:
            continue
        start = index(w.offset + column, (_steps(w)[0], PANEL if count > 1 else 0), ("b", "p"))
        body = [f"const float *const w = {_at(w.buffer.name, start)};"]
        body += _panel(product, column, width, width, w.strides[1] if k > 1 else n, count)
        head = f"for (int p = 0; p < {count}; ++p) {{" if count > 1 else "{"
        lines += [head, *indent(body), "}"]
    return _scope(_over_rows(product, lines), product)


OUTPUTS = 4
"""Outputs that one pass over ``x`` computes."""


def _dot(product: _Product) -> list[str]:
    """Tiles of ``rows`` x ``OUTPUTS`` dot products; each element of ``x`` and ``w`` that is loaded serves a whole tile."""
    _, m, _, n = product.sizes
    rows = 4 if m >= 4 else 1
    lines: list[str] = []
    for m0, count_m, tile_m in ((0, m // rows, rows), (m - m % rows, m % rows, 1)):
        for n0, count_n, tile_n in (
            (0, n // OUTPUTS, OUTPUTS),
            (n - n % OUTPUTS, 1 if n % OUTPUTS else 0, n % OUTPUTS),
        ):
            if not count_m or not count_n:
                continue
            body = _dot_tile(product, tile_m, tile_n)
            lines += [
                f"for (int n = {n0}; n < {n0 + count_n * tile_n}; n += {tile_n}) {{",
                *indent([f"for (int m = {m0}; m < {m0 + count_m * tile_m}; m += {tile_m}) {{", *indent(body), "}"]),
                "}",
            ]
    return lines


def _dot_tile(product: _Product, rows: int, outputs: int) -> list[str]:
    k = product.sizes[2]
    x, w = product.x, product.w
    sums = [[f"s{r}_{o}" for o in range(outputs)] for r in range(rows)]
    names = [name for row in sums for name in row]
    lines = []
    for r in range(rows):
        where = index(x.offset, _steps(x)[:2], ["b", f"(m + {r})" if r else "m"])
        lines.append(f"const float *const x{r} = {_at(x.buffer.name, where)};")
    for o in range(outputs):
        where = index(w.offset, (_steps(w)[0], _steps(w)[2]), ["b", f"(n + {o})" if o else "n"])
        lines.append(f"const float *const w{o} = {_at(w.buffer.name, where)};")
    lines += ["float " + ", ".join(f"{s} = 0.0f" for s in names) + ";"]
    lines += [f"#pragma omp simd reduction(+ : {', '.join(names)})"] if k >= 8 else []
    lines += [f"for (int i = 0; i < {k}; ++i) {{"]
    lines += [f"    {sums[r][o]} += x{r}[i] * w{o}[i];" for r in range(rows) for o in range(outputs)]
    lines += ["}"]
    for r in range(rows):
        for o in range(outputs):
            lines.append(product.store(sums[r][o], f"(m + {r})" if r else "m", f"(n + {o})" if o else "n"))
    return lines
