"""Generalised advantage estimation and its gradient in Triton; the equations stand in reference.py."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrl.kernels._triton_scan import coefficient, flag, offsets, scan

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def forward_kernel(
    reward, value, next_value, done, terminated, gamma, lmbda, advantage, value_target,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, LMBDA: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr,
):  # fmt: skip
    base, row_live = offsets(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    blocks = tl.cdiv(steps, TIME)
    for i in range(blocks):
        t = (blocks - 1 - i) * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        ended = flag(terminated, at, live)
        g, l = coefficient(gamma, at, live, GAMMA), coefficient(lmbda, at, live, LMBDA)  # noqa: E741
        v = tl.load(value + at, mask=live, other=0.0).to(ACC)
        bootstrap = tl.where(ended, 0.0, tl.load(next_value + at, mask=live, other=0.0).to(ACC))
        d = tl.load(reward + at, mask=live, other=0.0).to(ACC) + g * bootstrap - v
        c = tl.where(flag(done, at, live) | ended, 0.0, g * l + tl.zeros((ROWS, TIME), dtype=ACC))
        x, carry = scan(c, d, carry, lane, True)
        tl.store(advantage + at, x.to(advantage.dtype.element_ty), mask=live)
        tl.store(value_target + at, (x + v).to(value_target.dtype.element_ty), mask=live)


@triton.jit
def backward_kernel(
    grad_advantage, grad_value_target, next_value, advantage, done, terminated, gamma, lmbda,
    grad_reward, grad_value, grad_next_value, grad_gamma, grad_lmbda,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, LMBDA: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr,
):  # fmt: skip
    base, row_live = offsets(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    for i in range(tl.cdiv(steps, TIME)):
        t = i * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        before, has_before = at - time_stride, live & (t > 0)
        g0, l0 = coefficient(gamma, before, has_before, GAMMA), coefficient(lmbda, before, has_before, LMBDA)
        over = flag(done, before, has_before) | flag(terminated, before, has_before)
        c = tl.where(over, 0.0, g0 * l0 + tl.zeros((ROWS, TIME), dtype=ACC))
        y = tl.load(grad_value_target + at, mask=live, other=0.0).to(ACC)
        d = tl.load(grad_advantage + at, mask=live, other=0.0).to(ACC) + y
        x, carry = scan(c, d, carry, lane, False)
        ended = flag(terminated, at, live)
        g = coefficient(gamma, at, live, GAMMA)
        tl.store(grad_reward + at, x.to(grad_reward.dtype.element_ty), mask=live)
        tl.store(grad_value + at, (y - x).to(grad_value.dtype.element_ty), mask=live)
        w = tl.where(ended, 0.0, g * x)
        tl.store(grad_next_value + at, w.to(grad_next_value.dtype.element_ty), mask=live)
        if grad_gamma is not None:
            l = coefficient(lmbda, at, live, LMBDA)  # noqa: E741
            carries = live & (t + 1 < steps) & ((flag(done, at, live) | ended) == 0)
            later = tl.load(advantage + at + time_stride, mask=carries, other=0.0).to(ACC)
            bootstrap = tl.load(next_value + at, mask=live & (ended == 0), other=0.0).to(ACC)
            tl.store(grad_gamma + at, x * (bootstrap + l * later), mask=live)
            tl.store(grad_lmbda + at, x * (g * later), mask=live)
