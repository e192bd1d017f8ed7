"""The multilayer perceptron layer by layer, in the dtype of its input; in float64 it judges the fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "mlp_reference"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""The activations by name, as torch defines them."""


def mlp_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor:
    """``h_0 = x``, ``h_i = activation_i(h_{i-1} W_i^T + b_i)``; returns the last. Arguments as :func:`mlp_forward`."""
    for weight, bias, activation in zip(weights, biases, activations, strict=True):
        x = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return x
