"""Numerical kernels: one folder per family, holding a float64 reference, a C++ version and a Triton version of the
same equations, and the one registered torch operator that chooses between them. What needs a network or a keyed
batch does not belong here.
"""

if __name__ != "graphrl.kernels":  # a second copy would register every op twice
    raise ImportError("import graphrl.kernels, not kernels")

from graphrl.kernels.gae import gae

__all__ = ["gae"]
