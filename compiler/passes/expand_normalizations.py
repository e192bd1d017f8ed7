"""Normalisations as arithmetic: statistics that are fixed fold away, and the rest joins the loops around it."""

from __future__ import annotations

import torch
from torch import Tensor

from graphrl.compiler.lowering import normalize
from graphrl.compiler.program import Program, node_value

__all__ = ["expand_normalizations"]

aten = torch.ops.aten


def expand_normalizations(program: Program) -> Program:
    """Write batch, instance and group normalisation as sums and products.

    before   y = batch_norm(x, weight, bias, mean, var)
    after    y = (x - mean) * (weight / sqrt(var + eps)) + bias

    Equal in real arithmetic; float32 differs by rounding, so it runs for deployment only. torch's own forms are not
    used: they cancel digits or address memory by strides.
    """
    if not any(node.target in _FORMS for node in program.graph_module.graph.nodes):
        return program
    values = [node_value(node) for node in program.placeholders()]
    tensors = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
    return program.with_graph(normalize(program.graph_module, tensors, extra=_FORMS).graph)


def _fixed_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` with statistics kept from training."""
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    y = (x - _channel(mean, x)) * _channel(scale, x)
    return (y if bias is None else y + _channel(bias, x)).to(x.dtype), mean.new_empty(0), mean.new_empty(0)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of the batch itself: over all dims but the channels."""
    dims = [0, *range(2, x.dim())]
    y, mean, scale = _standardized(x, dims, eps)
    return _affine(y, weight, bias).to(x.dtype), mean.flatten(), scale.flatten()


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of each group of channels of each sample. Wu and He 2018 (arXiv:1803.08494)."""
    y, mean, scale = _standardized(x.reshape(n, groups, channels // groups * size), [2], eps)
    return _affine(y.reshape(x.shape), weight, bias).to(x.dtype), mean.flatten(1), scale.flatten(1)


def _standardized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(value, mean, reciprocal deviation), at least in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    return centred * scale, mean, scale


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * _channel(weight, y)
    return y if bias is None else y + _channel(bias, y)


def _channel(values: Tensor, like: Tensor) -> Tensor:
    """[C] against the second dim of ``like``."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


_FORMS = {
    aten._native_batch_norm_legit_no_training.default: _fixed_batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten.native_group_norm.default: _group_norm,
}
