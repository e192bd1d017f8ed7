"""AOTInductor: the program as a shared library in a ``.pt2`` package, called through torch's C++ loader.

Inputs, state and draws are all arguments of the library, so weights stay live. A call is shorter than through
``inductor`` and the package is kept on disk, but the first compilation takes several times as long.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

__all__ = ["BACKEND", "Aot", "embed_constants", "package_host", "why_not_on_host", "write_package"]

PACKAGE = "program.pt2"

MARCH = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
"""The compiler's name of torch's instruction sets: with ``native`` the code would need more than the recorded set."""


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
    instruction set and version of torch, and runs on one thread. Both, and ``metadata``, are read back with
    ``loader.get_metadata()``.
    Raises :class:`CompileError` where AOTInductor cannot compile the program, or ``path`` does not end in ``.pt2``.
    """
    if Path(path).suffix != ".pt2":
        raise CompileError(f"aot: a package's name ends in .pt2, not {Path(path).name!r}")
    if (refusal := BACKEND.supports(program)) is not None:
        raise CompileError(f"aot: {refusal.reason}")
    arguments = example_arguments(program)
    module = as_inductor_sees_it(program, arguments, FakeTensorMode())
    constants = embed_constants(program, module, arguments)
    more: dict[str, Any] = {"aot_inductor.metadata": {**package_host(), **(metadata or {})}}
    march = MARCH.get(package_host()["instruction_set"])
    if march is not None and hasattr(torch._inductor.config.cpp, "march"):
        more["cpp.march"] = march
    _compile(module, constants, 1, Path(path), more)


def package_host() -> dict[str, str]:
    """What a package written here is bound to: version of torch, machine, and instruction set."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def why_not_on_host(host: Mapping[str, str]) -> str | None:
    """Why a package bound to ``host`` cannot be loaded here, or ``None``: foreign code would end the process."""
    here = package_host()
    if host["torch"].split("+")[0] != here["torch"].split("+")[0]:
        return f"model.pt2 is for torch {host['torch']}, here is {here['torch']}"
    order, wanted, found = list(MARCH), host["instruction_set"], here["instruction_set"]
    more = wanted in order and found in order and order.index(found) > order.index(wanted)
    if host["machine"] != here["machine"] or not (wanted in (found, "DEFAULT") or more):
        return f"model.pt2 is for {host['machine']} with {wanted}, here is {here['machine']} with {found}"
    return None


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
    more: Mapping[str, Any] | None = None,
) -> None:
    settings = {"cpp.threads": threads, "size_asserts": False, "fallback_random": True, **(more or {})}
    try:
        with quietly(), torch.no_grad():
            exported = torch.export.export(module, tuple(t.detach() for t in arguments))
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=settings)
    except OSError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"aot: AOTInductor could not compile this program: {lines[0]}") from error


def embed_constants(program: Program, module: fx.GraphModule, arguments: Sequence[Tensor]) -> list[Tensor]:
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
