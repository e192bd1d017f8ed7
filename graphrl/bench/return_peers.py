"""The other kernels over trajectories and distributions as they are usually written, in numpy, PyTorch and TorchRL.

Each function makes a call without arguments, whose result is that of graphrl's kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bincount_projection",
    "index_add_projection",
    "numpy_discounted_sum",
    "numpy_n_step",
    "numpy_td_lambda",
    "numpy_vtrace",
    "torchrl",
]

Call = Callable[[], Any]


def _by_time(data: Sequence[Tensor]) -> list[Any]:
    """[T, B] arrays, each row contiguous: a loop over time then reads memory in order."""
    import numpy as np

    return [np.ascontiguousarray(x.squeeze(-1).numpy().T) for x in data]


def numpy_td_lambda(data: Sequence[Tensor], gamma: float, lmbda: float) -> Call:
    """A loop over time; data: reward, next_value, done, terminated."""
    import numpy as np

    reward, next_value, done, terminated = _by_time(data)

    def run() -> Any:
        target, carry = np.empty_like(reward), np.zeros_like(reward[0])
        for t in range(len(reward) - 1, -1, -1):
            bootstrap = next_value[t] * ~terminated[t]
            later = carry if t + 1 < len(reward) else bootstrap
            mixed = np.where(done[t], bootstrap, (1 - lmbda) * bootstrap + lmbda * later)
            carry = target[t] = reward[t] + gamma * mixed
        return target.T

    return run


def numpy_vtrace(data: Sequence[Tensor], gamma: float) -> Call:
    """A loop over time; data: reward, value, next_value, done, terminated, ratio."""
    import numpy as np

    reward, value, next_value, done, terminated, ratio = _by_time(data)

    def run() -> Any:
        rho, bootstrap = np.minimum(ratio, 1), next_value * ~terminated
        delta, keep = rho * (reward + gamma * bootstrap - value), gamma * rho * ~done
        target, carry = np.empty_like(reward), np.zeros_like(reward[0])
        for t in range(len(reward) - 1, -1, -1):
            carry = delta[t] + keep[t] * carry
            target[t] = carry
        target += value
        later = bootstrap.copy()
        later[:-1] = np.where(done[:-1], bootstrap[:-1], target[1:])
        return (rho * (reward + gamma * later - value)).T, target.T

    return run


def numpy_discounted_sum(data: Sequence[Tensor], gamma: float) -> Call:
    """A loop over time; data: reward, done."""
    import numpy as np

    reward, done = _by_time(data)

    def run() -> Any:
        total, carry = np.empty_like(reward), np.zeros_like(reward[0])
        for t in range(len(reward) - 1, -1, -1):
            carry = total[t] = reward[t] + gamma * ~done[t] * carry
        return total.T

    return run


def numpy_n_step(data: Sequence[Tensor], gamma: float, n: int) -> Call:
    """A loop over the n rewards, on whole arrays; data: reward, done, terminated."""
    import numpy as np

    reward, done, terminated = (x.squeeze(-1).numpy() for x in data)
    steps = reward.shape[1]

    def run() -> Any:
        total, discount = reward.copy(), np.full_like(reward, gamma)
        index = np.broadcast_to(np.arange(steps), reward.shape).copy()
        alive = ~done
        for k in range(1, min(n, steps)):
            head = alive[:, : steps - k]
            total[:, : steps - k] += head * discount[:, : steps - k] * reward[:, k:]
            discount[:, : steps - k] *= np.where(head, np.float32(gamma), np.float32(1))
            index[:, : steps - k] += head
            alive = head & ~done[:, k:]
        discount[np.take_along_axis(terminated, index, 1)] = 0
        return total, discount, index

    return run


def bincount_projection(probs: Tensor, reward: Tensor, terminated: Tensor, support: Tensor, gamma: float) -> Call:
    """C51's projection in numpy: floor, and one weighted count of where all mass goes."""
    import numpy as np

    p, r, ends, z = (x.numpy() for x in (probs, reward, terminated, support))
    (rows, atoms), low, high = p.shape, z[0], z[-1]
    offset = np.arange(0, rows * atoms, atoms)[:, None]

    def run() -> Any:
        position = (np.clip(r + gamma * z * ~ends, low, high) - low) * ((atoms - 1) / (high - low))
        below = np.clip(position.astype(np.int64), 0, atoms - 2)
        upper = position - below
        at = np.concatenate([(below + offset).ravel(), (below + offset + 1).ravel()])
        mass = np.concatenate([(p * (1 - upper)).ravel(), (p * upper).ravel()])
        return np.bincount(at, mass, rows * atoms).astype(np.float32).reshape(p.shape)

    return run


def index_add_projection(probs: Tensor, reward: Tensor, terminated: Tensor, support: Tensor, gamma: float) -> Call:
    """C51's projection as most implementations write it: floor, ceil, and two ``index_add_``."""
    rows, atoms = probs.shape
    low, high = float(support[0]), float(support[-1])
    offset = torch.arange(0, rows * atoms, atoms, device=probs.device).unsqueeze(1)

    def run() -> Tensor:
        position = (reward + gamma * support * ~terminated).clamp(low, high)
        position = ((position - low) * ((atoms - 1) / (high - low))).clamp(0, atoms - 1)
        below = position.floor().long().clamp(max=atoms - 2)
        upper = position - below
        target = torch.zeros_like(probs)
        target.view(-1).index_add_(0, (below + offset).view(-1), (probs * (1 - upper)).view(-1))
        target.view(-1).index_add_(0, (below + 1 + offset).view(-1), (probs * upper).view(-1))
        return target

    return run


def torchrl(name: str, *args: Any) -> Call:
    """The function ``name`` of TorchRL's value functionals on these arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives.value import functional
    function = getattr(functional, name)
    return lambda: function(*args)
