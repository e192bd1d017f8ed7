"""Generalised advantage estimation as other libraries compute it: functions that make a call without arguments.

data: reward, value, next_value [B, T, 1] float32, done, terminated [B, T, 1] bool; a call returns advantage and target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["GAMMA", "LMBDA", "lfilter", "numba_loop", "numpy_loop", "torchrl", "unrolled"]

GAMMA, LMBDA = 0.99, 0.95


def _arrays(data: Sequence[Tensor]) -> list[Any]:
    return [x.squeeze(-1).numpy() for x in data]


def numba_loop(data: Sequence[Tensor]) -> Callable[[], Any]:
    """One compiled loop, as Tianshou has it; the arrays are made in advance."""
    import numba
    import numpy as np

    @numba.njit
    def loop(reward: Any, value: Any, next_value: Any, done: Any, terminated: Any, gamma: Any, lmbda: Any) -> Any:
        advantage = np.empty_like(reward)
        for row in range(reward.shape[0]):
            carry = np.float32(0)
            for t in range(reward.shape[1] - 1, -1, -1):
                delta = reward[row, t] + gamma * next_value[row, t] * (1 - terminated[row, t]) - value[row, t]
                carry = delta + gamma * lmbda * (1 - done[row, t]) * carry
                advantage[row, t] = carry
        return advantage, advantage + value

    arrays, compiled = _arrays(data), loop  # type: Any, Any
    gamma, lmbda = np.float32(GAMMA), np.float32(LMBDA)
    return lambda: compiled(*arrays, gamma, lmbda)


def numpy_loop(data: Sequence[Tensor]) -> Callable[[], Any]:
    """A loop over time on rows at once, as Stable-Baselines3 has it."""
    import numpy as np

    reward, value, next_value, done, terminated = _arrays(data)

    def run() -> Any:
        advantage = np.empty_like(reward)
        carry = np.zeros(len(reward), dtype=np.float32)
        for t in range(reward.shape[1] - 1, -1, -1):
            delta = reward[:, t] + GAMMA * next_value[:, t] * ~terminated[:, t] - value[:, t]
            carry = delta + GAMMA * LMBDA * ~done[:, t] * carry
            advantage[:, t] = carry
        return advantage, advantage + value

    return run


def lfilter(data: Sequence[Tensor]) -> Callable[[], Any]:
    """A recursive filter, as RLlib has it. It knows no cuts, so it is called once for each trajectory."""
    import numpy as np
    from scipy.signal import lfilter as filtered

    reward, value, next_value, done, terminated = _arrays(data)

    def run() -> Any:
        delta = (reward + GAMMA * next_value * ~terminated - value).reshape(-1)
        ends = done.copy()
        ends[:, -1] = True
        advantage, start = np.empty_like(delta), 0
        for stop in (np.flatnonzero(ends) + 1).tolist():
            advantage[start:stop] = filtered([1], [1, -GAMMA * LMBDA], delta[start:stop][::-1])[::-1]
            start = stop
        advantage = advantage.reshape(reward.shape)
        return advantage, advantage + value

    return run


def torchrl(data: Sequence[Tensor], vectorised: bool) -> Callable[[], Any]:
    """TorchRL's function: a loop over time, or its products of padded segments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives.value import functional
    estimate = getattr(functional, f"{'vec_' if vectorised else ''}generalized_advantage_estimate")
    reward, value, next_value, done, terminated = data
    return lambda: estimate(GAMMA, LMBDA, value, next_value, reward, done, terminated)


def unrolled(data: Sequence[Tensor], compiled: bool = True) -> Callable[[], Any]:
    """A loop over time in PyTorch, which ``torch.compile`` unrolls."""

    def loop(reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, terminated: Tensor) -> Any:
        delta = reward + GAMMA * next_value * ~terminated - value
        keep = GAMMA * LMBDA * ~done
        carry, found = torch.zeros_like(delta[:, 0]), []
        for t in reversed(range(delta.shape[1])):
            carry = delta[:, t] + keep[:, t] * carry
            found.append(carry)
        advantage = torch.stack(found[::-1], 1)
        return advantage, advantage + value

    run = torch.compile(loop) if compiled else loop
    return lambda: run(*data)
