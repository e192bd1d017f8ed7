"""Critics: keyed graphs from an observation to its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from graphrl.graph import KeyedGraph
from graphrl.keys import Key, normalize_keys
from graphrl.models.heads import Trunk
from graphrl.models.init import orthogonal_init_
from graphrl.models.mlp import MLP

__all__ = ["ValueCritic"]


class ValueCritic(KeyedGraph):
    """The value of a state, from a multi-layer perceptron.

        state_value = MLP(normalizer(observation))

    ``in_keys``: tensors [*B, F_i], joined, sum of F_i = ``observation_dim``. Writes ``value_key``: [*B, 1], gradient
    to the weights. ``normalizer``: a module before the network, such as a :class:`RunningNorm` shared with the actor.
    Linear layers start orthogonal, gain sqrt(2), the last 1: see ``orthogonal_init_``.
    """

    def __init__(
        self,
        observation_dim: int,
        *,
        num_cells: Sequence[int] = (64, 64),
        activation_class: Callable[..., nn.Module] = nn.Tanh,
        normalizer: nn.Module | None = None,
        in_keys: Key | list[Key] = "observation",
        value_key: Key = "state_value",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        mlp = MLP(
            observation_dim, 1, num_cells=num_cells, activation_class=activation_class, device=device, dtype=dtype
        )
        network = Trunk(normalizer=normalizer, mlp=orthogonal_init_(mlp, last_gain=1.0))
        super().__init__((network, normalize_keys(in_keys), [value_key]))
