"""Compiles a Triton kernel for a GPU that is not there, and reads from the binary what it would need."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KernelResources", "compile_without_gpu"]


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel takes: registers per thread, bytes of shared memory per program, warps per program."""

    registers: int
    shared_bytes: int
    warps: int
    ptx: str = field(repr=False)


def compile_without_gpu(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], capability: int, **options: Any
) -> KernelResources:
    """Compile ``kernel`` for ``sm_<capability>``.

    types: Triton's type of each argument that is not in ``constants`` (``*fp32``, ``i32``; a tuple of them for a tuple,
    with ``constexpr`` for a ``None`` in it). Pointers are taken to be 16-byte aligned, as torch allocates them. Raises
    whatever the compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    paths: dict[tuple[int, ...], str] = {}
    for i, kind in enumerate(signature.values()):
        paths |= {(i,): kind} if isinstance(kind, str) else {(i, j): inner for j, inner in enumerate(kind)}
    fixed: dict[tuple[int, ...], Any] = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    fixed |= {path: None for path, kind in paths.items() if kind == "constexpr" and path not in fixed}
    aligned = {path: [["tt.divisibility", 16]] for path, kind in paths.items() if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    meta = compiled.metadata
    return KernelResources(_registers(compiled.asm["cubin"]), meta.shared, meta.num_warps, compiled.asm["ptx"])


def _registers(cubin: bytes) -> int:
    """Registers per thread, from the ``.nv.info`` section of the 64-bit ELF: attribute 0x2f holds (symbol, count)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        start = names + header[0]
        if cubin[start : start + 9] != b".nv.info\0":
            continue
        at, end = header[4], header[4] + header[5]
        while at < end:
            kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if attribute == 0x2F:
                return int(struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (length if kind == 4 else 0)  # kind 4 has a payload; the others keep their value in `length`
    raise ValueError("this cubin states no register count")
