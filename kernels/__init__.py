"""Numerical kernels over trajectories, each one registered torch operator; README.md says what belongs here."""

if __name__ != "graphrl.kernels":  # a second copy would register every op twice
    raise ImportError("import graphrl.kernels, not kernels")

from graphrl.kernels.gae import gae

__all__ = ["gae"]
