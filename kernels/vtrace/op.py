"""``graphrl::vtrace``: the public function and the operator, whose gradient to ``ratio`` is none."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from graphrl.errors import SpecError
from graphrl.kernels._checks import as_coefficient, as_flag, check_same_shape, check_time_dim, common_float_dtype
from graphrl.kernels._recurrence import Recurrence, following
from graphrl.kernels.discounted_sum.op import sum_of_earlier

__all__ = ["vtrace"]


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    ratio: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor = 1.0,
    *,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    time_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages, eq. 1 and section 4.2 of Espeholt et al. 2018 (arXiv:1802.01561).

        rho_t = min(rho_clip, ratio_t),   c_t = lmbda_t min(c_clip, ratio_t)
        x_t   = rho_t (r_t + gamma_t (1 - terminated_t) V'_t - V_t) + gamma_t c_t (1 - done_t) x_{t+1}
        adv_t = rho_t (r_t + gamma_t B_t - V_t),    value_target_t = V_t + x_t

    B_t: value_target_{t+1}; V'_t where the step is done or the last one; 0 where it is terminated.
    reward, value, next_value, ratio: [*B, T, 1] or [*B, T], any float dtype (half precision accumulates in float32).
        ``ratio`` is pi(a|s) / mu(a|s), unclipped; infinity is clipped like any other.
    done, terminated: the same shape, bool or integer; a terminated step counts as done.
    gamma, lmbda: a float, a 0-d tensor, or one value per step that broadcasts to ``reward``.
    rho_clip, c_clip: positive, ``inf`` clips nothing. As in the paper, rho_clip serves targets and advantages alike.
    time_dim: None takes -2 when the last dimension is 1 and -1 otherwise; -3 fits [*B, T, agents, 1], 0 [T, B].

    Returns ``(advantage, value_target)``, contiguous, of reward's shape. Gradient flows to reward, value, next_value,
    gamma and lmbda, any number of times; none to ratio, which the paper holds constant. A NaN that a cut hides reaches
    neither results nor gradients. Raises SpecError when shapes, dtypes or devices do not fit, and for a clip <= 0.
    """
    floats = {"reward": reward, "value": value, "next_value": next_value, "ratio": ratio}
    check_same_shape("vtrace", **floats, done=done, terminated=terminated)
    time_dim = check_time_dim("vtrace", reward, time_dim)
    dtype = common_float_dtype("vtrace", **floats)
    data = [x.to(dtype) for x in floats.values()]
    value_target, advantage = _recurrence(
        *data,
        as_flag("vtrace", "done", done),
        as_flag("vtrace", "terminated", terminated),
        as_coefficient("vtrace", "gamma", gamma, data[0]),
        as_coefficient("vtrace", "lmbda", lmbda, data[0]),
        time_dim,
        _as_clip("rho_clip", rho_clip),
        _as_clip("c_clip", c_clip),
    )
    return advantage, value_target


def _as_clip(name: str, x: float) -> float:
    if not isinstance(x, (Real, torch.SymFloat)) or not x > 0:
        found = f"={x}" if isinstance(x, Real) else f" is a {type(x).__name__}"
        raise SpecError(f"vtrace: {name}{found}, expected a positive number; float('inf') clips nothing")
    return float(x)


def _differentiable(
    grad_value_target: Tensor,
    grad_advantage: Tensor,
    value: Tensor,
    next_value: Tensor,
    value_target: Tensor,
    ratio: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
    rho_clip: float,
    c_clip: float,
    wants_coefficients: bool,
) -> list[Tensor]:
    over, zero, exact = done | terminated, gamma.new_zeros(()), gamma.dtype
    ratio, grad_advantage = ratio.to(exact), grad_advantage.to(exact)
    rho, c = ratio.clamp(max=rho_clip), ratio.clamp(max=c_clip)
    # An advantage reads value_target one step later where the step goes on, and next_value where it does not.
    goes_on = following(torch.ones_like(rho), over, time_dim) != 0
    reads_later = torch.where(goes_on, gamma * rho * grad_advantage, zero).roll(1, time_dim)
    direct = grad_value_target.to(exact) + reads_later
    total = sum_of_earlier(direct, over, gamma * lmbda * c, time_dim)
    grad_reward = rho * (total + grad_advantage)
    straight = torch.where(goes_on, total, total + grad_advantage)
    grads = [grad_reward, direct - grad_reward, torch.where(terminated, zero, gamma * rho * straight)]
    if wants_coefficients:
        later, bootstrap = following(value_target, over, time_dim), torch.where(terminated, zero, next_value)
        traced = total * torch.where(goes_on, c, zero) * (later - following(value, over, time_dim))
        further = torch.where(goes_on, later, bootstrap)
        grads += [rho * (total * bootstrap + grad_advantage * further) + lmbda * traced, gamma * traced]
    return grads


_recurrence = Recurrence(
    name="vtrace",
    data=("reward", "value", "next_value"),
    constants=("ratio",),
    coefficients=("gamma", "lmbda"),
    outputs=("value_target", "advantage"),  # in this order: the gradients of gamma and lmbda read the first
    read=("value", "next_value"),
    differentiable=_differentiable,
    options=("rho_clip", "c_clip"),
).register()
