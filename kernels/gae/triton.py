"""Generalised advantage estimation and its gradient in Triton; the equations stand in reference.py.

A program owns a few rows and walks them in blocks of time. Inside a block the recurrence is an associative scan over
pairs (c, d), x -> c x + d; the last element of one block is carried into the next. Blocks are sized by a fixed rule,
so no call autotunes, and nothing is read back by the host.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]

BLOCK = 1024  # elements of one program's block: four warps, eight elements a thread
MAX_ROWS = 64
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # Triton 3.9 warns unless fusion is chosen


@triton.jit
def _compose(c_first, d_first, c_then, d_then):
    """``x -> c_then (c_first x + d_first) + d_then``. A zero coefficient lets nothing through, not even NaN."""
    return c_then * c_first, d_then + tl.where(c_then == 0, 0.0, c_then * d_first)


@triton.jit
def _tile(row_stride, outer_stride, rows, ROWS: tl.constexpr):
    """Offsets of this program's rows, and which of them exist. int64: a rollout may hold over 2^31 elements."""
    blocks = tl.cdiv(rows, ROWS)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (outer * outer_stride + row * row_stride)[:, None], (row < rows)[:, None]


@triton.jit
def _coefficient(pointer, at, live, PER_STEP: tl.constexpr):
    """gamma or lmbda: a tile of them, or the one number all steps share."""
    if PER_STEP:
        return tl.load(pointer + at, mask=live, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _over(done, terminated, at, live):
    return (tl.load(done + at, mask=live, other=1) | tl.load(terminated + at, mask=live, other=1)) != 0


@triton.jit
def _forward_kernel(
    reward, value, next_value, done, terminated, gamma, lmbda, advantage, value_target,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, LMBDA: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    base, row_live = _tile(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    blocks = tl.cdiv(steps, TIME)
    for i in range(blocks):
        t = (blocks - 1 - i) * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        over = _over(done, terminated, at, live)
        ended = tl.load(terminated + at, mask=live, other=1) != 0
        g, l = _coefficient(gamma, at, live, GAMMA), _coefficient(lmbda, at, live, LMBDA)  # noqa: E741
        v = tl.load(value + at, mask=live, other=0.0).to(ACC)
        bootstrap = tl.where(ended, 0.0, tl.load(next_value + at, mask=live, other=0.0).to(ACC))
        d = tl.load(reward + at, mask=live, other=0.0).to(ACC) + g * bootstrap - v
        c = tl.where(over, 0.0, g * l + tl.zeros((ROWS, TIME), dtype=ACC))
        c, d = tl.associative_scan((c, d), 1, _compose, reverse=True)
        x = d + tl.where(c == 0, 0.0, c * carry)
        carry = tl.sum(tl.where(lane == 0, x, 0.0), 1, keep_dims=True)
        tl.store(advantage + at, x.to(advantage.dtype.element_ty), mask=live)
        tl.store(value_target + at, (x + v).to(value_target.dtype.element_ty), mask=live)


@triton.jit
def _backward_kernel(
    grad_advantage, grad_value_target, next_value, advantage, done, terminated, gamma, lmbda,
    grad_reward, grad_value, grad_next_value, grad_gamma, grad_lmbda,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, LMBDA: tl.constexpr, COEFFICIENTS: tl.constexpr,
    ROWS: tl.constexpr, TIME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    base, row_live = _tile(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    for i in range(tl.cdiv(steps, TIME)):
        t = i * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        before, has_before = at - time_stride, live & (t > 0)
        g0, l0 = _coefficient(gamma, before, has_before, GAMMA), _coefficient(lmbda, before, has_before, LMBDA)
        over = _over(done, terminated, before, has_before)
        c = tl.where(over, 0.0, g0 * l0 + tl.zeros((ROWS, TIME), dtype=ACC))
        y = tl.load(grad_value_target + at, mask=live, other=0.0).to(ACC)
        d = tl.load(grad_advantage + at, mask=live, other=0.0).to(ACC) + y
        c, d = tl.associative_scan((c, d), 1, _compose)
        x = d + tl.where(c == 0, 0.0, c * carry)
        carry = tl.sum(tl.where(lane == TIME - 1, x, 0.0), 1, keep_dims=True)
        ended = tl.load(terminated + at, mask=live, other=1) != 0
        g = _coefficient(gamma, at, live, GAMMA)
        tl.store(grad_reward + at, x.to(grad_reward.dtype.element_ty), mask=live)
        tl.store(grad_value + at, (y - x).to(grad_value.dtype.element_ty), mask=live)
        w = tl.where(ended, 0.0, g * x)
        tl.store(grad_next_value + at, w.to(grad_next_value.dtype.element_ty), mask=live)
        if COEFFICIENTS:
            l = _coefficient(lmbda, at, live, LMBDA)  # noqa: E741
            carries = live & (t + 1 < steps) & (_over(done, terminated, at, live) == 0)
            later = tl.load(advantage + at + time_stride, mask=carries, other=0.0).to(ACC)
            bootstrap = tl.load(next_value + at, mask=live & (ended == 0), other=0.0).to(ACC)
            tl.store(grad_gamma + at, x * (bootstrap + l * later), mask=live)
            tl.store(grad_lmbda + at, x * (g * later), mask=live)


def _plan(shape: torch.Size, time_dim: int) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Grid, the five shape arguments and the block sizes for contiguous tensors of ``shape``."""
    time_dim %= len(shape)
    outer, steps, inner = prod(shape[:time_dim]), shape[time_dim], prod(shape[time_dim + 1 :])
    if inner == 1:  # time is fastest: long blocks of time
        rows, row_stride, time_stride, outer_stride, outer = outer, steps, 1, 0, 1
        time = min(triton.next_power_of_2(steps), BLOCK)
        block_rows = min(triton.next_power_of_2(rows), MAX_ROWS, BLOCK // time)
    else:  # rows lie side by side in memory: wide blocks of them
        rows, row_stride, time_stride, outer_stride = inner, 1, inner, steps * inner
        block_rows = min(triton.next_power_of_2(rows), 16)
        time = min(triton.next_power_of_2(steps), BLOCK // block_rows)
    grid = (triton.cdiv(rows, block_rows) * outer,)
    return grid, (rows, steps, row_stride, time_stride, outer_stride), {"ROWS": block_rows, "TIME": time}


def _accumulator(gamma: Tensor) -> Any:
    return tl.float64 if gamma.dtype == torch.float64 else tl.float32


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [x.contiguous().view(torch.uint8) if x.dtype == torch.bool else x.contiguous() for x in tensors]


def forward(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    """``graphrl::gae`` on a GPU: same arguments, advantage and value_target back."""
    inputs = _dense(reward, value, next_value, done, terminated, gamma, lmbda)
    advantage, value_target = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    if advantage.numel():
        grid, shape, blocks = _plan(reward.shape, time_dim)
        flags = {"GAMMA": gamma.dim() > 0, "LMBDA": lmbda.dim() > 0, "ACC": _accumulator(gamma)}
        _forward_kernel[grid](*inputs, advantage, value_target, *shape, **flags, **blocks, **OPTIONS)
    return advantage, value_target


def backward(
    grad_advantage: Tensor,
    grad_value_target: Tensor,
    next_value: Tensor,
    advantage: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
    coefficients: bool,
) -> list[Tensor]:
    """Gradients of reward, value and next_value; with ``coefficients`` also of gamma and lmbda, one per element."""
    inputs = _dense(grad_advantage, grad_value_target, next_value, advantage, done, terminated, gamma, lmbda)
    grads = [torch.empty_like(inputs[0]) for _ in range(3)]
    extra = [torch.empty_like(inputs[0], dtype=gamma.dtype) for _ in range(2)] if coefficients else []
    if grads[0].numel():
        grid, shape, blocks = _plan(grad_advantage.shape, time_dim)
        flags = {"GAMMA": gamma.dim() > 0, "LMBDA": lmbda.dim() > 0, "ACC": _accumulator(gamma)}
        out = (*grads, *(extra or (inputs[0], inputs[0])))  # never written without `coefficients`
        _backward_kernel[grid](*inputs, *out, *shape, COEFFICIENTS=coefficients, **flags, **blocks)
    return [*grads, *extra]
