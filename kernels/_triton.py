"""Where the Triton versions are imported: at the first call on a GPU, so that importing graphrl needs no triton."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from graphrl.errors import require_extra

__all__ = ["triton_version"]


@cache
def triton_version(family: str) -> Any:
    """The module ``<family>/triton.py``, or an error that says how to install triton."""
    require_extra("triton", "triton")
    return importlib.import_module(f"graphrl.kernels.{family}.triton")
