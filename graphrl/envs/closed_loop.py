"""Episodes of an environment with a deployed policy: one observation in, one action out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphrl.compiler.bundle.parity import Player
from graphrl.envs.make import make_raw
from graphrl.envs.spaces import action_converter, observation_leaves
from graphrl.errors import EnvError
from graphrl.keys import Key, encode_key

__all__ = ["closed_loop"]


def closed_loop(
    env: str | Callable[..., Any], episodes: int = 5, seed: int = 0, action_key: Key = "action", **make_kwargs: Any
) -> Callable[[Player], Sequence[float]]:
    """What ``graphrl.export(closed_loop=...)`` takes: runs ``episodes`` with a player, and gives their returns.

    env, make_kwargs: as of :class:`GymEnv`. Every call makes a new environment and resets it with ``seed``,
    ``seed + 1`` and so on, so all players meet the same episodes. Observations go to the player as the environment
    gives them, by key; actions are clipped to their bounds, as in training. Raises :class:`EnvError` for less than one.
    """
    if episodes < 1:
        raise EnvError(f"closed_loop of {episodes} episodes: expected at least 1")

    def drive(player: Player) -> list[float]:
        raw = make_raw(env, make_kwargs)
        try:
            return [_episode(raw, player, seed + i, encode_key(action_key)) for i in range(episodes)]
        finally:
            raw.close()

    return drive


def _episode(raw: Any, player: Player, seed: int, action: str) -> float:
    leaves, convert = observation_leaves(raw.observation_space), action_converter(raw.action_space)
    observation, _ = raw.reset(seed=seed)
    player.reset()
    total, ended = 0.0, False
    while not ended:
        given = {encode_key(leaf.key): observation if leaf.read is None else leaf.read(observation) for leaf in leaves}
        chosen = np.asarray(player.step(given)[action]).reshape(raw.action_space.shape)
        observation, reward, terminated, truncated, _ = raw.step(convert(chosen))
        total += float(reward)
        ended = bool(terminated or truncated)
    return total
