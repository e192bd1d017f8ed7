"""Values from a critic with a memory: along the rows, and one step on from each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from graphrl.keys import Key, normalize_keys
from graphrl.losses.common import next_key

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """What a recurrent critic carries from step to step.

    ``states``: keys that it reads and writes under ``next``. ``resets``: flags that start a new episode.
    ``every_step``: it writes the state after every step of a sequence, as nodes with ``over_time()`` do, not only
    after the last. ``walks``: none of its nodes with ``over_time()`` is in its form for single steps.
    """

    states: tuple[Key, ...]
    resets: tuple[Key, ...]
    every_step: bool
    walks: bool

    @classmethod
    def of(cls, critic: Any) -> Memory | None:
        """The memory of a critic, or ``None`` for one without."""
        states = _carried(critic)
        if not states:
            return None
        nodes = [m for m in critic.modules() if _carried(m)]
        nodes = [m for m in nodes if not any(inner is not m and _carried(inner) for inner in m.modules())]
        flags = {m.is_init_key for m in nodes if hasattr(m, "is_init_key")} | {"is_init"}
        resets = [key for key in normalize_keys(critic.in_keys) if key in flags or key[-1] == "is_init"]
        return cls(
            states=tuple(states),
            resets=tuple(resets),
            every_step=all(hasattr(m, "over_time") for m in nodes),
            walks=all(getattr(m, "steps_through_time", True) for m in nodes),
        )

    @property
    def keys(self) -> set[Key]:
        """The keys whose successors the critic makes itself."""
        return {*self.states, *self.resets}

    def along(self, critic: Any, value_key: Key, root: TensorDictBase) -> tuple[Tensor, dict[Key, Tensor]]:
        """The values of a batch [*B, T] of roots, and the states after each: one call, or one for each step."""
        if self.every_step:
            result = critic(root.copy())
            return result.get(value_key), {key: result.get(next_key(key)) for key in self.states}
        time, size = len(root.batch_size) - 1, root.batch_size
        values: list[Tensor] = []
        states: list[dict[Key, Tensor]] = []
        for t in range(size[-1]):
            step = TensorDict({}, batch_size=[*size[:-1], 1])
            for key in root.keys(True, True):
                step.set(key, root.get(key).narrow(time, t, 1))
            if t:
                for key, state in states[-1].items():
                    step.set(key, self._starting(step, state, step.get(key)))
            result = critic(step)
            values.append(result.get(value_key))
            states.append({key: result.get(next_key(key)) for key in self.states})
        return torch.cat(values, time), {key: torch.cat([s[key] for s in states], time) for key in self.states}

    def _starting(self, step: TensorDictBase, carried: Tensor, stored: Tensor) -> Tensor:
        """The state a step starts from: the carried one, or where an episode starts, what the batch holds there."""
        for key in self.resets:
            flag = step.get(key)
            flag = flag.reshape(step.batch_size + (1,) * (carried.dim() - step.batch_dims))
            carried = torch.where(flag, stored, carried)
        return carried

    def one_step_on(
        self, critic: Any, value_key: Key, root: TensorDictBase, following: TensorDictBase, states: Mapping[Key, Tensor]
    ) -> Tensor:
        """The value of each following state [*B, T], by one step from the state after its root: never reset.

        Each step is a sequence of its own, of length one, so the critic needs no other form.
        """
        size = root.batch_size
        steps = TensorDict({}, batch_size=[prod(size), 1])
        entries = {key: following.get(key) for key in following.keys(True, True)}
        entries |= states
        entries |= {key: torch.zeros_like(root.get(key)) for key in self.resets}
        for key, x in entries.items():
            steps.set(key, x.reshape(steps.batch_size + x.shape[len(size) :]))
        value = critic(steps).get(value_key)
        return value.reshape(size + value.shape[2:])


def _carried(node: Any) -> list[Key]:
    """The keys that a node reads and writes the successors of."""
    if not isinstance(node, nn.Module) or not hasattr(node, "in_keys") or not hasattr(node, "out_keys"):
        return []
    written = normalize_keys(node.out_keys)
    return [key for key in normalize_keys(node.in_keys) if next_key(key) in written]
