"""TD(lambda) returns: ``reference.py`` judges ``cpu.cpp`` and ``triton.py``; ``op.py`` dispatches."""

from graphrl.kernels.td_lambda.op import lambda_return, td0, td1, td_lambda

__all__ = ["lambda_return", "td0", "td1", "td_lambda"]
