"""Allocations and threads of a runtime that Python calls, counted in a process of its own.

A small C library is preloaded there, before glibc, and counts ``malloc``, ``calloc``, ``realloc``, ``memalign``,
``aligned_alloc`` and ``posix_memalign`` in all threads; C++'s ``new`` ends in ``malloc``. Python takes objects up to
512 bytes from pools of its own: those are not counted, nor is memory that a library keeps and hands out again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.compiler.bundle.load import read_manifest
from graphrl.compiler.bundle.runners import first_row, make_player
from graphrl.errors import BundleError

__all__ = ["allocations_per_call", "count_steps", "counted", "threads"]

WARM_UP = 20
"""Calls before counting starts: libraries fill their pools with the first ones."""


@contextlib.contextmanager
def counted() -> Iterator[dict[str, str]]:
    """The environment for a process whose allocations are counted; without the library where none can be built.

    That takes a C compiler and Linux with glibc.
    """
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "allocations.so"))
        if _build(library):
            others = environment.get("LD_PRELOAD")
            environment["LD_PRELOAD"] = f"{library} {others}" if others else library
        yield environment


def _build(library: str) -> bool:
    compiler = find_compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        return False
    source = str(Path(__file__).with_name("allocations.c"))
    build = [compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", source, "-o", library]
    if subprocess.run(build, capture_output=True).returncode:
        return False
    with contextlib.suppress(OSError):
        ctypes.CDLL(library)  # a C library that is not glibc lacks what it calls
        return True
    return False


def allocations_per_call(run: Callable[[], Any], calls: int) -> float | None:
    """How often ``run`` asks for memory, less what an empty function does in the same loop; the middle of three counts.

    ``None`` outside a process that was started with the environment of :func:`counted`.
    """
    counter = getattr(ctypes.CDLL(None), "graphrl_allocations", None)
    if counter is None:
        return None
    counter.restype = ctypes.c_ulong

    def count(function: Callable[[], Any]) -> int:
        before: int = counter()
        for _ in range(calls):
            function()
        return int(counter()) - before

    for _ in range(WARM_UP):
        run()
    middle = sorted(count(run) for _ in range(3))[1] - sorted(count(lambda: None) for _ in range(3))[1]
    return round(max(middle, 0) / calls, 2)


def threads() -> int:
    """Threads of this process, where Linux tells; 0 elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Threads:")), 0)


def count_steps(bundle: Path, target: str, calls: int = 200) -> dict[str, Any]:
    """A process of its own that loads one target of a bundle and steps it on the first golden row.

    ``allocations_per_call``, or ``None`` where they cannot be counted; ``threads_before``: after the first step, which
    may start some; ``threads``: after all of them. Raises :class:`BundleError` where the process fails.
    """
    command = [sys.executable, "-m", "graphrl.compiler.bundle.allocations", str(bundle), target, str(calls)]
    with counted() as environment:
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise BundleError(f"counting the allocations of {target} fails: {reason}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str]) -> None:
    """What :func:`count_steps` runs: prints one line of JSON."""
    folder, target, calls = Path(arguments[0]), arguments[1], int(arguments[2])
    manifest = read_manifest(folder)
    player, row = make_player(target, folder, manifest), first_row(folder, manifest)
    player.step(row)
    before = threads()
    found = allocations_per_call(lambda: player.step(row), calls)
    print(json.dumps({"allocations_per_call": found, "threads_before": before, "threads": threads()}))


if __name__ == "__main__":
    main(sys.argv[1:])
