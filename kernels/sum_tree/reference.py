"""A sum tree without a tree, in float64: running sums over all leaves. The judge of the other versions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sum_tree_search_reference", "sum_tree_update_reference"]


def sum_tree_update_reference(leaves: Tensor, index: Tensor, priority: Tensor) -> Tensor:
    """New leaves, in float64: one write after the other, so the last one to a leaf stays."""
    leaves = leaves.double().clone()
    for i, p in zip(index.flatten().tolist(), priority.double().flatten().tolist(), strict=True):
        leaves[i] = p
    return leaves


def sum_tree_search_reference(leaves: Tensor, prefix: Tensor) -> Tensor:
    """The leaf whose part of the running sum holds each prefix, of those above zero the nearest when none does.

    cumsum[index - 1] <= prefix < cumsum[index]
    """
    above_zero = leaves.nonzero()[:, 0]
    sums = leaves.double()[above_zero].cumsum(0)
    found = torch.searchsorted(sums, prefix.double(), right=True)
    return above_zero[found.clamp(max=len(above_zero) - 1)]
