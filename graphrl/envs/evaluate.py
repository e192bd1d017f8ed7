"""The return of a policy over a fixed number of whole episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor

from graphrl.envs.base import EnvBase
from graphrl.envs.driver import Driver
from graphrl.errors import EnvError

__all__ = ["EpisodeStats", "evaluate"]


@dataclass(frozen=True)
class EpisodeStats:
    """Undiscounted returns (float32 ``[episodes]``) and lengths in steps (int64 ``[episodes]``) of whole episodes."""

    returns: Tensor
    lengths: Tensor

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.double().mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns (dividing by the number of episodes)."""
        return float(self.returns.double().std(correction=0))


def evaluate(
    env: EnvBase,
    policy: Any,
    episodes: int,
    seed: int | None = None,
    *,
    device: torch.device | str | None = None,
    primers: dict[Any, Any] | None = None,
) -> EpisodeStats:
    """Run exactly ``episodes`` whole episodes with the deterministic policy and give their returns and lengths.

    policy: any form a collector takes (``InteractionType.DETERMINISTIC`` is set); None draws random actions.
    Each environment runs a share of the episodes fixed in advance, so short episodes are not counted more often
    than long ones. seed: as ``env.set_seed``. The environment is reset; its episodes must end by themselves or by a
    time limit. Raises :class:`EnvError` for ``episodes < 1``.
    """
    if episodes < 1:
        raise EnvError(f"evaluate of {episodes} episodes: expected at least 1")
    if seed is not None:
        env.set_seed(seed)
    driver = Driver(env, policy, 1, device, primers)
    buffers = driver.buffers
    quota = [episodes // env.num_envs + (i < episodes % env.num_envs) for i in range(env.num_envs)]
    finished: list[list[tuple[float, int]]] = [[] for _ in quota]
    total, length = [0.0] * env.num_envs, [0] * env.num_envs
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        driver.start()
        while any(len(done) < wanted for done, wanted in zip(finished, quota, strict=True)):
            if policy is None:
                driver.draw(1)
            driver.act(0)
            driver.step(0)
            rewards, ended = buffers.reward.view(-1).tolist(), buffers.done().view(-1).tolist()
            for i, gain in enumerate(rewards):
                total[i], length[i] = total[i] + gain, length[i] + 1
                if ended[i]:
                    if len(finished[i]) < quota[i]:
                        finished[i].append((total[i], length[i]))
                    total[i], length[i] = 0.0, 0
            driver.carry()
    rows = [episode for done in finished for episode in done]
    return EpisodeStats(torch.tensor([r for r, _ in rows]), torch.tensor([n for _, n in rows]))
