"""A whole multilayer perceptron in one launch, in Triton; the equation stands in reference.py.

A program owns a block of rows and takes them through all layers. A layer is a loop over tiles of its outputs, each a
sum over tiles of its inputs, so that neither weights nor activations must fit into registers: weights are read tile
by tile, and what one layer hands to the next lies in scratch memory that only this program touches, a few kilobytes
that stay in cache. Sums are float32, without TF32. Blocks are sized by a fixed rule: nothing is autotuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["mlp_forward"]

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies the bit patterns of bfloat16, so there it gets the same numbers in float32."""


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "tanh":  # the quotient loses its digits near zero, where the series has them
        e = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - e) / (1.0 + e)
        s = x * x
        near = x * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0))))
        x = tl.where(s < 0.04, near, tl.where(x < 0, -far, far))
    elif KIND == "relu":
        x = tl.where(x < 0, 0.0, x)  # keeps NaN
    elif KIND == "elu":
        x = tl.where(x > 0, x, tl.exp(tl.where(x > 0, 0.0, x)) - 1.0)
    elif KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(KIND == "identity")
    return x


@triton.jit
def _layer(
    source, target, weight, bias, row, live,
    IN: tl.constexpr, OUT: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    for first_out in range(0, OUT, OUTS):
        n = first_out + tl.arange(0, OUTS)
        total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
        for first_in in range(0, IN, INS):
            k = first_in + tl.arange(0, INS)
            x = tl.load(source + row[:, None] * IN + k[None, :], mask=live[:, None] & (k < IN)[None, :], other=0.0)
            at = n[None, :] * IN + k[:, None]
            w = tl.load(weight + at, mask=(n < OUT)[None, :] & (k < IN)[:, None], other=0.0)
            if INTERPRETED:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
        y = _activate(total, KIND)
        at = row[:, None] * OUT + n[None, :]
        tl.store(target + at, y.to(target.dtype.element_ty), mask=live[:, None] & (n < OUT)[None, :])


@triton.jit
def _mlp_kernel(
    x, out, scratch, weights, biases, rows, half,
    SIZES: tl.constexpr, KINDS: tl.constexpr, LAYERS: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    source = x
    for i in tl.static_range(LAYERS):
        target = out if i == LAYERS - 1 else scratch + half * (i % 2)
        _layer(source, target, weights[i], biases[i], row, live, SIZES[i], SIZES[i + 1], KINDS[i], ROWS, OUTS, INS)
        tl.debug_barrier()  # the next layer reads what other threads of this program wrote
        source = target


def _plan(rows: int) -> dict[str, Any]:
    """Rows a program takes, and the tiles: few rows while there are multiprocessors without a program."""
    return {"ROWS": 16 if rows <= 4096 else 32, "OUTS": 64, "INS": 32}


def mlp_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor:
    """``graphrl::mlp_forward`` on a GPU: the same arguments, its result."""
    sizes = (x.shape[-1], *(w.shape[0] for w in weights))
    out = x.new_empty(*x.shape[:-1], sizes[-1])
    rows = prod(x.shape[:-1])
    if rows:
        half = rows * max(sizes[1:-1], default=0)
        scratch = x.new_empty(2 * half)
        blocks = _plan(rows)
        dense_weights = tuple(w.contiguous() for w in weights)
        dense_biases = tuple(b if b is None else b.contiguous() for b in biases)
        _mlp_kernel[(triton.cdiv(rows, blocks["ROWS"]),)](
            x.contiguous(), out, scratch, dense_weights, dense_biases, rows, half,
            SIZES=sizes, KINDS=tuple(activations), LAYERS=len(weights), **blocks, **OPTIONS,
        )  # fmt: skip
    return out
