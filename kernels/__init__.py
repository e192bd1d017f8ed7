"""Numerical kernels for trajectories and policies, each a registered torch operator: see README.md."""

if __name__ != "graphrl.kernels":  # a second copy would register every op twice
    raise ImportError("import graphrl.kernels, not kernels")

from graphrl.kernels.discounted_sum import discounted_sum
from graphrl.kernels.gae import gae
from graphrl.kernels.mlp import mlp_forward
from graphrl.kernels.n_step import n_step_return
from graphrl.kernels.td_lambda import lambda_return, td0, td1, td_lambda
from graphrl.kernels.vtrace import vtrace

__all__ = [
    "discounted_sum",
    "gae",
    "lambda_return",
    "mlp_forward",
    "n_step_return",
    "td0",
    "td1",
    "td_lambda",
    "vtrace",
]
