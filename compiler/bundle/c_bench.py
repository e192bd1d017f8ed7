"""Building and running a bundle's ``bench.c``: latency, allocations, threads; and what the C takes of memory."""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.errors import BundleError

__all__ = ["CBench", "Latency", "c_memory", "measure_c", "stack_at_most"]

COUNTED = ("malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign")
FLAGS = ("-O3", "-march=native")


@dataclass(frozen=True)
class Latency:
    """Microseconds a call."""

    calls: int
    p50: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, us: Sequence[float]) -> Latency:
        """Of the times of single steps."""
        ranked = sorted(us)
        at = [ranked[len(ranked) * part // 1000] for part in (500, 990, 999)]
        return cls(len(ranked), *(round(v, 3) for v in (*at, ranked[-1])))


@dataclass(frozen=True)
class CBench:
    """What ``bench.c`` printed. allocations: over its first calls; ``None`` where they cannot be counted.

    late: how long after its deadline a paced step began. overruns: paced steps that ended after the next deadline.
    """

    hot: Latency
    subnormal: Latency
    paced: Latency | None
    late: Latency | None
    overruns: int | None
    period_bias_us: float | None
    allocations: int | None
    threads_before: int
    threads: int


def measure_c(
    bundle: Path, prefix: str, *, calls: int, rate_hz: float = 0.0, paced_calls: int = 0,
    flags: Sequence[str] = FLAGS,
) -> CBench:  # fmt: skip
    """Compile a bundle's ``bench.c`` and run it. Raises :class:`BundleError` where that fails."""
    with tempfile.TemporaryDirectory() as temporary:
        program = str(Path(temporary, "bench"))
        sources = [str(bundle / "c" / f"{prefix}.c"), str(bundle / "c" / "bench.c"), "-lm", "-o", program]
        count = [f"-D{prefix.upper()}_COUNT_ALLOCATIONS", *(f"-Wl,--wrap={name}" for name in COUNTED)]
        counted = _compiles([*flags, *count, *sources]) is None
        portable = [f for f in flags if not f.startswith("-march")]
        if not counted and (problem := _compiles([*portable, *sources])):
            raise BundleError(f"bench.c does not compile: {problem}")
        command = [program, str(calls), repr(rate_hz), str(paced_calls)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise BundleError(f"bench.c fails with {result.returncode}: {result.stderr[:500] or 'no message'}")
    text = result.stdout
    before, after = (int(n) for n in re.findall(r"threads: (\d+) then (\d+)", text)[0])
    return CBench(
        _latency("hot", text), _latency("subnormal", text), _found(_latency, "paced", text),
        _found(_latency, "late", text), _found(lambda w, t: int(_number(w, t)), "overruns", text),
        _found(_number, "period bias", text), int(_number("allocations", text)) if counted else None, before, after,
    )  # fmt: skip


def c_memory(bundle: Path, interface: dict[str, Any], flags: Sequence[str] = ("-O3",)) -> dict[str, int | None]:
    """Bytes of weights, of scratch and the rest of the state struct, of stack and of machine code, with ``flags``.

    stack_at_most: of a step, see :func:`stack_at_most`. Code and constants by ``size``; ``None`` where compiler or tool
    does not tell.
    """
    prefix = interface["prefix"]
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary, f"{prefix}.o")
        source = ["-c", str(bundle / "c" / f"{prefix}.c"), "-o", str(target)]
        if _compiles([*flags, "-fstack-usage", *source]) and (problem := _compiles([*flags, *source])):
            raise BundleError(f"{prefix}.c does not compile: {problem}")
        stack = stack_at_most(target.with_suffix(".su"), prefix)
        sections = _sections(target)
    members = {m["name"]: m for m in (*interface["inputs"], *interface["outputs"]) if m["place"] == "state"}
    sizes = {"float": 4, "double": 8, "int32_t": 4, "int64_t": 8, "unsigned char": 1}
    return {
        "weights": interface["weight_bytes"],
        "scratch": sum(sizes[m["c_type"]] * m["size"] for m in interface["scratch"]),
        "state": 4 + sum(sizes[m["c_type"]] * max(m["size"], 1) for m in members.values()),
        "stack_at_most": stack,
        "code": sections.get(".text"),
        "constants": sum(n for name, n in sections.items() if name.startswith(".rodata")) if sections else None,
    }


def stack_at_most(usage: Path, prefix: str) -> int | None:
    """Bytes of stack of a step, from what ``-fstack-usage`` wrote; ``None`` where that is missing or not a constant.

    Every function but the other entry points together: no chain of calls can exceed that without recursion. On x86-64
    the 128 bytes below the stack pointer, which a function may use without taking them, are added.
    """
    if not usage.is_file():
        return None
    others = {f"{prefix}_{name}" for name in ("state_size", "init", "reset", "contract_hash")}
    functions = [line.split("\t") for line in usage.read_text().splitlines()]
    if any(kind == "dynamic" for _, _, kind in functions):  # "dynamic,bounded" is a constant too
        return None
    red_zone = 128 if platform.machine() in ("x86_64", "AMD64") else 0
    return sum(int(size) for name, size, _ in functions if name.split(":")[-1] not in others) + red_zone


def _sections(file: Path) -> dict[str, int]:
    """Bytes of each section of an object file; none where ``size`` is not installed."""
    try:
        text = subprocess.run(["size", "-A", str(file)], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {name: int(n) for name, n in re.findall(r"^(\.\S+)\s+(\d+)", text, re.MULTILINE)}


def _compiles(arguments: Sequence[str]) -> str | None:
    """The compiler's complaint, or ``None``."""
    try:
        compiler = find_compiler()
    except OSError as error:
        raise BundleError(str(error)) from error
    if compiler is None:
        raise BundleError("no C compiler: install gcc or clang, or set CC")
    result = subprocess.run([compiler, "-std=c99", *arguments], capture_output=True, text=True)
    return (result.stderr[:1000] or f"exit status {result.returncode}") if result.returncode else None


def _number(what: str, text: str) -> float:
    return float(re.findall(rf"^{what}: (-?[\d.]+)", text, re.MULTILINE)[0])


def _latency(what: str, text: str) -> Latency:
    form = rf"^{what}: (\d+) calls, p50 (\S+) us, p99 (\S+) us, p99.9 (\S+) us, max (\S+) us"
    calls, *figures = re.findall(form, text, re.MULTILINE)[0]
    return Latency(int(calls), *map(float, figures))


def _found(read: Any, what: str, text: str) -> Any:
    return read(what, text) if re.search(rf"^{what}: ", text, re.MULTILINE) else None
