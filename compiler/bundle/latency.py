"""How long a step of a bundle takes on this machine, in every runtime: back to back, and at the control rate."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from graphrl.compiler.bundle.allocations import count_steps
from graphrl.compiler.bundle.c_bench import FLAGS, CBench, Latency, c_memory, measure_c
from graphrl.compiler.bundle.files import dump_json, dump_zip, hash_files, sealed
from graphrl.compiler.bundle.load import Bundle
from graphrl.compiler.bundle.runners import first_row, make_player, why_not_here
from graphrl.compiler.files import replace_file
from graphrl.compiler.machine import cpu_name
from graphrl.errors import BundleError

__all__ = ["bench_bundle", "memory_report", "wait_until", "write_reports"]

SLACK_S = 2e-4
"""The last part of a wait is spent looking at the clock: a sleep may take so much longer than asked."""

MOST_STEPS = 10_000_000
"""Of one measurement: the time of each is kept."""


def bench_bundle(bundle: Bundle, *, rate_hz: float, calls: int = 20_000, seconds: float = 10.0) -> dict[str, Any]:
    """Latency of each target: ``calls`` steps on end, then ``seconds`` at ``rate_hz`` with absolute deadlines.

    C is its own process, built from the bundle's ``bench.c``; the others run here, the first golden row every time,
    state carried. Their allocations and threads are counted apart, in a process for each; Python's own small objects
    are left out, and ``None`` is said where nothing can count (``allocations.py``). ``warm_up``: steps at the start
    that took more than ten times the median. ``subnormal``: all observations 1e-40. Raises
    :class:`BundleError` for a rate or number that is not positive.
    """
    for name, value in (("rate_hz", rate_hz), ("calls", calls), ("seconds", seconds)):
        if not value > 0:
            raise BundleError(f"{name} is {value}: expected a positive number")
    for what, steps in (("calls", calls), (f"{seconds:g} s at {rate_hz:g} Hz", seconds * rate_hz)):
        if not steps <= MOST_STEPS:
            raise BundleError(f"{what}: {steps:.3g} steps; expected {MOST_STEPS:,} at most")
    paced = max(int(seconds * rate_hz), 1)
    manifest, found, skipped = bundle.manifest, {}, {}
    for target in manifest["targets"]:
        if (reason := why_not_here(target, manifest)) is not None:
            skipped[target] = reason
        elif target == "c99":
            prefix = manifest["c"]["prefix"]
            made = measure_c(bundle.path, prefix, calls=calls, rate_hz=rate_hz, paced_calls=paced)
            found[target] = _plain(made, None if made.allocations is None else made.allocations / made.hot.calls)
        else:
            found[target] = _in_python(bundle, target, rate_hz, calls, paced)
    return {
        "contract_hash": manifest["contract_hash"],
        "unit": "us",
        "rate_hz": rate_hz,
        "host": _host(),
        "targets": found,
        "not_run": skipped,
    }


def _plain(found: CBench, allocations_per_call: float | None, warm_up: int = 0) -> dict[str, Any]:
    ratio = found.subnormal.p50 / max(found.hot.p50, 1e-9)
    told = {name: value for name, value in asdict(found).items() if name != "allocations"}
    return {**told, "allocations_per_call": allocations_per_call, "warm_up": warm_up,
            "subnormal_ratio": round(ratio, 3)}  # fmt: skip


def _in_python(bundle: Bundle, target: str, rate_hz: float, calls: int, paced: int) -> dict[str, Any]:
    counts = count_steps(bundle.path, target, calls=min(calls, 200))
    player, row = make_player(target, bundle.path, bundle.manifest), first_row(bundle.path, bundle.manifest)
    tiny = {k: np.full_like(v, 1e-40) if v.dtype.kind == "f" else v for k, v in row.items()}
    hot = [_timed(player.step, row) for _ in range(calls)]
    slow = 10 * float(np.median(hot))
    warm_up = next((i for i, us in enumerate(hot) if us <= slow), 0)
    times, late, overruns, bias = _paced(player.step, row, rate_hz, paced)
    subnormal = [_timed(player.step, tiny) for _ in range(calls // 10 + 1)]
    made = CBench(Latency.of(hot), Latency.of(subnormal), Latency.of(times), Latency.of(late), overruns, bias, None,
                  counts["threads_before"], counts["threads"])  # fmt: skip
    return _plain(made, counts["allocations_per_call"], warm_up)


def _paced(
    step: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any], rate_hz: float, calls: int
) -> tuple[list[float], list[float], int, float]:
    """Times of the steps and how late each began, in us; the steps that ended after the next deadline; period bias."""
    period, times, late, overruns = 1 / rate_hz, [], [], 0
    begin = last = time.perf_counter() + period
    for i in range(calls):
        due = begin + i * period  # absolute: a late step does not move the next one
        wait_until(due)
        last = time.perf_counter()
        times.append(_timed(step, row))
        late.append(1e6 * (last - due))
        overruns += time.perf_counter() > due + period
    bias = 1e6 * ((last - begin) / (calls - 1) - period) if calls > 1 else 0.0
    return times, late, overruns, round(bias, 3)


def wait_until(due: float) -> None:
    """Return once ``time.perf_counter()`` is at ``due``: asleep, and at the end with an eye on the clock."""
    while (left := due - time.perf_counter()) > 0:
        if left > SLACK_S:
            time.sleep(left - SLACK_S)


def _timed(step: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    step(row)
    return 1e6 * (time.perf_counter() - start)


def _host() -> dict[str, Any]:
    return {
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "c_flags": " ".join(FLAGS),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def memory_report(bundle: Bundle) -> dict[str, Any]:
    """Bytes: of the C's weights, scratch, state, stack, code and constants; of every file a target needs."""
    size = {name: (bundle.path / name).stat().st_size for name in bundle.manifest["files"]}
    files = {"onnx": "model.onnx", "pt2": "model.pt2", "executorch": "model.pte"}
    targets: dict[str, Any] = {t: {"file": size[files[t]]} for t in bundle.manifest["targets"] if t in files}
    if "numpy" in bundle.manifest["targets"]:
        targets["numpy"] = {"file": size["graph.json"] + size["weights.safetensors"] + size["runtime.py"]}
    if "c99" in bundle.manifest["targets"] and why_not_here("c99", bundle.manifest) is None:
        targets["c99"] = c_memory(bundle.path, bundle.manifest["c"])
    return {"contract_hash": bundle.manifest["contract_hash"], "unit": "bytes", "targets": targets}


def write_reports(bundle: Bundle, **reports: Mapping[str, Any]) -> None:
    """Put ``reports/NAME.json`` into a bundle, folder or zip, and into its manifest's list of files."""
    for name, report in reports.items():
        replace_file(bundle.path / "reports" / f"{name}.json", dump_json(report).encode())
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    manifest["files"] = hash_files(bundle.path)
    replace_file(bundle.path / "manifest.json", dump_json(sealed(manifest)).encode())
    if bundle.source != bundle.path:
        replace_file(bundle.source, dump_zip(bundle.path))
