"""The sum tree as an object whose state is two buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphrl.errors import SpecError
from graphrl.kernels.sum_tree.layout import level_offsets
from graphrl.kernels.sum_tree.op import sum_tree_search, sum_tree_update

__all__ = ["SumTree"]


class SumTree(nn.Module):
    """Priorities, their sum and a search by running sum: Schaul et al. 2016 (arXiv:1511.05952), appendix B.2.1.

        P(index) = priority[index] / total;   index of a uniform prefix in [0, total) has that probability

    capacity: number of leaves, all zero at first. dtype: float64, or float32 for half the memory: a leaf smaller than
    about 1e-7 of the sum is then hit too often or never. Reading and writing a leaf costs O(log capacity).

    A priority of 0 is never sampled. NaN, infinite or negative priorities and indices outside the tree are refused
    before anything is written: SpecError on the CPU; on a GPU, where no call waits for the device, a device-side
    assertion. Sampling from a tree of zeros is refused likewise. Results have no gradient. ``state_dict`` holds
    ``leaves`` and ``inner``; a tree of another capacity does not load. Not safe to write from two threads at once.
    """

    leaves: Tensor
    inner: Tensor

    def __init__(
        self, capacity: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if capacity < 1:
            raise SpecError(f"SumTree: capacity is {capacity}, expected at least one leaf")
        if dtype not in (torch.float32, torch.float64):
            raise SpecError(f"SumTree: dtype is {dtype}, expected float64 or float32: sums of halves lose leaves")
        self.register_buffer("leaves", torch.zeros(capacity, dtype=dtype, device=device))
        self.register_buffer("inner", torch.zeros(3, level_offsets(capacity)[1], dtype=dtype, device=device))

    def __len__(self) -> int:
        return self.leaves.shape[0]

    def extra_repr(self) -> str:
        return f"capacity={len(self)}, dtype={self.leaves.dtype}"

    def build(self, priority: Any) -> None:
        """Set the first leaves to ``priority``, [n] with n <= capacity, and all others to zero."""
        priority = torch.as_tensor(priority, device=self.leaves.device)
        if priority.dim() != 1 or len(priority) > len(self):
            raise SpecError(f"SumTree.build: priority is {list(priority.shape)}, expected [n], n <= {len(self)}")
        rest = self.leaves.new_zeros(len(self) - len(priority))
        self.update(torch.arange(len(self), device=self.leaves.device), torch.cat([priority, rest]))

    def update(self, index: Any, priority: Any) -> None:
        """Write ``priority``, [*B] or one number, to the leaves ``index``, [*B]; the last write to a leaf stays."""
        leaves = self.leaves
        if not isinstance(index, Tensor):
            index = _tensor(index, leaves.device)
            index = index if index.numel() else index.long()  # torch reads [] as floating point numbers
        sum_tree_update(leaves, self.inner, index, _tensor(priority, leaves.device, leaves.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        """A copy of the priorities at ``index``: an integer, slice or tensor, as torch reads them."""
        return self.leaves[index].clone()

    @property
    def total(self) -> Tensor:
        """The sum of all priorities, 0-d."""
        return self.inner[0, 0].clone()

    @property
    def min(self) -> Tensor:
        """The smallest priority above zero, 0-d: of the leaves that can be sampled; 0 when there is none.

        Importance weights divided by their maximum are ``(tree.min / priority) ** beta``.
        """
        return self.inner[1, 0].clone()

    @property
    def max(self) -> Tensor:
        """The largest priority now in the tree, 0-d; 0 when it is empty."""
        return self.inner[2, 0].clone()

    def search(self, prefix: Any) -> tuple[Tensor, Tensor]:
        """``(index, priority)`` of the leaves with sum(leaves[:index]) <= prefix < sum(leaves[: index + 1]).

        Never one of priority 0: outside [0, total) the nearest leaf above zero counts.
        """
        leaves = self.leaves
        return sum_tree_search(leaves, self.inner, _tensor(prefix, leaves.device, leaves.dtype))

    def sample(
        self, n: int, *, generator: torch.Generator | None = None, stratified: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``(index, priority)`` of ``n`` draws with replacement, [n] each; the probability is priority / total.

        stratified: one draw from each n-th of the sum, as the paper does, which lowers the variance of a batch.
        """
        leaves = self.leaves
        uniform = torch.rand(n, dtype=leaves.dtype, device=leaves.device, generator=generator)
        return sum_tree_search(leaves, self.inner, uniform, n if stratified else 1)


def _tensor(x: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype, device=device)
