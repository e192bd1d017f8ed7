"""n-step returns and the gradient of their rewards in Triton; the equations stand in reference.py.

A program owns a run of elements, each the start of one window (backward: the end of several), and walks all of them a
step at a time, until the last one is closed. Nothing is read back by the host.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]

BLOCK = 1024  # elements of one program: four warps, eight elements a thread
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # Triton 3.9 warns unless fusion is chosen


@triton.jit
def _run(size, steps, inner, BLOCK: tl.constexpr):
    """This program's elements, which of them exist, and their steps. int64: a rollout may hold over 2^31 elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < size, (at // inner) % steps


@triton.jit
def _gamma(gamma, at, live, PER_STEP: tl.constexpr):
    if PER_STEP:
        return tl.load(gamma + at, mask=live, other=1.0)
    else:
        return tl.load(gamma)


@triton.jit
def _flag(pointer, at, live):
    return tl.load(pointer + at, mask=live, other=0).to(tl.int32)


@triton.jit
def _forward_kernel(
    reward, done, terminated, gamma, horizon, total, discount, index, n, size, steps, inner,
    GAMMA: tl.constexpr, HORIZON: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    start, exists, t = _run(size, steps, inner, BLOCK)
    longest = tl.full((BLOCK,), 0, tl.int64) + n
    if HORIZON:
        longest = tl.maximum(tl.load(horizon + start, mask=exists, other=1).to(tl.int64), 1)
    longest = tl.minimum(longest, steps - t)
    open = tl.where(exists, 1, 0)
    count = tl.zeros((BLOCK,), dtype=tl.int64)
    ended = tl.zeros((BLOCK,), dtype=tl.int32)
    sum = tl.zeros((BLOCK,), dtype=ACC)
    product = tl.full((BLOCK,), 1.0, dtype=ACC)
    while tl.max(open, 0) > 0:
        live = open != 0
        at = start + count * inner  # an open window has taken every step so far
        r = tl.load(reward + at, mask=live, other=0.0).to(ACC)
        sum += tl.where(live, product * r, 0.0)
        product *= tl.where(live, _gamma(gamma, at, live, GAMMA), 1.0)
        end = _flag(terminated, at, live)
        ended |= end
        count += open
        over = (_flag(done, at, live) | end) != 0
        open = tl.where(over | (count >= longest), 0, open)
    tl.store(total + start, sum.to(total.dtype.element_ty), mask=exists)
    tl.store(discount + start, tl.where(ended != 0, 0.0, product).to(discount.dtype.element_ty), mask=exists)
    tl.store(index + start, t + count - 1, mask=exists)


@triton.jit
def _backward_kernel(
    grad, done, terminated, gamma, horizon, grad_reward, n, size, steps, inner,
    GAMMA: tl.constexpr, HORIZON: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    end, exists, t = _run(size, steps, inner, BLOCK)
    sum = tl.load(grad + end, mask=exists, other=0.0).to(ACC)
    product = tl.full((BLOCK,), 1.0, dtype=ACC)
    i = tl.full((), 1, dtype=tl.int64)
    open = tl.where(exists & (i < n) & (t >= i), 1, 0)
    while tl.max(open, 0) > 0:
        at, live = end - i * inner, open != 0
        open = tl.where((_flag(done, at, live) | _flag(terminated, at, live)) != 0, 0, open)
        live = open != 0
        product *= tl.where(live, _gamma(gamma, at, live, GAMMA), 1.0)
        reaches = live
        if HORIZON:
            reaches = live & (tl.load(horizon + at, mask=live, other=0).to(tl.int64) > i)
        y = tl.load(grad + at, mask=reaches, other=0.0).to(ACC)
        sum += tl.where(reaches, product * y, 0.0)
        i += 1
        open = tl.where((i < n) & (t >= i), open, 0)
    tl.store(grad_reward + end, sum.to(grad_reward.dtype.element_ty), mask=exists)


def _launch(kernel: Any, x: Tensor, args: tuple[Any, ...], *out: Tensor) -> None:
    """``kernel`` on ``x`` and the operator's other arguments."""
    done, terminated, gamma, horizon, n, time_dim = args
    if not x.numel():
        return
    flags = [y.contiguous().view(torch.uint8) for y in (done, terminated)]
    x, gamma = x.contiguous(), gamma.contiguous()
    dim = time_dim % x.dim()
    sizes = (n, x.numel(), x.shape[dim], prod(x.shape[dim + 1 :]))
    constants = {
        "GAMMA": gamma.dim() > 0,
        "HORIZON": horizon is not None,
        "ACC": tl.float64 if gamma.dtype == torch.float64 else tl.float32,
    }
    horizon = gamma if horizon is None else horizon.contiguous()  # never read then
    grid = (triton.cdiv(x.numel(), BLOCK),)
    kernel[grid](x, *flags, gamma, horizon, *out, *sizes, BLOCK=BLOCK, **constants, **OPTIONS)


def forward(reward: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``graphrl::n_step_return`` on a GPU: same arguments, same results."""
    total, discount = (torch.empty(reward.shape, dtype=reward.dtype, device=reward.device) for _ in range(2))
    index = torch.empty(reward.shape, dtype=torch.int64, device=reward.device)
    _launch(_forward_kernel, reward, args, total, discount, index)
    return total, discount, index


def backward(grad: Tensor, *args: Any) -> Tensor:
    """Gradient of reward, in the dtype of ``grad``."""
    grad_reward = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _launch(_backward_kernel, grad, args, grad_reward)
    return grad_reward
