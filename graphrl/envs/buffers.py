"""The memory of one batch of steps, laid out so that each step is a contiguous row."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from graphrl.specs import Composite, Spec

__all__ = ["StepBuffers"]

Key = Any  # a str or a tuple of str


class StepBuffers:
    """Preallocated CPU tensors for ``steps`` steps of ``num_envs`` environments, time first: ``[T, N, ...]``.

    ``root[key]``: ``[T + 1, N, ...]``; row T is where the next batch starts. ``next[key]``: ``[T, N, ...]``.
    ``action``: ``[T, N, ...]``. ``reward``: float32 ``[T, N, 1]``. ``terminated``, ``truncated``: bool ``[T, N, 1]``,
    false until written. ``extra[key]``: what a policy writes besides the action. Rows are contiguous, so a policy
    and an environment read and write them without a copy; :meth:`to_tensordict` turns time to the last batch dim.
    """

    def __init__(self, steps: int, observation_spec: Composite, action_spec: Spec) -> None:
        self.steps = steps
        self.num_envs = observation_spec.batch_size[0]
        leaves = list(observation_spec.items(True, True))
        self.root: dict[Key, Tensor] = {k: torch.empty((steps + 1, *s.shape), dtype=s.dtype) for k, s in leaves}
        self.next: dict[Key, Tensor] = {k: torch.empty((steps, *s.shape), dtype=s.dtype) for k, s in leaves}
        self.action = torch.empty((steps, *action_spec.shape), dtype=action_spec.dtype)
        flags = (steps, self.num_envs, 1)
        self.reward = torch.empty(flags)
        self.terminated = torch.zeros(flags, dtype=torch.bool)
        self.truncated = torch.zeros(flags, dtype=torch.bool)
        self.extra: dict[Key, Tensor] = {}

    def done(self) -> Tensor:
        """``terminated | truncated``, bool ``[T, N, 1]``."""
        return self.terminated | self.truncated

    def carry_from(self, previous: StepBuffers) -> None:
        """Start where ``previous`` ended: its row T becomes row 0."""
        for key, rows in self.root.items():
            rows[0].copy_(previous.root[key][previous.steps])

    def to_tensordict(self, entries: dict[Key, Tensor] | None = None) -> TensorDict:
        """A TensorDict of batch size ``[N, T]``: every row written, root flags false, and ``entries`` ``[T, N, ...]``.

        A root row is always the start of a step, never the end of an episode, so its flags are false.
        """
        steps = self.steps
        fields: dict[Key, Tensor] = {key: rows[:steps] for key, rows in self.root.items()}
        fields["action"] = self.action
        fields.update(self.extra)
        outcome = {**self.next, "reward": self.reward, "done": self.done()}
        outcome.update(terminated=self.terminated, truncated=self.truncated)
        for key, rows in outcome.items():
            fields[("next", *(key if isinstance(key, tuple) else (key,)))] = rows
        for key in ("done", "terminated", "truncated"):
            fields[key] = torch.zeros_like(self.terminated)
        fields.update(entries or {})
        out = TensorDict({}, batch_size=[self.num_envs, steps])
        for key, rows in fields.items():
            out.set(key, rows.transpose(0, 1).contiguous())  # no copy with one environment
        return out
