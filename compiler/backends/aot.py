"""AOTInductor: the program as a shared library in a ``.pt2`` package, called through torch's C++ loader.

Inputs, state and draws are all arguments of the library, so weights stay live. A call is shorter than through
``inductor`` and the package is kept on disk, but the first compilation takes several times as long.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphrl.compiler import cache
from graphrl.compiler.backends.base import Lowered, Refusal
from graphrl.compiler.backends.inductor import as_inductor_sees_it, example_arguments, quietly
from graphrl.compiler.backends.inductor_artifacts import cxx_compilers
from graphrl.compiler.backends.threads import estimated_threads, on_threads
from graphrl.compiler.program import Program
from graphrl.errors import CompileError

__all__ = ["BACKEND", "Aot", "write_package"]

PACKAGE = "program.pt2"


class Aot:
    """Compiles a program ahead of time and runs it without Python in between, on the CPU."""

    name = "aot"
    dynamic = False

    def supports(self, program: Program) -> Refusal | None:
        for port in program.signature:
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


def write_package(program: Program, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write ``program`` as one ``.pt2`` file for ``torch._inductor.aoti_load_package``, or torch's C++ loader.

    The loaded model takes inputs, state and draws in the program's order and returns the outputs; state that it writes
    is written in place. Constants (all weights, after the passes for deployment) are inside. The code is for this
    machine's kind of CPU and this version of torch. ``metadata`` is read back with ``loader.get_metadata()``.
    Raises :class:`CompileError` where AOTInductor cannot compile the program, or ``path`` does not end in ``.pt2``.
    """
    if Path(path).suffix != ".pt2":
        raise CompileError(f"aot: a package's name ends in .pt2, not {Path(path).name!r}")
    if (refusal := BACKEND.supports(program)) is not None:
        raise CompileError(f"aot: {refusal.reason}")
    arguments = example_arguments(program)
    module = as_inductor_sees_it(program, arguments, FakeTensorMode())
    constants = _embed_constants(program, module, arguments)
    _compile(module, constants, estimated_threads(program), Path(path), metadata)


def _cached_package(program: Program, threads: int) -> Path:
    """The package of ``program``, from the cache or compiled into it."""
    from torch._inductor import config

    cxx = next((c for c in cxx_compilers(config) if c), None)
    key = cache.cache_key(program, "aot", cxx, threads=threads, inductor=config.get_hash().hex())
    if key is None:
        raise CompileError(f"aot: {program.name} holds a constant that cannot be written down")
    start = time.perf_counter()
    entry, what = cache.load(key), "hit"
    if entry is None:
        arguments = example_arguments(program)
        module = as_inductor_sees_it(program, arguments, FakeTensorMode())
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, PACKAGE)
            _compile(module, arguments, threads, package)
            files = {PACKAGE: package.read_bytes()}
        entry, what = cache.store(key, files, time.perf_counter() - start), "miss, now kept"
    if entry is None:
        raise CompileError(f"aot: cannot write to {cache.programs_dir()}: set GRAPHRL_CACHE_DIR")
    cache.note_outcome(program, what)
    return entry.folder / PACKAGE


def _compile(
    module: fx.GraphModule,
    arguments: Sequence[Tensor],
    threads: int,
    path: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    settings = {"cpp.threads": threads, "size_asserts": False, "fallback_random": True,
                "aot_inductor.metadata": dict(metadata or {})}  # fmt: skip
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
