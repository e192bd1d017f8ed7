"""``graphrl bench``: the suites of ``graphrl.bench``, printed and written."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from graphrl.errors import require_extra

__all__ = ["run"]


@dataclass(frozen=True)
class Bench:
    """Measure graphrl beside its peers. All competitors of a suite take turns in one run."""

    suite: str = "policy,update,ensemble,kernels,collector"
    """Comma-separated. Not among these: foreign (other libraries' models), precision (minutes of training),
    deploy (thirteen robots' policies, minutes)."""
    device: str = "cpu"
    peers: bool = True
    """Include other libraries where they are installed."""
    repeats: int = 30
    """Rounds; median and quartiles are over these."""
    json: str | None = None
    """Write the tables as JSON to this file."""
    markdown: str | None = None
    """Write the tables as Markdown to this file, or, where it has them, between its <!-- bench --> marks."""
    plot: str | None = None
    """Draw the tables to this PNG file; needs matplotlib."""


def run(arguments: list[str]) -> None:
    """Run the suites; print each table as it is done."""
    options = tyro.cli(Bench, prog="graphrl bench", args=arguments)
    if "deploy" in options.suite.split(","):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is there: its runtime too gets one thread
    from rich.console import Console

    from graphrl.bench import run_suites, to_markdown

    if options.plot is not None:
        require_extra("matplotlib", "plot")  # before minutes of measuring
    console = Console(width=None if sys.stdout.isatty() else 120)
    tables = []
    for table in run_suites(options.suite.split(","), options.device, options.peers, options.repeats):
        console.print(table)
        tables.append(table)
    if options.json is not None:
        Path(options.json).write_text(json.dumps([json.loads(t.to_json()) for t in tables], indent=2) + "\n")
    if options.plot is not None:
        from graphrl.compiler.benchmark_plot import plot_tables

        plot_tables(tables, options.plot)
    if options.markdown is not None:
        _write_markdown(Path(options.markdown), to_markdown(tables))


def _write_markdown(path: Path, tables: str) -> None:
    begin, end = "<!-- bench -->", "<!-- /bench -->"
    page = path.read_text() if path.is_file() else ""
    if begin in page and end in page:
        tables = f"{page[: page.index(begin)]}{begin}\n{tables}{page[page.index(end) :]}"
    path.write_text(tables)
