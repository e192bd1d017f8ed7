"""V-trace and its gradient in Triton; the equations stand in reference.py, the walk through time in _triton_scan.py."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrl.kernels._triton_scan import coefficient, flag, offsets, scan

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _clip(x, most):
    """``min(x, most)``, but NaN stays NaN: a lost ratio must not pass for a clipped one."""
    return tl.where(x > most, most, x)


@triton.jit
def forward_kernel(
    reward, value, next_value, ratio, done, terminated, gamma, lmbda, value_target, advantage, rho_clip, c_clip,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, LMBDA: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    base, row_live = offsets(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    blocks = tl.cdiv(steps, TIME)
    for i in range(blocks):
        t = (blocks - 1 - i) * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        ended = flag(terminated, at, live)
        carries = live & (t + 1 < steps) & (flag(done, at, live) == 0) & (ended == 0)
        g, l = coefficient(gamma, at, live, GAMMA), coefficient(lmbda, at, live, LMBDA)  # noqa: E741
        p = tl.load(ratio + at, mask=live, other=0.0).to(ACC)
        v = tl.load(value + at, mask=live, other=0.0).to(ACC)
        r = tl.load(reward + at, mask=live, other=0.0).to(ACC)
        bootstrap = tl.where(ended, 0.0, tl.load(next_value + at, mask=live, other=0.0).to(ACC))
        rho = _clip(p, rho_clip)
        d = rho * (r + g * bootstrap - v)
        c = tl.where(carries, g * l * _clip(p, c_clip), 0.0)
        x, leaving = scan(c, d, carry, lane, True)
        # x of the step after: a neighbour's, or for the last lane what the block after carries in.
        neighbour = tl.gather(x, tl.minimum(lane + 1, TIME - 1) + tl.zeros((ROWS, 1), dtype=tl.int32), 1)
        later = tl.where(lane == TIME - 1, carry, neighbour)
        later += tl.load(value + at + time_stride, mask=carries, other=0.0).to(ACC)
        further = tl.where(carries, tl.where(g == 0, 0.0, later), bootstrap)
        carry = leaving
        tl.store(advantage + at, (rho * (r + g * further - v)).to(advantage.dtype.element_ty), mask=live)
        tl.store(value_target + at, (v + x).to(value_target.dtype.element_ty), mask=live)


@triton.jit
def backward_kernel(
    grad_value_target, grad_advantage, value, next_value, value_target, ratio, done, terminated, gamma, lmbda,
    grad_reward, grad_value, grad_next_value, grad_gamma, grad_lmbda, rho_clip, c_clip,
    rows, steps, row_stride, time_stride, outer_stride,
    GAMMA: tl.constexpr, LMBDA: tl.constexpr, ROWS: tl.constexpr, TIME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    base, row_live = offsets(row_stride, outer_stride, rows, ROWS)
    lane = tl.arange(0, TIME)[None, :]
    carry = tl.zeros((ROWS, 1), dtype=ACC)
    for i in range(tl.cdiv(steps, TIME)):
        t = i * TIME + lane
        at, live = base + t.to(tl.int64) * time_stride, row_live & (t < steps)
        before, has_before = at - time_stride, live & (t > 0)
        # What comes from one step earlier: its trace, and its advantage's share of value_target.
        over = flag(done, before, has_before) | flag(terminated, before, has_before)
        g0, l0 = coefficient(gamma, before, has_before, GAMMA), coefficient(lmbda, before, has_before, LMBDA)
        p0 = tl.load(ratio + before, mask=has_before, other=0.0).to(ACC)
        x0 = tl.load(grad_advantage + before, mask=has_before, other=0.0).to(ACC)
        c = tl.where(over, 0.0, g0 * l0 * _clip(p0, c_clip))
        direct = tl.load(grad_value_target + at, mask=live, other=0.0).to(ACC)
        direct += tl.where(over, 0.0, g0 * _clip(p0, rho_clip) * x0)
        y, carry = scan(c, direct, carry, lane, False)

        x = tl.load(grad_advantage + at, mask=live, other=0.0).to(ACC)
        p = tl.load(ratio + at, mask=live, other=0.0).to(ACC)
        rho, g = _clip(p, rho_clip), coefficient(gamma, at, live, GAMMA)
        ended = flag(terminated, at, live)
        carries = live & (t + 1 < steps) & (flag(done, at, live) == 0) & (ended == 0)
        r = rho * (y + x)
        w = tl.where(ended, 0.0, g * rho * (y + tl.where(carries, 0.0, x)))
        tl.store(grad_reward + at, r.to(grad_reward.dtype.element_ty), mask=live)
        tl.store(grad_value + at, (direct - r).to(grad_value.dtype.element_ty), mask=live)
        tl.store(grad_next_value + at, w.to(grad_next_value.dtype.element_ty), mask=live)
        if grad_gamma is not None:
            l = coefficient(lmbda, at, live, LMBDA)  # noqa: E741
            bootstrap = tl.load(next_value + at, mask=live & (ended == 0), other=0.0).to(ACC)
            later = tl.load(value_target + at + time_stride, mask=carries, other=0.0).to(ACC)
            traced = later - tl.load(value + at + time_stride, mask=carries, other=0.0).to(ACC)
            traced = tl.where(carries, _clip(p, c_clip) * y * traced, 0.0)
            further = tl.where(carries, later, bootstrap)
            tl.store(grad_gamma + at, rho * (y * bootstrap + x * further) + l * traced, mask=live)
            tl.store(grad_lmbda + at, g * traced, mask=live)
