"""The pieces between a network's features and a distribution's parameters."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from graphrl.errors import GraphError

__all__ = ["GaussianHead", "Trunk"]


class GaussianHead(nn.Module):
    """Turn features into the location and scale of a Gaussian.

        state independent   loc = x,             scale = exp(log_std)                   log_std: a parameter [A]
        state dependent     loc, u = split(x),   scale = exp(clamp(log init_std + u, min_log_std, max_log_std))

    x: [*B, A], or [*B, 2 A] when state dependent. Returns loc, scale: [*B, A], scale positive; gradient flows to x
    and ``log_std``. The bounds are those of Haarnoja et al. 2018 (arXiv:1801.01290).
    """

    def __init__(
        self,
        action_dim: int,
        *,
        init_std: float = 1.0,
        state_dependent_std: bool = False,
        min_log_std: float = -20.0,
        max_log_std: float = 2.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not init_std > 0:
            raise GraphError(f"init_std={init_std} must be positive: it is the standard deviation at the start")
        self.init_log_std = math.log(init_std)
        self.state_dependent_std = state_dependent_std
        self.min_log_std = min_log_std
        self.max_log_std = max_log_std
        if not state_dependent_std:
            self.log_std = nn.Parameter(torch.full((action_dim,), self.init_log_std, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``loc`` and ``scale``: [*B, A] each."""
        if not self.state_dependent_std:
            return x, self.log_std.exp().expand_as(x)
        loc, raw = x.chunk(2, -1)
        return loc, (raw + self.init_log_std).clamp(self.min_log_std, self.max_log_std).exp()


class Trunk(nn.Sequential):
    """Named modules in a row whose first may read several tensors, joined on the last dim: one node of a graph.

        trunk = Trunk(normalizer=RunningNorm(3), mlp=MLP(3, 4))

    A module given as ``None`` is left out, and the others keep their names in the state dict. Call: tensors
    [*B, F_i] -> whatever the last module returns.
    """

    def __init__(self, **modules: nn.Module | None) -> None:
        super().__init__(OrderedDict((name, module) for name, module in modules.items() if module is not None))

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        """The last module's output."""
        return super().forward(inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1))
