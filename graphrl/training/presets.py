"""Settings by environment: what the defaults for MuJoCo get wrong elsewhere."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from graphrl.training.config import PPOConfig

__all__ = ["PRESETS", "describe_preset", "preset"]

PRESETS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"env.num_envs": 8, "total_frames": 120_000, "gamma": 0.95, "lr": 1e-3, "reward_scale": 0.1},
    "CartPole-v1": {"env.num_envs": 8, "total_frames": 100_000, "lr": 1e-3},
}
"""Environment id to the fields that differ from :class:`PPOConfig`'s defaults."""


def preset(env_id: str) -> PPOConfig:
    """The defaults for an environment: PPOConfig's own, with those of :data:`PRESETS` where it stands there."""
    config = PPOConfig()
    values = PRESETS.get(env_id, {})
    env = {name.removeprefix("env."): value for name, value in values.items() if name.startswith("env.")}
    rest = {name: value for name, value in values.items() if not name.startswith("env.")}
    return replace(config, **rest, env=replace(config.env, id=env_id, **env))


def describe_preset(config: PPOConfig) -> str | None:
    """What ``config`` has from its environment's preset, in one line; None when that is nothing."""
    values = PRESETS.get(config.env.id, {})
    kept = [f"{name} {value}" for name, value in values.items() if attrgetter(name)(config) == value]
    return f"settings for {config.env.id}: {', '.join(kept)}" if kept else None
