"""TorchInductor called directly on the traced program, without Dynamo's frame evaluation and guards.

torch's private compile entries live in this file alone. Checked with torch 2.11 and 2.13; where they are missing or
fail to import, ``torch.compile`` of the traced module is used instead (slower per call, same results).
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphrl.compiler.backends.base import Lowered, Refusal
from graphrl.compiler.cost import estimate_cost
from graphrl.compiler.lowering import fake_like
from graphrl.compiler.program import Port, Program, StateSlot
from graphrl.errors import CompileError

__all__ = ["BACKEND", "Inductor", "chosen_threads"]

ONE_THREAD_FLOPS = 30e6
"""Below this many floating-point operations one thread wins: a PPO minibatch of 64 took 0.24 ms on one, 0.50 on two."""

FUSION_ATTEMPTS = 4
"""Neighbours each kernel is compared with for fusion, in place of 64: half of the compile time of a large update went
into comparisons, and its speed is the same."""

_VECTOR_ELEMENTS = 1 << 16


class Inductor:
    """Compiles a program to machine code with TorchInductor (C++ on CPU, Triton on GPU)."""

    name = "inductor"

    def supports(self, program: Program) -> Refusal | None:
        ports: list[Port | StateSlot] = [*program.inputs, *program.state]
        for port in ports:
            if 0 in port.shape:
                return Refusal(f"{port} is empty, and Inductor's code for empty inputs is not safe: run eagerly")
        return None

    def lower(self, program: Program) -> Lowered:
        arguments = program.arguments([torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in program.inputs])
        try:
            with _quietly():
                return _compile_directly(program, arguments)
        except (ImportError, AttributeError):  # a torch whose private entries moved
            compiled = torch.compile(program.graph_module, dynamic=False, fullgraph=True)
            return lambda values: compiled(*values)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CompileError(f"inductor could not compile {program.name}: {lines[0]}") from error


def chosen_threads(program: Program) -> int:
    """CPU threads the generated code will use: one for small programs, else torch's setting."""
    return 1 if estimate_cost(program).flops < ONE_THREAD_FLOPS else torch.get_num_threads()


def _compile_directly(program: Program, arguments: list[Tensor]) -> Lowered:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    mode = FakeTensorMode()
    fakes = fake_like(arguments, mode)
    # a copy_ epilogue must survive the second trace, so the module is traced as it is: it is already functional
    table = {**select_decomp_table(), **_vector_products()}
    with mode, torch.no_grad():
        module = make_fx(program.graph_module, decomposition_table=table, tracing_mode="real")(*fakes)
    module = _returning_tuple(module)
    settings: dict[str, Any] = {"size_asserts": False, "fallback_random": True, "cpp.threads": chosen_threads(program)}
    if hasattr(config, "max_fusion_buffer_group_pairwise_attempts"):
        # kernels that share a buffer are compared pair by pair; an update's all share the finite flag and the rate
        settings["max_fusion_buffer_group_pairwise_attempts"] = FUSION_ATTEMPTS
    with config.patch(settings), torch._guards.tracing(torch._guards.TracingContext(mode)):
        compiled = compile_fx_inner(copy.deepcopy(module), fakes)
    inner = getattr(compiled, "current_callable", None) or compiled  # the inner callable skips profiling checks
    on_cpu = all(t.device.type == "cpu" for t in arguments)
    return _on_one_thread(inner) if on_cpu and settings["cpp.threads"] == 1 else inner


def _on_one_thread(run: Lowered) -> Lowered:
    """``run`` with the libraries it calls on one thread as well; torch's setting is put back (0.2 us)."""

    def alone(values: list[Tensor]) -> Sequence[Tensor]:
        threads = torch.get_num_threads()
        if threads == 1:
            return run(values)
        torch.set_num_threads(1)
        try:
            return run(values)
        finally:
            torch.set_num_threads(threads)

    return alone


def _vector_products() -> dict[Any, Any]:
    """For one row on the CPU, products as sums: fused C++ in place of a library call each (an MLP: 16.7 -> 7.1 us)."""
    aten = torch.ops.aten

    def small(row: Tensor, matrix: Tensor) -> bool:
        return row.device.type == "cpu" and row.shape[0] == 1 and 0 < matrix.numel() <= _VECTOR_ELEMENTS

    def mm(row: Tensor, matrix: Tensor) -> Any:
        return (row * matrix.t()).sum(-1).unsqueeze(0) if small(row, matrix) else NotImplemented

    def addmm(bias: Tensor, row: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if beta != 1 or alpha != 1 or not small(row, matrix):
            return NotImplemented
        return (row * matrix.t()).sum(-1).unsqueeze(0) + bias

    return {aten.mm.default: mm, aten.addmm.default: addmm}


def _returning_tuple(module: fx.GraphModule) -> fx.GraphModule:
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
        module.recompile()
    return module


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the C++ compiler's chatter, and torch's warnings about its own parts, off the user's screen.

    Errors are raised anyway.
    """
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


BACKEND = Inductor()
