"""Generalised advantage estimation: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.gae.op import gae

__all__ = ["gae"]
