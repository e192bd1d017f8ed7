"""``graphrl::mlp_forward``: the public function, its registration with torch and its shape rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphrl.errors import SpecError
from graphrl.kernels._checks import FLOATS
from graphrl.kernels._triton import triton_version
from graphrl.kernels.mlp.reference import ACTIVATIONS, mlp_reference

__all__ = ["MAX_WIDTH", "mlp_forward"]

MAX_WIDTH = 512
"""The widest layer the fused kernel is meant for; beyond it separate matrix products win."""


def mlp_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor:
    """A multilayer perceptron, forward only: ``h_i = activation_i(h_{i-1} W_i^T + b_i)`` from ``h_0 = x``.

    x: [*B, n_0], float32, float16 or bfloat16 (float64 too on the CPU). weights: [n_i, n_{i-1}] each, biases: [n_i] or
    ``None``, activations: ``identity tanh relu elu silu gelu gelu_tanh``; all of one dtype and device, at most
    ``MAX_WIDTH`` wide. Returns [*B, n_last] in the dtype of ``x``.

    On a GPU all layers run in one launch, with float32 sums and no TF32; on the CPU layer by layer.
    ``torch.vmap`` over ``x`` is one launch, over weights one for each. Raises :class:`SpecError` when shapes, dtypes or
    names do not fit. Calling ``backward`` through it is an error.
    """
    _check(x, weights, biases, activations)
    return torch.ops.graphrl.mlp_forward(x, list(weights), list(biases), list(activations))


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]) -> None:
    if not len(weights) == len(biases) == len(activations) or not weights:
        raise SpecError(
            f"mlp_forward: {len(weights)} weights, {len(biases)} biases, {len(activations)} activations: expected "
            "one of each for every layer, and a layer at least"
        )
    unknown = [a for a in activations if a not in ACTIVATIONS]
    if unknown:
        raise SpecError(f"mlp_forward: no activation {unknown[0]!r}; there are {', '.join(ACTIVATIONS)}")
    if x.dtype not in FLOATS or (x.dtype == torch.float64 and x.is_cuda):
        raise SpecError(f"mlp_forward: x is {x.dtype} on {x.device}, expected float32, float16 or bfloat16. x.float()")
    width = x.shape[-1] if x.dim() else 0
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
                raise SpecError(
                    f"mlp_forward: {name} {i} is {tensor.dtype} on {tensor.device}, x {x.dtype} on {x.device}"
                )
        if weight.dim() != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
            found = f"weight {list(weight.shape)}, bias {None if bias is None else list(bias.shape)}"
            raise SpecError(f"mlp_forward: layer {i} gets {width} numbers, but has {found}")
        width = weight.shape[0]
    widest = max(x.shape[-1], *(w.shape[0] for w in weights))
    if widest > MAX_WIDTH:
        raise SpecError(f"mlp_forward: a layer is {widest} wide, expected at most {MAX_WIDTH}")


def _cpu(x: Tensor, *args: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):  # the result is in the dtype of x
        return mlp_reference(x, *args).contiguous()


def _cuda(x: Tensor, *args: Any) -> Tensor:
    with torch.cuda.device_of(x):
        return triton_version("mlp").mlp_forward(x, *args)


def _fake(x: Tensor, weights: Sequence[Tensor], *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[-1].shape[0])


def _vmap(info: Any, in_dims: Any, x: Tensor, *layers: Any) -> tuple[Tensor, int]:
    """Rows are free, so over ``x`` it is the same call with one more dimension; networks go one by one."""
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if not any(d is not None for dims in in_dims[1:3] for d in dims or ()):
        return torch.ops.graphrl.mlp_forward(x, *layers), 0
    outputs = []
    for i, rows in enumerate(x):
        weights, biases = (
            [t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)]
            for tensors, dims in zip(layers[:2], in_dims[1:3], strict=True)
        )
        outputs.append(torch.ops.graphrl.mlp_forward(rows, weights, biases, layers[2]))
    return torch.stack(outputs), 0


def _backward(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError("graphrl::mlp_forward has no gradient: train through the layers themselves")


_ops = torch.library.Library("graphrl", "FRAGMENT")  # keeps the registrations alive
_ops.define(
    "mlp_forward(Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ops.impl("mlp_forward", _cpu, "CPU")
_ops.impl("mlp_forward", _cuda, "CUDA")
torch.library.register_fake("graphrl::mlp_forward", _fake, lib=_ops)
torch.library.register_vmap("graphrl::mlp_forward", _vmap, lib=_ops)
torch.library.register_autograd("graphrl::mlp_forward", _backward, lib=_ops)
