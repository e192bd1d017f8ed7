"""Argument checks shared by the kernels over trajectories. They read shapes, dtypes and devices, never values."""

from __future__ import annotations

from numbers import Real
from operator import index

import torch
from torch import Tensor

from graphrl.errors import SpecError

__all__ = [
    "accumulate_dtype",
    "as_coefficient",
    "as_flag",
    "broadcasts_to",
    "check_same_shape",
    "check_time_dim",
    "common_float_dtype",
]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _show(shape: torch.Size) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def check_same_shape(op: str, **tensors: Tensor) -> None:
    """Raise SpecError unless all are tensors of the first one's shape and device. Nothing is broadcast."""
    (first, head), *rest = tensors.items()
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise SpecError(f"{op}: {name} is a {type(x).__name__}, expected a torch.Tensor. torch.as_tensor({name})")
    for name, x in rest:
        if x.shape != head.shape:
            hint = ""
            if x.dim() + 1 == head.dim() and head.shape[-1] == 1 and x.shape == head.shape[:-1]:
                hint = f" Add the trailing 1: {name}.unsqueeze(-1)"
            elif head.dim() + 1 == x.dim() and x.shape[-1] == 1 and head.shape == x.shape[:-1]:
                hint = f" Add the trailing 1: {first}.unsqueeze(-1)"
            else:
                hint = f" Nothing is broadcast here: give {name} one entry for each of {first}'s"
            raise SpecError(f"{op}: {name} is {_show(x.shape)}, but {first} is {_show(head.shape)}.{hint}")
        if x.device != head.device:
            raise SpecError(
                f"{op}: {name} is on {x.device}, but {first} is on {head.device}. {name}.to({first}.device)"
            )


def check_time_dim(op: str, x: Tensor, time_dim: int | None) -> int:
    """The time dimension counted from the end, or SpecError when ``x`` has no such dimension.

    None means the last but one when the last dimension is 1, as in [*B, T, 1], else the last, as in [*B, T].
    """
    n = x.dim()
    if time_dim is None:
        time_dim = -2 if n >= 2 and x.shape[-1] == 1 else -1
    try:
        time_dim = index(time_dim)
    except TypeError as error:
        raise SpecError(f"{op}: time_dim is a {type(time_dim).__name__}, expected an int or None") from error
    if not -n <= time_dim < n:
        hint = "time_dim=-2 is for [*B, T, 1], time_dim=-1 for [*B, T]; leave it out and the shape decides"
        if n == 0:
            hint = "a trajectory has at least one dimension: [T]"
        raise SpecError(f"{op}: time_dim={time_dim} is not a dimension of reward {_show(x.shape)}: {hint}")
    return time_dim if time_dim < 0 else time_dim - n


def common_float_dtype(op: str, **tensors: Tensor) -> torch.dtype:
    """The dtype these promote to, or SpecError when one is not floating point."""
    dtype = None
    for name, x in tensors.items():
        if x.dtype not in FLOATS:
            raise SpecError(
                f"{op}: {name} is {x.dtype}, expected float32, float64, bfloat16 or float16. {name}.float()"
            )
        dtype = x.dtype if dtype is None else torch.promote_types(dtype, x.dtype)
    assert dtype is not None
    return dtype


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_flag(op: str, name: str, x: Tensor) -> Tensor:
    """A boolean tensor from a boolean or integer one, or SpecError."""
    if x.dtype == torch.bool:
        return x
    if x.dtype.is_floating_point or x.dtype.is_complex:
        raise SpecError(f"{op}: {name} is {x.dtype}, expected bool or an integer dtype. {name}.bool()")
    return x != 0


def broadcasts_to(x: Tensor, shape: torch.Size) -> bool:
    """Whether ``x`` can be expanded to ``shape``, the empty ones included."""
    return x.dim() <= len(shape) and all(
        a == 1 or a == b for a, b in zip(reversed(x.shape), reversed(shape), strict=False)
    )


def as_coefficient(op: str, name: str, x: float | Tensor, like: Tensor) -> Tensor:
    """``x`` in the accumulation dtype of ``like`` and on its device: 0-d, or expanded to the shape of ``like``."""
    dtype = accumulate_dtype(like.dtype)
    if not isinstance(x, Tensor):
        if not isinstance(x, (Real, torch.SymInt, torch.SymFloat)):
            raise SpecError(
                f"{op}: {name} is a {type(x).__name__}, expected a number or a tensor. torch.tensor({name})"
            )
        return torch.full((), x, dtype=dtype, device=like.device)
    if x.dtype.is_complex or x.dtype == torch.bool:
        raise SpecError(f"{op}: {name} is {x.dtype}, expected a float or a floating point tensor. {name}.float()")
    x = x.to(device=like.device, dtype=dtype)
    if x.dim() == 0:
        return x
    if not broadcasts_to(x, like.shape):
        raise SpecError(
            f"{op}: {name} is {_show(x.shape)} and does not broadcast to reward {_show(like.shape)}. "
            f"Pass a float, a 0-d tensor, or one value per step, as [T, 1] or {_show(like.shape)}"
        )
    return x.expand(like.shape)
