"""Sum trees of other libraries: objects with ``update(index, priority)``, ``search(prefix)`` and ``total()``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["NumpyTree", "TorchRLTree"]


class NumpyTree:
    """A binary tree in one float64 array, all indices of a batch moving one level at a time."""

    def __init__(self, priority: Tensor) -> None:
        import numpy as np

        self.depth = max(1, (len(priority) - 1).bit_length())
        self.size = 1 << self.depth
        self.nodes = np.zeros(2 * self.size)
        self.nodes[self.size : self.size + len(priority)] = priority.numpy()
        for level in range(self.depth - 1, -1, -1):
            at = np.arange(1 << level, 2 << level)
            self.nodes[at] = self.nodes[2 * at] + self.nodes[2 * at + 1]

    def total(self) -> float:
        """The sum of all priorities."""
        return float(self.nodes[1])

    def update(self, index: Tensor, priority: Tensor) -> None:
        """Write the leaves, then the parents of what changed, level by level."""
        import numpy as np

        at = index.numpy() + self.size
        self.nodes[at] = priority.numpy()
        for _ in range(self.depth):
            at = np.unique(at >> 1)
            self.nodes[at] = self.nodes[2 * at] + self.nodes[2 * at + 1]

    def search(self, prefix: Tensor) -> Any:
        """The leaf that holds each prefix."""
        import numpy as np

        left, at = prefix.numpy().copy(), np.ones(len(prefix), dtype=np.int64)
        for _ in range(self.depth):
            at *= 2
            child = self.nodes[at]
            right = left >= child
            left -= right * child
            at += right
        return at - self.size


class TorchRLTree:
    """TorchRL's C++ tree. Raises ImportError where its library does not load."""

    def __init__(self, priority: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                from torchrl._torchrl import SumSegmentTreeFp64
            except ImportError:
                raise ImportError("torchrl's C++ library does not load with this torch") from None
        self.size = len(priority)
        self.tree: Any = SumSegmentTreeFp64(self.size)
        self.tree[torch.arange(self.size)] = priority

    def total(self) -> float:
        """The sum of all priorities."""
        return float(self.tree.query(0, self.size))

    def update(self, index: Tensor, priority: Tensor) -> None:
        """Write the leaves and what depends on them."""
        self.tree[index] = priority

    def search(self, prefix: Tensor) -> Any:
        """The leaf that holds each prefix."""
        return self.tree.scan_lower_bound(prefix)
