"""Numerical kernels for trajectories and policies, each a registered torch operator: see README.md."""

if __name__ != "graphrl.kernels":  # a second copy would register every op twice
    raise ImportError("import graphrl.kernels, not kernels")

from graphrl.kernels.gae import gae
from graphrl.kernels.mlp import mlp_forward
from graphrl.kernels.sum_tree import SumTree, sum_tree_search, sum_tree_update

__all__ = ["SumTree", "gae", "mlp_forward", "sum_tree_search", "sum_tree_update"]
