"""TD(lambda) returns and their gradient in Triton; the equations stand in reference.py, y and z in cpu.cpp."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrl.kernels._triton_scan import coefficient, flag, offsets, scan

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _weights(
    done, terminated, gamma, lmbda, at, live, carries, GAMMA: tl.constexpr, LMBDA: tl.constexpr
):  # fmt: skip
    """y = gamma (1 - terminated), and z = lmbda (1 - done) where a step ``carries``."""
    ended = flag(terminated, at, live)
    over = flag(done, at, live) | ended | (carries == 0)
    y = tl.where(ended, 0.0, coefficient(gamma, at, live, GAMMA))
    return y, tl.where(over, 0.0, coefficient(lmbda, at, live, LMBDA)), ended, over


@triton.jit
def forward_kernel(
    reward, next_value, done, terminated, gamma, lmbda, target,
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
        y, z, _, _ = _weights(done, terminated, gamma, lmbda, at, live, t + 1 < steps, GAMMA, LMBDA)
        b = y * (1.0 - z)
        w = tl.load(next_value + at, mask=live, other=0.0).to(ACC)
        d = tl.load(reward + at, mask=live, other=0.0).to(ACC) + tl.where(b == 0, 0.0, b * w)
        x, carry = scan(y * z, d, carry, lane, True)
        tl.store(target + at, x.to(target.dtype.element_ty), mask=live)


@triton.jit
def backward_kernel(
    grad, next_value, target, done, terminated, gamma, lmbda,
    grad_reward, grad_next_value, grad_gamma, grad_lmbda,
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
        y0, z0, _, _ = _weights(done, terminated, gamma, lmbda, before, has_before, has_before, GAMMA, LMBDA)
        d = tl.load(grad + at, mask=live, other=0.0).to(ACC)
        x, carry = scan(y0 * z0, d, carry, lane, False)
        y, z, ended, over = _weights(done, terminated, gamma, lmbda, at, live, t + 1 < steps, GAMMA, LMBDA)
        own = 1.0 - z
        w = tl.where(y * own == 0, 0.0, y * own * x)
        tl.store(grad_reward + at, x.to(grad_reward.dtype.element_ty), mask=live)
        tl.store(grad_next_value + at, w.to(grad_next_value.dtype.element_ty), mask=live)
        if grad_gamma is not None:
            later = tl.load(target + at + time_stride, mask=live & (over == 0), other=0.0).to(ACC)
            bootstrap = tl.load(next_value + at, mask=live & (ended == 0), other=0.0).to(ACC)
            mixed = tl.where(own == 0, 0.0, own * bootstrap) + tl.where(z == 0, 0.0, z * later)
            tl.store(grad_gamma + at, tl.where(ended, 0.0, x * mixed), mask=live)
            tl.store(grad_lmbda + at, tl.where(over | (y == 0), 0.0, x * y * (later - bootstrap)), mask=live)
