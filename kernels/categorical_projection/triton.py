"""C51's projection and its transpose in Triton; the equations stand in reference.py.

A program owns a few rows and a block of their output atoms, and walks the atoms that feed them: the weights are a tile
of hats h_i(Tz_j), summed over j, or over i for the transpose. Every sum has one order, so results repeat to the bit,
which scattering with atomic additions would not. Blocks are sized by a fixed rule; the host reads nothing back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["categorical_projection"]

TILE = 2048  # weights of one program at a time: four warps, 16 a thread
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # Triton 3.9 warns unless fusion is chosen


@triton.jit
def _moved(support, j, r, g, ended, atoms):
    """Where the Bellman update takes atom j, clipped to the support. NaN stays."""
    z = tl.load(support + j, mask=j < atoms, other=0.0)
    low, high = tl.load(support), tl.load(support + atoms - 1)
    x = tl.where(ended, r, r + g * z)
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _hat(x, support, i, atoms):
    """Atom i's share of a mass at x: one at z_i, zero at its neighbours and beyond. Shares of one x add up to one."""
    z = tl.load(support + i, mask=i < atoms, other=float("inf"))
    below = tl.load(support + i - 1, mask=(i > 0) & (i < atoms), other=float("-inf"))
    above = tl.load(support + i + 1, mask=i + 1 < atoms, other=float("inf"))
    rising = tl.where(x <= below, 0.0, (x - below) / (z - below))
    falling = tl.where(x >= above, 0.0, 1.0 - (x - z) / (above - z))
    return tl.where(i < atoms, tl.where(x < z, rising, falling), 0.0)


@triton.jit
def _kernel(
    source, reward, terminated, discount, support, out, rows, atoms,
    PER_ROW: tl.constexpr, TRANSPOSE: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    r = tl.load(reward + row, mask=live, other=0.0)
    ended = tl.load(terminated + row, mask=live, other=1) != 0
    if PER_ROW:
        g = tl.load(discount + row, mask=live, other=0.0)
    else:
        g = tl.load(discount) + tl.zeros((ROWS,), dtype=ACC)
    to = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    total = tl.zeros((ROWS, OUTS), dtype=ACC)
    increases = 1
    for start in range(0, atoms, INS):
        k = start + tl.arange(0, INS)
        here = tl.load(support + k, mask=k < atoms, other=0.0)
        there = tl.load(support + k + 1, mask=k + 1 < atoms, other=float("inf"))
        increases = tl.minimum(increases, tl.min((there > here).to(tl.int32), 0))
        at = row[:, None] * atoms + k[None, :]
        v = tl.load(source + at, mask=(live & (ended == 0))[:, None] & (k < atoms)[None, :], other=0.0).to(ACC)
        if TRANSPOSE:
            x = _moved(support, to[None, :], r[:, None], g[:, None], ended[:, None], atoms)
            weight = _hat(x[:, :, None], support, k[None, None, :], atoms)
        else:  # a terminated row is one unit of mass, all of it at r
            v = tl.where(ended[:, None] & (k == 0)[None, :], 1.0, v)
            x = _moved(support, k[None, :], r[:, None], g[:, None], ended[:, None], atoms)
            weight = _hat(x[:, None, :], support, to[None, :, None], atoms)
        total += tl.sum(tl.where(weight == 0, 0.0, weight * v[:, None, :]), 2)
    if TRANSPOSE:
        total = tl.where(ended[:, None], 0.0, total)
    total = tl.where(increases == 1, total, float("nan"))
    at = row[:, None] * atoms + to[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live[:, None] & (to < atoms)[None, :])


def _plan(rows: int, atoms: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and block sizes: outputs in blocks of 64 at most, the rest of the tile shared by inputs and rows."""
    outs = min(triton.next_power_of_2(atoms), 64)
    ins = min(outs, 16)
    block_rows = min(triton.next_power_of_2(rows), TILE // (outs * ins))
    return (triton.cdiv(rows, block_rows), triton.cdiv(atoms, outs)), {"ROWS": block_rows, "OUTS": outs, "INS": ins}


def categorical_projection(
    x: Tensor, reward: Tensor, terminated: Tensor, discount: Tensor, support: Tensor, transpose: bool
) -> Tensor:
    """``graphrl::categorical_projection`` on a GPU: the same arguments, its result."""
    x, reward, terminated, discount, support = (t.contiguous() for t in (x, reward, terminated, discount, support))
    out = torch.empty_like(x)
    if out.numel():
        grid, blocks = _plan(reward.numel(), len(support))
        flags: dict[str, Any] = {"PER_ROW": discount.dim() > 0, "TRANSPOSE": transpose}
        flags["ACC"] = tl.float64 if support.dtype == torch.float64 else tl.float32
        flags |= blocks | OPTIONS
        _kernel[grid](
            x, reward, terminated.view(torch.uint8), discount, support, out, reward.numel(), len(support), **flags
        )
    return out
