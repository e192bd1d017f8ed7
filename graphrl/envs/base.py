"""The contract of an environment: two methods to implement, everything else follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from graphrl.envs.buffers import StepBuffers
from graphrl.envs.step_mdp import step_mdp
from graphrl.errors import EnvError, SpecError
from graphrl.specs import Categorical, Composite, Spec, Unbounded

__all__ = ["EnvBase"]

Policy = Callable[[Any], Any]


def done_composite(num_envs: int, device: torch.device) -> Composite:
    """The spec of ``done``, ``terminated`` and ``truncated``: bool ``[num_envs, 1]`` each."""
    flag = Categorical(2, (num_envs, 1), dtype=torch.bool, device=device)
    return Composite({"done": flag, "terminated": flag, "truncated": flag}, [num_envs], device=device)


class EnvBase:
    """``num_envs`` environments stepped together; a subclass implements :meth:`_reset` and :meth:`_step`.

    A subclass passes its specs (all with batch size ``[num_envs]``) to ``__init__``. ``dt``: seconds of simulated
    time per step if known, else None; ``rate_hz`` its inverse.
    """

    dt: float | None = None

    def __init__(
        self, observation_spec: Composite, action_spec: Spec, device: torch.device | str | None = None
    ) -> None:
        self.device = torch.device("cpu" if device is None else device)
        self.num_envs = observation_spec.batch_size[0]
        self.batch_size = torch.Size([self.num_envs])
        self.observation_spec: Composite = observation_spec.to(self.device)
        self.action_spec: Spec = action_spec.to(self.device)
        self.reward_spec: Spec = Unbounded((self.num_envs, 1), device=self.device)
        self.done_spec: Composite = done_composite(self.num_envs, self.device)
        self.is_closed = False
        self.use_count = 0  # public resets and steps so far: a collector notices that another user moved its env

    # What a subclass implements

    def _reset(self, mask: Tensor) -> TensorDictBase:
        """Observations ``[num_envs]`` after resetting the rows where ``mask`` (bool ``[num_envs]``) is true.

        The other rows may hold anything: the caller keeps their old values.
        """
        raise NotImplementedError

    def _step(self, action: Tensor) -> TensorDictBase:
        """Apply ``action``; observations, reward, terminated and truncated ``[num_envs]``, without any reset."""
        raise NotImplementedError

    def set_seed(self, seed: int) -> int:
        """Seed the next reset of environment i with ``seed + i``; returns the first seed not used."""
        raise NotImplementedError

    def bind(self, buffers: StepBuffers) -> Callable[[int], None]:
        """A function ``step(t)`` that reads ``buffers.action[t]`` and writes row t of the outcome and root row t + 1.

        Where an episode ends, ``next`` keeps its true final observation and root row t + 1 is a reset observation.
        """

        def step(t: int) -> None:
            outcome = self._step(buffers.action[t].to(self.device))
            for key, rows in buffers.next.items():
                rows[t].copy_(outcome[key])
                buffers.root[key][t + 1].copy_(outcome[key])
            buffers.reward[t].copy_(outcome["reward"])
            buffers.terminated[t].copy_(outcome["terminated"])
            buffers.truncated[t].copy_(outcome["truncated"])
            done = (buffers.terminated[t] | buffers.truncated[t]).squeeze(-1)
            if bool(done.any()):
                fresh = self._reset(done.to(self.device))
                for key, rows in buffers.root.items():
                    rows[t + 1][done] = fresh[key].to(rows.device)[done]

        return step

    def close(self) -> None:
        """Release what the environment holds. Calling it twice is harmless."""
        self.is_closed = True

    # What every environment offers

    @property
    def rate_hz(self) -> float | None:
        """Steps per second of simulated time, or None if the environment does not say."""
        return None if self.dt is None else 1.0 / self.dt

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Start new episodes: a TensorDict ``[num_envs]`` with the observations and false flags.

        tensordict: with a bool ``_reset`` entry (``[num_envs]`` or ``[num_envs, 1]``) only the rows it marks are
        reset and the others keep the values of ``tensordict``. Raises :class:`SpecError` for another mask shape.
        """
        self._check_open()
        self.use_count += 1
        mask = self._reset_mask(tensordict)
        fresh = self._reset(mask)
        out = TensorDict({key: fresh[key] for key in self.observation_spec.keys()}, batch_size=self.batch_size)
        out.update(self.done_spec.zero())
        if tensordict is None or bool(mask.all()):
            return out
        kept = tensordict.select(*out.keys())
        return torch.where(mask.view(-1), out, kept)  # type: ignore[call-overload, no-any-return]

    def _reset_mask(self, tensordict: TensorDictBase | None) -> Tensor:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if mask.dtype != torch.bool or list(mask.shape) not in ([self.num_envs], [self.num_envs, 1]):
            raise SpecError(
                f"'_reset' is {mask.dtype} of shape {list(mask.shape)}, expected torch.bool of shape "
                f"[{self.num_envs}] or [{self.num_envs}, 1]: one flag per environment"
            )
        return mask.reshape(-1).to(self.device)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply ``tensordict["action"]`` and write the outcome under ``next`` (in place); no reset.

        ``next`` holds the observations, ``reward`` float32 ``[num_envs, 1]`` and the flags bool ``[num_envs, 1]``,
        ``done = terminated | truncated``. Raises :class:`SpecError` for an action that does not fit and
        :class:`EnvError` when an episode had already ended.
        """
        self._check_open()
        self.use_count += 1
        action = tensordict.get("action", None)
        if action is None:
            raise SpecError(f"step reads 'action', but the batch has {list(tensordict.keys())}")
        outcome = self._step(action)
        outcome["done"] = outcome["terminated"] | outcome["truncated"]
        tensordict.set("next", outcome)
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """``step``, then the root of the next step: where an episode ended, its row is reset.

        Returns ``(tensordict with next, next root)``; ``next`` keeps the true final observation.
        """
        tensordict = self.step(tensordict)
        return tensordict, self.maybe_reset(step_mdp(tensordict))

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """``tensordict`` with the rows whose ``done`` is true replaced by the start of a new episode."""
        done = tensordict["done"]
        if not bool(done.any()):
            return tensordict
        root = self.reset(tensordict.copy().set("_reset", done))
        return tensordict.update(root)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random ``action`` drawn from ``action_spec`` with torch's global generator."""
        out = TensorDict({}, batch_size=self.batch_size) if tensordict is None else tensordict
        return out.set("action", self.action_spec.rand())

    def rollout(
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        tensordict: TensorDictBase | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
    ) -> TensorDictBase:
        """Up to ``max_steps`` steps as a TensorDict of batch size ``[num_envs, T]``, time last.

        policy: TensorDict in, TensorDict with ``action`` out; None draws random actions. auto_reset: start with a
        reset, else from ``tensordict`` (the root of a running episode). break_when_any_done: stop after the first
        step that ends an episode; when false, ended rows are reset and go on, with no dummy row between.
        """
        if max_steps < 1:
            raise EnvError(f"rollout of {max_steps} steps: max_steps must be at least 1")
        if not auto_reset and tensordict is None:
            raise EnvError("rollout with auto_reset=False starts from a given root: pass tensordict=")
        root = self.reset() if auto_reset else tensordict
        act = self.rand_action if policy is None else policy
        steps = []
        for _ in range(max_steps):
            row, following = self._rollout_step(act(root), break_when_any_done)
            steps.append(row)
            if callback is not None:
                callback(self, row)
            if break_when_any_done and bool(row["next", "done"].any()):
                break
            root = following
        return torch.stack(steps, dim=len(self.batch_size))  # type: ignore[call-overload, no-any-return]

    def _rollout_step(self, row: TensorDictBase, stop: bool) -> tuple[TensorDictBase, TensorDictBase]:
        row = self.step(row)
        following = step_mdp(row)
        return row, following if stop else self.maybe_reset(following)

    def fake_tensordict(self) -> TensorDictBase:
        """One step made of zeros, from the specs alone: keys, shapes and dtypes of real data ``[num_envs]``."""
        out = self.observation_spec.zero().update(self.done_spec.zero())
        outcome = self.observation_spec.zero().update(self.done_spec.zero())
        outcome["reward"] = self.reward_spec.zero()
        out["action"] = self.action_spec.zero()
        out["next"] = outcome
        return out

    def _check_open(self) -> None:
        if self.is_closed:
            raise EnvError(f"{type(self).__name__} is closed: make a new one")

    def __enter__(self) -> EnvBase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
