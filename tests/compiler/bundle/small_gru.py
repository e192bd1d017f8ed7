"""A recurrent policy small enough to read, its contract, and an example."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn

from graphrl.compiler.bundle import Contract, Normalizer, ObservationTerm, RecurrentState
from graphrl.graph import KeyedGraph

__all__ = ["CONTRACT", "START", "gru"]


def gru(seed: int = 0) -> KeyedGraph:
    """A small recurrent policy, the same at every call."""
    torch.manual_seed(seed)
    return KeyedGraph(
        (nn.GRUCell(3, 8), ["observation", "h"], [("next", "h")]), (nn.Linear(8, 2), [("next", "h")], ["action"])
    )


CONTRACT = Contract(
    rate_hz=50,
    observations=(
        ObservationTerm(
            "observation",
            names=("hip", "knee", "speed"),
            low=(-5.0,) * 3,
            high=(5.0,) * 3,
            normalizer=Normalizer("none"),
        ),
    ),
    recurrent=(RecurrentState("h", ("next", "h"), 0.25),),
)
"""Of :func:`gru`: names, ranges, and a state that starts at a quarter."""
START = TensorDict(observation=torch.zeros(1, 3), h=torch.zeros(1, 8), batch_size=[1])
