"""The policies a bundle must be able to carry, by the sizes real robots use, with random weights."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from graphrl.compiler.bundle import Contract, ObservationTerm, RecurrentState
from graphrl.graph import KeyedGraph

__all__ = ["CONTRACT", "POLICIES", "START", "Made", "gru"]

Made = tuple[KeyedGraph, TensorDict, Contract]


def mlp(
    *sizes: int, activation: type[nn.Module] = nn.ELU, norm: bool = False, last: nn.Module | None = None
) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else []), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]), *([last] if last else []))


def feedforward(net: nn.Module, observations: int, rate_hz: float = 50) -> Made:
    graph = KeyedGraph((net, ["observation"], ["action"]))
    return graph, TensorDict(observation=torch.randn(4, observations), batch_size=[4]), Contract(rate_hz=rate_hz)


class History(nn.Module):
    """An estimator over a history window, beside the newest observation."""

    def __init__(self) -> None:
        super().__init__()
        self.estimate, self.act = mlp(270, 128, 64, 19), mlp(64, 512, 256, 128, 12)

    def forward(self, history: Tensor) -> Tensor:
        return self.act(torch.cat([self.estimate(history), history[..., -45:]], -1))


def recurrent(kind: str, observations: int, hidden: int, *head: int) -> Made:
    """A recurrent cell and a head; the state starts at 0.1."""
    names = ["h", "c"] if kind == "lstm" else ["h"]
    cell = nn.LSTMCell(observations, hidden) if kind == "lstm" else nn.GRUCell(observations, hidden)

    def step(x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        found = cell(x, state if kind == "lstm" else state[0])
        return found if isinstance(found, tuple) else (found,)

    following = [("next", name) for name in names]
    graph = KeyedGraph(
        (_Step(cell, step), ["observation", *names], following),
        (mlp(hidden, *head), [("next", "h")], ["action"]),
    )
    td = TensorDict(observation=torch.randn(4, observations), batch_size=[4])
    td.update({name: torch.zeros(4, hidden) for name in names})
    return graph, td, Contract(rate_hz=50, recurrent=tuple(RecurrentState(n, ("next", n), 0.1) for n in names))


class _Step(nn.Module):
    def __init__(self, cell: nn.Module, step) -> None:
        super().__init__()
        self.cell, self.step = cell, step

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return self.step(*values)


class Parkour(nn.Module):
    """Depth through convolutions into a GRU, beside a history of proprioception."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ELU(), nn.Conv2d(32, 64, 3), nn.ELU(), nn.Flatten(),
            nn.Linear(64 * 25 * 39, 128), nn.ELU(),
        )  # fmt: skip
        self.cell, self.act = nn.GRUCell(128 + 530, 512), mlp(512, 512, 256, 128, 12)

    def forward(self, history: Tensor, depth: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(torch.cat([self.eye(depth), history], -1), state)
        return self.act(state), state


def parkour() -> Made:
    keys = ["proprioception", "depth", "state"]
    graph = KeyedGraph(TensorDictModule(Parkour(), in_keys=keys, out_keys=["action", ("next", "state")]))
    td = TensorDict(
        proprioception=torch.randn(2, 530), depth=torch.rand(2, 1, 58, 87), state=torch.zeros(2, 512), batch_size=[2]
    )
    return graph, td, Contract(rate_hz=50, recurrent=(RecurrentState("state", ("next", "state")),))


class Digit(nn.Module):
    """Causal attention over sixteen steps of context."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 192)
        self.position = nn.Parameter(torch.randn(1, 16, 192) * 0.02)
        block = nn.TransformerEncoderLayer(192, 4, 384, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 20)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16))

    def forward(self, context: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(context) + self.position, mask=self.mask, is_causal=True)[:, -1])


def digit() -> Made:
    graph = KeyedGraph((Digit(), ["observation"], ["action"]))
    return graph, TensorDict(observation=torch.randn(2, 16, 64), batch_size=[2]), Contract(rate_hz=50)


POLICIES = {
    "crazyflie": lambda: feedforward(mlp(146, 64, 64, 4, activation=nn.Tanh), 146, 100),
    "anymal_flat": lambda: feedforward(mlp(48, 128, 128, 128, 12), 48),
    "anymal_rough": lambda: feedforward(mlp(235, 512, 256, 128, 12), 235),
    "go1": lambda: feedforward(mlp(48, 512, 256, 128, 12, activation=nn.SiLU, last=nn.Tanh()), 48),
    "go2_history": lambda: feedforward(History(), 270),
    "h1_lstm": lambda: recurrent("lstm", 41, 64, 32, 10),
    "g1": lambda: feedforward(mlp(480, 512, 256, 128, 29), 480),
    "g1_lstm": lambda: recurrent("lstm", 96, 256, 256, 128, 29),
    "g1_fastsac": lambda: feedforward(mlp(100, 512, 256, 128, 29, activation=nn.SiLU, norm=True, last=nn.Tanh()), 100),
    "leap_hand": lambda: feedforward(mlp(57, 512, 256, 128, 16, activation=nn.SiLU, last=nn.Tanh()), 57, 20),
    "gru": lambda: recurrent("gru", 45, 64, 32, 12),
    "depth_parkour": parkour,
    "digit": digit,
}  # fmt: skip
"""One function a policy: the graph, a batch of observations, what the contract says of its state."""


def gru(seed: int = 0) -> KeyedGraph:
    """A small recurrent policy, the same at every call."""
    torch.manual_seed(seed)
    return KeyedGraph(
        (nn.GRUCell(3, 8), ["observation", "h"], [("next", "h")]), (nn.Linear(8, 2), [("next", "h")], ["action"])
    )


CONTRACT = Contract(
    rate_hz=50,
    observations=(ObservationTerm("observation", names=("hip", "knee", "speed"), low=(-5.0,) * 3, high=(5.0,) * 3),),
    recurrent=(RecurrentState("h", ("next", "h"), 0.25),),
)
"""Of :func:`gru`: names, ranges, and a state that starts at a quarter."""
START = TensorDict(observation=torch.zeros(1, 3), h=torch.zeros(1, 8), batch_size=[1])
