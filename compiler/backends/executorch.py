"""ExecuTorch: the program as a ``.pte`` file, for devices where torch does not fit. No backend of compile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphrl.compiler.backends.aot import embed_constants
from graphrl.compiler.backends.inductor import example_arguments, quietly
from graphrl.compiler.program import Program
from graphrl.errors import CompileError

__all__ = ["load_pte", "write_pte"]


def write_pte(program: Program, path: str | Path, contract_hash: str) -> None:
    """Write ``program`` as one ``.pte`` file: XNNPACK for the parts it has kernels of, ExecuTorch's own for the rest.

    Method ``forward`` takes inputs and state in the program's order and returns the outputs; constants (all weights,
    after the passes for deployment) are inside. Method ``contract_hash`` returns that text.
    Raises :class:`CompileError` where ExecuTorch cannot lower the program.
    """
    arguments = example_arguments(program)
    module = copy.deepcopy(program.graph_module)
    left = embed_constants(program, module, arguments)
    try:
        with quietly(), torch.no_grad():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            exported = torch.export.export(module, tuple(t.detach() for t in left))
            methods = {"contract_hash": contract_hash}
            edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()], constant_methods=methods)
            Path(path).write_bytes(edge.to_executorch().buffer)
    except OSError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"executorch: ExecuTorch could not lower this program: {lines[0]}") from error


def load_pte(path: str | Path) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """``forward`` of a file that :func:`write_pte` wrote, on one thread.

    ExecuTorch's threads are the process's: other programs in it get one as well.
    """
    with quietly():
        from executorch.extension.pybindings.portable_lib import _threadpool_get_thread_count, _unsafe_reset_threadpool
        from executorch.runtime import Runtime

    if _threadpool_get_thread_count() != 1:  # it tells of each change on stderr
        _unsafe_reset_threadpool(1)
    return Runtime.get().load_program(path).load_method("forward").execute  # type: ignore[no-any-return]
