"""Proximal policy optimisation as one explicit loop: every step of it is on this page.

python examples/ppo.py --env-id Pendulum-v1 --num-envs 8 --gamma 0.9 --lr 1e-3
python examples/ppo.py --env-id HalfCheetah-v5 --total-frames 1000000

`graphrl train ppo` runs the same loop with checkpoints, resume and loggers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import torch
import tyro

import graphrl as grl
from graphrl.collectors import SyncCollector
from graphrl.envs import GymEnv, evaluate
from graphrl.losses import GAE, PPOLoss
from graphrl.models import GaussianActor, RunningNorm, ValueCritic


@dataclass
class Options:
    """The defaults are those for MuJoCo: one environment, 2048 steps, 10 epochs, minibatches of 64."""

    env_id: str = "HalfCheetah-v5"
    num_envs: int = 1
    seed: int = 0
    total_frames: int = 1_000_000
    frames_per_batch: int = 2048
    epochs: int = 10
    minibatch: int = 64
    lr: float = 3e-4
    gamma: float = 0.99
    lmbda: float = 0.95
    clip_epsilon: float = 0.2
    max_grad_norm: float = 0.5
    policy_backend: str = "native"
    update_backend: str = "inductor"
    eval_episodes: int = 10


def main(options: Options) -> float:
    """Train, evaluate, and return the mean return of the evaluation."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more, and lose much when a core is busy
    env = GymEnv(options.env_id, num_envs=options.num_envs, seed=options.seed)
    observation_dim, action_dim = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]

    # Actor and critic see the observation through one running normaliser.
    normalizer = RunningNorm(observation_dim)
    actor = GaussianActor(observation_dim, action_dim, normalizer=normalizer)
    critic = ValueCritic(observation_dim, normalizer=normalizer)

    loss = PPOLoss(
        actor,
        critic,
        clip_epsilon=options.clip_epsilon,
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
    )
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, lr=options.lr, eps=1e-5)

    def step(minibatch):
        terms = loss(minibatch)
        optimizer.zero_grad()
        (terms["loss_objective"] + terms["loss_critic"]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        optimizer.step()
        return {"objective": terms["loss_objective"], "critic": terms["loss_critic"], "kl": terms["kl_approx"]}

    # Three compiled programs: the policy for collection, the advantage of a batch, the whole update of a minibatch.
    policy = grl.compile(actor, backend=options.policy_backend)
    advantage = grl.compile(
        GAE(critic, gamma=options.gamma, lmbda=options.lmbda, average_gae=True), backend=options.update_backend
    )
    update = grl.compile_update(step, backend=options.update_backend)

    frames = max(options.total_frames // options.frames_per_batch, 1) * options.frames_per_batch
    collector = SyncCollector(env, policy, frames_per_batch=options.frames_per_batch, total_frames=frames)
    start = time.perf_counter()
    for batch in collector:
        optimizer.param_groups[0]["lr"] = options.lr * (1 - (collector.frames - options.frames_per_batch) / frames)
        for _ in range(options.epochs):
            with torch.no_grad():
                advantage(batch)
            flat = batch.select(*loss.in_keys).reshape(-1)
            for index in torch.randperm(options.frames_per_batch).split(options.minibatch):
                metrics = update(flat, index)
        # Only now: within a batch the statistics stand still, so the stored log-probabilities stay true.
        normalizer.update(batch["observation"])
        returns = collector.episode_returns
        print(
            f"{collector.frames:9d} frames  {collector.frames / (time.perf_counter() - start):7.0f} frames/s  "
            f"return {fmean(returns) if returns else float('nan'):9.2f}  "
            + "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items()),
            flush=True,
        )

    with GymEnv(options.env_id, num_envs=1) as test_env:
        result = evaluate(test_env, actor, options.eval_episodes, seed=options.seed + 1000)
    print(
        f"return of the deterministic policy: {result.mean:.1f} +- {result.std:.1f}, {options.eval_episodes} episodes"
    )
    collector.shutdown()
    env.close()
    return result.mean


if __name__ == "__main__":
    main(tyro.cli(Options))
