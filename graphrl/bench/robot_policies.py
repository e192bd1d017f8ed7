"""Policies that robots run, each as a keyed graph with random weights: the shapes are those of published controllers.

State is a key like any other: a history window, a context or a recurrent value is read at a step and written under
``("next", key)`` for the following one. ``is_init`` empties it at the start of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from graphrl.graph import KeyedGraph
from graphrl.keys import Key, next_key
from graphrl.models import MLP, GRUModule, LSTMModule, ObservationHistory, RunningNorm

__all__ = ["POLICIES", "Policy", "make_policy"]


@dataclass(frozen=True)
class Policy:
    """A graph that writes ``action``, an example batch of one, its state as (key, next key), and its control rate."""

    name: str
    graph: KeyedGraph
    example: TensorDict
    state: tuple[tuple[Key, Key], ...]
    rate_hz: float

    def episode(self, steps: int, starts: Sequence[int] = (0,), seed: int = 1) -> Iterator[TensorDict]:
        """Batches of one with random observations, ``is_init`` at ``starts``; the caller feeds the state back."""
        generator = torch.Generator().manual_seed(seed)
        kept = [key for key, _ in self.state]
        for t in range(steps):
            td = self.example.clone()
            for key in td.keys(True, True):
                if key == "is_init":
                    td[key] = torch.full((1, 1), t in starts)
                elif key not in kept:
                    td[key] = torch.randn(td[key].shape, generator=generator)
            yield td


@dataclass(frozen=True)
class Width:
    """Divides hidden sizes, so that a test of every policy takes seconds; observations and actions keep theirs."""

    shrink: int

    def __call__(self, size: int) -> int:
        return max(size // self.shrink, 8)


def make_policy(name: str, shrink: int = 1) -> Policy:
    """One of :data:`POLICIES` with seeded weights; ``shrink`` divides its hidden sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        graph, shapes, rate_hz = POLICIES[name](Width(shrink))
    graph.eval()
    example = TensorDict({key: torch.zeros(1, *shape) for key, shape in shapes.items()}, batch_size=[1])
    if "is_init" in graph.in_keys:
        example["is_init"] = torch.ones(1, 1, dtype=torch.bool)
    following = {key: next_key(key) for key in graph.in_keys}
    state = tuple((key, then) for key, then in following.items() if then in graph.out_keys)
    return Policy(name, graph, example, state, rate_hz)


Made = tuple[KeyedGraph, dict[str, tuple[int, ...]], float]


def _node(module: nn.Module, key: Key = "observation", out: Key = "action") -> TensorDictModule:
    return TensorDictModule(module, in_keys=[key], out_keys=[out])


def _norm(size: int) -> RunningNorm:
    norm = RunningNorm(size)
    norm.update(torch.randn(64, size) * torch.linspace(0.2, 3, size) + torch.linspace(-1, 1, size))
    return norm


def _mlp(size: int, out: int, cells: list[int], activation: type[nn.Module], *tail: nn.Module) -> nn.Module:
    return nn.Sequential(MLP(size, out, num_cells=cells, activation_class=activation), *tail)


def _plain(size: int, out: int, rate: float, cells: tuple[int, ...], activation: type[nn.Module], *tail: nn.Module,
           norm: bool = False) -> Callable[[Width], Made]:  # fmt: skip
    def make(width: Width) -> Made:
        first = [_node(_norm(size), out="normed")] if norm else []
        mlp = _mlp(size, out, [width(n) for n in cells], activation, *tail)
        key = "normed" if norm else "observation"
        return KeyedGraph(*first, _node(mlp, key), out_keys=["action"]), {"observation": (size,)}, rate

    return make


def _window(size: int, length: int, flatten: bool = True) -> ObservationHistory:
    """The last observations, oldest first; zeros before the start of the episode."""
    return ObservationHistory(size, length, out_key="window", state_key="history", padding="constant", flatten=flatten)


def _go2(width: Width) -> Made:
    """An estimator reads six observations; the actor reads its guess beside the last."""
    graph = KeyedGraph(
        _window(45, 6),
        _node(_mlp(270, 19, [width(128), width(64)], nn.ELU), "window", "estimate"),
        (lambda x, z: torch.cat([x, z], -1), ["observation", "estimate"], ["features"]),
        _node(_mlp(64, 12, [width(n) for n in (512, 256, 128)], nn.ELU), "features"),
        out_keys=["action", ("next", "history")],
    )
    return graph, {"observation": (45,), "history": (6, 45)}, 50.0


def _g1(width: Width) -> Made:
    """Five observations in a row, 480 numbers."""
    graph = KeyedGraph(
        _window(96, 5),
        _node(_mlp(480, 29, [width(n) for n in (512, 256, 128)], nn.ELU), "window"),
        out_keys=["action", ("next", "history")],
    )
    return graph, {"observation": (96,), "history": (5, 96)}, 50.0


def _lstm(size: int, out: int, hidden: int, cells: tuple[int, ...]) -> Callable[[Width], Made]:
    def make(width: Width) -> Made:
        lstm = LSTMModule(size, width(hidden))
        graph = KeyedGraph(lstm, _node(_mlp(width(hidden), out, [width(n) for n in cells], nn.ELU), "features"),
                           out_keys=["action", ("next", "recurrent_state")])  # fmt: skip
        return graph, {"observation": (size,), "recurrent_state": lstm.state_shape}, 50.0

    return make


class _Scale(nn.Module):
    scale: Tensor
    offset: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.25, 0.6, size))
        self.register_buffer("offset", torch.linspace(-0.3, 0.9, size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale + self.offset


def _fast_sac(width: Width) -> Made:
    sizes = [100, *(width(n) for n in (512, 256, 128))]
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False)
              for part in (nn.Linear(a, b), nn.LayerNorm(b), nn.SiLU())]  # fmt: skip
    net = nn.Sequential(*layers, nn.Linear(sizes[-1], 29), _Scale(29))
    return (
        KeyedGraph(_node(_norm(100), out="normed"), _node(net, "normed"), out_keys=["action"]),
        {"observation": (100,)},
        50.0,
    )


def _depth_parkour(width: Width) -> Made:
    """A depth image and ten observations, both through convolutions, then a GRU."""
    eye = nn.Sequential(
        nn.Conv2d(1, width(32), 5), nn.MaxPool2d(2), nn.ELU(), nn.Conv2d(width(32), width(64), 3), nn.ELU(),
        nn.AvgPool2d(6), nn.Flatten(), nn.Linear(width(64) * 24, width(128)), nn.ELU(),
        nn.Linear(width(128), 32), nn.Tanh(),
    )  # fmt: skip
    past = nn.Sequential(nn.Conv1d(53, 20, 4, stride=2), nn.ELU(), nn.Conv1d(20, 10, 2), nn.ELU(), nn.Flatten(),
                         nn.Linear(30, 20))  # fmt: skip
    gru = GRUModule(53 + 32 + 20, width(512), in_key="seen")
    graph = KeyedGraph(
        _window(53, 10, flatten=False),
        _node(nn.Sequential(nn.Unflatten(1, (1, 58)), eye), "depth", "latent"),
        (lambda window: window.transpose(1, 2), ["window"], ["channels"]),
        _node(past, "channels", "past"),
        (lambda *parts: torch.cat(parts, -1), ["observation", "latent", "past"], ["seen"]),
        gru,
        _node(_mlp(width(512), 12, [width(n) for n in (512, 256, 128)], nn.ELU), "features"),
        out_keys=["action", ("next", "history"), ("next", "recurrent_state")],
    )
    shapes = {"observation": (53,), "history": (10, 53), "depth": (58, 87), "recurrent_state": (width(512),)}
    return graph, shapes, 50.0


class _Block(nn.Module):
    """Causal attention of four heads and a perceptron, each behind a normalisation and around a shortcut."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.project, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class _Transformer(nn.Module):
    def __init__(self, size: int, inputs: int, steps: int, outputs: int) -> None:
        super().__init__()
        self.embed, self.act = nn.Linear(inputs, size), nn.Linear(size, outputs)
        self.place = nn.Parameter(torch.randn(steps, size) * 0.1)
        self.blocks = nn.Sequential(*(_Block(size) for _ in range(4)))
        self.norm = nn.LayerNorm(size)

    def forward(self, context: Tensor) -> Tensor:
        return self.act(self.norm(self.blocks(self.embed(context) + self.place)[:, -1]))


def _digit(width: Width) -> Made:
    net = _Transformer(width(192), 102, 16, 20)
    graph = KeyedGraph(_window(102, 16, flatten=False), _node(net, "window"), out_keys=["action", ("next", "history")])
    return graph, {"observation": (102,), "history": (16, 102)}, 50.0


POLICIES: dict[str, Callable[[Width], Made]] = {
    "crazyflie": _plain(146, 4, 500.0, (64, 64), nn.Tanh),
    "anymal_flat": _plain(48, 12, 50.0, (128, 128, 128), nn.ELU),
    "anymal_rough": _plain(235, 12, 50.0, (512, 256, 128), nn.ELU),
    "go1": _plain(48, 12, 50.0, (512, 256, 128), nn.SiLU, nn.Tanh(), norm=True),
    "go2_history": _go2,
    "h1_lstm": _lstm(41, 10, 64, (32,)),
    "g1_lstm": _lstm(47, 12, 64, (32,)),
    "g1_29_history": _g1,
    "g1_29_lstm": _lstm(96, 29, 256, (256, 256, 128)),
    "g1_fast_sac": _fast_sac,
    "leap_hand": _plain(57, 16, 20.0, (512, 256, 128), nn.SiLU, nn.Tanh(), norm=True),
    "depth_parkour": _depth_parkour,
    "digit": _digit,
}
"""By name: a function of a :class:`Width` that gives the graph, the shapes of its float inputs, and the rate."""
