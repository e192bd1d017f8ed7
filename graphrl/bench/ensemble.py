"""Off-policy updates: one of SAC, and one of REDQ's ten critics, written as each library would.

The step of "plain PyTorch" is the one that ``compile_update`` compiles: losses, ``backward()``, Adam, soft targets.
"""

from __future__ import annotations

import inspect
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from graphrl.bench.tables import BenchOptions, installed, measure
from graphrl.compiler.benchmark import BenchmarkTable, refused_row
from graphrl.compiler.update import compile_update

__all__ = ["suite"]

OBSERVATION, ACTION, BATCH = 17, 6, 256
GAMMA, TAU, LR = 0.99, 0.005, 3e-4
SAC_WIDTH, SAC_CRITICS = 256, 2
REDQ_WIDTHS, REDQ_CRITICS, REDQ_SUBSET = (64, 256), 10, 2

Step = Callable[[TensorDictBase], dict[str, Tensor]]


def suite(options: BenchOptions) -> list[BenchmarkTable]:
    """One table for SAC, one for each width of REDQ; each competitor trains its own copy on the same batch."""
    batch = _batch(options.device)
    sac = _table(f"SAC update, {SAC_CRITICS} critics {SAC_WIDTH} wide, batch {BATCH}", _sac, _torchrl_sac, batch,
                 SAC_WIDTH, options)  # fmt: skip
    redq = [
        _table(f"REDQ critic update, {REDQ_CRITICS} critics {width} wide, batch {BATCH}", _redq, _torchrl_redq, batch,
               width, options)
        for width in REDQ_WIDTHS
    ]  # fmt: skip
    return [sac, *redq]


def _table(
    title: str,
    plain: Callable[[int, str, bool], Step],
    torchrl: Callable[[int, str], Step],
    batch: TensorDictBase,
    width: int,
    options: BenchOptions,
) -> BenchmarkTable:
    device = options.device
    steps: dict[str, Callable[[], Step]] = {
        "plain PyTorch, eager": lambda: plain(width, device, False),
        "plain PyTorch, torch.compile of the losses": lambda: plain(width, device, True),
        "graphrl, compile_update": lambda: _compiled(plain(width, device, False), batch),
    }
    if "precision" in inspect.signature(compile_update).parameters:
        steps["graphrl, compile_update, bf16"] = lambda: _compiled(plain(width, device, False), batch, precision="bf16")
    if installed("torchrl", options):
        steps["torchrl, eager"] = lambda: torchrl(width, device)
        steps["torchrl's loss, compile_update"] = lambda: _compiled(torchrl(width, device), batch)
    runs: dict[str, Callable[[], Any]] = {}
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, make in steps.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            step = make()
            step(batch)
        except Exception as error:  # a peer or a combination that does not work on this machine has its reason here
            refused[name] = textwrap.shorten(str(error), 160) or type(error).__name__
            continue
        runs[name] = lambda step=step: step(batch)  # type: ignore[misc]
        if "compile" in name:
            seconds[name] = time.perf_counter() - start
    table = measure(f"{title}, per update", runs, options, compile_s=seconds)
    return replace(table, rows=(*table.rows, *(refused_row(name, why) for name, why in refused.items())))


def _compiled(step: Step, batch: TensorDictBase, **options: Any) -> Step:
    return compile_update(step, batch, **options)


def _batch(device: str) -> TensorDict:
    torch.manual_seed(0)
    ends = torch.zeros(BATCH, 1, dtype=torch.bool)
    following = {"observation": torch.randn(BATCH, OBSERVATION), "reward": torch.randn(BATCH, 1)}
    following |= {"terminated": ends, "done": ends.clone()}
    data = {"observation": torch.randn(BATCH, OBSERVATION), "action": torch.rand(BATCH, ACTION) * 1.8 - 0.9}
    return TensorDict({**data, "next": TensorDict(following, batch_size=[BATCH])}, batch_size=[BATCH]).to(device)


# ---- plain PyTorch


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def _critics(count: int, width: int, device: str) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The critics, and their targets with equal weights."""
    critics, targets = (
        nn.ModuleList(_mlp(OBSERVATION + ACTION, width, 1) for _ in range(count)).to(device) for _ in range(2)
    )
    targets.load_state_dict(critics.state_dict())
    return critics, targets.requires_grad_(False)


def _sample(actor: nn.Module, observation: Tensor) -> tuple[Tensor, Tensor]:
    """An action of a tanh-squashed Gaussian and its log-probability [B, 1]."""
    mean, log_std = actor(observation).chunk(2, -1)
    log_std = log_std.clamp(-5, 2)
    noise = torch.randn_like(mean)
    raw = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.9189385332046727
    squash = 2 * (0.6931471805599453 - raw - F.softplus(-2 * raw))
    return raw.tanh(), (log_prob - squash).sum(-1, keepdim=True)


def _values(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    """[count, B, 1]."""
    joined = torch.cat([observation, action], -1)
    return torch.stack([critic(joined) for critic in critics])


def _soft_update(critics: nn.ModuleList, targets: nn.ModuleList) -> None:
    with torch.no_grad():
        for target, source in zip(targets.parameters(), critics.parameters(), strict=True):
            target.lerp_(source, TAU)


def _columns(batch: TensorDictBase) -> tuple[Tensor, ...]:
    keys = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"))
    return tuple(batch[key] for key in keys)


def _sac(width: int, device: str, compiled: bool) -> Step:
    """SAC with two critics and a learned temperature, in the order of most single-file scripts."""
    actor = _mlp(OBSERVATION, width, 2 * ACTION).to(device)
    critics, targets = _critics(SAC_CRITICS, width, device)
    log_alpha = nn.Parameter(torch.zeros(1, device=device))
    owners = (critics.parameters(), actor.parameters(), [log_alpha])
    critic_optimizer, actor_optimizer, alpha_optimizer = (torch.optim.Adam(p, lr=LR) for p in owners)

    def critic_loss(now: Tensor, action: Tensor, then: Tensor, reward: Tensor, terminated: Tensor) -> Tensor:
        with torch.no_grad():
            next_action, log_prob = _sample(actor, then)
            value = _values(targets, then, next_action).min(0).values - log_alpha.exp() * log_prob
            target = reward + GAMMA * (~terminated) * value
        return (_values(critics, now, action) - target).square().mean((1, 2)).sum()

    def actor_loss(now: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob = _sample(actor, now)
        value = _values(critics, now, action).min(0).values
        return (log_alpha.exp().detach() * log_prob - value).mean(), log_prob.detach()

    run_critic: Callable[..., Tensor] = torch.compile(critic_loss) if compiled else critic_loss
    run_actor: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(actor_loss) if compiled else actor_loss

    def step(batch: TensorDictBase) -> dict[str, Tensor]:
        columns = _columns(batch)
        loss_qvalue = run_critic(*columns)
        _descend(critic_optimizer, loss_qvalue)
        loss_actor, log_prob = run_actor(columns[0])
        _descend(actor_optimizer, loss_actor)
        loss_alpha = -(log_alpha.exp() * (log_prob - ACTION)).mean()
        _descend(alpha_optimizer, loss_alpha)
        critic_optimizer.zero_grad()  # the actor's loss left gradients in the critics
        _soft_update(critics, targets)
        return {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor, "loss_alpha": loss_alpha}

    return step


def _redq(width: int, device: str, compiled: bool) -> Step:
    """REDQ's critics: ten, against the smaller of two random targets."""
    actor = _mlp(OBSERVATION, width, 2 * ACTION).to(device).requires_grad_(False)
    critics, targets = _critics(REDQ_CRITICS, width, device)
    optimizer = torch.optim.Adam(critics.parameters(), lr=LR)

    def loss(now: Tensor, action: Tensor, then: Tensor, reward: Tensor, terminated: Tensor, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            next_action, log_prob = _sample(actor, then)
            value = _values(targets, then, next_action)[chosen].min(0).values - 0.2 * log_prob
            target = reward + GAMMA * (~terminated) * value
        return (_values(critics, now, action) - target).square().mean((1, 2)).sum()

    run_loss: Callable[..., Tensor] = torch.compile(loss) if compiled else loss

    def step(batch: TensorDictBase) -> dict[str, Tensor]:
        total = run_loss(*_columns(batch), torch.randperm(REDQ_CRITICS, device=device)[:REDQ_SUBSET])
        _descend(optimizer, total)
        _soft_update(critics, targets)
        return {"loss_qvalue": total}

    return step


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- TorchRL


def _torchrl_networks(width: int, device: str) -> tuple[Any, Any]:
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

    body = nn.Sequential(_mlp(OBSERVATION, width, 2 * ACTION), NormalParamExtractor()).to(device)
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(_Joined(_mlp(OBSERVATION + ACTION, width, 1)), in_keys=["observation", "action"])
    return actor, critic.to(device)


class _Joined(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.network(torch.cat([observation, action], -1))


def _torchrl_step(loss: Any, terms: Mapping[str, Any]) -> Step:
    """One backward of the summed ``terms``, an Adam for each, and TorchRL's soft update."""
    from torchrl.objectives import SoftUpdate

    soft = SoftUpdate(loss, tau=TAU)
    optimizers = [torch.optim.Adam(parameters, lr=LR) for parameters in terms.values()]

    def step(batch: TensorDictBase) -> dict[str, Tensor]:
        found = loss(batch)
        total = sum(found[name] for name in terms)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
        soft.step()
        return {"loss": total}

    return step


def _torchrl_sac(width: int, device: str) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives import SACLoss

        actor, critic = _torchrl_networks(width, device)
        loss = SACLoss(actor, critic, num_qvalue_nets=SAC_CRITICS, loss_function="l2", target_entropy=-ACTION)
        loss.make_value_estimator(gamma=GAMMA)
    critics, actors = (getattr(loss, f"{name}_network_params").values(True, True) for name in ("qvalue", "actor"))
    return _torchrl_step(
        loss.to(device), {"loss_qvalue": list(critics), "loss_actor": list(actors), "loss_alpha": [loss.log_alpha]}
    )


def _torchrl_redq(width: int, device: str) -> Step:
    """TorchRL's loss computes the actor's terms too; only the critics' is used here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives import REDQLoss

        actor, critic = _torchrl_networks(width, device)
        loss = REDQLoss(
            actor,
            critic,
            num_qvalue_nets=REDQ_CRITICS,
            sub_sample_len=REDQ_SUBSET,
            loss_function="l2",
            target_entropy=-ACTION,
        )
        loss.make_value_estimator(gamma=GAMMA)
    return _torchrl_step(loss.to(device), {"loss_qvalue": list(loss.qvalue_network_params.values(True, True))})
