"""The sum tree of prioritised replay: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.sum_tree.op import sum_tree_search, sum_tree_update
from graphrl.kernels.sum_tree.tree import SumTree

__all__ = ["SumTree", "sum_tree_search", "sum_tree_update"]
