"""Value estimators as keyed graphs: temporal differences and their mixtures over many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from graphrl.kernels import gae, td0, td1, td_lambda
from graphrl.keys import Key
from graphrl.losses.value_estimator import ValueEstimator

__all__ = ["GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator"]


def _td0(
    reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, terminated: Tensor, *, gamma: Tensor, time_dim: int
) -> tuple[Tensor, Tensor]:
    target = td0(reward, next_value, terminated, gamma)
    return target - value, target


def _td1(
    reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, terminated: Tensor, *, gamma: Tensor, time_dim: int
) -> tuple[Tensor, Tensor]:
    target = td1(reward, next_value, done, terminated, gamma, time_dim=time_dim)
    return target - value, target


class _OneDiscount(ValueEstimator):
    """An estimator whose kernel takes ``gamma`` alone."""

    _kernel: ClassVar[Callable[..., tuple[Tensor, Tensor]]]

    def __init__(
        self,
        critic: Any,
        *,
        gamma: float | Tensor = 0.99,
        average_rewards: bool = False,
        differentiable: bool = False,
        shifted: bool = False,
        skip_existing: bool = False,
        mask_key: Key | None = None,
        time_dim: int | None = None,
    ) -> None:
        super().__init__(
            critic,
            self._kernel,
            {"gamma": gamma},
            average_rewards=average_rewards,
            differentiable=differentiable,
            shifted=shifted,
            skip_existing=skip_existing,
            mask_key=mask_key,
            time_dim=time_dim,
        )


class TD0Estimator(_OneDiscount):
    """The one-step temporal difference as a keyed graph, Sutton 1988, "Learning to Predict by the Methods of TD".

        value_target_t = r_t + gamma (1 - terminated_t) V(s'_t);   advantage_t = value_target_t - V(s_t)

    Keys, shapes, options and errors: :class:`ValueEstimator`. ``average_rewards``: rewards are normalised over the
    batch first; the batch keeps its own.
    """

    _kernel = staticmethod(_td0)


class TD1Estimator(_OneDiscount):
    """The return to the end of the trajectory as a keyed graph: TD(lambda) with lambda 1.

        value_target_t = r_t + gamma value_target_{t+1}, or gamma V(s'_t) where the trajectory or the batch ends and
        nothing where it ended by itself;   advantage_t = value_target_t - V(s_t)

    Keys, shapes, options and errors: :class:`ValueEstimator`. ``average_rewards``: as in :class:`TD0Estimator`.
    """

    _kernel = staticmethod(_td1)


class TDLambdaEstimator(ValueEstimator):
    """The lambda-return as a keyed graph, chapter 12 of Sutton and Barto 2018, "Reinforcement Learning".

        G_t = r_t + gamma ((1 - lmbda) V(s'_t) + lmbda G_{t+1});   where done, r_t + gamma (1 - terminated_t) V(s'_t)
        value_target_t = G_t;   advantage_t = G_t - V(s_t)

    Keys, shapes, options and errors: :class:`ValueEstimator`. ``average_rewards``: as in :class:`TD0Estimator`.
    """

    def __init__(
        self,
        critic: Any,
        *,
        gamma: float | Tensor = 0.99,
        lmbda: float | Tensor = 0.95,
        average_rewards: bool = False,
        differentiable: bool = False,
        shifted: bool = False,
        skip_existing: bool = False,
        mask_key: Key | None = None,
        time_dim: int | None = None,
    ) -> None:
        super().__init__(
            critic,
            _td_lambda,
            {"gamma": gamma, "lmbda": lmbda},
            average_rewards=average_rewards,
            differentiable=differentiable,
            shifted=shifted,
            skip_existing=skip_existing,
            mask_key=mask_key,
            time_dim=time_dim,
        )


class GAE(ValueEstimator):
    """Generalised advantage estimation as a keyed graph, eqs. 11 to 16 of Schulman et al. 2016 (arXiv:1506.02438).

        delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)
        A_t = delta_t + gamma lmbda (1 - done_t) A_{t+1};   value_target_t = A_t + V(s_t)

    Keys, shapes, options and errors: :class:`ValueEstimator`. s'_t is the true next observation, never the root of the
    next row. ``average_gae`` normalises the advantage over the batch, over what ``mask_key`` keeps; the target stays.
    """

    def __init__(
        self,
        critic: Any,
        *,
        gamma: float | Tensor = 0.99,
        lmbda: float | Tensor = 0.95,
        average_gae: bool = False,
        differentiable: bool = False,
        shifted: bool = False,
        skip_existing: bool = False,
        mask_key: Key | None = None,
        time_dim: int | None = None,
    ) -> None:
        super().__init__(
            critic,
            gae,
            {"gamma": gamma, "lmbda": lmbda},
            average_advantage=average_gae,
            differentiable=differentiable,
            shifted=shifted,
            skip_existing=skip_existing,
            mask_key=mask_key,
            time_dim=time_dim,
        )


def _td_lambda(
    reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, terminated: Tensor,
    *, gamma: Tensor, lmbda: Tensor, time_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    target = td_lambda(reward, next_value, done, terminated, gamma, lmbda, time_dim=time_dim)
    return target - value, target
