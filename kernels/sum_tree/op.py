"""``graphrl::sum_tree_update`` and ``graphrl::sum_tree_search``: public functions, registration and shape rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from graphrl.errors import SpecError
from graphrl.kernels._eager import plain_eager
from graphrl.kernels._lib import lib as _native
from graphrl.kernels._triton import triton_version
from graphrl.kernels.sum_tree.layout import level_offsets

__all__ = ["sum_tree_search", "sum_tree_update"]

_UPDATE = {torch.float32: _native.grl_sum_tree_update_f32, torch.float64: _native.grl_sum_tree_update_f64}
_SEARCH = {torch.float32: _native.grl_sum_tree_search_f32, torch.float64: _native.grl_sum_tree_search_f64}
_EMPTY, _INFINITE = -2, -3  # what the search returns for a tree whose sum is zero, or overflows
EMPTY_TREE = "every priority is 0: there is nothing to sample. Write one above 0 first: tree.update(index, priority)"

INFINITE_TREE = "the priorities are finite, but their sum is not in this dtype. Scale them down before they are written"


def sum_tree_update(leaves: Tensor, inner: Tensor, index: Tensor, priority: Tensor) -> None:
    """Write priorities into a sum tree, in place, and recompute the nodes above them from their children.

    leaves: [capacity], inner: [3, width], laid out as layout.py says; contiguous, float32 or float64.
    index: [*B] integers; of several writes to one leaf the last one stays, on every device.
    priority: [*B] or one for all; cast to the dtype of ``leaves``. Nothing here has a gradient.

    Sums are never corrected by differences, so nothing drifts: a tree after any number of updates equals, to the bit,
    one built afresh from its leaves.

    Raises SpecError when shapes, dtypes or devices do not fit, and, before anything is written, for an index outside
    the tree or a priority that is NaN, infinite or negative. On a GPU those values are checked there, without waiting
    for it: a device-side assertion stops the stream, again before anything is written.
    """
    index = _as_index(index, leaves)
    priority = _as_priority(priority, leaves, index)
    if (plain := plain_eager()) and _native.ordinary(leaves, inner, index, priority):
        return _update_cpu(leaves, inner, index, priority)
    _check_device(leaves, inner)
    if plain or torch.compiler.is_compiling():
        torch.ops.graphrl.sum_tree_update(leaves, inner, index, priority)
    else:  # a tracer is watching: programs are pure, and write what has changed at their end
        new_leaves, new_inner = torch.ops.graphrl.sum_tree_updated(leaves, inner, index, priority)
        leaves.copy_(new_leaves)
        inner.copy_(new_inner)


def sum_tree_search(leaves: Tensor, inner: Tensor, prefix: Tensor, strata: int = 0) -> tuple[Tensor, Tensor]:
    """The leaf that holds each prefix of a sum tree's sum: sum(leaves[:index]) <= prefix < sum(leaves[: index + 1]).

    leaves, inner: as in :func:`sum_tree_update`. prefix: [*B], cast to the dtype of ``leaves``. Below zero it finds
    the first leaf above zero, at the sum or past it the last one; never a leaf that is zero, whatever rounding does.
    strata: 0 takes ``prefix`` as it is. For k > 0 it is uniform in [0, 1), and of the i-th, (u + i % k) / k of the sum
    counts: k = 1 samples leaves by their priority, k = n > 1 one from each n-th of the sum.

    Returns ``(index, priority)``: [*B], int64 and the dtype of ``leaves``, without gradient.

    Raises SpecError for a NaN, and for a tree whose sum is zero or infinite; on a GPU a device-side assertion says so.
    """
    if prefix.dtype == leaves.dtype and strata >= 0 and plain_eager() and _native.ordinary(leaves, inner, prefix):
        return _search_cpu(leaves, inner, prefix, strata)
    _check_device(leaves, inner)
    if prefix.device != leaves.device:
        raise SpecError(f"sum_tree_search: prefix is on {prefix.device}, the tree on {leaves.device}. prefix.to(...)")
    if prefix.dtype.is_complex or strata < 0:
        what = (
            f"strata={strata}, expected 0 or more" if strata < 0 else f"prefix is {prefix.dtype}, expected real numbers"
        )
        raise SpecError(f"sum_tree_search: {what}")
    prefix = (prefix.detach() if prefix.requires_grad else prefix).to(leaves.dtype)
    found: tuple[Tensor, Tensor] = torch.ops.graphrl.sum_tree_search(leaves, inner, prefix, strata)
    return found


def _as_index(index: Tensor, leaves: Tensor) -> Tensor:
    if index.dtype == torch.int64 and index.device == leaves.device:
        return index
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        hint = "index.nonzero().squeeze(-1)" if index.dtype == torch.bool else "index.long()"
        raise SpecError(f"sum_tree_update: index is {index.dtype}, expected integers. {hint}")
    if index.device != leaves.device:
        raise SpecError(f"sum_tree_update: index is on {index.device}, the tree on {leaves.device}. index.to(...)")
    return index.long()


def _as_priority(priority: Tensor, leaves: Tensor, index: Tensor) -> Tensor:
    if priority.dtype.is_complex or priority.dtype == torch.bool:
        raise SpecError(f"sum_tree_update: priority is {priority.dtype}, expected real numbers. priority.abs()")
    if priority.device != leaves.device:
        raise SpecError(
            f"sum_tree_update: priority is on {priority.device}, the tree on {leaves.device}. priority.to(...)"
        )
    if priority.requires_grad:
        priority = priority.detach()
    if priority.dtype != leaves.dtype:
        priority = priority.to(leaves.dtype)
    if priority.dim() == 0:
        return priority.expand(index.shape)
    if priority.shape != index.shape:
        hint = "one for each index, or one number for all"
        if priority.shape == (*index.shape, 1):
            hint += ": priority.squeeze(-1)"
        raise SpecError(f"sum_tree_update: priority is {list(priority.shape)}, index {list(index.shape)}. Pass {hint}")
    return priority


def _check_device(leaves: Tensor, inner: Tensor) -> None:
    """The dispatcher would follow one of them, past the kernels' own checks when that one is on the meta device."""
    if leaves.device != inner.device:
        raise SpecError(f"sum_tree: leaves are on {leaves.device}, inner on {inner.device}. Move them together")


def _capacity(leaves: Tensor, inner: Tensor) -> int:
    """The number of leaves of what is laid out as one tree, or SpecError: the kernels read and write by that alone."""
    capacity, dtype = leaves.numel(), leaves.dtype
    if (
        capacity > 0
        and leaves.dim() == 1
        and inner.shape == (3, level_offsets(capacity)[1])
        and inner.dtype == dtype
        and dtype in _UPDATE
        and leaves.is_contiguous()
        and inner.is_contiguous()
        and inner.is_cpu == leaves.is_cpu
    ):
        return capacity
    if dtype not in _UPDATE or inner.dtype != dtype:
        raise SpecError(
            f"sum_tree: leaves are {dtype} and inner {inner.dtype}, expected float64 or float32 for both. Build the "
            "tree with that dtype: sums in half precision would lose leaves"
        )
    found = f"leaves {list(leaves.shape)} on {leaves.device} and inner {list(inner.shape)} on {inner.device}"
    raise SpecError(f"sum_tree: {found} are not one tree. Build it with SumTree, and keep both contiguous")


# --- CPU ---


def _update_cpu(leaves: Tensor, inner: Tensor, index: Tensor, priority: Tensor) -> None:
    capacity = _capacity(leaves, inner)
    index, priority = index.contiguous(), priority.contiguous()
    if not index.numel():
        return
    refused = _UPDATE[leaves.dtype](
        leaves.data_ptr(),
        inner.data_ptr(),
        index.data_ptr(),
        priority.data_ptr(),
        capacity,
        index.numel(),
    )
    if refused >= 0:
        at, value = index.view(-1)[refused].item(), priority.view(-1)[refused].item()
        what = f"index {at}, at position {refused}, is outside the tree, expected 0 to {capacity - 1}"
        if 0 <= at < capacity:
            what = f"the priority of index {at}, at position {refused}, is {value}, expected a finite number >= 0"
        raise SpecError(f"sum_tree_update: {what}. Nothing was written: correct it where it is computed")
    increment_version((leaves, inner))  # autograd cannot see the write


def _search_cpu(leaves: Tensor, inner: Tensor, prefix: Tensor, strata: int) -> tuple[Tensor, Tensor]:
    capacity, prefix = _capacity(leaves, inner), prefix.contiguous()
    index, priority = torch.empty_like(prefix, dtype=torch.int64), torch.empty_like(prefix)
    if not index.numel():
        return index, priority
    refused = _SEARCH[leaves.dtype](
        leaves.data_ptr(),
        inner.data_ptr(),
        prefix.data_ptr(),
        index.data_ptr(),
        priority.data_ptr(),
        capacity,
        prefix.numel(),
        strata,
    )
    if refused == _EMPTY:
        raise SpecError(f"sum_tree_search: {EMPTY_TREE}")
    if refused == _INFINITE:
        raise SpecError(f"sum_tree_search: {INFINITE_TREE}")
    if refused >= 0:
        raise SpecError(f"sum_tree_search: the prefix at position {refused} is NaN, expected 0 <= prefix < total")
    return index, priority


def _updated(leaves: Tensor, inner: Tensor, index: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
    leaves, inner = leaves.clone(), inner.clone()
    torch.ops.graphrl.sum_tree_update(leaves, inner, index, priority)
    return leaves, inner


# --- CUDA ---


def _update_cuda(leaves: Tensor, inner: Tensor, index: Tensor, priority: Tensor) -> None:
    _capacity(leaves, inner)
    # What is read may be the tree itself, as in tree.update(order, tree.leaves); the C++ copies always.
    written = [x.untyped_storage().data_ptr() for x in (leaves, inner)]
    index, priority = (x.clone() if x.untyped_storage().data_ptr() in written else x for x in (index, priority))
    with torch.cuda.device_of(leaves):
        triton_version("sum_tree").update(leaves, inner, index, priority)
    increment_version((leaves, inner))


def _search_cuda(leaves: Tensor, inner: Tensor, prefix: Tensor, strata: int) -> tuple[Tensor, Tensor]:
    _capacity(leaves, inner)
    with torch.cuda.device_of(leaves):
        found: tuple[Tensor, Tensor] = triton_version("sum_tree").search(leaves, inner, prefix, strata)
        return found


# --- shape rules, batching rule and registration ---


def _search_fake(leaves: Tensor, inner: Tensor, prefix: Tensor, strata: int) -> tuple[Tensor, Tensor]:
    return prefix.new_empty(prefix.shape, dtype=torch.int64), prefix.new_empty(prefix.shape)


def _search_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """As many searches: of one tree or of several, each with its own strata."""
    tensors = [x.unbind(d) if d is not None else [x] * info.batch_size for x, d in zip(args[:3], in_dims, strict=False)]
    found = [torch.ops.graphrl.sum_tree_search(*each, args[3]) for each in zip(*tensors, strict=True)]
    return tuple(torch.stack(x) for x in zip(*found, strict=True)), (0, 0)


_ops = torch.library.Library("graphrl", "FRAGMENT")  # keeps the registrations alive
_TAGS = (torch.Tag.pt2_compliant_tag,)
_ops.define(
    "sum_tree_update(Tensor(a!) leaves, Tensor(b!) inner, Tensor index, Tensor priority) -> ()",
    tags=_TAGS,
)
_ops.define(
    "sum_tree_updated(Tensor leaves, Tensor inner, Tensor index, Tensor priority) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_ops.define("sum_tree_search(Tensor leaves, Tensor inner, Tensor prefix, int strata) -> (Tensor, Tensor)", tags=_TAGS)
_ops.impl("sum_tree_update", _update_cpu, "CPU")
_ops.impl("sum_tree_update", _update_cuda, "CUDA")
_ops.impl("sum_tree_updated", _updated, "CPU")
_ops.impl("sum_tree_updated", _updated, "CUDA")
_ops.impl("sum_tree_search", _search_cpu, "CPU")
_ops.impl("sum_tree_search", _search_cuda, "CUDA")
torch.library.register_fake("graphrl::sum_tree_update", lambda *_: None, lib=_ops)
torch.library.register_fake(
    "graphrl::sum_tree_updated", lambda x, y, *_: (torch.empty_like(x), torch.empty_like(y)), lib=_ops
)
torch.library.register_fake("graphrl::sum_tree_search", _search_fake, lib=_ops)
torch.library.register_vmap("graphrl::sum_tree_search", _search_vmap, lib=_ops)
