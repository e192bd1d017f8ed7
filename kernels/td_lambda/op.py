"""``graphrl::td_lambda``: TD(lambda) returns, the returns that are cases of them, and their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from graphrl.kernels._checks import (
    as_coefficient,
    as_flag,
    check_same_shape,
    check_time_dim,
    common_float_dtype,
)
from graphrl.kernels._recurrence import Recurrence, ends, following
from graphrl.kernels.discounted_sum.op import sum_of_earlier

__all__ = ["lambda_return", "td0", "td1", "td_lambda"]


def td_lambda(
    reward: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    *,
    time_dim: int | None = None,
) -> Tensor:
    """TD(lambda) returns (Sutton 1988), eq. 12.18 of Sutton and Barto 2018.

        G_t = r_t + gamma_t (1 - terminated_t) [(1 - lmbda_t) V'_t + lmbda_t G_{t+1}],
        G_{t+1} := V'_t where done_t and at the last step

    reward, next_value: [*B, T, 1] or [*B, T], any float dtype (promoted to a common one; half precision accumulates
        in float32). ``next_value`` is the value of the true next observation V'_t.
    done, terminated: the same shape, bool or integer. ``done = terminated | truncated`` cuts the recurrence,
        ``terminated`` drops the bootstrap; a terminated step counts as done.
    gamma, lmbda: a float, a 0-d tensor, or one value per step that broadcasts to ``reward``.
    time_dim: None takes -2 when the last dimension is 1 and -1 otherwise; -3 fits [*B, T, agents, 1], 0 [T, B].

    Returns G, contiguous, of reward's shape. Gradient flows to reward, next_value, gamma and lmbda, any number of
    times. What a cut or a weight of exactly zero hides is selected away: a NaN there reaches neither result nor
    gradients.

    Raises SpecError when shapes, dtypes or devices do not fit: nothing but gamma and lmbda is broadcast.
    """
    check_same_shape("td_lambda", reward=reward, next_value=next_value, done=done, terminated=terminated)
    done, terminated = as_flag("td_lambda", "done", done), as_flag("td_lambda", "terminated", terminated)
    return _returns("td_lambda", reward, next_value, (done, terminated), ("gamma", gamma), lmbda, time_dim)


def td1(
    reward: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    *,
    time_dim: int | None = None,
) -> Tensor:
    """TD(1) returns: :func:`td_lambda` with ``lmbda = 1``, discounted rewards to the cut and the bootstrap there.

        G_t = r_t + gamma_t (1 - terminated_t) G_{t+1},    G_{t+1} := V'_t where done_t and at the last step

    Arguments, result, gradient and errors are those of :func:`td_lambda`; ``next_value`` is read at cuts and at the
    last step only.
    """
    check_same_shape("td1", reward=reward, next_value=next_value, done=done, terminated=terminated)
    done, terminated = as_flag("td1", "done", done), as_flag("td1", "terminated", terminated)
    return _returns("td1", reward, next_value, (done, terminated), ("gamma", gamma), 1.0, time_dim)


def lambda_return(
    reward: Tensor,
    next_value: Tensor,
    discount: float | Tensor,
    lmbda: float | Tensor,
    *,
    time_dim: int | None = None,
) -> Tensor:
    """Lambda returns over imagined steps, eq. 6 of Hafner et al. 2020 (arXiv:1912.01603) as a recurrence.

        G_t = r_t + discount_t [(1 - lmbda_t) V'_t + lmbda_t G_{t+1}],    G_{t+1} := V'_t at the last step

    reward, next_value: [*B, H, 1] or [*B, H], any float dtype.
    discount: gamma times the predicted probability that the episode goes on: one value per step that broadcasts to
        ``reward``, or a float. Zero ends the trajectory, and a NaN behind it reaches neither result nor gradients,
        except the gradient of that discount, which is what it hides.
    lmbda, time_dim: as in :func:`td_lambda`.

    Returns G, contiguous, of reward's shape; gradient flows to all four. Raises SpecError when shapes, dtypes or
    devices do not fit: nothing but discount and lmbda is broadcast.
    """
    check_same_shape("lambda_return", reward=reward, next_value=next_value)
    return _returns("lambda_return", reward, next_value, (None, None), ("discount", discount), lmbda, time_dim)


def td0(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: float | Tensor) -> Tensor:
    """One-step returns, eq. 6.2 of Sutton and Barto 2018: plain torch operations, each step on its own.

        G_t = r_t + gamma_t (1 - terminated_t) V'_t

    reward, next_value: one shape, any float dtype (promoted to a common one, computed in float32 at least).
    terminated: the same shape, bool or integer. gamma: a float, a 0-d tensor, or a tensor that broadcasts to reward.

    Returns G of reward's shape. Gradient flows to reward, next_value and gamma; a NaN behind a terminated step
    reaches none of them. Raises SpecError when shapes, dtypes or devices do not fit.
    """
    check_same_shape("td0", reward=reward, next_value=next_value, terminated=terminated)
    dtype = common_float_dtype("td0", reward=reward, next_value=next_value)
    gamma = as_coefficient("td0", "gamma", gamma, reward.to(dtype))
    bootstrap = next_value.to(gamma.dtype).masked_fill(as_flag("td0", "terminated", terminated), 0.0)
    return (reward.to(gamma.dtype) + gamma * bootstrap).to(dtype)


def _returns(
    op: str,
    reward: Tensor,
    next_value: Tensor,
    flags: tuple[Tensor, Tensor] | tuple[None, None],
    gamma: tuple[str, float | Tensor],
    lmbda: float | Tensor,
    time_dim: int | None,
) -> Tensor:
    time_dim = check_time_dim(op, reward, time_dim)
    dtype = common_float_dtype(op, reward=reward, next_value=next_value)
    reward, next_value = reward.to(dtype), next_value.to(dtype)
    coefficients = as_coefficient(op, *gamma, reward), as_coefficient(op, "lmbda", lmbda, reward)
    target: Tensor = _recurrence(reward, next_value, *flags, *coefficients, time_dim)
    return target


def _differentiable(
    grad: Tensor,
    next_value: Tensor,
    target: Tensor,
    done: Tensor | None,
    terminated: Tensor | None,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
    wants_coefficients: bool,
) -> list[Tensor]:
    if done is None or terminated is None:
        ended = over = torch.zeros_like(grad, dtype=torch.bool)
    else:
        ended, over = terminated, done | terminated
    y, z = gamma.masked_fill(ended, 0.0), lmbda.masked_fill(ends(over, time_dim), 0.0)
    total = sum_of_earlier(grad.to(gamma.dtype), None, y * z, time_dim)
    grads = [total, _times(y * (1 - z), total)]
    if wants_coefficients:
        later = following(target.to(gamma.dtype), over, time_dim)
        bootstrap = next_value.to(gamma.dtype).masked_fill(ended, 0.0)
        mixed = _times(1 - z, bootstrap) + _times(z, later)
        grads += [(total * mixed).masked_fill(ended, 0.0), _times(y, total * (later - bootstrap))]
        grads[3] = grads[3].masked_fill(ends(over, time_dim), 0.0)
    return grads


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """``weight * x``, where a zero weight hides a NaN or inf. A finite x stays: it is the derivative by the weight."""
    return weight * x.masked_fill((weight == 0) & ~x.isfinite(), 0.0)


_recurrence = Recurrence(
    name="td_lambda",
    data=("reward", "next_value"),
    optional_flags=True,
    coefficients=("gamma", "lmbda"),
    outputs=("value_target",),
    read=("next_value",),
    differentiable=_differentiable,
).register()
