"""One PPO update on a minibatch of 64 (gather, loss, gradients, clipping, Adam), written as each library would."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from graphrl.bench.tables import BenchOptions, installed, measure
from graphrl.compiler.benchmark import BenchmarkTable
from graphrl.compiler.update import compile_update
from graphrl.losses import PPOLoss
from graphrl.models import GaussianActor, ValueCritic

__all__ = ["eager_against_compiled", "suite"]

OBSERVATION, ACTION, ROWS, MINIBATCH = 17, 6, 2048, 64
CLIP, CRITIC, MAX_NORM, LR = 0.2, 0.5, 0.5, 3e-4


def suite(options: BenchOptions) -> list[BenchmarkTable]:
    """The update table: each competitor trains its own copy on the same rows."""
    torch.manual_seed(0)
    device = options.device
    batch = TensorDict(
        {
            "observation": torch.randn(ROWS, OBSERVATION),
            "action": torch.randn(ROWS, ACTION),
            "action_log_prob": torch.full((ROWS,), -8.5),
            "advantage": torch.randn(ROWS, 1),
            "value_target": torch.randn(ROWS, 1),
        },
        batch_size=[ROWS],
    ).to(device)
    index = torch.randperm(ROWS)[:MINIBATCH].to(device)
    plain, compiled_loss = _plain(batch, index, device, False), _plain(batch, index, device, True)
    step = _keyed_step(device)
    start = time.perf_counter()
    update = compile_update(_keyed_step(device))
    update.warm_up(batch, index)
    seconds = {"graphrl, compile_update": time.perf_counter() - start}
    runs: dict[str, Callable[[], Any]] = {
        "plain PyTorch, eager": plain,
        "plain PyTorch, torch.compile of the loss": compiled_loss,
        "graphrl, eager": lambda: step(batch[index]),
        "graphrl, compile_update": lambda: update(batch, index),
    }
    if installed("torchrl", options):
        runs["torchrl ClipPPOLoss, eager"] = _torchrl(batch, index, device)
    return [measure(f"PPO update, minibatch {MINIBATCH}, per update", runs, options, compile_s=seconds)]


def eager_against_compiled(algorithm: Any, batch: TensorDictBase, options: BenchOptions) -> BenchmarkTable:
    """The update of a :class:`PPO` on a batch ``[num_envs, T]``, eager and compiled. It trains while it is timed."""
    start = time.perf_counter()
    algorithm.warm_up(batch)
    compiled = f"{algorithm.config.update_backend}, compile_update"
    seconds = {compiled: time.perf_counter() - start}
    flat = algorithm._estimate(batch)
    index = torch.arange(algorithm.config.minibatch, device=algorithm.config.device)
    runs: dict[str, Callable[[], Any]] = {
        "eager": lambda: algorithm._step(flat[index]),
        compiled: lambda: algorithm.update(flat, index),
    }
    return measure(f"PPO update, minibatch {len(index)}, per update", runs, options, compile_s=seconds)


def _keyed_step(device: str) -> Callable[[TensorDictBase], dict[str, Tensor]]:
    actor, critic = GaussianActor(OBSERVATION, ACTION).to(device), ValueCritic(OBSERVATION).to(device)
    loss = PPOLoss(
        actor, critic, clip_epsilon=CLIP, critic_coeff=CRITIC, entropy_bonus=False, loss_critic_type="l2"
    ).to(device)
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LR)

    def step(minibatch: TensorDictBase) -> dict[str, Tensor]:
        terms = loss(minibatch)
        total = terms["loss_objective"] + terms["loss_critic"]
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        return {"loss": total}

    return step


def _network(outputs: int, device: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    ).to(device)


def _plain(batch: TensorDictBase, index: Tensor, device: str, compiled: bool) -> Callable[[], Any]:
    """The update as a single-file PyTorch script has it: plain tensors, no keys."""
    actor, critic = _network(ACTION, device), _network(1, device)
    log_std = nn.Parameter(torch.zeros(ACTION, device=device))
    parameters = [*actor.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, lr=LR)
    keys = ("observation", "action", "action_log_prob", "advantage", "value_target")
    columns = [batch[key] for key in keys]

    def loss(observation: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> Tensor:
        mean = actor(observation)
        new = Normal(mean, log_std.exp().expand_as(mean), validate_args=False).log_prob(action).sum(-1)
        ratio = (new - old).exp().unsqueeze(-1)
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return -gain.mean() + CRITIC * (critic(observation) - target).square().mean()

    run_loss = torch.compile(loss) if compiled else loss

    def run() -> Tensor:
        total = run_loss(*(column[index] for column in columns))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        return total.detach()

    return run


def _torchrl(batch: TensorDictBase, index: Tensor, device: str) -> Callable[[], Any]:
    """TorchRL's loss on its own actor and critic, as its examples write the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
        from torchrl.modules import ProbabilisticActor, ValueOperator
        from torchrl.objectives import ClipPPOLoss
    body = nn.Sequential(_network(ACTION, device), AddStateIndependentNormalScale(ACTION).to(device))
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
        return_log_prob=True,
    )
    critic = ValueOperator(_network(1, device), in_keys=["observation"])
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP,
        entropy_bonus=False,
        critic_coeff=CRITIC,
        loss_critic_type="l2",
        normalize_advantage=False,
    )
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LR)
    sample_key = loss.tensor_keys.sample_log_prob
    renamed = batch.copy().set(sample_key, batch["action_log_prob"])

    def run() -> Tensor:
        terms = loss(renamed[index])
        total = terms["loss_objective"] + terms["loss_critic"]
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        return total.detach()

    return run
