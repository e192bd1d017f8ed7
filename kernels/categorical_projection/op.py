"""``graphrl::categorical_projection``: the public function, its registration with torch, gradient and batching rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphrl.errors import SpecError
from graphrl.kernels._checks import accumulate_dtype, as_coefficient, as_flag, check_same_shape, common_float_dtype
from graphrl.kernels._eager import inside_transform
from graphrl.kernels._lib import lib as _native
from graphrl.kernels._triton import triton_version

__all__ = ["categorical_projection"]

_KERNEL = {
    torch.float32: _native.grl_categorical_projection_f32,
    torch.float64: _native.grl_categorical_projection_f64,
}
# Below this many atoms per thread, waking one costs more than it saves.
_PER_THREAD = 16_384


def categorical_projection(
    next_probs: Tensor, reward: Tensor, terminated: Tensor, discount: float | Tensor, support: Tensor
) -> Tensor:
    """C51's projected Bellman update, eq. 7 and algorithm 1 of Bellemare et al. 2017 (arXiv:1707.06887).

        Tz_j     = clip(r + discount z_j, z_0, z_{N-1}),    Tz_j = clip(r, z_0, z_{N-1}) where terminated
        target_i = sum_j p_j h_i(Tz_j),    h_i the hat that is 1 at z_i and falls to 0 at both neighbours

    next_probs: [*B, N], probabilities (no logarithms) of the next state's return under the chosen action.
    reward: [*B, 1] or [*B], told apart by the number of dimensions. terminated: the same shape, bool or integer.
    discount: gamma, or gamma^k behind a k-step reward: a float, a 0-d tensor, or one per row in reward's shape.
    support: [N >= 2] increasing, C51's uniform one or any other: mass is split linearly between neighbours, and all of
        it stays on an atom that Tz meets. One that does not increase gives NaN. (``terminated`` everywhere makes this
        the "two-hot" code of ``reward``.)

    Returns target: [*B, N] in the dtype of next_probs, contiguous. Positions are computed in float32, or in float64
    when an input is float64. Each row's mass is kept; a terminated row is one unit of mass, whatever next_probs holds
    there (NaN too). NaN in reward or discount makes its own row NaN; an infinite reward is clipped like any other.

    Gradient flows to next_probs, any number of times; none to reward, discount and support: a target is a constant.
    Raises SpecError when shapes, dtypes or devices do not fit: nothing is broadcast but a 0-d discount.
    """
    name = "categorical_projection"
    _check_atoms(name, next_probs, reward, support)
    rows = {"reward": reward, "terminated": terminated}
    if isinstance(discount, Tensor) and discount.dim():
        rows["discount"] = discount
    check_same_shape(name, **rows)
    dtype = accumulate_dtype(common_float_dtype(name, next_probs=next_probs, reward=reward, support=support))
    reward, support = reward.to(dtype), support.to(dtype)
    discount = as_coefficient(name, "discount", discount, reward)
    constants = (x.detach() if x.requires_grad else x for x in (reward, discount, support))
    reward, discount, support = constants
    return _apply(next_probs, reward, as_flag(name, "terminated", terminated), discount, support, False)


def _check_atoms(name: str, next_probs: Tensor, reward: Tensor, support: Tensor) -> None:
    for label, x in (("next_probs", next_probs), ("reward", reward), ("support", support)):
        if not isinstance(x, Tensor):
            raise SpecError(
                f"{name}: {label} is a {type(x).__name__}, expected a torch.Tensor. torch.as_tensor({label})"
            )
        if x.device != next_probs.device:
            raise SpecError(
                f"{name}: {label} is on {x.device}, but next_probs is on {next_probs.device}. "
                f"{label}.to(next_probs.device)"
            )
    if support.dim() != 1 or support.shape[0] < 2:
        raise SpecError(
            f"{name}: support is {list(support.shape)}, expected [N] with two atoms at least. "
            "torch.linspace(v_min, v_max, N)"
        )
    if next_probs.dim() == 0 or next_probs.shape[-1] != support.shape[0]:
        raise SpecError(
            f"{name}: next_probs is {list(next_probs.shape)}, expected [*B, {support.shape[0]}], one per atom of "
            "support, for the chosen action only"
        )
    lead = next_probs.shape[:-1]
    if reward.shape not in (lead, (*lead, 1)):
        raise SpecError(
            f"{name}: reward is {list(reward.shape)}, but next_probs is {list(next_probs.shape)}: expected "
            f"{[*lead, 1]} or {list(lead)}. Nothing is broadcast here: expand it if that is what you mean"
        )


# --- CPU ---


def _cpu(x: Tensor, reward: Tensor, terminated: Tensor, discount: Tensor, support: Tensor, transpose: bool) -> Tensor:
    """target from x = next_probs; with ``transpose`` the gradient of next_probs from x = that of target."""
    dtype, per_row = support.dtype, discount.dim() > 0
    x_, reward, discount, support = (t.to(dtype).contiguous() for t in (x, reward, discount, support))
    terminated, out = terminated.contiguous(), torch.empty_like(x_)
    size = out.numel()
    if size:
        _KERNEL[dtype](
            x_.data_ptr(),
            reward.data_ptr(),
            terminated.data_ptr(),
            discount.data_ptr() if per_row else None,
            0.0 if per_row else discount.item(),
            support.data_ptr(),
            out.data_ptr(),
            reward.numel(),
            len(support),
            transpose,
            1 if size < 2 * _PER_THREAD else min(size // _PER_THREAD, torch.get_num_threads()),
        )
    return out.to(x.dtype)


# --- CUDA ---


def _cuda(x: Tensor, *args: Any) -> Tensor:
    with torch.cuda.device_of(x):
        return triton_version("categorical_projection").categorical_projection(x, *args)


# --- shape rule, autograd and batching ---


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *constants, ctx.transpose = inputs
    ctx.save_for_backward(*constants)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    reward, terminated, discount, support = ctx.saved_tensors
    if ctx.transpose:  # the transpose is zero where terminated, and there only it is not the projection's own
        grad = _apply(grad, reward, terminated, discount, support, False)
        grad = grad.masked_fill(terminated.reshape(*grad.shape[:-1], 1), 0)
    else:
        grad = _apply(grad, reward, terminated, discount, support, True)
    return grad, None, None, None, None, None


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """Leading dimensions are free, so a batched call is the same call with one more; supports go one by one."""
    *tensors, support, transpose = args
    x, reward, terminated, discount = (
        t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape) if i < 3 or t.dim() else t
        for i, (t, d) in enumerate(zip(tensors, in_dims, strict=False))
    )
    if 0 < discount.dim() < reward.dim():  # a 0-d discount that is mapped
        discount = discount.reshape(-1, *(1,) * (reward.dim() - 1)).expand_as(reward)
    if in_dims[4] is None:
        return _apply(x, reward, terminated, discount, support, transpose), 0
    discount = discount.expand_as(reward)
    rows = zip(x, reward, terminated, discount, support.movedim(in_dims[4], 0), strict=True)
    return torch.stack([_apply(*row, transpose) for row in rows]), 0


class _Transformable(torch.autograd.Function):
    """The operator for ``torch.func``: grad, vmap and their compositions."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return torch.ops.graphrl.categorical_projection(*args)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(_vmap)


def _apply(*args: Any) -> Tensor:
    return (_Transformable.apply if inside_transform() else torch.ops.graphrl.categorical_projection)(*args)


_ops = torch.library.Library("graphrl", "FRAGMENT")  # keeps the registrations alive
_ops.define(
    "categorical_projection(Tensor x, Tensor reward, Tensor terminated, Tensor discount, Tensor support, "
    "bool transpose) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ops.impl("categorical_projection", _cpu, "CPU")
_ops.impl("categorical_projection", _cuda, "CUDA")
torch.library.register_fake("graphrl::categorical_projection", _fake, lib=_ops)
torch.library.register_autograd("graphrl::categorical_projection", _backward, setup_context=_setup_context, lib=_ops)
torch.library.register_vmap("graphrl::categorical_projection", _vmap, lib=_ops)
