"""``graphrl::gae``: the public function, its registration with torch, shape rule, gradient and batching rule."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from graphrl.errors import require_extra
from graphrl.kernels._checks import (
    as_coefficient,
    as_flag,
    check_same_shape,
    check_time_dim,
    common_float_dtype,
)
from graphrl.kernels._eager import inside_transform, plain_eager
from graphrl.kernels._lib import lib as _native

__all__ = ["gae"]

_FORWARD = {torch.float32: _native.grl_gae_f32, torch.float64: _native.grl_gae_f64}
_DIRECT = {dtype.itemsize: kernel for dtype, kernel in _FORWARD.items()}
_BACKWARD = {torch.float32: _native.grl_gae_backward_f32, torch.float64: _native.grl_gae_backward_f64}
Extents = tuple[int, int, int, int]  # outer, steps, inner, threads
# Below this many elements per thread, waking one costs more than it saves.
_PER_THREAD = 65_536


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, eqs. 11 to 16 of Schulman et al. 2016 (arXiv:1506.02438).

        delta_t = r_t + gamma_t (1 - terminated_t) V'_t - V_t
        A_t     = delta_t + gamma_t lmbda_t (1 - done_t) A_{t+1},    value_target_t = A_t + V_t

    reward, value, next_value: [*B, T, 1], any float dtype (promoted to a common one; half precision accumulates in
        float32). ``next_value`` is the value of the true next observation V'_t, not ``value`` shifted by a step.
    done, terminated: the same shape, bool or integer. ``done = terminated | truncated`` cuts the recurrence,
        ``terminated`` drops the bootstrap; a terminated step counts as done.
    gamma, lmbda: a float, a 0-d tensor, or one value per step that broadcasts to ``reward``.
    time_dim: -2 fits [*B, T, 1]; pass -1 for [T] and [*B, T], -3 for [*B, T, agents, 1], 0 for [T, B].

    Returns ``(advantage, value_target)``, contiguous, of reward's shape. Gradient flows to reward, value, next_value,
    gamma and lmbda, any number of times. What a cut hides is selected away, not multiplied by zero: a NaN there
    reaches neither results nor gradients, and neither does one behind a coefficient that is exactly zero.

    Raises SpecError when shapes, dtypes or devices do not fit: nothing but gamma and lmbda is broadcast.
    """
    if type(gamma) is float and type(lmbda) is float and plain_eager():
        direct = _direct_kernel(reward, value, next_value, done, terminated, time_dim)
        if direct is not None:
            kernel, extents = direct
            return _call_forward(kernel, extents, reward, value, next_value, done, terminated, None, None, gamma, lmbda)
    check_same_shape("gae", reward=reward, value=value, next_value=next_value, done=done, terminated=terminated)
    time_dim = check_time_dim("gae", reward, time_dim)
    dtype = common_float_dtype("gae", reward=reward, value=value, next_value=next_value)
    reward, value, next_value = reward.to(dtype), value.to(dtype), next_value.to(dtype)
    return _apply(
        reward,
        value,
        next_value,
        as_flag("gae", "done", done),
        as_flag("gae", "terminated", terminated),
        as_coefficient("gae", "gamma", gamma, reward),
        as_coefficient("gae", "lmbda", lmbda, reward),
        time_dim,
    )


def _direct_kernel(
    reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, terminated: Tensor, time_dim: int
) -> tuple[Any, Extents] | None:
    """The C function and its extents when these can go to it as they are and no gradient is asked for, else None."""
    layout = _native.trajectories(reward, value, next_value, done, terminated, 3, time_dim)
    if layout is None or (
        torch.is_grad_enabled() and (reward.requires_grad or value.requires_grad or next_value.requires_grad)
    ):
        return None
    itemsize, outer, steps, inner = layout
    return _DIRECT[itemsize], (outer, steps, inner, _threads(outer * steps * inner))


# --- CPU ---


def _threads(size: int) -> int:
    """How many threads this much work is worth."""
    return 1 if size < 2 * _PER_THREAD else min(size // _PER_THREAD, torch.get_num_threads())


def _extents(shape: torch.Size, time_dim: int) -> Extents:
    """outer, steps and inner, all 0 when there is nothing, and the number of threads."""
    size = shape.numel()
    if not size:
        return 0, 0, 0, 1
    steps, inner = shape[time_dim], prod(shape[time_dim % len(shape) + 1 :])
    return size // (steps * inner), steps, inner, _threads(size)


def _call_forward(
    kernel: Any,
    extents: Extents,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gammas: Tensor | None,
    lmbdas: Tensor | None,
    gamma: float,
    lmbda: float,
) -> tuple[Tensor, Tensor]:
    outer, steps, inner, threads = extents
    advantage, value_target = torch.empty_like(reward), torch.empty_like(reward)
    kernel(
        reward.data_ptr(),
        value.data_ptr(),
        next_value.data_ptr(),
        done.data_ptr(),
        terminated.data_ptr(),
        gammas.data_ptr() if gammas is not None else None,
        lmbdas.data_ptr() if lmbdas is not None else None,
        gamma,
        lmbda,
        advantage.data_ptr(),
        value_target.data_ptr(),
        outer,
        steps,
        inner,
        threads,
    )
    return advantage, value_target


def _cpu_coefficients(
    gamma: Tensor, lmbda: Tensor, shape: torch.Size
) -> tuple[Tensor | None, Tensor | None, float, float]:
    """Two full tensors, or two numbers: the C function takes both per element or neither."""
    if gamma.dim() == 0 and lmbda.dim() == 0:
        return None, None, gamma.item(), lmbda.item()
    return gamma.expand(shape).contiguous(), lmbda.expand(shape).contiguous(), 0.0, 0.0


def _gae_cpu(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    r, v, w = (x.to(gamma.dtype).contiguous() for x in (reward, value, next_value))
    coefficients = _cpu_coefficients(gamma, lmbda, reward.shape)
    advantage, value_target = _call_forward(
        _FORWARD[gamma.dtype],
        _extents(reward.shape, time_dim),
        r,
        v,
        w,
        done.contiguous(),
        terminated.contiguous(),
        *coefficients,
    )
    return advantage.to(reward.dtype), value_target.to(reward.dtype)


def _gae_backward_cpu(
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
) -> tuple[Tensor, ...]:
    dtype, shape = grad_advantage.dtype, grad_advantage.shape
    floats = [x.to(gamma.dtype).contiguous() for x in (grad_advantage, grad_value_target)]
    # Without `coefficients` the C function reads neither next_value nor advantage.
    floats += [x.to(gamma.dtype).contiguous() if coefficients else x for x in (next_value, advantage)]
    flags = [done.contiguous(), terminated.contiguous()]
    gammas, lmbdas, gamma0, lmbda0 = _cpu_coefficients(gamma, lmbda, shape)
    grads = [torch.empty_like(floats[0]) for _ in range(5 if coefficients else 3)]
    if grads[0].numel():
        pointers = [x.data_ptr() if x is not None else None for x in (*floats, *flags, gammas, lmbdas)]
        out = [x.data_ptr() for x in grads] + [None] * (5 - len(grads))
        _BACKWARD[gamma.dtype](*pointers, gamma0, lmbda0, *out, *_extents(shape, time_dim))
    return _finish_backward(grads, dtype, gamma, lmbda)


def _finish_backward(grads: list[Tensor], dtype: torch.dtype, gamma: Tensor, lmbda: Tensor) -> tuple[Tensor, ...]:
    """Three gradients in the dtype of the data; those of gamma and lmbda in theirs, summed when they are 0-d."""
    three = [x.to(dtype) for x in grads[:3]]
    if len(grads) == 3:
        return (*three, gamma.new_empty(0), gamma.new_empty(0))
    return (*three, *(g.sum() if x.dim() == 0 else g for g, x in zip(grads[3:], (gamma, lmbda), strict=True)))


# --- CUDA: triton is imported by the first call, so that importing graphrl does not need it ---


@cache
def _triton() -> Any:
    require_extra("triton", "triton")
    from graphrl.kernels.gae import triton

    return triton


def _gae_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(args[0]):
        return _triton().gae_forward(*args)


def _gae_backward_cuda(*args: Any) -> tuple[Tensor, ...]:
    with torch.cuda.device_of(args[0]):
        grads = _triton().gae_backward(*args)
        return _finish_backward(grads, args[0].dtype, args[6], args[7])


# --- shape rules ---


def _gae_fake(reward: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return reward.new_empty(reward.shape), reward.new_empty(reward.shape)


def _gae_backward_fake(grad_advantage: Tensor, *args: Any) -> tuple[Tensor, ...]:
    gamma, lmbda, coefficients = args[5], args[6], args[8]
    shape = grad_advantage.shape
    three = [grad_advantage.new_empty(shape) for _ in range(3)]
    if not coefficients:
        return (*three, gamma.new_empty(0), gamma.new_empty(0))
    return (*three, *(x.new_empty(() if x.dim() == 0 else shape) for x in (gamma, lmbda)))


# --- autograd ---


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, next_value, done, terminated, gamma, lmbda, ctx.time_dim = inputs
    ctx.coefficients = ctx.needs_input_grad[5] or ctx.needs_input_grad[6]
    extra = (next_value, output[0]) if ctx.coefficients else ()
    ctx.save_for_backward(done, terminated, gamma, lmbda, *extra)


def _backward(ctx: Any, grad_advantage: Tensor, grad_value_target: Tensor) -> tuple[Tensor | None, ...]:
    done, terminated, gamma, lmbda, *extra = ctx.saved_tensors
    next_value, advantage = extra if ctx.coefficients else (grad_advantage, grad_advantage)
    args = (grad_advantage, grad_value_target, next_value, advantage, done, terminated, gamma, lmbda, ctx.time_dim)
    # Gradient mode is on in a backward pass only under create_graph=True.
    backward = _differentiable_backward if torch.is_grad_enabled() else torch.ops.graphrl.gae_backward
    r, v, w, g, l = backward(*args, ctx.coefficients)  # noqa: E741
    needs = ctx.needs_input_grad
    return r, v, w, None, None, g if needs[5] else None, l if needs[6] else None, None


def _differentiable_backward(
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
) -> tuple[Tensor, ...]:
    """The gradient as differentiable operations: its recurrence is GAE's own on the time-reversed trajectory."""
    steps = grad_advantage.shape[time_dim]
    if steps == 0:
        zeros = grad_advantage * 0
        return zeros, zeros, zeros, (gamma * 0), (lmbda * 0)
    over, zero = done | terminated, grad_advantage.new_zeros(())
    first = torch.ones_like(over.narrow(time_dim, 0, 1))
    earlier = torch.cat([first, over.narrow(time_dim, 0, steps - 1)], time_dim).flip(time_dim)
    g, l = (x if x.dim() == 0 else x.roll(1, time_dim).flip(time_dim) for x in (gamma, lmbda))  # noqa: E741
    total = (grad_advantage + grad_value_target).flip(time_dim)
    none = torch.zeros_like(total)
    total = _apply(total, none, none, earlier, earlier, g, l, time_dim)[0].flip(time_dim)
    dtype = grad_advantage.dtype
    grads = [total, grad_value_target - total, torch.where(terminated, zero, (gamma * total).to(dtype))]
    if coefficients:
        ends = torch.cat([over.narrow(time_dim, 0, steps - 1), first], time_dim)
        later = torch.where(ends, zero, advantage.roll(-1, time_dim))
        grads += [total * (torch.where(terminated, zero, next_value) + lmbda * later), total * (gamma * later)]
        grads[3:] = [x.to(gamma.dtype) for x in grads[3:]]
    return _finish_backward(grads, dtype, gamma, lmbda)


# --- vmap: leading dimensions are free, so a batched call is the same call with one more ---


def _to_front(x: Any, dim: int | None, size: int, rank: int) -> Any:
    """``x`` with its mapped dimension first, or expanded to have one; 0-d coefficients grow to ``rank`` dimensions."""
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    x = x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:])
    return x.expand(size, *x.shape[1:])


def _gae_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    tensors, time_dim = args[:7], args[7]
    rank = tensors[0].dim() - (in_dims[0] is not None)
    data = [_to_front(x, d, info.batch_size, rank) for x, d in zip(tensors[:5], in_dims, strict=False)]
    scalars = [
        x if d is None and x.dim() == 0 else _to_front(x, d, info.batch_size, rank).expand(data[0].shape)
        for x, d in zip(tensors[5:], in_dims[5:7], strict=True)
    ]
    return _apply(*data, *scalars, time_dim), (0, 0)


def _gae_backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    tensors, (time_dim, coefficients) = args[:8], args[8:]
    rank = tensors[0].dim() - (in_dims[0] is not None)
    ranks = [x.dim() - (d is not None) for x, d in zip(tensors, in_dims, strict=False)]
    full = [_to_front(x, d, info.batch_size, rank) for x, d in zip(tensors, in_dims, strict=False)]
    full[6:] = [x.expand(full[0].shape) for x in full[6:]]
    *three, g, l = torch.ops.graphrl.gae_backward(*full, time_dim, coefficients)  # noqa: E741
    if not coefficients:
        return (*three, g, l), (0, 0, 0, None, None)
    g, l = (x.flatten(1).sum(1) if r == 0 else x for x, r in zip((g, l), ranks[6:], strict=True))  # noqa: E741
    return (*three, g, l), (0,) * 5


class _Transformable(torch.autograd.Function):
    """The operator for ``torch.func``: grad, vmap and their compositions."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.graphrl.gae(*args)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(_gae_vmap)


def _apply(*args: Any) -> tuple[Tensor, Tensor]:
    return _Transformable.apply(*args) if inside_transform() else torch.ops.graphrl.gae(*args)


# --- registration ---

_ops = torch.library.Library("graphrl", "FRAGMENT")  # keeps the registrations alive
_DATA = "Tensor done, Tensor terminated, Tensor gamma, Tensor lmbda, int time_dim"
_ops.define(
    f"gae(Tensor reward, Tensor value, Tensor next_value, {_DATA}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ops.define(
    f"gae_backward(Tensor grad_advantage, Tensor grad_value_target, Tensor next_value, Tensor advantage, {_DATA}, "
    "bool coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ops.impl("gae", _gae_cpu, "CPU")
_ops.impl("gae", _gae_cuda, "CUDA")
_ops.impl("gae_backward", _gae_backward_cpu, "CPU")
_ops.impl("gae_backward", _gae_backward_cuda, "CUDA")
torch.library.register_fake("graphrl::gae", _gae_fake, lib=_ops)
torch.library.register_fake("graphrl::gae_backward", _gae_backward_fake, lib=_ops)
torch.library.register_autograd("graphrl::gae", _backward, setup_context=_setup_context, lib=_ops)
torch.library.register_vmap("graphrl::gae", _gae_vmap, lib=_ops)
torch.library.register_vmap("graphrl::gae_backward", _gae_backward_vmap, lib=_ops)
