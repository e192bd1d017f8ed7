"""The multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphrl.errors import GraphError

__all__ = ["MLP"]

Options = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class MLP(nn.Sequential):
    """A multi-layer perceptron: linear layers with an activation after each but the last.

        h_0 = x;   h_{k+1} = activation(W_k h_k + b_k);   y = W_n h_n + b_n

    ``num_cells``: width of each hidden layer, or one width with ``depth``; neither gives a single linear layer.
    ``activation_kwargs``, ``norm_kwargs``, ``layer_kwargs``: one mapping for all layers, or a list with one a layer.
    ``norm_class`` and ``dropout`` come between a layer and its activation. Argument names are TorchRL's.

    Call: one or more tensors [*B, F_i], joined on the last dim, sum of F_i = ``in_features``; returns
    [*B, out_features], or [*B, *out_features] when that is a tuple. Inputs are cast to the weights' dtype, so the
    float64 of a simulator is float32 inside. Gradient flows to inputs and weights.
    Raises :class:`GraphError` for sizes that cannot be built, ``ValueError`` for an input of another width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        depth: int | None = None,
        num_cells: Sequence[int] | int | None = None,
        activation_class: Callable[..., nn.Module] = nn.Tanh,
        activation_kwargs: Options = None,
        norm_class: Callable[..., nn.Module] | None = None,
        norm_kwargs: Options = None,
        dropout: float | None = None,
        bias_last_layer: bool = True,
        layer_class: Callable[..., nn.Module] = nn.Linear,
        layer_kwargs: Options = None,
        activate_last_layer: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        cells = _widths(depth, num_cells)
        shape = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        for name, sizes in (("in_features", (in_features,)), ("num_cells", cells), ("out_features", shape)):
            if not sizes and name == "out_features" or any(not isinstance(n, int) or n < 1 for n in sizes):
                raise GraphError(f"MLP: {name} is {sizes}, expected whole numbers of at least 1")
        activated = len(cells) + activate_last_layer
        factory = {k: v for k, v in (("device", device), ("dtype", dtype)) if v is not None}
        layer_options = _per_layer("layer_kwargs", layer_kwargs, len(cells) + 1)
        activation_options = _per_layer("activation_kwargs", activation_kwargs, activated)
        norm_options = _per_layer("norm_kwargs", norm_kwargs, activated)
        layers: list[nn.Module] = []
        widths = [in_features, *cells, math.prod(shape)]
        for i, (before, after) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            bias = True if i < len(cells) else bias_last_layer
            layers.append(layer_class(before, after, **{"bias": bias, **next(layer_options), **factory}))
            if i < activated:
                if dropout is not None:
                    layers.append(nn.Dropout(dropout))
                if norm_class is not None:
                    layers.append(norm_class(**next(norm_options)).to(device=device, dtype=dtype))
                layers.append(activation_class(**next(activation_options)).to(device=device, dtype=dtype))
        super().__init__(*layers)
        self.in_features = in_features
        self.out_features = out_features
        self._out_shape = shape

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        """``y`` of one tensor [*B, in_features], or of several that are joined on the last dim."""
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            shapes = ", ".join(str(list(i.shape)) for i in inputs)
            raise ValueError(f"MLP takes [..., {self.in_features}] (in_features), but was given {shapes}")
        weight = next(self.parameters(), None)
        if weight is not None and x.dtype != weight.dtype:
            x = x.to(weight.dtype)
        y = super().forward(x)
        return y if len(self._out_shape) == 1 else y.unflatten(-1, self._out_shape)


def _widths(depth: int | None, num_cells: Sequence[int] | int | None) -> tuple[int, ...]:
    """Hidden widths from TorchRL's two arguments."""
    if num_cells is None:
        return () if depth is None else (32,) * depth
    if isinstance(num_cells, int):
        if depth is None:
            raise GraphError(f"MLP: num_cells={num_cells} needs a depth, or a list such as num_cells=[64, 64]")
        return (num_cells,) * depth
    if depth is not None and depth != len(num_cells):
        raise GraphError(f"MLP: depth={depth}, but num_cells={list(num_cells)} has {len(num_cells)} widths; give one")
    return tuple(num_cells)


def _per_layer(name: str, options: Options, count: int) -> Iterator[dict[str, Any]]:
    """One dictionary of keyword arguments a layer."""
    if options is None or isinstance(options, Mapping):
        return iter([dict(options or {}) for _ in range(count)])
    if len(options) != count:
        raise GraphError(f"MLP: {name} lists {len(options)} mappings for {count} layers")
    return iter([dict(entry) for entry in options])
