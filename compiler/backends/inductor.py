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
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx

from graphrl.compiler.backends.base import Lowered, Refusal
from graphrl.compiler.backends.cuda_graph import captured
from graphrl.compiler.backends.inductor_artifacts import kept_on_disk
from graphrl.compiler.backends.threads import by_rows, on_fastest
from graphrl.compiler.lowering import fake_like
from graphrl.compiler.program import Port, Program, StateSlot
from graphrl.errors import CompileError

__all__ = ["BACKEND", "Inductor", "as_inductor_sees_it", "example_arguments", "quietly"]

FUSION_ATTEMPTS = 4
"""Neighbours each kernel is compared with for fusion, in place of 64: half of the compile time of a large update went
into comparisons, and its speed is the same."""

_VECTOR_ELEMENTS = 1 << 16


class Inductor:
    """Compiles a program to machine code with TorchInductor (C++ on CPU, Triton on GPU)."""

    name = "inductor"
    dynamic = True

    def supports(self, program: Program) -> Refusal | None:
        ports: list[Port | StateSlot] = [*program.inputs, *program.state]
        for port in ports:
            if 0 in port.shape:
                return Refusal(f"{port} is empty, and Inductor's code for empty inputs is not safe: run eagerly")
        return None

    def lower(self, program: Program) -> Lowered:
        try:
            with quietly():
                return _compile_directly(program, example_arguments(program))
        except (ImportError, AttributeError):  # a torch whose private entries moved
            return _through_dynamo(program)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CompileError(f"inductor could not compile {program.name}: {lines[0]}") from error


def _through_dynamo(program: Program) -> Lowered:
    """The public way. Dynamo switches the argument checks of distributions off when it first compiles; not here."""
    with _argument_checks_kept():  # torch.compile switches them off before it compiles anything
        compiled = torch.compile(program.graph_module, dynamic=program.dynamic, fullgraph=True)

    def run(values: list[Tensor]) -> Sequence[Tensor]:
        with _argument_checks_kept():
            return compiled(*values)

    return run


@contextlib.contextmanager
def _argument_checks_kept() -> Iterator[None]:
    checked = Distribution._validate_args
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


def example_arguments(program: Program) -> list[Tensor]:
    """Values for all placeholders: zeros for the inputs, the live state, fresh draws."""
    return program.arguments([torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in program.inputs])


def as_inductor_sees_it(program: Program, arguments: Sequence[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The program in Inductor's own operations, with one row's products as sums; a ``copy_`` into state stays."""
    from torch._inductor import lowering  # noqa: F401  the decomposition of pooling takes for granted that it is there
    from torch._inductor.decomposition import select_decomp_table

    # a copy_ epilogue must survive the second trace, so the module is traced as it is: it is already functional
    table = {**select_decomp_table(), **_vector_products()}
    fakes = fake_like(arguments, mode)  # those that are fake already stay
    with mode, torch.no_grad():
        return _returning_tuple(make_fx(program.graph_module, decomposition_table=table, tracing_mode="real")(*fakes))


def _compile_directly(program: Program, arguments: list[Tensor]) -> Lowered:
    from torch._inductor import config

    def compiled_for(threads: int) -> Lowered:
        settings: dict[str, Any] = {"size_asserts": False, "fallback_random": True, "cpp.threads": threads}
        settings["cpp.dynamic_threads"] = program.dynamic  # the number is then chosen at each call
        if hasattr(config, "max_fusion_buffer_group_pairwise_attempts"):
            # kernels that share a buffer are compared pair by pair; an update's all share the finite flag and the rate
            settings["max_fusion_buffer_group_pairwise_attempts"] = FUSION_ATTEMPTS
        with config.patch(settings):
            return kept_on_disk(program, settings, lambda: _compile_afresh(program, arguments))

    if all(t.device.type == "cpu" for t in arguments):
        if program.dynamic:
            return by_rows(program, compiled_for(-1))
        return on_fastest(program, arguments, compiled_for)
    return captured(program, compiled_for(torch.get_num_threads()))


def _compile_afresh(program: Program, arguments: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    if program.dynamic:  # the fake tensors it was traced on know the batch size's symbol
        fakes = [node.meta["val"] for node in program.placeholders()]
        mode = fakes[0].fake_mode
        fakes[: len(program.inputs)] = [t.contiguous() for t in fakes[: len(program.inputs)]]  # as they will come
    else:
        mode = FakeTensorMode()
        fakes = fake_like(arguments, mode)
    module = as_inductor_sees_it(program, fakes, mode)
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        return compile_fx_inner(copy.deepcopy(module), fakes)


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
def quietly() -> Iterator[None]:
    """Keep the C++ compiler's chatter, and torch's warnings about its own parts, off the user's screen.

    Errors are raised anyway.
    """
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


BACKEND = Inductor()
