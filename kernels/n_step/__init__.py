"""n-step returns: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.n_step.op import n_step_return

__all__ = ["n_step_return"]
