"""``graphrl::n_step_return``: the public function, its registration with torch, shape rule, gradient, batching rule."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from graphrl.errors import SpecError
from graphrl.kernels._checks import (
    as_coefficient,
    as_flag,
    broadcasts_to,
    check_same_shape,
    check_time_dim,
    common_float_dtype,
)
from graphrl.kernels._eager import inside_transform, plain_eager
from graphrl.kernels._lib import lib as _native
from graphrl.kernels._recurrence import extents, ordinary, to_front
from graphrl.kernels._triton import triton_version
from graphrl.kernels.n_step.doubling import n_step_by_doubling

__all__ = ["n_step_return"]

_UNLIMITED = 2**31 - 1  # steps: the operator's `n` where a tensor of horizons says it all


def n_step_return(
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    n: int | Tensor,
    *,
    time_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """n-step returns without their bootstrap, eq. 7.1 of Sutton and Barto 2018: R_t + discount_t V'[index_t].

        k_t = min(n_t, steps up to and including the first done one, steps left in the batch)
        R_t = sum_{i<k} (prod_{j<i} gamma_{t+j}) r_{t+i},   discount_t = prod_{j<k} gamma_{t+j},   index_t = t + k - 1

    reward: [*B, T, 1] or [*B, T], any float dtype (half precision accumulates in float32).
    done, terminated: the same shape, bool or integer; a terminated step counts as done. n=3 sums three rewards; no sum
        runs into the next trajectory or past the batch. The discount is 0 where row index_t is terminated.
    gamma: a float, a 0-d tensor, or one value per step that broadcasts to ``reward``.
    n: an int >= 1, or an integer tensor that broadcasts to ``reward``: one horizon per trajectory or per step, not
        checked (that would wait for a GPU); one below 1 counts as 1.
    time_dim: None takes -2 when the last dimension is 1 and -1 otherwise; -3 fits [*B, T, agents, 1], 0 [T, B].

    Returns ``(n_step_reward, discount, bootstrap_index)`` of reward's shape, the last int64 along time and counted from
    the start of the batch: ``next_value.gather(time_dim, bootstrap_index)``. Gradient flows to reward and gamma, any
    number of times. A NaN behind a done step reaches neither results nor gradients.

    Raises SpecError when shapes, dtypes or devices do not fit.
    """
    check_same_shape("n_step_return", reward=reward, done=done, terminated=terminated)
    time_dim = check_time_dim("n_step_return", reward, time_dim)
    common_float_dtype("n_step_return", reward=reward)
    horizon, n = (_as_horizon(n, reward), _UNLIMITED) if isinstance(n, Tensor) else (None, _as_steps(n))
    return _apply(
        reward,
        as_flag("n_step_return", "done", done),
        as_flag("n_step_return", "terminated", terminated),
        as_coefficient("n_step_return", "gamma", gamma, reward),
        horizon,
        n,
        time_dim,
    )


def _as_steps(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, (Integral, torch.SymInt)):
        raise SpecError(f"n_step_return: n is a {type(n).__name__}, expected an int or an integer tensor: n=3")
    if n < 1:
        raise SpecError(f"n_step_return: n={n}, expected at least 1: n=1 is the reward of one step")
    return min(int(n), _UNLIMITED)


def _as_horizon(n: Tensor, reward: Tensor) -> Tensor:
    """``n`` in the shape of ``reward`` and on its device."""
    if n.dtype == torch.bool or n.dtype.is_floating_point or n.dtype.is_complex:
        raise SpecError(f"n_step_return: n is {n.dtype}, expected an integer dtype. n.long()")
    if not broadcasts_to(n, reward.shape):
        raise SpecError(
            f"n_step_return: n is {list(n.shape)} and does not broadcast to reward {list(reward.shape)}. Pass an int, "
            "or one horizon per trajectory with a time dimension of size 1"
        )
    return n.to(reward.device).expand(reward.shape)


# --- CPU ---


def _call(name: str, x: Tensor, args: tuple[Any, ...], *out: Tensor) -> None:
    """The C function ``name`` on ``x`` and the operator's other arguments."""
    done, terminated, gamma, horizon, n, time_dim = args
    if not x.numel():
        return
    x, done, terminated = x.to(gamma.dtype).contiguous(), done.contiguous(), terminated.contiguous()
    per_step = gamma.contiguous() if gamma.dim() else None
    if horizon is not None:
        horizon = horizon.long().clamp(1, _UNLIMITED).to(torch.int32).contiguous()
    pointers = [y if y is None else y.data_ptr() for y in (x, done, terminated, per_step, horizon)]
    function = getattr(_native, f"grl_{name}_{'f64' if gamma.dtype == torch.float64 else 'f32'}")
    number = 0.0 if gamma.dim() else gamma.item()
    function(*pointers, number, n, *(y.data_ptr() for y in out), *extents(x.shape, time_dim))


def _forward_cpu(reward: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    total, discount = (torch.empty(reward.shape, dtype=args[2].dtype) for _ in range(2))
    index = torch.empty(reward.shape, dtype=torch.int64)
    _call("n_step_return", reward, args, total, discount, index)
    return total.to(reward.dtype), discount.to(reward.dtype), index


def _backward_cpu(grad: Tensor, *args: Any) -> Tensor:
    grad_reward = torch.empty(grad.shape, dtype=args[2].dtype)
    _call("n_step_return_backward", grad, args, grad_reward)
    return grad_reward.to(grad.dtype)


# --- CUDA ---


def _forward_cuda(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(args[0]):
        return triton_version("n_step").forward(*args)  # type: ignore[no-any-return]


def _backward_cuda(*args: Any) -> Tensor:
    with torch.cuda.device_of(args[0]):
        return triton_version("n_step").backward(*args)  # type: ignore[no-any-return]


# --- shape rules ---


def _forward_fake(reward: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = reward.shape
    return reward.new_empty(shape), reward.new_empty(shape), reward.new_empty(shape, dtype=torch.int64)


def _backward_fake(grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(grad.shape)


# --- autograd ---


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    reward, done, terminated, gamma, horizon, ctx.n, ctx.time_dim = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.wants_gamma = ctx.needs_input_grad[3]
    ctx.save_for_backward(done, terminated, gamma, horizon, reward if ctx.wants_gamma else None)


def _backward(ctx: Any, grad: Tensor, grad_discount: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    done, terminated, gamma, horizon, reward = ctx.saved_tensors
    hidden = (done, terminated, gamma, horizon, ctx.n, ctx.time_dim)
    grad_gamma = None
    # Gradient mode is on in a backward pass only under create_graph=True.
    if ctx.wants_gamma or torch.is_grad_enabled():
        reward = torch.zeros_like(grad) if reward is None else reward  # the sums are linear in it
        pull = torch.func.vjp(lambda r, g: n_step_by_doubling(r, done, terminated, g, *hidden[3:]), reward, gamma)[1]
        grad_reward, grad_gamma = pull((grad, grad_discount))
    else:
        grad_reward = torch.ops.graphrl.n_step_return_backward(grad, *hidden)
    return grad_reward, None, None, grad_gamma if ctx.wants_gamma else None, None, None, None


# --- vmap: leading dimensions are free, so a batched call is the same call with one more ---


def _in_front(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Any]:
    rank = args[0].dim() - (in_dims[0] is not None)
    full = [to_front(x, d, info.batch_size, rank) for x, d in zip(args[:5], in_dims, strict=False)]
    alone = in_dims[3] is None and args[3].dim() == 0
    full[3] = args[3] if alone else full[3].expand(full[0].shape)
    return [*full, *args[5:]]


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    return _apply(*_in_front(info, in_dims, args)), (0, 0, 0)


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    return torch.ops.graphrl.n_step_return_backward(*_in_front(info, in_dims, args)), 0


class _Transformable(torch.autograd.Function):
    """The operator for ``torch.func``: grad, vmap and their compositions."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.graphrl.n_step_return(*args)  # type: ignore[no-any-return]

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(_forward_vmap)


def _apply(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if plain_eager() and ordinary(args):
        return _forward_cpu(*args)
    found = _Transformable.apply(*args) if inside_transform() else torch.ops.graphrl.n_step_return(*args)
    return found  # type: ignore[no-any-return]


# --- registration ---

_ops = torch.library.Library("graphrl", "FRAGMENT")  # keeps the registrations alive
_DATA = "Tensor done, Tensor terminated, Tensor gamma, Tensor? horizon, int n, int time_dim"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_ops.define(f"n_step_return(Tensor reward, {_DATA}) -> (Tensor, Tensor, Tensor)", tags=_TAGS)
_ops.define(f"n_step_return_backward(Tensor grad, {_DATA}) -> Tensor", tags=_TAGS)
_ops.impl("n_step_return", _forward_cpu, "CPU")
_ops.impl("n_step_return", _forward_cuda, "CUDA")
_ops.impl("n_step_return_backward", _backward_cpu, "CPU")
_ops.impl("n_step_return_backward", _backward_cuda, "CUDA")
torch.library.register_fake("graphrl::n_step_return", _forward_fake, lib=_ops)
torch.library.register_fake("graphrl::n_step_return_backward", _backward_fake, lib=_ops)
torch.library.register_autograd("graphrl::n_step_return", _backward, setup_context=_setup_context, lib=_ops)
torch.library.register_vmap("graphrl::n_step_return", _forward_vmap, lib=_ops)
torch.library.register_vmap("graphrl::n_step_return_backward", _backward_vmap, lib=_ops)
