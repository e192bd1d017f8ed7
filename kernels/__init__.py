"""Numerical kernels for trajectories and policies, each a registered torch operator: see README.md."""

if __name__ != "graphrl.kernels":  # a second copy would register every op twice
    raise ImportError("import graphrl.kernels, not kernels")

from graphrl.kernels.discounted_sum import discounted_sum
from graphrl.kernels.gae import gae
from graphrl.kernels.mlp import mlp_forward
from graphrl.kernels.td_lambda import lambda_return, td0, td1, td_lambda

__all__ = ["discounted_sum", "gae", "lambda_return", "mlp_forward", "td0", "td1", "td_lambda"]
