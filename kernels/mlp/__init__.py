"""Multilayer perceptrons in one launch: ``reference.py`` judges ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.mlp.op import mlp_forward

__all__ = ["mlp_forward"]
