"""The kernels that are linear recurrences: for each its reference, its arguments, and which of them get a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from trajectories import random_trajectory

from graphrl.kernels import discounted_sum, gae, td_lambda, vtrace
from graphrl.kernels.discounted_sum import op as discounted_sum_op
from graphrl.kernels.discounted_sum.reference import discounted_sum_reference
from graphrl.kernels.gae import op as gae_op
from graphrl.kernels.gae.reference import gae_reference
from graphrl.kernels.td_lambda import op as td_lambda_op
from graphrl.kernels.td_lambda.reference import td_lambda_reference
from graphrl.kernels.vtrace import op as vtrace_op
from graphrl.kernels.vtrace.reference import vtrace_reference

COEFFICIENTS = {"gamma": 0.99, "lmbda": 0.95}


@dataclass(frozen=True)
class Family:
    """One kernel: ``function(*arguments, time_dim=)`` is judged by ``reference``, called alike."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    module: Any
    arguments: tuple[str, ...]
    differentiable: tuple[str, ...]
    """The data that get a gradient; the coefficients get one too."""

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def coefficients(self) -> list[str]:
        return [x for x in self.arguments if x in COEFFICIENTS]

    @property
    def recurrence(self) -> Any:
        return self.module._recurrence

    def draw(self, shape: Any, dtype: torch.dtype = torch.float64, **random: Any) -> dict[str, Any]:
        """Random arguments by name, in order; the coefficients are numbers."""
        drawn = random_trajectory(shape, dtype, **random)._asdict() | COEFFICIENTS
        drawn["ratio"] = random_trajectory(shape, dtype, seed=9).reward.abs()
        return {name: drawn[name] for name in self.arguments}

    def __call__(self, arguments: dict[str, Any], time_dim: int | None = None) -> tuple[Tensor, ...]:
        return as_tuple(self.function(*arguments.values(), time_dim=time_dim))

    def judge(self, arguments: dict[str, Any], time_dim: int | None = None) -> tuple[Tensor, ...]:
        return as_tuple(self.reference(*arguments.values(), time_dim=time_dim))

    def leaves(self, arguments: dict[str, Any]) -> list[Tensor]:
        """Make the differentiable arguments new leaves, in place, and list them; coefficients become tensors."""
        for name in (*self.differentiable, *self.coefficients):
            x = torch.as_tensor(arguments[name])
            exact = torch.float64 if name in COEFFICIENTS and x.dim() == 0 else x.dtype
            arguments[name] = x.detach().clone().to(exact).requires_grad_()
        return [arguments[name] for name in (*self.differentiable, *self.coefficients)]


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def ratio_before_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """V-trace with its arguments in the order of its operator."""

    @wraps(function)
    def call(reward, value, next_value, ratio, done, terminated, *coefficients, **options):
        return function(reward, value, next_value, done, terminated, ratio, *coefficients, **options)

    return call


FLAGS = ("done", "terminated")
FAMILIES = {
    family.name: family
    for family in (
        Family(
            gae,
            gae_reference,
            gae_op,
            ("reward", "value", "next_value", *FLAGS, "gamma", "lmbda"),
            ("reward", "value", "next_value"),
        ),
        Family(
            td_lambda,
            td_lambda_reference,
            td_lambda_op,
            ("reward", "next_value", *FLAGS, "gamma", "lmbda"),
            ("reward", "next_value"),
        ),
        Family(
            discounted_sum,
            discounted_sum_reference,
            discounted_sum_op,
            ("reward", "done", "gamma"),
            ("reward",),
        ),
        Family(
            ratio_before_flags(vtrace),
            ratio_before_flags(vtrace_reference),
            vtrace_op,
            ("reward", "value", "next_value", "ratio", *FLAGS, "gamma", "lmbda"),
            ("reward", "value", "next_value"),
        ),
    )
}
