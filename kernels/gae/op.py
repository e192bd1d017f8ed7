"""``graphrl::gae``: the public function, its shortest way to the C function, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphrl.kernels._checks import (
    as_coefficient,
    as_flag,
    check_same_shape,
    check_time_dim,
    common_float_dtype,
)
from graphrl.kernels._eager import plain_eager
from graphrl.kernels._lib import lib as _native
from graphrl.kernels._recurrence import Recurrence, extents, following
from graphrl.kernels.discounted_sum.op import sum_of_earlier

__all__ = ["gae"]

_FORWARD = {torch.float32: _native.grl_gae_f32, torch.float64: _native.grl_gae_f64}


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    *,
    time_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, eqs. 11 to 16 of Schulman et al. 2016 (arXiv:1506.02438).

        delta_t = r_t + gamma_t (1 - terminated_t) V'_t - V_t
        A_t     = delta_t + gamma_t lmbda_t (1 - done_t) A_{t+1},    value_target_t = A_t + V_t

    reward, value, next_value: [*B, T, 1] or [*B, T], any float dtype (promoted to a common one; half precision
        accumulates in float32). ``next_value``: of the true next observation V'_t, not ``value`` shifted by a step.
    done, terminated: the same shape, bool or integer. ``done = terminated | truncated`` cuts the recurrence,
        ``terminated`` drops the bootstrap; a terminated step counts as done.
    gamma, lmbda: a float, a 0-d tensor, or one value per step that broadcasts to ``reward``.
    time_dim: None takes -2 when the last dimension is 1 and -1 otherwise; -3 fits [*B, T, agents, 1], 0 [T, B].

    Returns ``(advantage, value_target)``, contiguous, of reward's shape. Gradient flows to reward, value, next_value,
    gamma and lmbda, any number of times. What a cut hides is selected away, not multiplied by zero: a NaN there
    reaches neither results nor gradients, and no later step's passes a ``gamma lmbda`` that is exactly zero.

    Raises SpecError when shapes, dtypes or devices do not fit: nothing but gamma and lmbda is broadcast.
    """
    if (
        type(gamma) is float
        and type(lmbda) is float
        and plain_eager()
        and (kernel := _direct_kernel(reward, value, next_value, done, terminated)) is not None
    ):
        time_dim = check_time_dim("gae", reward, time_dim)
        return _call_forward(kernel, reward, value, next_value, done, terminated, gamma, lmbda, time_dim)
    check_same_shape("gae", reward=reward, value=value, next_value=next_value, done=done, terminated=terminated)
    time_dim = check_time_dim("gae", reward, time_dim)
    dtype = common_float_dtype("gae", reward=reward, value=value, next_value=next_value)
    reward, value, next_value = reward.to(dtype), value.to(dtype), next_value.to(dtype)
    return _recurrence(  # type: ignore[no-any-return]
        reward,
        value,
        next_value,
        as_flag("gae", "done", done),
        as_flag("gae", "terminated", terminated),
        as_coefficient("gae", "gamma", gamma, reward),
        as_coefficient("gae", "lmbda", lmbda, reward),
        time_dim,
    )


def _direct_kernel(reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, terminated: Tensor) -> Any:
    """The C function when these can go to it as they are and no gradient is asked for, else None."""
    if not (type(reward) is type(value) is type(next_value) is type(done) is type(terminated) is Tensor):
        return None
    kernel, shape = _FORWARD.get(reward.dtype), reward.shape
    if (
        kernel is not None
        and reward.dtype == value.dtype == next_value.dtype
        and done.dtype == terminated.dtype == torch.bool
        and shape == value.shape == next_value.shape == done.shape == terminated.shape
        and reward.is_cpu and value.is_cpu and next_value.is_cpu and done.is_cpu and terminated.is_cpu
        and reward.is_contiguous() and value.is_contiguous() and next_value.is_contiguous()
        and done.is_contiguous() and terminated.is_contiguous()
        and not (
            (reward.requires_grad or value.requires_grad or next_value.requires_grad) and torch.is_grad_enabled()
        )
    ):  # fmt: skip
        return kernel
    return None


def _call_forward(
    kernel: Any,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float,
    lmbda: float,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    advantage, value_target = torch.empty_like(reward), torch.empty_like(reward)
    if advantage.numel():
        kernel(
            reward.data_ptr(),
            value.data_ptr(),
            next_value.data_ptr(),
            done.data_ptr(),
            terminated.data_ptr(),
            None,
            None,
            gamma,
            lmbda,
            advantage.data_ptr(),
            value_target.data_ptr(),
            *extents(reward.shape, time_dim),
        )
    return advantage, value_target


def _differentiable(
    grad_advantage: Tensor,
    grad_value_target: Tensor,
    next_value: Tensor,
    advantage: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
    wants_coefficients: bool,
) -> list[Tensor]:
    over, zero = done | terminated, gamma.new_zeros(())
    straight = grad_value_target.to(gamma.dtype)
    total = sum_of_earlier(grad_advantage + straight, over, gamma * lmbda, time_dim)
    grads = [total, straight - total, torch.where(terminated, zero, gamma * total)]
    if wants_coefficients:
        later = following(advantage, over, time_dim)
        grads += [total * (torch.where(terminated, zero, next_value) + lmbda * later), total * (gamma * later)]
    return grads


_recurrence = Recurrence(
    name="gae",
    data=("reward", "value", "next_value"),
    coefficients=("gamma", "lmbda"),
    outputs=("advantage", "value_target"),
    read=("next_value",),
    differentiable=_differentiable,
).register()
