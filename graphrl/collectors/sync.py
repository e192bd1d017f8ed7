"""Collection in this process: the policy and the environments take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type

from graphrl.collectors.episodes import EpisodeTracker
from graphrl.envs.base import EnvBase
from graphrl.envs.buffers import StepBuffers
from graphrl.envs.driver import Driver
from graphrl.errors import EnvError, SpecError

__all__ = ["SyncCollector"]


def _check_multiple(name: str, value: int, unit: int, of_what: str) -> None:
    if value >= unit and value % unit == 0:
        return
    low, high = value // unit * unit, (value // unit + 1) * unit
    nearest = f"{low} or {high}" if low > 0 else f"{high}"
    raise SpecError(f"{name}={value} is not a positive multiple of {of_what} ({unit}): the nearest valid: {nearest}")


class SyncCollector:
    """Iterates over batches ``[num_envs, T]`` of fresh steps, ``T = frames_per_batch / num_envs``.

    Each row holds the root observation, what the policy writes, root flags (false), ``next`` with the observation,
    reward and flags, and ``("collector", "traj_ids")``. Where an episode ends ``next`` keeps its true final
    observation and the next row is the reset one: no dummy rows, ``frames`` counts exactly the rows delivered.
    Episodes go on from batch to batch; each batch owns its memory.

    env: an environment or a constructor of one (closed on shutdown only then). policy: see :class:`Driver`; None
    draws random actions. total_frames: a multiple of frames_per_batch, or -1 for ever. init_random_frames: the first
    frames take random actions; there what the policy would write besides is NaN (0 for integers). set_truncated:
    mark the last row of each batch as truncated. postproc: applied to each batch. device: of policy and batches,
    unless policy_device or storing_device says otherwise.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int = 0,
        reset_at_each_iter: bool = False,
        set_truncated: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        primers: dict[Any, Any] | None = None,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
    ) -> None:
        self._owns_env = not isinstance(env, EnvBase)
        self.env: EnvBase = env if isinstance(env, EnvBase) else env()
        if not isinstance(self.env, EnvBase):
            raise EnvError(f"env is a {type(self.env).__name__}; expected an EnvBase or a constructor of one")
        _check_multiple("frames_per_batch", frames_per_batch, self.env.num_envs, "the number of environments")
        if total_frames != -1:
            _check_multiple("total_frames", total_frames, frames_per_batch, "frames_per_batch")
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.init_random_frames, self.reset_at_each_iter = init_random_frames, reset_at_each_iter
        self.set_truncated, self.postproc, self.policy = set_truncated, postproc, policy
        self.storing_device = storing_device if storing_device is not None else device
        self.frames = 0
        self._steps = frames_per_batch // self.env.num_envs
        policy_device = policy_device if policy_device is not None else device
        self._driver = Driver(self.env, policy, self._steps, policy_device, primers)
        self._tracker = EpisodeTracker(self.env.num_envs)
        self._carries = False  # whether the last root row is the present state of the environment
        self._use_count = -1

    @property
    def episode_returns(self) -> deque[float]:
        """Undiscounted returns of the last 100 finished episodes, oldest first."""
        return self._tracker.returns

    @property
    def episode_lengths(self) -> deque[int]:
        """Lengths in steps of the last 100 finished episodes, oldest first."""
        return self._tracker.lengths

    def __len__(self) -> int:
        if self.total_frames == -1:
            raise TypeError("an endless collector (total_frames=-1) has no length")
        return self.total_frames // self.frames_per_batch

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches until ``total_frames`` are delivered; a second loop goes on where the first one stopped."""
        while self.total_frames == -1 or self.frames < self.total_frames:
            yield self.rollout()

    def rollout(self) -> TensorDictBase:
        """Collect one batch ``[num_envs, T]`` and count its frames.

        An exception or Ctrl-C on the way drops the unfinished batch: the next one starts with a reset.
        """
        if self.env.is_closed:
            raise EnvError("the collector's environment is closed: make a new collector")
        with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
            carries, self._carries = self._carries, False  # until the batch is finished
            self._begin(carries)
            self._driver.prepare()
            self._collect()
        batch = self._deliver(self._driver.buffers)
        self._carries, self._use_count = True, self.env.use_count
        self.frames += self.frames_per_batch
        return batch if self.postproc is None else self.postproc(batch)

    def _begin(self, carries: bool) -> None:
        # Anyone else who reset or stepped the environment (an evaluation, say) has ended our episodes.
        if carries and not self.reset_at_each_iter and self.env.use_count == self._use_count:
            self._driver.carry()
            return
        if self._use_count != -1:
            self._tracker.restart()
        self._use_count = 0
        self._driver.start()

    def _collect(self) -> None:
        act, step = self._driver.act, self._driver.step
        wanted = max(self.init_random_frames - self.frames, 0)
        drawn = self._steps if self.policy is None else min(-(-wanted // self.env.num_envs), self._steps)
        self._driver.draw(drawn)
        for t in range(drawn):
            step(t)
        for t in range(drawn, self._steps):
            act(t)
            step(t)
        self._driver.blank(drawn)

    def _deliver(self, buffers: StepBuffers) -> TensorDict:
        traj_ids = self._tracker.update(buffers.reward, buffers.done())
        if self.set_truncated:
            buffers.truncated[-1] |= ~buffers.terminated[-1]
        batch = buffers.to_tensordict({("collector", "traj_ids"): traj_ids})
        return batch if self.storing_device is None else batch.to(self.storing_device)

    def reset(self) -> None:
        """Drop the episodes in progress: the next batch starts with a reset."""
        self._carries = False

    def set_seed(self, seed: int) -> int:
        """Seed the environments and start new episodes; returns the first seed not used."""
        self.reset()
        return self.env.set_seed(seed)

    def update_policy_weights_(self, weights: Any = None) -> None:
        """Does nothing without ``weights``: the policy runs in this process, with live weights.

        weights: a TensorDict of parameters (as ``TensorDict.from_module`` gives) is copied into the policy.
        """
        if weights is not None and weights is not self.policy:
            TensorDict.from_module(self.policy).data.update_(weights)

    def state_dict(self) -> dict[str, Any]:
        """Counters and episode statistics; the environments' inner state is not part of it."""
        return {"frames": self.frames, "episodes": self._tracker.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from :meth:`state_dict`; the next batch starts with a reset."""
        self.frames = int(state["frames"])
        self._tracker.load_state_dict(state["episodes"])
        self._carries, self._use_count = False, -1

    def shutdown(self) -> None:
        """Let go of the last rows; close the environment if the collector made it. Calling it twice is harmless."""
        self._carries = False
        if self._owns_env:
            self.env.close()

    def __enter__(self) -> SyncCollector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
