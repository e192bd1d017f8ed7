"""``graphrl::discounted_sum``: the public function, and the same sum forwards in time, which is its gradient."""

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
from graphrl.kernels._recurrence import Recurrence, following

__all__ = ["discounted_sum", "sum_of_earlier"]


def discounted_sum(reward: Tensor, done: Tensor, gamma: float | Tensor, *, time_dim: int | None = None) -> Tensor:
    """Discounted reward-to-go, eq. 3.9 of Sutton and Barto 2018, with no bootstrap where a trajectory ends.

        x_t = r_t + gamma_t (1 - done_t) x_{t+1},    x = 0 after the last step

    reward: [*B, T, 1] or [*B, T], any float dtype (half precision accumulates in float32).
    done: the same shape, bool or integer.
    gamma: a float, a 0-d tensor, or one value per step that broadcasts to ``reward``.
    time_dim: None takes -2 when the last dimension is 1 and -1 otherwise; -3 fits [*B, T, agents, 1], 0 [T, B].

    Returns x, contiguous, of reward's shape and dtype. Gradient flows to reward and gamma, any number of times. What a
    cut hides is selected away, not multiplied by zero: a NaN there reaches neither result nor gradients, and neither
    does one behind a gamma that is exactly zero.

    Raises SpecError when shapes, dtypes or devices do not fit: nothing but gamma is broadcast.
    """
    check_same_shape("discounted_sum", reward=reward, done=done)
    time_dim = check_time_dim("discounted_sum", reward, time_dim)
    common_float_dtype("discounted_sum", reward=reward)
    gamma = as_coefficient("discounted_sum", "gamma", gamma, reward)
    x: Tensor = _recurrence(reward, as_flag("discounted_sum", "done", done), gamma, time_dim)
    return x


def sum_of_earlier(x: Tensor, done: Tensor | None, gamma: Tensor, time_dim: int) -> Tensor:
    """``s_t = x_t + gamma_{t-1} (1 - done_{t-1}) s_{t-1}``: how a gradient runs through a recurrence, differentiable.

    gamma: in the accumulation dtype, 0-d or of the full shape; ``time_dim`` counts from the end.
    """

    # Reversed in time, step t needs the coefficient of t - 1; what rolls around to the end meets no further step.
    def before(v: Tensor) -> Tensor:
        return v.roll(1, time_dim).flip(time_dim)

    s: Tensor = _recurrence(
        x.flip(time_dim),
        done if done is None else before(done),
        gamma if gamma.dim() == 0 else before(gamma),
        time_dim,
    )
    return s.flip(time_dim)


def _differentiable(
    grad: Tensor, result: Tensor, done: Tensor | None, gamma: Tensor, time_dim: int, wants_coefficients: bool
) -> list[Tensor]:
    total = sum_of_earlier(grad.to(gamma.dtype), done, gamma, time_dim)
    if not wants_coefficients:
        return [total]
    over = torch.zeros_like(grad, dtype=torch.bool) if done is None else done
    return [total, total * following(result, over, time_dim)]


_recurrence = Recurrence(
    name="discounted_sum",
    data=("reward",),
    flags=("done",),
    optional_flags=True,
    coefficients=("gamma",),
    outputs=("result",),
    read=(),
    differentiable=_differentiable,
).register()
