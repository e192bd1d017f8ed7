"""The sum tree in Triton; its layout stands in layout.py, its rules in op.py.

An update marks for each leaf its last writer, by an atomic maximum over positions, so the order in which lanes run
changes nothing. Then one launch a level recomputes the parents of what was written; lanes of one parent store the same
numbers. A search is one lane a query. Sums run from left to right as in cpu.cpp, so both choose the same leaf. No call
waits for the device: what op.py refuses on the CPU stops the stream by a device-side assertion.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrl.kernels.sum_tree.layout import FANOUT, level_offsets

__all__ = ["search", "update"]

BLOCK = 128
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused product would choose another leaf than the CPU
REFUSED = (
    "graphrl::sum_tree_update: an index outside the tree, or a priority that is NaN, infinite or negative. Nothing was "
    "written. Run the update on the CPU to see which"
)
NOTHING = "graphrl::sum_tree_search: the sum of all priorities is 0 or infinite, or a prefix is NaN"


@triton.jit
def _claim_kernel(index, priority, owner, fine, count, capacity, BLOCK: tl.constexpr):
    """owner[leaf] = the last position that writes it; fine = 0 when any write is refused."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    leaf = tl.load(index + i, mask=live, other=0)
    p = tl.load(priority + i, mask=live, other=0.0)
    good = (leaf >= 0) & (leaf < capacity) & (p >= 0) & (p < float("inf"))
    tl.atomic_max(owner + leaf, i, mask=live & good)
    tl.store(fine + i * 0, i * 0, mask=live & (good == 0))


@triton.jit
def _write_kernel(index, priority, owner, leaves, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    leaf = tl.load(index + i, mask=live, other=0)
    p = tl.load(priority + i, mask=live, other=0.0)
    last = tl.load(owner + leaf, mask=live, other=-1) == i
    tl.store(leaves + leaf, tl.where(p == 0, 0.0, p), mask=live & last)  # no negative zero


@triton.jit
def _recompute_kernel(
    index, leaves, inner, count, capacity, width, leaves_of_node, below, at,
    ABOVE_LEAVES: tl.constexpr, FAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum, smallest above zero and largest of the node above each index, at one level, from its children."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    node = tl.load(index + i, mask=live, other=0) // leaves_of_node
    total = tl.zeros((BLOCK,), dtype=inner.dtype.element_ty)
    low = total + float("inf")
    high = total
    for j in tl.static_range(FAN):
        child = node * FAN + j
        if ABOVE_LEAVES:
            x = tl.load(leaves + child, mask=live & (child < capacity), other=0.0)
            y, z = x, x
        else:
            x = tl.load(inner + below + child, mask=live, other=0.0)
            y = tl.load(inner + below + child + width, mask=live, other=0.0)
            z = tl.load(inner + below + child + 2 * width, mask=live, other=0.0)
        total += x
        low = tl.minimum(low, tl.where(y > 0, y, float("inf")))
        high = tl.maximum(high, z)
    to = inner + at + node
    tl.store(to, total, mask=live)
    tl.store(to + width, tl.where(low < float("inf"), low, 0.0), mask=live)
    tl.store(to + 2 * width, high, mask=live)


@triton.jit
def _descend(weights, node, prefix, live, children, FAN: tl.constexpr):
    """The child that ``prefix`` falls in, and the prefix inside it; past the end the last child above zero."""
    total = tl.zeros_like(prefix)
    before = total
    passed = tl.zeros_like(node)
    last = passed
    for j in tl.static_range(FAN):
        x = tl.load(weights + node * FAN + j, mask=live & (node * FAN + j < children), other=0.0)
        total += x
        over = total <= prefix
        passed += over.to(passed.dtype)
        before = tl.where(over, total, before)
        last = tl.where(x > 0, j, last)
    outside = passed == FAN
    child = node * FAN + tl.where(outside, last, passed)
    return tl.minimum(child, children - 1), tl.where(outside, float("inf"), prefix - before)


@triton.jit
def _search_kernel(
    leaves, inner, prefix, index, priority, fine, count, capacity, strata, levels, leaves_of_node,
    FAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """levels: of inner nodes below the root; leaves_of_node: how many leaves one of the topmost of them has."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    x = tl.load(prefix + i, mask=live, other=0.0)
    total = tl.load(inner + i * 0, mask=live, other=1.0)
    good = (x == x) & (total > 0) & (total < float("inf"))
    tl.store(fine + i * 0, i * 0, mask=live & (good == 0))
    if strata > 0:
        shifted, k = x + (i % strata).to(x.dtype), tl.zeros_like(x) + strata
        if x.dtype == tl.float32:  # `/` is not rounded to nearest in float32
            x = tl.div_rn(shifted, k) * total
        else:
            x = shifted / k * total
    x = tl.where(x > 0, x, 0.0)
    node = tl.zeros((BLOCK,), dtype=tl.int64)
    at = tl.zeros((), dtype=tl.int64) + FAN  # behind the root
    per_node = tl.zeros((), dtype=tl.int64) + leaves_of_node  # which a launch makes a constant when it is 1
    for _ in range(levels):
        size = tl.cdiv(capacity, per_node)
        node, x = _descend(inner + at, node, x, live, size, FAN)
        at += tl.cdiv(size, FAN) * FAN
        per_node = per_node // FAN
    node, x = _descend(leaves, node, x, live, capacity, FAN)
    tl.store(index + i, node, mask=live)
    tl.store(priority + i, tl.load(leaves + node, mask=live, other=0.0), mask=live)


def _launch(count: int) -> tuple[tuple[int], dict[str, Any]]:
    return (triton.cdiv(count, BLOCK),), {"BLOCK": BLOCK, **OPTIONS}


def update(leaves: Tensor, inner: Tensor, index: Tensor, priority: Tensor) -> None:
    """``graphrl::sum_tree_update`` on a GPU."""
    count, capacity, width = index.numel(), leaves.shape[0], inner.shape[1]
    if not count:
        return
    index, priority = index.contiguous(), priority.contiguous()
    owner = torch.full((capacity,), -1, dtype=torch.int32, device=leaves.device)
    fine = torch.ones((), dtype=torch.int32, device=leaves.device)
    grid, block = _launch(count)
    _claim_kernel[grid](index, priority, owner, fine, count, capacity, **block)
    torch._assert_async(fine, REFUSED)
    _write_kernel[grid](index, priority, owner, leaves, count, **block)
    below, leaves_of_node = 0, 1
    for level, at in enumerate(level_offsets(capacity)[0]):
        leaves_of_node *= FANOUT
        shape = (count, capacity, width, leaves_of_node, below, at)
        _recompute_kernel[grid](index, leaves, inner, *shape, ABOVE_LEAVES=level == 0, FAN=FANOUT, **block)
        below = at


def search(leaves: Tensor, inner: Tensor, prefix: Tensor, strata: int) -> tuple[Tensor, Tensor]:
    """``graphrl::sum_tree_search`` on a GPU."""
    prefix = prefix.contiguous()
    index, priority = torch.empty_like(prefix, dtype=torch.int64), torch.empty_like(prefix)
    if count := prefix.numel():
        fine = torch.ones((), dtype=torch.int32, device=leaves.device)
        grid, block = _launch(count)
        levels = len(level_offsets(leaves.shape[0])[0]) - 1
        shape = (count, leaves.shape[0], strata, levels, FANOUT**levels)
        _search_kernel[grid](leaves, inner, prefix, index, priority, fine, *shape, FAN=FANOUT, **block)
        torch._assert_async(fine, NOTHING)
    return index, priority
