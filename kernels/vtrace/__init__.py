"""V-trace: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` registers the operator."""

from graphrl.kernels.vtrace.op import vtrace

__all__ = ["vtrace"]
