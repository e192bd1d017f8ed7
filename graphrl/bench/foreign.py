"""Other libraries' modules and losses, untouched, through this compiler: which trace, how exactly, how fast."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn

from graphrl.bench.tables import BenchOptions, measure
from graphrl.compiler.benchmark import BenchmarkRow, BenchmarkTable, machine, refused_row
from graphrl.compiler.compiled import compile
from graphrl.compiler.entry import Entry
from graphrl.compiler.update import compile_update
from graphrl.compiler.verify import relative_error
from graphrl.errors import CompileError, ParityError, TraceError, require_extra
from graphrl.graph import KeyedGraph
from graphrl.training.threads import torch_threads

__all__ = ["FOREIGN_GRAPHS", "FOREIGN_LOSSES", "graph_error", "loss_error", "loss_example", "loss_step", "suite"]

OBSERVATION, ACTION, CELLS, ROWS = 17, 6, [64, 64], 64


def transitions(rows: int = ROWS, dtype: torch.dtype = torch.float32, seed: int = 0) -> TensorDict:
    """A batch with every key that the losses here read."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)

    flags = torch.rand(2, rows, 1, generator=generator) < 0.1
    after = {
        "observation": normal(OBSERVATION),
        "reward": normal(1),
        "done": flags.any(0),
        "terminated": flags[0],
    }
    return TensorDict(
        {
            "observation": normal(OBSERVATION),
            "action": 0.9 * normal(ACTION).tanh(),
            "loc": normal(ACTION),
            "scale": normal(ACTION).exp(),
            "action_log_prob": normal(),
            "advantage": normal(1),
            "value_target": normal(1),
            "state_value": normal(1),
            "next": after,
        },
        batch_size=[rows],
    )


def _mlp(inputs: int, outputs: int) -> nn.Module:
    from torchrl.modules import MLP

    return MLP(in_features=inputs, out_features=outputs, num_cells=CELLS, activation_class=nn.Tanh)


def torchrl_actor() -> Any:
    """TorchRL's ``ProbabilisticActor`` over a ``TanhNormal``."""
    from torchrl.modules import ProbabilisticActor, TanhNormal

    network = TensorDictModule(
        nn.Sequential(_mlp(OBSERVATION, 2 * ACTION), NormalParamExtractor()), ["observation"], ["loc", "scale"]
    )
    return ProbabilisticActor(network, ["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)


def torchrl_value() -> Any:
    """TorchRL's ``ValueOperator``."""
    from torchrl.modules import ValueOperator

    return ValueOperator(_mlp(OBSERVATION, 1), in_keys=["observation"])


def _deterministic() -> Any:
    return TensorDictModule(nn.Sequential(_mlp(OBSERVATION, ACTION), nn.Tanh()), ["observation"], ["action"])


class _Joined(nn.Module):
    """A perceptron over several tensors, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = _mlp(OBSERVATION + ACTION, 1)

    def forward(self, *parts: Tensor) -> Tensor:
        return self.mlp(torch.cat(parts, -1))


def torchrl_qvalue() -> Any:
    """TorchRL's ``ValueOperator`` over observation and action."""
    from torchrl.modules import ValueOperator

    return ValueOperator(_Joined(), in_keys=["observation", "action"])


def _box() -> Any:
    from torchrl.data import Bounded

    return Bounded(-torch.ones(ACTION), torch.ones(ACTION), (ACTION,))


def _dqn() -> Any:
    from torchrl.objectives import DQNLoss

    loss = DQNLoss(_qvalue_actor(), action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    return loss


def _loss(name: str, *parts: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchrl.objectives as objectives

        given = {key: value() if callable(value) else value for key, value in options.items()}
        loss = getattr(objectives, name)(*(part() for part in parts), **given)
        if "PPO" not in name and "A2C" not in name and "Reinforce" not in name:  # these read the advantage instead
            loss.make_value_estimator(gamma=0.99)
        return loss

    return make


FOREIGN_LOSSES: dict[str, Callable[[], Any]] = {
    "ClipPPOLoss": _loss("ClipPPOLoss", torchrl_actor, torchrl_value),
    "KLPENPPOLoss": _loss("KLPENPPOLoss", torchrl_actor, torchrl_value),
    "A2CLoss": _loss("A2CLoss", torchrl_actor, torchrl_value),
    "ReinforceLoss": _loss("ReinforceLoss", torchrl_actor, torchrl_value),
    "DQNLoss": _dqn,
    "DDPGLoss": _loss("DDPGLoss", _deterministic, torchrl_qvalue),
    "TD3Loss": _loss("TD3Loss", _deterministic, torchrl_qvalue, bounds=lambda: (-torch.ones(6), torch.ones(6))),
    "TD3BCLoss": _loss("TD3BCLoss", _deterministic, torchrl_qvalue, bounds=lambda: (-torch.ones(6), torch.ones(6))),
    "SACLoss": _loss("SACLoss", torchrl_actor, torchrl_qvalue, action_spec=_box),
    "REDQLoss": _loss("REDQLoss", torchrl_actor, torchrl_qvalue, num_qvalue_nets=10, action_spec=_box),
    "CrossQLoss": _loss("CrossQLoss", torchrl_actor, torchrl_qvalue, action_spec=_box),
    "IQLLoss": _loss("IQLLoss", torchrl_actor, torchrl_qvalue, torchrl_value),
    "CQLLoss": _loss("CQLLoss", torchrl_actor, torchrl_qvalue, action_spec=_box),
}
"""TorchRL's losses for flat observations, each made over networks of 64-64 tanh units."""


def loss_step(loss: Any) -> Callable[[Any], dict[str, Tensor]]:
    """A training step on a TorchRL loss: its terms summed, gradients, Adam, and soft targets where it has any."""
    from torchrl.objectives import SoftUpdate

    parameters = [p for p in loss.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, 3e-4)
    has_targets = any(name.startswith("target_") and "params" in name for name, _ in loss.named_buffers())
    targets = SoftUpdate(loss, eps=0.995) if has_targets else None

    def step(batch: Any) -> dict[str, Tensor]:
        terms = loss(batch)
        total = torch.stack([v.mean() for k, v in terms.items() if k.startswith("loss")]).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if targets is not None:
            targets.step()
        return {"loss": total.detach()}

    return step


def _recurrent(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        import torchrl.modules as modules

        module = getattr(modules, f"{kind}Module")
        return module(input_size=OBSERVATION, hidden_size=32, in_key="observation", out_key="features")

    return make


def _stable_baselines3() -> Any:
    """An SB3 ``ActorCriticPolicy``: a plain module given keys."""
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.policies import ActorCriticPolicy

    box = gym.spaces.Box(-1.0, 1.0, (ACTION,), np.float32)
    seen = gym.spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
    policy = ActorCriticPolicy(seen, box, lambda _: 3e-4, net_arch=CELLS)
    return KeyedGraph((policy, ["observation"], ["action", "state_value", "action_log_prob"]))


class _RslStyle(nn.Module):
    """An actor-critic as rsl_rl writes one: empirical normaliser, ELU networks, one standard deviation an action."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("mean", torch.zeros(1, OBSERVATION)), ("std", torch.ones(1, OBSERVATION))):
            self.register_buffer(name, value)
        self.actor = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.ELU(), nn.Linear(64, ACTION))
        self.critic = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.ELU(), nn.Linear(64, 1))
        self.std_parameter = nn.Parameter(torch.ones(ACTION))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = (observation - self.mean) / (self.std + 1e-2)
        distribution = torch.distributions.Normal(self.actor(x), self.std_parameter.expand(len(x), ACTION))
        action = distribution.sample()
        return action, distribution.log_prob(action).sum(-1), self.critic(x)


def _qvalue_actor() -> Any:
    from torchrl.modules import QValueActor

    return QValueActor(_mlp(OBSERVATION, ACTION), action_space="categorical")


FOREIGN_GRAPHS: dict[str, Callable[[], Any]] = {
    "ProbabilisticActor": torchrl_actor,
    "ValueOperator": torchrl_value,
    "ValueOperator, state-action": torchrl_qvalue,
    "QValueActor": _qvalue_actor,
    "LSTMModule": _recurrent("LSTM"),
    "GRUModule": _recurrent("GRU"),
    "SB3 ActorCriticPolicy": _stable_baselines3,
    "rsl_rl-style actor-critic": lambda: KeyedGraph(
        (_RslStyle(), ["observation"], ["action", "action_log_prob", "state_value"])
    ),
}
"""Modules of other libraries as users hand them over."""


def loss_example(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> TensorDict:
    """A batch for an entry of :data:`FOREIGN_LOSSES`."""
    batch = transitions(dtype=dtype, seed=seed)
    if name == "DQNLoss":
        batch["action"] = torch.arange(ROWS) % ACTION
    return batch


def graph_example(name: str, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> TensorDict:
    """A batch for an entry of :data:`FOREIGN_GRAPHS`."""
    batch = transitions(rows, dtype).exclude("next")
    if name in ("LSTMModule", "GRUModule"):
        states = ["recurrent_state_h", "recurrent_state_c"] if name[0] == "L" else ["recurrent_state"]
        batch.update({key: torch.zeros(rows, 1, 32, dtype=dtype) for key in states})
        batch.set("is_init", torch.arange(rows).view(-1, 1) % 3 == 0)
    return batch


def suite(options: BenchOptions) -> list[BenchmarkTable]:
    """A table of modules and one of losses: each eager against compiled, in turns, with its parity in float64."""
    for package in ("torchrl", "stable_baselines3"):
        require_extra(package, "peers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            _table(
                f"modules of other libraries, {ROWS} rows, TensorDict in and out", FOREIGN_GRAPHS, _graph_runs, options
            ),
            _table(f"TorchRL's losses, gradients, Adam and targets, {ROWS} rows", FOREIGN_LOSSES, _loss_runs, options),
        ]


def _table(title: str, kinds: dict[str, Callable[[], Any]], measured: Any, options: BenchOptions) -> BenchmarkTable:
    rows: list[BenchmarkRow] = []
    for name, make in kinds.items():
        try:
            runs, entry = measured(name, make)
        except (TraceError, CompileError) as refusal:
            rows.append(refused_row(name, re.sub(r"(?:/[^\s:/]+)+/([^/\s:]+:\d+)", r"\1", str(refusal))))
            continue
        eager, fast = measure(name, runs, options).rows
        rows.append(replace(eager, name=f"{name}, eager"))
        rows.append(replace(fast, name=f"{name}, compiled", compile_s=entry.seconds, error=entry.parity))
    with torch_threads(options.threads or torch.get_num_threads()):  # as they were measured
        return BenchmarkTable(title, tuple(rows), machine())


Runs = dict[str, Callable[[], Any]]


def _graph_runs(name: str, make: Callable[[], Any]) -> tuple[Runs, Entry]:
    graph, batch = make(), graph_example(name)
    fast = compile(graph, batch)
    run = torch.no_grad()  # as in a rollout
    return {"eager": run(lambda: graph(batch)), "compiled": run(lambda: fast(batch))}, fast.entries()[-1]


def _loss_runs(name: str, make: Callable[[], Any]) -> tuple[Runs, Entry]:
    loss, batch = make(), loss_example(name)
    step, update = loss_step(copy.deepcopy(loss)), compile_update(loss_step(loss), batch)
    return {"eager": lambda: step(batch), "compiled": lambda: update(batch)}, update.entries()[-1]


def graph_error(make: Callable[[], Any], name: str, backend: str) -> float:
    """Largest relative difference of a module compiled and eager, over its outputs; in float64 where it takes that."""
    dtype = torch.float32 if name.startswith("SB3") else torch.float64  # SB3 casts observations to float32
    graph = make().to(dtype)
    batch = graph_example(name, dtype=dtype)
    fast = compile(graph, batch, backend=backend)
    with torch.no_grad():
        torch.manual_seed(1)
        found = fast(batch.clone())
        torch.manual_seed(1)
        wanted = graph(batch.clone())
    if set(found.keys(True, True)) != set(wanted.keys(True, True)):
        raise ParityError(f"{name} compiled writes {set(found.keys(True, True))}, not {set(wanted.keys(True, True))}")
    return max(relative_error(found.get(key), wanted.get(key)) for key in graph.out_keys)


def loss_error(make: Callable[[], Any], name: str, backend: str, steps: int = 10) -> float:
    """Largest relative difference, in float64, of parameters and buffers after updates compiled and eager."""
    loss = make().double()
    other = copy.deepcopy(loss)
    update = compile_update(loss_step(loss), loss_example(name, torch.float64), backend=backend)
    step = loss_step(other)
    for seed in range(steps):
        batch = loss_example(name, torch.float64, seed)
        torch.manual_seed(seed)
        found = update(batch)
        torch.manual_seed(seed)
        wanted = step(batch)
    pairs = zip(loss.state_dict().values(), other.state_dict().values(), strict=True)
    return max(relative_error(found["loss"], wanted["loss"]), *(relative_error(a, b) for a, b in pairs))
