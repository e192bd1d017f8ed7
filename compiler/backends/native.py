"""In-process rollouts in generated C: weights by pointer, so they are never stale; compiled once, kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphrl.compiler import cache
from graphrl.compiler.backends.base import Refusal, written_input
from graphrl.compiler.backends.c99.emit import OUTSIDE, Generated, generate
from graphrl.compiler.backends.c99.nodes import Unsupported
from graphrl.compiler.program import Program
from graphrl.errors import CompileError

__all__ = ["BACKEND", "Native", "NativeProgram", "find_compiler"]

FLAGS = ("-std=gnu99", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
"""``-fno-math-errno -fno-trapping-math`` change no result; sums are reordered only where the C asks for it."""

LIBRARY = "program.so"

STACK_BYTES = 1 << 16
"""Scratch above this lives in thread-local memory: a large batch would overflow the stack."""

NO_COMPILER = "no C compiler: install gcc or clang, or set CC"


class Native:
    """Generated C with every state tensor by pointer: float32 on the CPU, shapes fixed when traced."""

    name = "native"
    dynamic = False

    def supports(self, program: Program) -> Refusal | None:
        """``None``, or why this program cannot run in generated C."""
        if program.dynamic:
            return Refusal("generated C has fixed shapes")
        for port in program.signature:
            if port.device.type != "cpu":
                return Refusal(f"generated C runs on the CPU, and {_label(port)!r} is on {port.device}")
        if (refusal := written_input(program)) is not None:
            return refusal
        try:
            generate(program, embed=False)
        except Unsupported as problem:
            return Refusal(problem.explain(program))
        return Refusal(NO_COMPILER) if find_compiler() is None else None

    def lower(self, program: Program) -> NativeProgram:
        """Compile ``program`` (or find it in the cache). Raises :class:`CompileError` when it is refused."""
        refusal = self.supports(program)
        if refusal is not None:
            raise CompileError(f"native: {refusal.reason}")
        return NativeProgram(program)


class NativeProgram:
    """A compiled program. Arguments must fit the program's signature: it reads raw memory and checks no shape.

    Arguments that are not contiguous are copied first. Weights are read in place at each call: in-place changes,
    ``load_state_dict`` and replaced tensors all count at the next call. Results carry no gradient.
    """

    def __init__(self, program: Program) -> None:
        self.code, generated = native_code(program)
        self._library: ctypes.CDLL = ctypes.PyDLL(
            str(compiled(program, self.code))
        )  # a call of microseconds is not worth a GIL release
        if _work(program) > 1_000_000:
            self._library = ctypes.CDLL(self._library._name)
        self._function = self._library.graphrl_call
        self._function.argtypes = [ctypes.c_char_p]
        self._function.restype = ctypes.c_int
        self._name, self._checks = program.name, f"{OUTSIDE} |=" in self.code
        outputs = [a for a in generated.arguments if a.kind == "output"]
        self._templates = [torch.empty(p.shape, dtype=p.dtype) for p in program.outputs]
        self._first, self._last = len(program.inputs), len(program.inputs) + len(program.state)
        self._slots = program.state
        self._fresh = [i for i in range(self._last + len(program.noise)) if not self._first <= i < self._last]
        self._pack = struct.Struct(f"{self._last + len(program.noise) + len(outputs)}P").pack
        self._state: list[int] = []
        self._bound: tuple[Any, list[bytes]] = (None, [])

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run on all placeholder values: inputs, state, draws. Returns fresh outputs in order."""
        outputs = list(map(_empty_like, self._templates))
        self.call_into(arguments, outputs)
        return outputs

    def call_into(self, arguments: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run and write the results into ``outputs``: contiguous tensors of the outputs' shapes and dtypes."""
        pointers = list(map(_data_ptr, arguments))
        for i in self._fresh:
            if not arguments[i].is_contiguous():
                return self._call_copied(arguments, outputs)
        if pointers[self._first : self._last] != self._state:
            if not self._check_state(arguments):
                return self._call_copied(arguments, outputs)
            self._state = pointers[self._first : self._last]
        if self._function(self._pack(*pointers, *map(_data_ptr, outputs))):
            self._raise_outside()

    def bind_rows(
        self,
        inputs: Sequence[Sequence[Tensor]],
        state: Sequence[Tensor],
        draws: Sequence[Tensor],
        outputs: Sequence[Any],
    ) -> Callable[[int], None] | None:
        """``step(t)``: row ``t`` of ``outputs`` from row ``t`` of ``inputs``, one foreign call and no Python besides.

        inputs, outputs: a tuple of tensors a row, in order. draws: each ``[rows, *shape]``. All memory must outlive the
        result. ``None`` where a tensor is not contiguous.
        """
        addresses = [t.data_ptr() for t in (*state, *draws)]
        key = (id(inputs), id(outputs), addresses)
        if self._bound[0] is None or self._bound[0][:3] != key:
            if not all(t.is_contiguous() for t in (*state, *(t for row in (*inputs, *outputs) for t in row))):
                return None
            columns = [[t.data_ptr() for t in draw.unbind(0)] for draw in draws]
            packed = [
                self._pack(
                    *map(_data_ptr, row), *addresses[: len(state)], *(c[t] for c in columns), *map(_data_ptr, out)
                )
                for t, (row, out) in enumerate(zip(inputs, outputs, strict=True))
            ]
            self._bound = ((*key, inputs, outputs), packed)
        function, packed = self._function, self._bound[1]
        if not self._checks:
            return lambda t: function(packed[t])
        return lambda t: self._raise_outside() if function(packed[t]) else None

    def _raise_outside(self) -> None:
        raise IndexError(f"native: an index in {self._name} is out of range; backend='eager' tells which")

    def _check_state(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the state tensors, which moved since the last call, can be read in place."""
        state = arguments[self._first : self._last]
        for slot, tensor in zip(self._slots, state, strict=True):
            found = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
            if found != (slot.shape, slot.dtype, "cpu"):
                raise CompileError(
                    f"native: {slot.name!r} is now {list(tensor.shape)} {tensor.dtype} on {tensor.device}, but this "
                    f"program was compiled for {slot} on the CPU: compile it again"
                )
        return all(t.is_contiguous() for t in state)

    def _call_copied(self, arguments: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._check_state(arguments)
        copies = [t.detach().contiguous() for t in arguments]
        if self._function(self._pack(*map(_data_ptr, copies), *map(_data_ptr, outputs))):
            self._raise_outside()
        for slot, tensor, copy in zip(self._slots, arguments[self._first :], copies[self._first :], strict=False):
            if slot.mutated and copy.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(copy)


_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr
_empty_like: Callable[[Tensor], Tensor] = torch.empty_like


def native_code(program: Program) -> tuple[str, Generated]:
    """The C text of ``program`` with one entry point that takes an array of pointers."""
    storage = "__attribute__((aligned(64))) "
    generated = generate(program, embed=False, scratch=storage)
    if generated.scratch_bytes > STACK_BYTES:
        generated = generate(program, embed=False, scratch=f"static __thread {storage}")
    order = {"input": 0, "state": len(program.inputs), "noise": len(program.inputs) + len(program.state)}
    order["output"] = order["noise"] + len(program.noise)
    cast = [f"({'' if a.written else 'const '}{a.c_type} *)p[{order[a.kind] + a.index}]" for a in generated.arguments]
    entry = "\n".join(
        [
            "int graphrl_call(void *const *p);",
            "int graphrl_call(void *const *p)",
            "{",
            f"    {OUTSIDE} = 0;",
            f"    run({', '.join(cast)});",
            f"    return {OUTSIDE};",
            "}",
        ]
    )
    head = f"#include <math.h>\n#include <stdint.h>\n\nstatic __thread int {OUTSIDE};\n"
    return f"{head}\n{generated.code}\n{entry}\n", generated


def _work(program: Program) -> int:
    """Multiplications in the program's matrix products, roughly."""
    total = 0
    for node in program.graph_module.graph.nodes:
        if "mm" in getattr(node.target, "__name__", ""):
            shared = node.args[-1].meta["val"].shape[-2]
            total += node.meta["val"].numel() * shared
    return total


def _label(port: object) -> object:
    return getattr(port, "key", None) or getattr(port, "name", None) or "a random draw"


# ---- compiling


def find_compiler() -> str | None:
    """The C compiler to use: ``$CC``, else cc, gcc or clang on the path; ``None`` when there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def compiled(program: Program, code: str) -> Path:
    """The shared library of ``code``, which was generated from ``program``: from the cache or compiled into it.

    Raises :class:`CompileError` where there is no compiler or no place to write.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"native: {NO_COMPILER}")
    digest = hashlib.sha256(code.encode()).hexdigest()
    key = cache.cache_key(program, "native", compiler, flags=FLAGS, code=digest)
    if key is None:
        raise CompileError(f"native: {program.name} holds a constant that cannot be written down")
    start = time.perf_counter()
    entry, what = cache.load(key), "hit"
    if entry is None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "program.c"), Path(folder, LIBRARY)
            source.write_text(code)
            _compile(compiler, source, library)
            files = {source.name: code.encode(), LIBRARY: library.read_bytes()}
        entry, what = cache.store(key, files, time.perf_counter() - start), "miss, now kept"
    if entry is None:
        raise CompileError(f"native: cannot write to {cache.programs_dir()}: set GRAPHRL_CACHE_DIR")
    cache.note_outcome(program, what)
    return entry.folder / LIBRARY


def _compile(compiler: str, source: Path, library: Path) -> None:
    errors = ""
    for tuning in (["-march=native"], ["-mcpu=native"], []):
        command = [compiler, *FLAGS, *tuning, "-o", str(library), str(source), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return
        errors = result.stderr
    raise CompileError(f"native: {compiler} failed on generated code:\n{errors[:2000]}")


BACKEND = Native()
