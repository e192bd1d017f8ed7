"""Weight initialisation for policy-gradient networks."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["orthogonal_init_"]


@torch.no_grad()
def orthogonal_init_(network: nn.Module, *, hidden_gain: float = math.sqrt(2.0), last_gain: float = 1.0) -> nn.Module:
    """Fill every linear layer with an orthogonal matrix times a gain, and its bias with zero.

        W = gain Q,  Q^T Q = I or Q Q^T = I;   gain = hidden_gain, or last_gain in the last linear layer

    Saxe et al. 2014 (arXiv:1312.6120). PPO implementations use sqrt(2) inside, 0.01 for a policy's last layer, so
    that the first policies barely depend on the observation, and 1 for a critic's: Andrychowicz et al. 2021, "What
    Matters for On-Policy Deep Actor-Critic Methods?" (arXiv:2006.05990). Returns ``network``, changed in place.
    """
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else hidden_gain)
        if layer.bias is not None:
            layer.bias.zero_()
    return network
