"""Gymnasium environments, stepped one after another in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from graphrl.envs.base import EnvBase
from graphrl.envs.buffers import StepBuffers
from graphrl.envs.make import make_raw
from graphrl.envs.spaces import action_converter, action_to_spec, observation_leaves, observation_to_spec
from graphrl.errors import EnvError, SpecError

__all__ = ["GymEnv"]


class GymEnv(EnvBase):
    """``num_envs`` copies of a Gymnasium environment as one batched environment.

    env: an id such as ``"HalfCheetah-v5"`` or a constructor; ``make_kwargs`` go to ``gymnasium.make`` or to it.
    seed: environment i is reset with ``seed + i`` the first time and without a seed after, so runs repeat exactly
    (random actions come from torch's generator: ``torch.manual_seed``). device: where TensorDicts and specs live.

    Observations keep their names (``observation`` for a plain space, the keys of a Dict), float64 comes out as
    float32, Discrete actions are int64 indices. Box actions are clipped to their bounds before ``env.step``; the
    stored action is the one given. ``envs`` holds the raw environments.
    Raises :class:`EnvError`, :class:`MissingExtraError` or :class:`SpecError` (a space it cannot read).
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        num_envs: int = 1,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **make_kwargs: Any,
    ) -> None:
        if num_envs < 1:
            raise EnvError(f"num_envs is {num_envs}; expected at least 1")
        self.envs: list[Any] = []
        try:
            for _ in range(num_envs):
                self.envs.append(make_raw(env, make_kwargs))
            first = self.envs[0]
            if len({id(raw.unwrapped) for raw in self.envs}) < num_envs:
                raise EnvError("the constructor returned the same environment twice: it must make a new one each call")
            self._leaves = observation_leaves(first.observation_space)
            super().__init__(
                observation_to_spec(self._leaves, num_envs), action_to_spec(first.action_space, num_envs), device
            )
        except BaseException:
            for raw in self.envs:
                raw.close()
            raise
        self._convert = action_converter(first.action_space)
        self._seeds: list[int | None] = [None] * num_envs
        self._running = [False] * num_envs
        dt = getattr(first.unwrapped, "dt", None)
        self.dt = None if dt is None else float(dt)
        self.name = env if isinstance(env, str) else type(first.unwrapped).__name__
        if seed is not None:
            self.set_seed(seed)

    def set_seed(self, seed: int) -> int:
        """Seed the next reset of environment i with ``seed + i``; returns ``seed + num_envs``."""
        self._seeds = [seed + i for i in range(self.num_envs)]
        return seed + self.num_envs

    def close(self) -> None:
        """Close every raw environment. Calling it twice is harmless."""
        if not self.is_closed:
            self.is_closed = True
            for raw in self.envs:
                raw.close()

    def __repr__(self) -> str:
        return f"GymEnv({self.name!r}, num_envs={self.num_envs}, rate_hz={self.rate_hz}, device={self.device})"

    def _reset_row(self, index: int) -> Any:
        seed, self._seeds[index] = self._seeds[index], None
        self._running[index] = True
        raw = self.envs[index].reset(seed=seed)[0]
        if len(self._leaves) == 1 and self._leaves[0].read is None:  # once an episode: numpy would broadcast silently
            found, want = np.asarray(raw), tuple(self._leaves[0].spec.shape)
            if found.shape != want or found.dtype.kind not in "fiub":
                raise EnvError(
                    f"{self.name} gave an observation {found.dtype} {list(found.shape)} at reset, but its "
                    f"observation_space says {list(want)}: mend the environment (gymnasium.utils.env_checker helps)"
                )
        return raw

    def _empty(self) -> TensorDict:
        return TensorDict(
            {leaf.key: torch.zeros((self.num_envs, *leaf.spec.shape), dtype=leaf.spec.dtype) for leaf in self._leaves},
            batch_size=self.batch_size,
        )

    def _write(self, views: list[Any], index: int, raw: Any) -> None:
        for leaf, view in zip(self._leaves, views, strict=True):
            view[index] = raw if leaf.read is None else leaf.read(raw)

    def _reset(self, mask: Tensor) -> TensorDictBase:
        out = self._empty()
        views = [out[leaf.key].numpy() for leaf in self._leaves]
        for index, wanted in enumerate(mask.tolist()):
            if wanted:
                self._write(views, index, self._reset_row(index))
        return out.to(self.device)

    def _step(self, action: Tensor) -> TensorDictBase:
        self._check_action(action)
        if not all(self._running):
            row = self._running.index(False)
            raise EnvError(f"environment {row} has no running episode: call reset, or use step_and_maybe_reset")
        actions = [self._convert(row) for row in action.detach().cpu().numpy()]  # all checked before any is applied
        out = self._empty()
        views = [out[leaf.key].numpy() for leaf in self._leaves]
        reward, flags = torch.zeros(self.num_envs, 1), torch.zeros(2, self.num_envs, 1, dtype=torch.bool)
        for index, (raw, one) in enumerate(zip(self.envs, actions, strict=True)):
            observation, gain, terminated, truncated, _ = raw.step(one)
            self._write(views, index, observation)
            reward.numpy()[index], flags[0, index], flags[1, index] = gain, bool(terminated), bool(truncated)
            self._running[index] = not (terminated or truncated)
        out.update({"reward": reward, "terminated": flags[0].clone(), "truncated": flags[1].clone()})
        return out.to(self.device)

    def _check_action(self, action: Tensor) -> None:
        spec = self.action_spec
        if action.shape != spec.shape or action.dtype != spec.dtype:
            raise SpecError(
                f"'action' is {action.dtype} of shape {list(action.shape)}, {self.name} with {self.num_envs} "
                f"environment(s) expects {spec.dtype} of shape {list(spec.shape)}"
            )

    def bind(self, buffers: StepBuffers) -> Callable[[int], None]:
        """``step(t)`` on the raw arrays of ``buffers``: no TensorDict and no torch call in it (see EnvBase.bind)."""
        if self.num_envs == 1 and len(self._leaves) == 1 and self._leaves[0].read is None:
            return self._bind_one(buffers)
        count, convert, envs, reset_row, running = (
            self.num_envs,
            self._convert,
            self.envs,
            self._reset_row,
            self._running,
        )
        actions, rewards = (
            buffers.action.flatten(0, 1).numpy(),
            buffers.reward.view(-1, 1).numpy(),
        )  # a reward may be [1]
        terminated_rows, truncated_rows = buffers.terminated.view(-1).numpy(), buffers.truncated.view(-1).numpy()
        leaves = [
            (buffers.root[leaf.key].flatten(0, 1).numpy(), buffers.next[leaf.key].flatten(0, 1).numpy(), leaf.read)
            for leaf in self._leaves
        ]

        def step(t: int) -> None:
            converted = [convert(actions[k]) for k in range(t * count, (t + 1) * count)]
            for index, one in enumerate(converted):
                k = t * count + index
                raw, rewards[k], terminated, truncated, _ = envs[index].step(one)
                for _, next_rows, read in leaves:
                    next_rows[k] = raw if read is None else read(raw)
                if terminated or truncated:
                    terminated_rows[k], truncated_rows[k] = terminated, truncated
                    running[index] = False
                    raw = reset_row(index)
                for root_rows, _, read in leaves:
                    root_rows[k + count] = raw if read is None else read(raw)

        return step

    def _bind_one(self, buffers: StepBuffers) -> Callable[[int], None]:
        # One environment with a plain observation: the same as bind, with nothing left to loop over.
        convert, step_env, reset_row = self._convert, self.envs[0].step, self._reset_row
        key = self._leaves[0].key
        root_rows, next_rows = buffers.root[key][:, 0].numpy(), buffers.next[key][:, 0].numpy()
        actions, rewards = buffers.action[:, 0].numpy(), buffers.reward.view(-1, 1).numpy()
        terminated_rows, truncated_rows = buffers.terminated.view(-1).numpy(), buffers.truncated.view(-1).numpy()

        def step(t: int) -> None:
            raw, rewards[t], terminated, truncated, _ = step_env(convert(actions[t]))
            next_rows[t] = raw
            if terminated or truncated:
                terminated_rows[t], truncated_rows[t] = terminated, truncated
                raw = reset_row(0)
            root_rows[t + 1] = raw

        return step
