"""Eager against compiled, side by side in one run."""

from __future__ import annotations

import io
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl._version import __version__
from graphrl.compiler.cache import outcome
from graphrl.compiler.compiled import compile
from graphrl.compiler.machine import cpu_name
from graphrl.compiler.trace import as_example, trace
from graphrl.compiler.verify import float64_reference, relative_error
from graphrl.errors import CompileError
from graphrl.keys import Key

__all__ = ["BenchmarkRow", "BenchmarkTable", "benchmark", "time_interleaved"]


_COLUMNS = ("median us", "quartiles", "times faster", "compile s", "error")


@dataclass(frozen=True)
class BenchmarkRow:
    """One competitor. Times in microseconds per call.

    ``ratio``: how many times faster than the first row, the median over rounds of the two times' ratio within a round;
    its quartiles tell how far it moved. ``error``: largest one against float64. ``note``: a remark below the table; of
    a row without times, why it has none. ``from_disk``: the compile time is that of loading from the on-disk cache.
    """

    name: str
    median_us: float
    quartile_1_us: float
    quartile_3_us: float
    ratio: float
    compile_s: float | None
    error: float | None
    note: str = ""
    ratio_quartile_1: float = float("nan")
    ratio_quartile_3: float = float("nan")
    from_disk: bool = False


@dataclass(frozen=True)
class BenchmarkTable:
    """Rows of one run, with the machine they were measured on. Prints as a table."""

    title: str
    rows: tuple[BenchmarkRow, ...]
    machine: Mapping[str, Any]

    def to_json(self) -> str:
        """The table as JSON text."""
        return json.dumps(asdict(self), indent=2)

    def row(self, name: str) -> BenchmarkRow:
        """The row called ``name``."""
        return next(r for r in self.rows if r.name == name)

    def to_markdown(self) -> str:
        """The table as Markdown, for a README."""
        lines = ["| | " + " | ".join(_COLUMNS) + " |", "|---" * (len(_COLUMNS) + 1) + "|"]
        lines += ["| " + " | ".join(cells) + " |" for cells in map(_cells, self.rows)]
        remarks = _remarks(self.rows)
        return "\n".join([*lines, *([""] if remarks else []), *(f"- {x}" for x in remarks)])

    def plot(self, path: str | Path) -> Path:
        """Draw medians and quartiles as a PNG. Raises :class:`MissingExtraError` without matplotlib."""
        from graphrl.compiler.benchmark_plot import plot_tables

        return plot_tables([self], path)

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=110).print(self)
        return out.getvalue()

    def __rich__(self) -> Any:
        from rich.table import Table

        caption = "\n".join([*_remarks(self.rows), ", ".join(f"{k} {v}" for k, v in self.machine.items())])
        table = Table("", *_COLUMNS, title=self.title, caption=caption)
        for row in self.rows:
            table.add_row(*_cells(row))
        return table


def benchmark(
    graph: TensorDictModuleBase,
    example: TensorDictBase | dict[Key, Tensor],
    backends: Sequence[str] = ("inductor",),
    *,
    others: Mapping[str, Callable[[], Any]] | None = None,
    repeats: int = 40,
) -> BenchmarkTable:
    """Time ``graph`` eagerly and compiled by each of ``backends``, TensorDict in and out and by ``call``, no gradients.

    Every competitor runs in turn within each of ``repeats`` rounds, so a slow moment of the machine hits all. Reported:
    median and quartiles over rounds, how many times faster than the first row with its own quartiles, compile time
    apart, and the largest error against the float64 interpreter (only where the graph draws no random numbers).
    ``others``: more competitors, as functions without arguments. One that returns what the graph writes, as tensors or
    arrays in ``out_keys`` order or as a TensorDict, has its error in the table too.
    """
    example = as_example(example)
    program = trace(graph, example)
    inputs = [example.get(k).contiguous() for k in program.in_keys]
    reference = None if program.noise else float64_reference(program, inputs)
    scratch = example.copy()
    runs: dict[str, Callable[[], Any]] = {"eager, TensorDict": lambda: graph(scratch)}
    compile_s: dict[str, float] = {}
    from_disk: set[str] = set()
    notes: dict[str, str] = {}
    errors: dict[str, float] = {}
    if reference is not None:
        with torch.no_grad():
            result = graph(example.copy())
        errors["eager, TensorDict"] = _worst([result.get(k) for k in program.out_keys], reference)
    for backend in backends:
        start = time.perf_counter()
        try:
            fast = compile(graph, example, backend=backend, strict=True)
        except CompileError as refusal:
            notes[backend] = str(refusal)
            continue
        label = "interpreter" if backend == "eager" else backend  # "eager" is the graph itself, the base of the ratios
        names = (f"{label}, TensorDict", f"{label}, call")
        compile_s.update(dict.fromkeys(names, time.perf_counter() - start))
        if outcome(fast.entries()[0].program).startswith("hit"):
            from_disk.update(names)
        runs[names[0]] = partial(fast, scratch)
        runs[names[1]] = partial(fast.call, *inputs)
        if reference is not None:
            with torch.no_grad():
                errors.update(dict.fromkeys(names, _worst(fast.call(*inputs), reference)))
    for name, run in (others or {}).items():
        runs[name] = run
        if reference is not None and (found := _tensors(run, program.out_keys)) is not None:
            if [t.shape for t in found] == [t.shape for t in reference]:
                errors[name] = _worst(found, reference)
    with torch.no_grad():
        times = time_interleaved(runs, repeats=repeats)
    rows = list(_rows(times, compile_s, errors, from_disk))
    rows += [refused_row(name, note) for name, note in notes.items()]
    return BenchmarkTable(f"{type(graph).__name__}, batch {list(example.batch_size)}", tuple(rows), machine())


def time_interleaved(
    runs: Mapping[str, Callable[[], Any]], *, repeats: int = 40, round_s: float = 0.01
) -> dict[str, list[float]]:
    """Seconds per call of each function, once per round, all functions taking turns; about ``round_s`` per turn."""
    counts: dict[str, int] = {}
    for name, run in runs.items():
        run()
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < round_s or calls < 3:
            run()
            calls += 1
        counts[name] = max(1, round(calls * round_s / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                run()
            times[name].append((time.perf_counter() - start) / counts[name])
    return times


def table_of(
    title: str,
    times: Mapping[str, Sequence[float]],
    compile_s: Mapping[str, float] | None = None,
    errors: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> BenchmarkTable:
    """A table from the result of :func:`time_interleaved`; ratios are against the first entry."""
    rows = _rows(times, compile_s or {}, errors or {}, (), notes or {})
    return BenchmarkTable(title, tuple(rows), machine())


def refused_row(name: str, reason: str) -> BenchmarkRow:
    """A competitor that did not run, and why."""
    nan = float("nan")
    return BenchmarkRow(name, nan, nan, nan, nan, None, None, reason)


def machine() -> dict[str, Any]:
    """Where and with what a measurement was made."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "graphrl": __version__,
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _rows(
    times: Mapping[str, Sequence[float]],
    compile_s: Mapping[str, float],
    errors: Mapping[str, float],
    from_disk: Collection[str],
    notes: Mapping[str, str] | None = None,
) -> Iterator[BenchmarkRow]:
    base = next(iter(times.values()))
    for name, seconds in times.items():
        low, median, high = (1e6 * s for s in statistics.quantiles(seconds, n=4))
        slow, middle, fast = statistics.quantiles([a / b for a, b in zip(base, seconds, strict=True)], n=4)
        given = compile_s.get(name), errors.get(name), (notes or {}).get(name, "")
        yield BenchmarkRow(name, median, low, high, middle, *given, slow, fast, name in from_disk)


def _tensors(run: Callable[[], Any], keys: Sequence[Key]) -> list[Tensor] | None:
    """What a competitor returns, as one tensor a key; ``None`` where it is something else."""
    with torch.no_grad():
        result = run()
    if isinstance(result, TensorDictBase):
        result = [result.get(key, None) for key in keys]
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    found = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in found]
    return found if len(found) == len(keys) and all(isinstance(x, Tensor) for x in found) else None


def _remarks(rows: Sequence[BenchmarkRow]) -> list[str]:
    return [f"{row.name}: {row.note}" for row in rows if row.note and not math.isnan(row.median_us)]


def _cells(row: BenchmarkRow) -> list[str]:
    if math.isnan(row.median_us):
        return [row.name, "-", "-", "-", "-", row.note]
    return [
        row.name,
        _short(row.median_us),
        f"{_short(row.quartile_1_us)}-{_short(row.quartile_3_us)}",
        f"{_factor(row.ratio)} ({_factor(row.ratio_quartile_1)}-{_factor(row.ratio_quartile_3)})",
        "" if row.compile_s is None else f"{row.compile_s:.1f}{' (disk)' if row.from_disk else ''}",
        "" if row.error is None else f"{row.error:.0e}",
    ]


def _factor(value: float) -> str:
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _worst(found: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(found, reference, strict=True))
