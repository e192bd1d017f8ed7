"""A policy driving an environment row by row through preallocated buffers: the hot loop of collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphrl.envs.base import EnvBase
from graphrl.envs.buffers import StepBuffers
from graphrl.envs.policy import keyed_policy, state_specs
from graphrl.errors import SpecError
from graphrl.keys import next_key
from graphrl.specs import Composite

__all__ = ["Driver"]

Key = Any
Step = Callable[[int], None]
FLAGS = ("done", "terminated", "truncated")


class Driver:
    """Binds a policy and an environment to its own :class:`StepBuffers` of ``steps`` steps, once.

    ``act(t)`` calls the policy on root row t and stores what it writes; ``step(t)`` steps the environment.

    policy: an object with ``in_keys``, ``out_keys`` and ``call(*tensors) -> tuple`` (and, faster still,
    ``call_into`` or ``bind_rows``, which write into given rows); a TensorDict module; a function of a TensorDict; or
    None for random actions. device: where the policy lives; rows are copied there and back. A recurrent entry is zero
    when an episode starts, then what the policy wrote to ``("next", key)``; its nodes tell which there are, and
    primers: ``{key: Spec}``, ``[num_envs, ...]``, those that no node tells. A policy that reads ``is_init`` gets it:
    bool ``[num_envs, 1]``, true on first steps, and until it acts where random actions went before.
    Raises :class:`KeyMissingError` or :class:`SpecError` where the two do not fit.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Any,
        steps: int,
        device: torch.device | str | None = None,
        primers: dict[Key, Any] | None = None,
    ) -> None:
        self.env = env
        self.device = torch.device("cpu" if device is None else device)
        self._action_spec = env.action_spec.to("cpu")
        self._state: list[Key] = []
        self._drawn = 0  # first rows of the batch in which the policy does not act, and so carries nothing on
        primers = {**state_specs(policy, env.num_envs), **(primers or {})}
        state_spec = Composite(primers, env.batch_size) if primers else None
        if state_spec is not None:
            self._state = list(state_spec.keys(True, True))
        self.buffers = StepBuffers(steps, env.observation_spec.to("cpu"), self._action_spec, state_spec)
        root = self.buffers.root
        known = [*root, *FLAGS]
        self.policy = None if policy is None else keyed_policy(policy, known, env.num_envs)
        self._tracks_init = self.policy is not None and "is_init" in self.policy.in_keys and "is_init" not in root
        if self._tracks_init:
            root["is_init"] = torch.zeros(steps + 1, env.num_envs, 1, dtype=torch.bool)
        self._known = [*root, *FLAGS]
        self._rows: list[tuple[Tensor, ...]] | None = None
        if self.policy is not None:
            self.policy.check(self._known)
            self._inputs = self._input_rows()
        self.act: Step = self._bind_policy()
        self.step: Step = self._bind_env()

    def start(self) -> None:
        """Reset every environment; root row 0 is the start of new episodes."""
        root = self.env.reset()
        for key, rows in self.buffers.root.items():
            if key == "is_init" and self._tracks_init:
                rows[0] = True
            elif key in self._state:
                rows[0] = 0
            else:
                rows[0].copy_(root[key])
        self.buffers.clear_flags()

    def prepare(self) -> None:
        """Before each batch: let a policy that can do so bind all rows at once."""
        if self._rows is not None and self.policy is not None and self.policy.bind_rows and self.device.type == "cpu":
            self.act = self.policy.bind_rows(self._inputs, self._rows)

    def carry(self) -> None:
        """Go on with the episodes in progress: the last root row becomes row 0."""
        self.buffers.carry()
        self.buffers.clear_flags()

    def draw(self, steps: int) -> None:
        """Draw the actions of the first ``steps`` rows at random, at once; those rows need no ``act``."""
        self._drawn = steps
        if steps:
            self.buffers.action[:steps].copy_(self._action_spec.rand((steps,)))
            for rows in self.buffers.extra.values():  # a recurrent state stays zero while the policy does not run
                rows[:steps] = 0

    def blank(self, steps: int) -> None:
        """Say that no policy wrote the first ``steps`` rows: NaN there in what it writes (0 for integers).

        The keys of a batch then do not depend on where its actions came from.
        """
        if self.policy is None or not steps:
            return
        if self._rows is None:
            with torch.random.fork_rng(devices=[]):  # only shapes are wanted: the draws of the run stay as they were
                self._allocate(self.policy.call(*self._moved(0)))
        for rows in self.buffers.extra.values():
            rows[:steps] = float("nan") if rows.dtype.is_floating_point else 0

    def _input_rows(self) -> list[tuple[Tensor, ...]]:
        assert self.policy is not None
        steps, columns = self.buffers.steps, []
        for key in self.policy.in_keys:
            if key in self.buffers.root:
                columns.append(list(self.buffers.root[key].unbind(0)[:steps]))
            else:  # a root flag: a root row is never the end of an episode
                columns.append([torch.zeros(self.env.num_envs, 1, dtype=torch.bool)] * steps)
        return list(zip(*columns, strict=True)) if columns else [()] * steps

    def _moved(self, t: int) -> tuple[Tensor, ...]:
        return tuple(x.to(self.device) for x in self._inputs[t])

    def _allocate(self, outputs: Any) -> None:
        self._check_outputs(outputs)
        assert self.policy is not None
        columns = []
        for key, value in zip(self.policy.out_keys or [], outputs, strict=True):
            rows = self.buffers.action
            if key != "action":
                rows = torch.zeros((self.buffers.steps, *value.shape), dtype=value.dtype)
                self.buffers.extra[key] = rows
            columns.append(rows.unbind(0))
        self._rows = list(zip(*columns, strict=True))

    def _check_outputs(self, outputs: Any) -> None:
        assert self.policy is not None
        if not isinstance(outputs, tuple | list):
            raise SpecError(f"policy.call returned a {type(outputs).__name__}; expected a tuple in out_keys order")
        self.policy.check_outputs(self._known)
        out_keys = self.policy.out_keys or []
        if len(outputs) != len(out_keys):
            raise SpecError(f"policy.call returned {len(outputs)} tensors for the {len(out_keys)} out_keys {out_keys}")
        for key, value in zip(out_keys, outputs, strict=True):
            if value.ndim == 0 or value.shape[0] != self.env.num_envs:
                shape = list(value.shape)
                raise SpecError(f"the policy's {key!r} has shape {shape}, expected [{self.env.num_envs}, ...]")
        action, want = outputs[out_keys.index("action")], self._action_spec
        if action.shape != want.shape or action.dtype != want.dtype:
            raise SpecError(
                f"the policy's 'action' is {action.dtype} of shape {list(action.shape)},"
                f" the environment expects {want.dtype} of shape {list(want.shape)}"
            )

    def _bind_policy(self) -> Step:
        if self.policy is None:
            return lambda t: None
        inputs, call = self._inputs, self.policy.call
        moved = self.device.type != "cpu"
        call_into = None if moved else self.policy.call_into
        rows: list[tuple[Tensor, ...]] | None = None

        def act(t: int) -> None:
            nonlocal rows
            if rows is not None and call_into is not None:
                call_into(inputs[t], rows[t])
                return
            outputs = call(*(self._moved(t) if moved else inputs[t]))
            if rows is None:
                if self._rows is None:
                    self._allocate(outputs)
                rows = self._rows
            for row, value in zip(rows[t], outputs):  # type: ignore[index]  # noqa: B905 - checked on the first call
                row.copy_(value)

        return act

    def _bind_env(self) -> Step:
        buffers, state = self.buffers, self._state
        step_env = self.env.bind(buffers)
        if not state and not self._tracks_init:
            return step_env

        def step(t: int) -> None:
            step_env(t)
            done = buffers.terminated[t] | buffers.truncated[t]
            if self._tracks_init:
                buffers.root["is_init"][t + 1] = done | (t < self._drawn)
            for key in state:
                written = buffers.extra.get(next_key(key))
                row = buffers.root[key][t + 1]
                row.zero_() if written is None else row.copy_(written[t])
                row[done[:, 0]] = 0

        return step
