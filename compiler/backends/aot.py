"""AOTInductor: the program as a shared library in a ``.pt2`` package, called through torch's C++ loader.

Inputs, state and draws are all arguments of the library, so weights stay live. A call is shorter than through
``inductor`` and the package is kept on disk, but the first compilation takes several times as long.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphrl.compiler.backends.base import Lowered, Refusal
from graphrl.compiler.backends.inductor import as_inductor_sees_it, example_arguments, quietly
from graphrl.compiler.backends.native import cache_dir, cpu_name
from graphrl.compiler.backends.threads import estimated_threads, on_threads
from graphrl.compiler.program import Program
from graphrl.errors import CompileError

__all__ = ["BACKEND", "Aot", "write_package"]


class Aot:
    """Compiles a program ahead of time and runs it without Python in between, on the CPU."""

    name = "aot"

    def supports(self, program: Program) -> Refusal | None:
        ports: list[Any] = [*program.inputs, *program.outputs, *program.state, *program.noise]
        for port in ports:
            if port.device.type != "cpu":
                return Refusal(f"this backend runs AOTInductor on the CPU, and {port} is on {port.device}")
            if 0 in port.shape:
                return Refusal(f"{port} is empty, and AOTInductor's code for empty tensors is not safe: run eagerly")
        return None

    def lower(self, program: Program) -> Lowered:
        """Load the package of ``program``, from the cache or compiled into it. Raises :class:`CompileError`."""
        if (refusal := self.supports(program)) is not None:
            raise CompileError(f"aot: {refusal.reason}")
        threads = estimated_threads(program)
        loader = torch._inductor.aoti_load_package(str(_cached_package(program, threads))).loader
        return on_threads(loader.run, threads)


def write_package(program: Program, path: str | Path) -> None:
    """Write ``program`` as one ``.pt2`` file for ``torch._inductor.aoti_load_package``, or torch's C++ loader.

    The loaded model takes inputs, state and draws in the program's order and returns the outputs; state that it writes
    is written in place. Constants (all weights, after the passes for deployment) are inside. The code is for this
    machine's kind of CPU and this version of torch.
    Raises :class:`CompileError` where AOTInductor cannot compile the program, or ``path`` does not end in ``.pt2``.
    """
    if Path(path).suffix != ".pt2":
        raise CompileError(f"aot: a package's name ends in .pt2, not {Path(path).name!r}")
    if (refusal := BACKEND.supports(program)) is not None:
        raise CompileError(f"aot: {refusal.reason}")
    arguments = example_arguments(program)
    module = as_inductor_sees_it(program, arguments, FakeTensorMode())
    _compile(module, _embed_constants(program, module, arguments), estimated_threads(program), Path(path))


def _cached_package(program: Program, threads: int) -> Path:
    """The package of ``program``: its name is a hash of all that decides what is in it."""
    arguments = example_arguments(program)
    module = as_inductor_sees_it(program, arguments, FakeTensorMode())
    layouts = [(tuple(t.shape), t.stride(), t.dtype) for t in arguments]
    names = sorted({str(n.target) for n in module.graph.nodes if n.op == "get_attr"})
    held = [getattr(module, name).tolist() for name in names]  # literals that a decomposition made, as single numbers
    text = "\0".join((module.code, str((layouts, names, held)), torch.__version__, str(threads), cpu_name()))
    target = cache_dir("aot") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.pt2"
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                _compile(module, arguments, threads, Path(folder, "program.pt2"))
                os.replace(Path(folder, "program.pt2"), target)  # several processes may do this at once
        except OSError as error:
            raise CompileError(f"aot: cannot write to {target.parent} ({error}): set GRAPHRL_CACHE_DIR") from error
    return target


def _compile(module: fx.GraphModule, arguments: Sequence[Tensor], threads: int, path: Path) -> None:
    settings = {"cpp.threads": threads, "size_asserts": False, "fallback_random": True}
    try:
        with quietly(), torch.no_grad():
            exported = torch.export.export(module, tuple(t.detach() for t in arguments))
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=settings)
    except OSError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"aot: AOTInductor could not compile this program: {lines[0]}") from error


def _embed_constants(program: Program, module: fx.GraphModule, arguments: list[Tensor]) -> list[Tensor]:
    """Move the constants among the placeholders of ``module`` into it; returns the arguments that are left."""
    first, kept = len(program.inputs), list(arguments)
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    start = next(n for n in module.graph.nodes if n.op != "placeholder")
    for i, slot in reversed(list(enumerate(program.state, first))):
        if slot.kind == "constant" and not slot.mutated:
            module.register_buffer(f"constant_{i}", kept.pop(i).detach().clone())
            with module.graph.inserting_before(start):
                places[i].replace_all_uses_with(module.graph.get_attr(f"constant_{i}"))
            module.graph.erase_node(places[i])
    module.recompile()
    return kept


BACKEND = Aot()
