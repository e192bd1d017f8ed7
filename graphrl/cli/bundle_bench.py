"""``graphrl bundle-bench BUNDLE``: how long a step takes here in every runtime of a bundle, and its memory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

__all__ = ["run"]


@dataclass(frozen=True)
class BundleBench:
    """Time a bundle's runtimes back to back and at the control rate; allocations, threads, memory."""

    bundle: Annotated[str, tyro.conf.Positional]
    """A bundle's folder, or its .zip."""
    rate: float | None = None
    """Control steps a second of the paced part; default: the contract's rate_hz."""
    calls: int = 20_000
    """Steps back to back."""
    seconds: float = 10.0
    """Length of the paced part, for each runtime."""
    write: bool = False
    """Put reports/latency.json and reports/memory.json into the bundle."""


def run(arguments: list[str]) -> None:
    """Print the tables. Raises :class:`BundleError` where neither the command nor the contract states a rate."""
    options = tyro.cli(BundleBench, prog="graphrl bundle-bench", args=arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is there; a robot has one core to spare
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from rich.console import Console

    from graphrl.compiler.bundle.latency import bench_bundle, memory_report, write_reports
    from graphrl.compiler.bundle.load import load
    from graphrl.errors import BundleError

    bundle = load(options.bundle)
    rate = options.rate if options.rate is not None else bundle.contract["rate_hz"]
    if rate is None:
        raise BundleError(f"the contract of {options.bundle} states no rate_hz: give --rate")
    latency = bench_bundle(bundle, rate_hz=rate, calls=options.calls, seconds=options.seconds)
    memory = memory_report(bundle)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_latency(latency))
    console.print(_memory(memory))
    for target, reason in latency["not_run"].items():
        console.print(f"{target} not run: {reason}")
    if options.write:
        write_reports(bundle, latency=latency, memory=memory)


def _latency(report: dict[str, Any]) -> Any:
    from rich.table import Table

    host = report["host"]
    title = f"us a step on {host['processor']}, {host['cores']} cores; paced at {report['rate_hz']:g} Hz"
    table = Table("target", "", "calls", "p50", "p99", "p99.9", "max", "allocations a call", "threads", title=title)
    for target, found in report["targets"].items():
        allocations = found["allocations_per_call"]
        counted = "not counted" if allocations is None else f"{allocations:g}"
        threads = f"{found['threads_before']} then {found['threads']}"
        for part in ("hot", "paced", "late", "subnormal"):
            figures = [f"{found[part][name]:.2f}" for name in ("p50", "p99", "p999", "max")]
            last = (counted, threads) if part == "hot" else ("", "")
            table.add_row(target if part == "hot" else "", part, f"{found[part]['calls']:,}", *figures, *last)
        table.add_row("", f"{found['overruns']} overruns, period {found['period_bias_us']:+.2f} us")
    return table


def _memory(report: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("target", "what", "bytes", title="memory")
    for target, sizes in report["targets"].items():
        for i, (name, size) in enumerate(sizes.items()):
            shown = "not known" if size is None else f"{size:,}"
            table.add_row("" if i else target, name.replace("_", " "), shown)
    return table
