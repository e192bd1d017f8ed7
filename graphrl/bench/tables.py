"""What the suites share: options, timing on either device, finding peers, Markdown."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrl.compiler.benchmark import BenchmarkTable, table_of, time_interleaved
from graphrl.training.threads import torch_threads

__all__ = ["BenchOptions", "TextTable", "cold_caches", "installed", "measure", "to_markdown"]


@dataclass(frozen=True)
class BenchOptions:
    """``round_s``: about how long a competitor runs before the next has its turn. ``threads``: of torch, for every
    competitor alike; networks as small as these gain nothing from more than one. None: torch's own setting."""

    device: str = "cpu"
    peers: bool = True
    repeats: int = 30
    round_s: float = 0.01
    threads: int | None = 1


class TextTable(BenchmarkTable):
    """A table with columns of its own, for which its class gives the text, and a verdict below."""

    def cells(self) -> list[list[str]]:
        """The header, then the lines."""
        raise NotImplementedError

    def verdict(self) -> str:
        """What the table says, in a line."""
        raise NotImplementedError

    def to_markdown(self) -> str:
        """The table as Markdown, with the verdict below it."""
        header, *lines = self.cells()
        text = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]
        return "\n".join([*text, "", f"{self.verdict()}."])

    def __rich__(self) -> Any:
        from rich.table import Table

        header, *lines = self.cells()
        table = Table(*header, title=self.title, caption=self.verdict(), padding=(0, 0, 0, 1))
        table.columns[0].no_wrap = True
        for cells in lines:
            table.add_row(*cells)
        return table


def installed(package: str, options: BenchOptions) -> bool:
    """Whether a peer is wanted and there."""
    return options.peers and importlib.util.find_spec(package) is not None


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Keep what is compiled in this block in a folder that starts empty: compile times are then of a first time,
    for graphrl and for ``torch.compile`` alike (but for the C++ headers that torch compiles once a machine)."""
    names = ("GRAPHRL_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {name: os.path.join(folder, name) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def measure(
    title: str,
    runs: Mapping[str, Callable[[], Any]],
    options: BenchOptions,
    *,
    per_call: int = 1,
    compile_s: Mapping[str, float] | None = None,
    errors: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> BenchmarkTable:
    """Time the competitors in turn; ratios are against the first.

    per_call: units of work in a call (frames, steps); times are then those of one unit. compile_s, errors, notes: of
    those that have one, as in :class:`BenchmarkRow`. On a GPU every call waits for its results, so what is timed is
    the work, not its launch.
    """
    if options.device == "cuda":
        runs = {name: _synchronised(run) for name, run in runs.items()}
    with torch_threads(options.threads or torch.get_num_threads()):
        times = time_interleaved(runs, repeats=options.repeats, round_s=options.round_s)
        each = {name: [s / per_call for s in seconds] for name, seconds in times.items()}
        return table_of(title, each, compile_s, errors, notes)


def _synchronised(run: Callable[[], Any]) -> Callable[[], Any]:

    def waiting() -> None:
        run()
        torch.cuda.synchronize()

    return waiting


def to_markdown(tables: Sequence[BenchmarkTable]) -> str:
    """The tables as a page, with the machine once at the end."""
    parts = [f"### {table.title}, {table.machine['threads']} thread(s)\n\n{table.to_markdown()}\n" for table in tables]
    if tables:
        facts = ", ".join(f"{k} {v}" for k, v in tables[0].machine.items() if k != "threads")
        parts.append(f"Measured on {facts}.\n")
    return "\n".join(parts)
