"""Replays a lowered program as one CUDA graph: one launch a call, whatever the number of kernels.

Inputs and draws are copied into fixed memory, state is read and written where it lies, and results are copied out, so
no later call overwrites them. Nothing waits for the GPU. ``GRAPHRL_CUDA_GRAPHS=0`` switches this off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from graphrl.compiler.backends.base import Lowered
from graphrl.compiler.program import Program

__all__ = ["MAX_CAPTURES", "CudaGraph", "captured"]

MAX_CAPTURES = 16
"""A graph holds the addresses of the weights. Where they move more often than this, calls run without a graph."""


def captured(program: Program, run: Lowered) -> Lowered:
    """``run`` as a CUDA graph where everything it takes is on one GPU, else ``run`` itself."""
    devices = {p.device for p in (*program.inputs, *program.outputs)}
    devices |= {p.device for p in program.state} | {p.device for p in program.noise}
    on_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    if not on_gpu or os.environ.get("GRAPHRL_CUDA_GRAPHS") == "0":
        return run
    return CudaGraph(program, run)


class CudaGraph:
    """A program captured at its first call, and again when a weight has moved."""

    def __init__(self, program: Program, run: Lowered) -> None:
        self._run = run
        self._notes = program.graph_module.meta
        first, last = len(program.inputs), len(program.inputs) + len(program.state)
        self._state = range(first, last)
        self._fresh = [i for i in range(last + len(program.noise)) if i not in self._state]
        self._written = [first + i for i, slot in enumerate(program.state) if slot.mutated]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []
        self._captures = 0
        self._lock = threading.Lock()  # one set of fixed memory

    def __call__(self, values: list[Tensor]) -> Sequence[Tensor]:
        """Run on all placeholder values: inputs, state, draws. Returns fresh outputs in order."""
        with self._lock:
            if self._captures > MAX_CAPTURES or torch.cuda.is_current_stream_capturing():
                return self._run(values)  # a graph of the caller's own takes the kernels as they are
            addresses = [values[i].data_ptr() for i in self._state]
            if self._graph is None or addresses != self._addresses:
                self._captures += 1
                try:
                    self._capture(values, addresses)
                except RuntimeError as error:
                    self._captures = MAX_CAPTURES + 1
                    self._notes["how"] = f"without a CUDA graph: {str(error).splitlines()[0]}"
                    return self._run(values)
            assert self._graph is not None
            for i in self._fresh:
                self._fixed[i].copy_(values[i])
            self._graph.replay()
            return [t.clone() for t in self._results]

    def _capture(self, values: list[Tensor], addresses: list[int]) -> None:
        """Record one run. Runs before it, on copies of the state it writes, load kernels and make workspaces."""
        self._graph = None
        self._fixed = [t.detach() if i in self._state else t.detach().clone() for i, t in enumerate(values)]
        device = self._fixed[0].device
        with torch.no_grad(), torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                trial = list(self._fixed)
                for i in self._written:
                    trial[i] = trial[i].clone()
                for _ in range(2):
                    self._run(list(trial))
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
                self._results = [t.detach() for t in self._run(list(self._fixed))]
        self._graph, self._addresses = graph, addresses
        self._notes["how"] = "one CUDA graph"
