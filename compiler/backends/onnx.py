"""ONNX Runtime in this process, one thread. The model file for a robot comes from :func:`export_onnx`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphrl.compiler.backends.base import Refusal, written_input
from graphrl.compiler.backends.c99.nodes import Unsupported
from graphrl.compiler.program import Program
from graphrl.errors import CompileError, MissingExtraError, require_extra

__all__ = ["BACKEND", "Onnx", "OnnxProgram", "export_onnx"]


def export_onnx(
    program: Program, path: str | Path, *, symbolic_batch: bool = False, metadata: dict[str, str] | None = None
) -> None:
    """Write ``program`` as one ONNX file: weights inside with today's values, inputs and outputs named by their keys.

    symbolic_batch: leave dim 0 of inputs and outputs open. metadata: becomes ``metadata_props``, in the given order.
    The same program gives the same bytes. Raises :class:`CompileError` for an operation without an ONNX form, and
    :class:`MissingExtraError` without the ``onnx`` package.
    """
    require_extra("onnx", "onnx")
    from graphrl.compiler.backends.onnx_graph import build_model

    try:
        model = build_model(program, embed=True, symbolic_batch=symbolic_batch)
    except Unsupported as problem:
        raise CompileError(f"onnx: {problem.explain(program)}") from None
    for key, value in (metadata or {}).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    Path(path).write_bytes(model.SerializeToString(deterministic=True))


class Onnx:
    """The program in ONNX Runtime. Weights are bound by address, not copied, so they stay live."""

    name = "onnx"
    dynamic = False

    def supports(self, program: Program) -> Refusal | None:
        """``None``, or why this program cannot run in ONNX Runtime."""
        if program.dynamic:
            return Refusal("memory is bound to ONNX Runtime with fixed shapes")
        try:
            require_extra("onnx", "onnx")
            require_extra("onnxruntime", "onnx")
        except MissingExtraError as missing:
            return Refusal(str(missing))
        from graphrl.compiler.backends.onnx_graph import build_model

        for port in program.signature:
            if port.device.type != "cpu":
                return Refusal(f"this backend runs ONNX Runtime on the CPU, and {port} is on {port.device}")
            if 0 in port.shape:
                return Refusal(f"ONNX Runtime cannot bind {port}, which has no elements")
        if (refusal := written_input(program)) is not None:
            return refusal
        try:
            _session(build_model(program, embed=False).SerializeToString())
        except Unsupported as problem:
            return Refusal(problem.explain(program))
        except Exception as problem:  # ONNX Runtime's own classes have no common base
            return Refusal(f"ONNX Runtime does not take this program: {str(problem).strip().splitlines()[0]}")
        return None

    def lower(self, program: Program) -> OnnxProgram:
        """A session for ``program``. Raises :class:`CompileError` when it is refused."""
        refusal = self.supports(program)
        if refusal is not None:
            raise CompileError(f"onnx: {refusal.reason}")
        return OnnxProgram(program)


class OnnxProgram:
    """An ONNX Runtime session whose inputs, weights among them, are read where PyTorch holds them.

    One call at a time: the bindings are kept between calls.
    """

    def __init__(self, program: Program) -> None:
        from graphrl.compiler.backends.onnx_graph import build_model, input_names, output_names

        self._session = _session(build_model(program, embed=False).SerializeToString())
        kept = {i.name for i in self._session.get_inputs()}
        names = input_names(program, embed=False)
        self._inputs = [(i, name) for i, name in enumerate(names) if name in kept]
        first = len(program.inputs)
        written = [(first + i, s) for i, s in enumerate(program.state) if s.mutated]
        self._written = [i for i, _ in written]
        results: list[Any] = [*program.outputs, *(s for _, s in written)]
        self._templates = [torch.empty(p.shape, dtype=p.dtype) for p in results]
        self._outputs = list(zip(output_names(program), self._templates, strict=True))
        self._count = len(program.outputs)
        self._binding = self._session.io_binding()
        self._bound: dict[int, int] = {}
        self._lock = threading.Lock()  # the binding holds one call's addresses

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run on all placeholder values: inputs, state, draws. Returns fresh outputs in order."""
        with self._lock:
            return self._run(arguments)

    def _run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        binding, alive = self._binding, []
        for i, name in self._inputs:
            tensor = arguments[i]
            if not tensor.is_contiguous():
                tensor = tensor.detach().contiguous()
                alive.append(tensor)
            address = tensor.data_ptr()
            if self._bound.get(i) != address:  # binding costs 4 us each: weights rarely move
                binding.bind_input(name, "cpu", 0, _NUMPY[tensor.dtype], list(tensor.shape), address)
                self._bound[i] = address
        results = [torch.empty_like(t) for t in self._templates]
        for (name, _), tensor in zip(self._outputs, results, strict=True):
            binding.bind_output(name, "cpu", 0, _NUMPY[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        self._session.run_with_iobinding(binding)
        for i, _ in self._inputs if alive else ():
            self._bound.pop(i, None)  # copies die with this call
        with torch.no_grad():
            for i, value in zip(self._written, results[self._count :], strict=True):
                arguments[i].copy_(value)
        return results[: self._count]


def _session(model: bytes) -> Any:
    """A session of one thread, with every optimisation that gives a valid graph.

    ONNX Runtime's (1.32) fusions lose a value that is an output and also read, as a reshape before a product.
    """
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel
    for level in (levels.ORT_ENABLE_ALL, levels.ORT_ENABLE_BASIC, levels.ORT_DISABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = level
        try:
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception:
            if level == levels.ORT_DISABLE_ALL:
                raise


_NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.bool: np.bool_,
}  # fmt: skip

BACKEND = Onnx()
