"""Reward-to-go: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.discounted_sum.op import discounted_sum

__all__ = ["discounted_sum"]
