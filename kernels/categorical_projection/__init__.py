"""C51's projected update: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.categorical_projection.op import categorical_projection

__all__ = ["categorical_projection"]
