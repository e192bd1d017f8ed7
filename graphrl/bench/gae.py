"""Generalised advantage estimation over 1000 trajectories of 1000 steps, done probability .001."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphrl.bench.tables import BenchOptions, installed, measure
from graphrl.compiler.benchmark import BenchmarkTable
from graphrl.kernels import gae

__all__ = ["suite"]

GAMMA, LMBDA = 0.99, 0.95


def suite(options: BenchOptions, size: int = 1000) -> list[BenchmarkTable]:
    """The GAE table; its last row copies as many bytes as an estimate reads and writes."""
    generator = torch.Generator().manual_seed(0)
    shape = (size, size, 1)
    reward, value, next_value = (torch.randn(shape, generator=generator).to(options.device) for _ in range(3))
    terminated, truncated = ((torch.rand(shape, generator=generator) < 0.0005).to(options.device) for _ in range(2))
    done = terminated | truncated
    data = [reward, value, next_value, done, terminated]
    # glibc returns large blocks to the system, at a page fault per 4 KiB, until it has seen a larger one freed.
    torch.empty(16 << 20, dtype=torch.uint8).fill_(0)
    arrays = [*data, reward, reward]
    into = [torch.empty_like(x) for x in arrays]
    numbers = options.device == "cpu"
    runs: dict[str, Callable[[], Any]] = {}
    if numbers and installed("numba", options):
        runs["numba loop"] = _numba(data)
    runs["graphrl"] = lambda: gae(reward, value, next_value, done, terminated, GAMMA, LMBDA)
    if numbers:
        runs["numpy, loop over time"] = _numpy(data)
    if installed("torchrl", options):
        runs["torchrl, vectorised"] = _torchrl(data)
    # last, as OpenMP's threads spin on for a while afterwards, on the cores of whoever comes next
    runs["torch copy of the same bytes"] = lambda: [y.copy_(x) for x, y in zip(arrays, into, strict=True)]
    return [measure(f"GAE {size} x {size}, per estimate", runs, replace(options, threads=None))]


def _numpy(data: list[Tensor]) -> Callable[[], Any]:
    import numpy as np

    reward, value, next_value, done, terminated = (x.squeeze(-1).numpy() for x in data)

    def run() -> Any:
        advantage = np.empty_like(reward)
        carry = np.zeros(len(reward), dtype=np.float32)
        for t in range(reward.shape[1] - 1, -1, -1):
            delta = reward[:, t] + GAMMA * next_value[:, t] * ~terminated[:, t] - value[:, t]
            carry = delta + GAMMA * LMBDA * ~done[:, t] * carry
            advantage[:, t] = carry
        return advantage, advantage + value

    return run


def _numba(data: list[Tensor]) -> Callable[[], Any]:
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

    arrays = [x.squeeze(-1).numpy() for x in data]
    compiled: Any = loop
    return lambda: compiled(*arrays, np.float32(GAMMA), np.float32(LMBDA))


def _torchrl(data: list[Tensor]) -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate as estimate
    reward, value, next_value, done, terminated = data
    return lambda: estimate(GAMMA, LMBDA, value, next_value, reward, done, terminated)
