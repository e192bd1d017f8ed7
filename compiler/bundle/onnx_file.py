"""The ONNX file of a bundle, and running it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphrl.compiler.backends.onnx import export_onnx
from graphrl.compiler.program import Program
from graphrl.errors import BundleError, CompileError

__all__ = ["onnx_runner", "write_onnx"]


def write_onnx(program: Program, path: Path, contract: Mapping[str, Any], contract_hash: str) -> None:
    """Write ``program`` with its contract as ``metadata_props``. Raises :class:`BundleError`."""
    metadata = {"contract_hash": contract_hash, "contract": json.dumps(contract)}
    try:
        export_onnx(program, path, metadata=metadata)
    except CompileError as error:
        raise BundleError(str(error)) from error


def onnx_runner(path: Path, program: Program) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """ONNX Runtime on the written file, one thread: inputs in the program's order to outputs in its order."""
    import onnxruntime

    from graphrl.compiler.backends.onnx_graph import input_names, output_names

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kept = {i.name for i in session.get_inputs()}

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        feed = {n: t.numpy() for n, t in zip(input_names(program), inputs, strict=True) if n in kept}
        return [torch.from_numpy(a) for a in session.run(output_names(program), feed)]

    return run
