"""Matrix products. Three loops, chosen by where the weights lie in memory.

*packed*: constant weights, stored input-major in panels of columns. ``acc += x[i] * w[i, :]`` keeps a panel of sums in
registers and vectorises under strict IEEE rules, because no sum is reordered.
*dot*: weights by pointer in PyTorch's [out, in] order, read where they lie; several outputs at once share each ``x``.
On a robot, where nothing may ask for reordered sums, products of two computed values take the next one instead.
*rows*: weights by pointer, contiguous in the outputs, or turned so at each call because many rows share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.c99.elementwise import literal
from graphrl.compiler.backends.c99.layout import Step
from graphrl.compiler.backends.c99.loops import indent, index
from graphrl.compiler.backends.c99.nodes import Unsupported, arguments, op_name, value_of
from graphrl.compiler.backends.c99.values import Buffer, View
from graphrl.compiler.backends.c99.weights import Stored, encode

__all__ = ["MATMULS", "ROWS", "Product", "columns", "emit_matmul", "in_groups"]

PANEL = 64
"""Columns of a panel: 4 AVX-512 or 8 AVX2 registers of sums."""

NARROW = 16
"""gcc takes loops of 16 and fewer apart before it vectorises, and then does not vectorise them: panels are wider."""

INPUTS = 4
"""Inputs that one pass over the sums takes in. Measured at 64 x 64: 87 ns with AVX-512, 105 with AVX2, 210 at -O2; one
input a pass took 91, 160 and 571, since gcc sometimes keeps the sums in memory."""

ROWS = 4
"""Rows that one pass over a panel of weights computes. Measured roughly at 16 x 192 x 576: two took 1.1 times as long
with AVX-512, 1.3 with AVX2, 1.2 at -O3 alone; eight are slower but with AVX-512 and narrow panels."""

TURN_ROWS = 16
"""From this many rows on, transposing [out, in] weights first pays (64 x 64: 4 us once, 0.1 us saved a row)."""

MATMULS = frozenset(("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "mv.default", "addmv.default",
                     "dot.default"))  # fmt: skip

Each = Callable[[Callable[[int], list[str]]], list[str]]
"""Given the code of a panel for a number of rows from ``m`` on, what stands there for all rows."""


@dataclass(frozen=True)
class Product:
    """``out[b, m, n] = bias + scale sum_k x[b, m, k] w[b, k, n]``; every view has these dims.

    read: C text of a weight, from what is stored.
    """

    x: View
    w: View
    bias: View | None
    out: View
    scale: View | None = None
    read: str = "{}"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, M, K, N."""
        b, m, k = self.x.shape
        return b, m, k, self.w.shape[2]

    def store(self, value: str, m: str, n: str) -> str:
        """The statement that scales, adds the bias and stores output ``[b, m, n]``."""
        where = ["b", m, n]
        bias, scale = self.bias, self.scale
        if scale is not None:
            value = f"{value} * {scale.buffer.name}[{index(scale.offset, _steps(scale), where)}]"
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
        lines, reads = _by_rows(emitter, product)
    elif product.w.strides[1] == 1 and m < TURN_ROWS and not emitter.embed:
        product = replace(product, x=emitter.unit_stride(product.x))
        lines, reads = _dot(product), {product.x.buffer, product.w.buffer}
    else:
        w = product.w if product.w.strides[2] == 1 else emitter.materialize(product.w)
        lines, reads = _by_rows(emitter, Product(product.x, w, product.bias, product.out))
    reads |= {product.bias.buffer} if product.bias is not None else set()
    if b > 1:
        lines = [f"for (int b = 0; b < {b}; ++b) {{", *indent(lines), "}"]
    emitter.add_step(Step(lines, reads, {product.out.buffer}))
    return _result(product, node)


def _result(product: Product, node: fx.Node) -> View:
    view = product.out.reshape(tuple(value_of(node).shape))
    assert view is not None
    return view


def _as_product(emitter, node: fx.Node) -> Product:  # type: ignore[no-untyped-def]
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
    return Product(x, w, bias, emitter.new_value(shape, torch.float32))


def _insert(view: View, dim: int) -> View:
    return View(view.buffer, (*view.shape[:dim], 1, *view.shape[dim:]), (*view.strides[:dim], 0, *view.strides[dim:]),
                view.offset)  # fmt: skip


def _steps(view: View) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True))


def columns(emitter, product: Product, each: Each) -> tuple[list[str], set[Buffer]]:  # type: ignore[no-untyped-def]
    """Code for row ``m`` of batch ``b``, whose inputs are at ``x``, and the buffers that it reads.

    The weights are constant, or contiguous in the outputs.
    """
    constant = product.w.buffer.kind == "constant"
    lines = _packed(emitter, product, each) if constant else _rows(product, each)
    return lines, {product.x.buffer} if constant else {product.x.buffer, product.w.buffer}


def _by_rows(emitter, product: Product) -> tuple[list[str], set[Buffer]]:  # type: ignore[no-untyped-def]
    """All rows, some at a time; a panel of weights serves one after another while it is in the cache."""
    m = product.sizes[1]
    if m == 1:
        lines, reads = columns(emitter, product, lambda panel: panel(1))
        return ["{", *indent([_row(product), *lines]), "}"], reads

    def each(panel: Callable[[int], list[str]]) -> list[str]:
        return in_groups("m", m, lambda rows: [_row(product), *panel(rows)])

    return columns(emitter, product, each)


def in_groups(name: str, count: int, body: Callable[[int], list[str]]) -> list[str]:
    """``body(ROWS)`` for every ``ROWS``-th ``name`` below ``count``, and ``body`` of what is left over."""
    whole, left = count - count % ROWS, count % ROWS
    lines = []
    if whole:
        lines += [f"for (int {name} = 0; {name} < {whole}; {name} += {ROWS}) {{", *indent(body(ROWS)), "}"]
    if left:
        lines += ["{", *indent([*[f"const int {name} = {whole};"] * (count > 1), *body(left)]), "}"]
    return lines


def _row(product: Product) -> str:
    """Declaration of ``x``, the row of inputs at ``b, m``."""
    m = "m" if product.sizes[1] > 1 else "0"
    x = product.x
    return f"const float *const x = {_at(x.buffer.name, index(x.offset, _steps(x)[:2], ['b', m]))};"


def _at(name: str, where: str) -> str:
    return name if where == "0" else f"{name} + {where}"


# ---- constant weights

_READ = {torch.float32: ("float", "{}"), torch.uint16: ("uint16_t", "k_halff({})"), torch.int8: ("int8_t", "(float){}")}
"""C type of a stored weight, and its value from it."""


def _packed(emitter, product: Product, each: Each) -> list[str]:  # type: ignore[no-untyped-def]
    b, _, k, n = product.sizes
    panels = _panels(n)
    weights = product.w.as_torch()
    stored = encode(weights, emitter.weights if k else "float32")
    if not (weights.isfinite().all() and torch.equal(stored.decode(), weights)):
        stored = Stored(weights)
    table = emitter.constant(_pack(stored.values, panels))
    kind, read = _READ[stored.values.dtype]
    scale = None if stored.scale is None else View.whole(emitter.constant(stored.scale), (b, n))
    scale = None if scale is None else _insert(scale, 1).expand(product.out.shape)
    product = replace(product, scale=scale, read=read)
    per_batch = sum(k * padded for _, _, padded in panels)
    lines = []
    for column, count, valid, padded in _runs(panels):
        start = index(column * k, (per_batch if b > 1 else 0, k * PANEL if count > 1 else 0), ("b", "p"))
        body = [
            f"const {kind} *const w = {_at(table.name, start)};",
            *each(partial(_panel, product, column, valid, padded, padded, count)),
        ]
        lines += [_repeat("p", count), *indent(body), "}"]
    return lines


def _panels(n: int) -> list[tuple[int, int, int]]:
    """(first column, columns, columns with padding) of each panel; a narrow rest joins the panel before it."""
    starts = list(range(0, n, PANEL))
    if len(starts) > 1 and n - starts[-1] <= NARROW:
        starts.pop()
    ends = [*starts[1:], n]
    return [(a, z - a, max(NARROW + 8, -(-(z - a) // 8) * 8)) for a, z in zip(starts, ends, strict=True)]


def _runs(panels: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """(first column, panels, columns, columns with padding) of each run of equal full panels."""
    full = [p for p in panels if p[1] == PANEL]
    runs = [(0, len(full), PANEL, PANEL)] if full else []
    return runs + [(c, 1, valid, padded) for c, valid, padded in panels if valid != PANEL]


def _repeat(name: str, count: int) -> str:
    return f"for (int {name} = 0; {name} < {count}; ++{name}) {{" if count > 1 else "{"


def _pack(weights: Tensor, panels: list[tuple[int, int, int]]) -> Tensor:
    """[B, K, N] weights as one flat table: a panel after another, each [K, padded] with zeros in the padding."""
    parts = []
    for batch in weights:
        for column, valid, padded in panels:
            block = torch.zeros(batch.shape[0], padded, dtype=weights.dtype)
            block[:, :valid] = batch[:, column : column + valid]
            parts.append(block.reshape(-1))
    return torch.cat(parts)


def _panel(product: Product, column: int, valid: int, width: int, stride: int, count: int, rows: int) -> list[str]:
    """Sums of one panel of ``width`` columns for ``rows`` rows, weights at ``w`` with ``stride`` between inputs."""
    k = product.sizes[2]
    m = "m" if product.sizes[1] > 1 else "0"
    n = "j" if column == 0 and count == 1 else f"({column} + j)" if count == 1 else f"(p * {PANEL} + j)"
    main, sums = k - k % INPUTS, [f"acc{r}" if r else "acc" for r in range(rows)]
    lines = [f"float {acc}[{width}];" for acc in sums]
    lines.append(f"for (int j = 0; j < {width}; ++j) {{ {' '.join(f'{acc}[j] = 0.0f;' for acc in sums)} }}")
    for start, stop, inputs in ((0, main, INPUTS), (main, k, 1)):
        if start < stop:
            last = f"i += {inputs}" if inputs > 1 else "++i"
            body = _taken_in(product, sums, inputs, width, stride)
            lines += [f"for (int i = {start}; i < {stop}; {last}) {{", *indent(body), "}"]
    for r, acc in enumerate(sums):
        value = product.store(f"{acc}[j]", f"({m} + {r})" if r else m, n)
        lines.append(f"for (int j = 0; j < {valid}; ++j) {{ {value} }}")
    return lines


def _taken_in(product: Product, sums: list[str], inputs: int, width: int, stride: int) -> list[str]:
    """Code that adds ``inputs`` inputs from ``i`` on to the sums of each row."""
    step = product.x.strides[2] if product.sizes[2] > 1 else 1
    lines, updates = [], []
    for r, acc in enumerate(sums):
        names = [f"x{q}_{r}" if r else f"x{q}" for q in range(inputs)]
        at = [index(q * step + r * product.x.strides[1], (step,), ("i",)) for q in range(inputs)]
        lines += [f"const float {name} = x[{where}];" for name, where in zip(names, at, strict=True)]
        weights = [f"w[(i + {q}) * {stride} + j]" if q else f"w[i * {stride} + j]" for q in range(inputs)]
        terms = [f"{name} * {product.read.format(weight)}" for name, weight in zip(names, weights, strict=True)]
        sum_ = f"({terms[0]} + {terms[1]}) + ({terms[2]} + {terms[3]})" if inputs == INPUTS else terms[0]
        updates.append(f"{acc}[j] += {sum_};")
    if len(sums) == 1 and inputs == 1:
        return [*lines, f"for (int j = 0; j < {width}; ++j) {{ {updates[0]} }}"]
    return [*lines, f"for (int j = 0; j < {width}; ++j) {{", *indent(updates), "}"]


# ---- weights by pointer


def _rows(product: Product, each: Each) -> list[str]:
    _, _, k, n = product.sizes
    w = product.w
    stride = w.strides[1] if k > 1 else n
    lines = []
    for column, count, width, _ in _runs(_panels(n)):
        start = index(w.offset + column, (_steps(w)[0], PANEL if count > 1 else 0), ("b", "p"))
        body = [f"const float *const w = {_at(w.buffer.name, start)};"]
        body += each(partial(_panel, product, column, width, width, stride, count))
        lines += [_repeat("p", count), *indent(body), "}"]
    return lines


OUTPUTS = 4
"""Outputs that one pass over ``x`` computes."""


def _dot(product: Product) -> list[str]:
    """Tiles of ``rows`` x ``OUTPUTS`` dot products; an element that is loaded serves a whole tile."""
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


def _dot_tile(product: Product, rows: int, outputs: int) -> list[str]:
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
