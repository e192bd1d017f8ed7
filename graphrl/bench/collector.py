"""Collection in one process on HalfCheetah-v5: the raw environment loop, and collectors with a 64-64 policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphrl.bench.tables import BenchOptions, installed, measure
from graphrl.collectors import SyncCollector
from graphrl.compiler.benchmark import BenchmarkTable
from graphrl.compiler.compiled import compile
from graphrl.envs import GymEnv
from graphrl.errors import MissingExtraError
from graphrl.models import GaussianActor

__all__ = ["frames_per_second", "suite"]

ENV = "HalfCheetah-v5"


def suite(options: BenchOptions, frames: int = 500) -> list[BenchmarkTable]:
    """The collection table, time per frame; one turn collects ``frames``. Always on the CPU, where MuJoCo runs.

    Empty where MuJoCo is not installed.
    """
    try:
        envs = [GymEnv(ENV, seed=i) for i in range(3)]
    except MissingExtraError:
        return []
    observation_dim, action_dim = envs[0].observation_spec["observation"].shape[-1], envs[0].action_spec.shape[-1]
    runs: dict[str, Callable[[], Any]] = {"raw environment, random actions": _raw(frames)}
    for env, backend in zip(envs, ("native", "inductor", "eager"), strict=True):
        torch.manual_seed(0)
        actor = GaussianActor(observation_dim, action_dim)
        policy = actor if backend == "eager" else compile(actor, backend=backend)
        collector = SyncCollector(env, policy, frames_per_batch=frames)
        runs[f"SyncCollector, {backend} policy"] = collector.rollout
    closing: list[Callable[[], Any]] = [env.close for env in envs]
    if installed("torchrl", options):
        runs["torchrl Collector, eager policy"], close = _torchrl(frames, observation_dim, action_dim)
        closing.append(close)
    cpu = replace(options, device="cpu", round_s=0.0)
    try:
        return [measure(f"collection on {ENV}, 1 process, per frame", runs, cpu, per_call=frames)]
    finally:
        for close in closing:
            close()


def frames_per_second(table: BenchmarkTable) -> dict[str, float]:
    """Frames a second of each row of a collection table."""
    return {row.name: 1e6 / row.median_us for row in table.rows}


def _raw(frames: int) -> Callable[[], Any]:
    import gymnasium

    env = gymnasium.make(ENV, disable_env_checker=True)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(frames)]

    def run() -> None:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return run


def _torchrl(frames: int, observation_dim: int, action_dim: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    warnings.simplefilter("ignore")  # torchrl warns at import and at every start
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torch import nn
    from torch.distributions import Independent, Normal
    from torchrl import collectors
    from torchrl.envs import GymEnv as TorchRLEnv
    from torchrl.modules import MLP, ProbabilisticActor

    network = MLP(in_features=observation_dim, out_features=action_dim, num_cells=[64, 64], activation_class=nn.Tanh)
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(network, AddStateIndependentNormalScale(action_dim)), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
        return_log_prob=True,
    )
    from torchrl.envs import DoubleToFloat, TransformedEnv

    env = TransformedEnv(TorchRLEnv(ENV), DoubleToFloat())
    kind = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
    collector = kind(env, actor, frames_per_batch=frames, total_frames=-1)
    batches = iter(collector)
    return lambda: next(batches), collector.shutdown
