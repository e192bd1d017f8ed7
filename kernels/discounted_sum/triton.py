"""Discounted reward-to-go and its gradient in Triton; the equation stands in reference.py."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrl.kernels._triton_scan import coefficient, flag, offsets, scan

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def forward_kernel(
    reward, done, gamma, result,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr,
):  # fmt: skip
    base, row_live = offsets(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    blocks = tl.cdiv(steps, TIME)
    for i in range(blocks):
        t = (blocks - 1 - i) * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        d = tl.load(reward + at, mask=live, other=0.0).to(ACC)
        g = coefficient(gamma, at, live, GAMMA) + tl.zeros((ROWS, TIME), dtype=ACC)
        x, carry = scan(tl.where(flag(done, at, live), 0.0, g), d, carry, lane, True)
        tl.store(result + at, x.to(result.dtype.element_ty), mask=live)


@triton.jit
def backward_kernel(
    grad, result, done, gamma, grad_reward, grad_gamma,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr,
):  # fmt: skip
    base, row_live = offsets(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    for i in range(tl.cdiv(steps, TIME)):
        t = i * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        before, has_before = at - time_stride, live & (t > 0)
        g = coefficient(gamma, before, has_before, GAMMA) + tl.zeros((ROWS, TIME), dtype=ACC)
        d = tl.load(grad + at, mask=live, other=0.0).to(ACC)
        x, carry = scan(tl.where(flag(done, before, has_before), 0.0, g), d, carry, lane, False)
        tl.store(grad_reward + at, x.to(grad_reward.dtype.element_ty), mask=live)
        if grad_gamma is not None:
            carries = live & (t + 1 < steps) & (flag(done, at, live) == 0)
            later = tl.load(result + at + time_stride, mask=carries, other=0.0).to(ACC)
            tl.store(grad_gamma + at, x * later, mask=live)
