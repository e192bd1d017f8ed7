"""PPO as an object: networks, optimiser, and the compiled programs that run them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from graphrl.compiler.compiled import compile
from graphrl.compiler.update import compile_update
from graphrl.envs import EnvBase
from graphrl.errors import CheckpointError, NonFiniteError, SpecError
from graphrl.losses import GAE, PPOLoss
from graphrl.models import CategoricalActor, GaussianActor, RunningNorm, ValueCritic
from graphrl.specs import Categorical
from graphrl.training.config import PPOConfig

__all__ = ["PPO"]


class PPO:
    """Proximal policy optimisation with three compiled programs.

    ``policy``: observation to action, for the collector. ``advantage``: GAE over a batch, without gradients.
    ``update``: minibatch gather, loss, gradients, clipping and Adam. :meth:`learn` runs them over one batch
    ``[num_envs, T]`` and then moves the observation statistics: within a batch they stand still, so the
    log-probabilities stored while acting stay those of the policy that acted.

    env: gives the specs only. Continuous actions get a Gaussian, a discrete one a categorical actor.
    Raises :class:`SpecError` for an environment the perceptrons cannot read.
    """

    def __init__(self, config: PPOConfig, env: EnvBase) -> None:
        self.config = config
        self.modules = build_modules(config, env).to(config.device)
        actor, critic = self.modules["actor"], self.modules["critic"]
        self.observation_keys: list[Any] = list(actor.in_keys)  # type: ignore[arg-type]
        self.normalizer = next((m for m in self.modules.modules() if isinstance(m, RunningNorm)), None)
        self.loss = PPOLoss(
            actor,
            critic,
            clip_epsilon=config.clip_epsilon,
            entropy_bonus=config.entropy_coeff > 0,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
        ).to(config.device)
        self.parameters = list(self.modules.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lr, eps=1e-5)
        estimator = GAE(critic, gamma=config.gamma, lmbda=config.lmbda, average_gae=config.normalize_advantage).to(
            config.device
        )
        self.actor = actor
        self.policy = compile(actor, backend=config.policy_backend)
        self.advantage = compile(estimator, backend=config.update_backend)
        self.update = compile_update(self._step, backend=config.update_backend)

    def _step(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        terms = self.loss(minibatch)
        losses = {key: value for key, value in terms.items() if key.startswith("loss_")}
        self.optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        return {**losses, "kl": terms["kl_approx"], "clip_fraction": terms["clip_fraction"], "grad_norm": norm}

    def warm_up(self, batch: TensorDictBase) -> None:
        """Compile for batches like ``batch``; nothing is learned."""
        flat = self._estimate(self._prepared(batch))
        self.update.warm_up(flat, torch.arange(self.config.minibatch, device=self.config.device))

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """All epochs on one batch ``[num_envs, T]``; returns the means of the metrics over its minibatches.

        Raises :class:`NonFiniteError` for a NaN or infinity in the batch (before anything is changed) or in an update.
        """
        config = self.config
        batch = self._prepared(batch)
        history: list[dict[str, Tensor]] = []
        for epoch in range(config.epochs):
            if epoch == 0 or config.gae_each_epoch:
                flat = self._estimate(batch)
            order = torch.randperm(config.frames_per_batch).to(config.device)
            for index in order.split(config.minibatch):
                history.append(self.update(flat, index))
        if self.normalizer is not None:
            self.normalizer.update(self._joined_observation(batch))
        return {key: float(torch.stack([m[key] for m in history]).mean()) for key in history[0]}

    def set_progress(self, fraction: float) -> None:
        """Set the learning rate for a run that is ``fraction`` [0, 1] done."""
        rate = self.config.lr * (1.0 - fraction) if self.config.anneal_lr else self.config.lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _prepared(self, batch: TensorDictBase) -> TensorDictBase:
        """A shallow copy with scaled rewards, checked for NaN."""
        checked = [*self.observation_keys, *(("next", *_path(k)) for k in self.observation_keys), ("next", "reward")]
        for key in checked:
            value = batch.get(key)
            if not torch.isfinite(value).all():
                count = int((~torch.isfinite(value)).sum())
                raise NonFiniteError(
                    f"the environment gave {count} NaN or infinite values in {key!r} of a batch "
                    f"{list(batch.batch_size)}; the weights are as they were before it"
                )
        batch = batch.copy()
        if self.config.reward_scale != 1.0:
            batch.set(("next", "reward"), batch.get(("next", "reward")) * self.config.reward_scale)
        return batch

    def _estimate(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the advantage; return the batch as rows with what the loss reads."""
        with torch.no_grad():
            self.advantage(batch)
        return batch.select(*self.loss.in_keys).reshape(-1)

    def _joined_observation(self, batch: TensorDictBase) -> Tensor:
        return torch.cat([batch.get(key) for key in self.observation_keys], -1)

    # ---- saving

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, normaliser statistics and Adam's moments, as named tensors."""
        named = {f"modules.{name}": value for name, value in self.modules.state_dict().items()}
        for i, parameter in enumerate(self.parameters):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                named[f"optimizer.{i}.{name}"] = value
        return named

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over :meth:`state_dict`. Raises :class:`CheckpointError` where it does not fit these networks."""
        modules = {k.removeprefix("modules."): v for k, v in state.items() if k.startswith("modules.")}
        adam: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key.startswith("optimizer."):
                _, number, name = key.split(".")
                adam.setdefault(int(number), {})[name] = value
        for place, values in adam.items():
            if place >= len(self.parameters) or values["exp_avg"].shape != self.parameters[place].shape:
                raise CheckpointError("the optimiser state belongs to networks of other sizes")
        try:
            self.modules.load_state_dict(modules)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise CheckpointError(f"the checkpoint belongs to other networks: {reason}") from error
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": adam})


def build_modules(config: PPOConfig, env: EnvBase) -> nn.ModuleDict:
    """Actor and critic for an environment's specs, with one observation normaliser between them."""
    keys = list(env.observation_spec.keys(True, True))
    width = 0
    for key in keys:
        spec = env.observation_spec[key]
        if len(spec.shape) != 2 or not spec.dtype.is_floating_point:
            raise SpecError(
                f"{config.env.id} observes {key!r} as {spec.dtype} {list(spec.shape[1:])}: PPO's perceptrons read flat "
                "float vectors. Wrap the environment (gymnasium.wrappers.FlattenObservation)"
            )
        width += spec.shape[-1]
    normalizer = RunningNorm(width) if config.normalize_observation else None
    options: dict[str, Any] = {"num_cells": config.num_cells, "normalizer": normalizer, "in_keys": keys}
    action = env.action_spec
    if isinstance(action, Categorical):
        actor: nn.Module = CategoricalActor(width, action.n, **options)
    elif len(action.shape) == 2 and action.dtype.is_floating_point:
        actor = GaussianActor(width, action.shape[-1], init_std=config.init_std, **options)
    else:
        raise SpecError(f"{config.env.id} takes {action}: PPO acts with one float vector or one discrete choice")
    return nn.ModuleDict({"actor": actor, "critic": ValueCritic(width, **options)})


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key
