"""The ONNX file of a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphrl.compiler.backends.onnx import export_onnx
from graphrl.compiler.program import Program
from graphrl.errors import BundleError, CompileError

__all__ = ["write_onnx"]


def write_onnx(program: Program, path: Path, contract: Mapping[str, Any], contract_hash: str) -> None:
    """Write ``program`` with its contract as ``metadata_props``. Raises :class:`BundleError`."""
    metadata = {"contract_hash": contract_hash, "contract": json.dumps(contract)}
    try:
        export_onnx(program, path, metadata=metadata)
    except CompileError as error:
        raise BundleError(str(error)) from error
