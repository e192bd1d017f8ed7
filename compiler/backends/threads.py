"""How many CPU threads a program runs on: by its work where that decides it, else by measuring.

Inductor's thread count is fixed when the code is generated, so measuring means compiling twice; only programs near the
border are. ``GRAPHRL_THREADS=n`` fixes the number and nothing is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from graphrl.compiler.backends.base import Lowered
from graphrl.compiler.cost import estimate_cost
from graphrl.compiler.program import Program
from graphrl.compiler.shapes import sizes
from graphrl.errors import CompileError

__all__ = ["ALL_THREADS_FLOPS", "ONE_THREAD_FLOPS", "by_rows", "estimated_threads", "on_fastest", "on_threads"]

ONE_THREAD_FLOPS = 5e6
"""Below this many floating-point operations one thread wins, whatever the machine."""

ALL_THREADS_FLOPS = 200e6
"""Above this many all threads win."""

BORDER_FLOPS = 30e6
"""The border between the two where nothing is measured."""

ROUNDS, ROUND_S = 7, 2e-3


def estimated_threads(program: Program) -> int:
    """The number of threads for ``program`` by its estimated work alone, or what ``GRAPHRL_THREADS`` says."""
    fixed = os.environ.get("GRAPHRL_THREADS")
    if fixed is not None:
        if not fixed.isdigit() or int(fixed) < 1:
            raise CompileError(f"GRAPHRL_THREADS is {fixed!r}: expected a number of threads, 1 or more")
        return int(fixed)
    return 1 if estimate_cost(program).flops < BORDER_FLOPS else torch.get_num_threads()


def on_fastest(program: Program, arguments: Sequence[Tensor], compiled_for: Callable[[int], Lowered]) -> Lowered:
    """``compiled_for(n)`` for the best number of threads ``n``; near the border both are made and timed.

    Timed on copies of ``arguments``: a program that writes state leaves the real tensors alone. What was chosen, and
    the figures, are kept as text in ``program.graph_module.meta["how"]``.
    """
    most = torch.get_num_threads()
    near = ONE_THREAD_FLOPS <= estimate_cost(program).flops <= ALL_THREADS_FLOPS
    chosen, notes = estimated_threads(program), program.graph_module.meta
    notes["how"] = _count(chosen)
    if most == 1 or not near or "GRAPHRL_THREADS" in os.environ or _divides_integers(program):
        return on_threads(compiled_for(chosen), chosen)
    runs = {n: on_threads(compiled_for(n), n) for n in (1, most)}
    try:
        seconds = _measure(runs, [t.detach().clone() for t in arguments])
    except RuntimeError:  # the program fails on these values, as a Cholesky factor of zeros does
        return runs[chosen]
    chosen = min(seconds, key=lambda n: seconds[n])
    figures = ", ".join(f"{_count(n)}: {1e3 * s:.3g} ms" for n, s in seconds.items())
    notes["how"] = f"{_count(chosen)} ({figures})"
    return runs[chosen]


def on_threads(run: Lowered, threads: int) -> Lowered:
    """``run`` with the libraries it calls on as many threads as well; torch's setting is put back (0.2 us)."""
    if threads != 1:
        return run

    def alone(values: list[Tensor]) -> Sequence[Tensor]:
        before = torch.get_num_threads()
        if before == 1:
            return run(values)
        torch.set_num_threads(1)
        try:
            return run(values)
        finally:
            torch.set_num_threads(before)

    return alone


def by_rows(program: Program, run: Lowered) -> Lowered:
    """A program for any batch size: one thread for few rows, torch's setting for more, chosen at each call."""
    places = program.placeholders()
    place = next(i for i, n in enumerate(places) if n.meta["val"].dim() and type(n.meta["val"].shape[0]) is not int)
    rows = sizes(places[place].meta["val"])[0]
    below = int(BORDER_FLOPS * rows / max(1, estimate_cost(program).flops))
    program.graph_module.meta["how"] = f"1 thread below {below} rows, torch's setting above"
    alone = on_threads(run, 1)
    return lambda values: alone(values) if values[place].shape[0] < below else run(values)


def _measure(runs: Mapping[int, Lowered], arguments: list[Tensor]) -> dict[int, float]:
    """Median seconds a call, all taking turns; a few hundredths of a second in all."""
    times: dict[int, list[float]] = {n: [] for n in runs}
    with torch.no_grad():
        for run in runs.values():
            run(list(arguments))
        start = time.perf_counter()
        for run in runs.values():
            run(list(arguments))
        calls = max(1, int(ROUND_S * len(runs) / (time.perf_counter() - start)))
        for _ in range(ROUNDS):
            for n, run in runs.items():
                start = time.perf_counter()
                for _ in range(calls):
                    run(list(arguments))
                times[n].append((time.perf_counter() - start) / calls)
    return {n: statistics.median(seconds) for n, seconds in times.items()}


def _divides_integers(program: Program) -> bool:
    """Whether an integer is divided by another: by a zero among the example values, the processor traps."""
    nodes = (n for n in program.graph_module.graph.nodes if n.op == "call_function")
    names = ("div", "floor_divide", "remainder", "fmod")
    return any(
        n.target.__name__.split(".")[0] in names and not n.meta["val"].is_floating_point()  # type: ignore[union-attr]
        for n in nodes
    )


def _count(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"
