"""Latency and memory of a bundle's runtimes, at sizes that take no time; the figures themselves are not judged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_gru import CONTRACT, START, gru

from graphrl.cli import main
from graphrl.compiler.bundle import Bundle, allocations, export, latency, load, verify
from graphrl.compiler.bundle.allocations import allocations_per_call, counted
from graphrl.compiler.bundle.c_bench import measure_c
from graphrl.errors import BundleError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(gru(), tmp_path_factory.mktemp("bench") / "b", START, contract=CONTRACT, targets=("c99", "numpy"))


def test_every_runtime_is_timed_hot_and_paced(made: Bundle) -> None:
    report = latency.bench_bundle(made, rate_hz=500, calls=300, seconds=0.02)
    assert set(report["targets"]) == {"c99", "numpy"} and report["contract_hash"] == made.manifest["contract_hash"]
    for found in report["targets"].values():
        assert found["hot"]["calls"] == 300 and found["paced"]["calls"] == found["late"]["calls"] == 10
        for part in ("hot", "paced", "subnormal"):
            assert 0 <= found[part]["p50"] <= found[part]["p99"] <= found[part]["p999"] <= found[part]["max"]
        assert found["threads"] == found["threads_before"] and found["subnormal_ratio"] > 0
    c, py = (report["targets"][name] for name in ("c99", "numpy"))
    assert c["allocations_per_call"] == 0 and c["threads"] == 1  # beside whatever else runs here
    assert py["allocations_per_call"] > 1 and isinstance(report["host"]["processor"], str)
    for bad in ({"rate_hz": 0}, {"rate_hz": 50, "calls": 0}, {"rate_hz": 50, "seconds": -1}):
        with pytest.raises(BundleError, match="expected a positive number"):
            latency.bench_bundle(made, **bad)
    for endless in ({"rate_hz": 1e12}, {"rate_hz": 50, "calls": 10**12}, {"rate_hz": 50, "seconds": float("inf")}):
        with pytest.raises(BundleError, match="steps; expected 10,000,000 at most"):
            latency.bench_bundle(made, **endless)


def test_allocations_of_c_are_counted(made: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.path, tmp_path / "b"))
    source = folder / "c" / "policy.c"
    waste = "uint32_t status = 0u; { extern void *malloc(size_t); char *volatile p = malloc(8u); (void)p; }"
    source.write_text(source.read_text().replace("uint32_t status = 0u;", waste))
    assert measure_c(folder, "policy", calls=50, flags=("-O0",)).allocations == 50


COUNTED = """
import ctypes, numpy as np
from graphrl.compiler.bundle.allocations import allocations_per_call
c = ctypes.CDLL(None)
c.malloc.restype = c.calloc.restype = c.aligned_alloc.restype = ctypes.c_void_p
def three():
    for memory in (c.malloc(8), c.calloc(2, 8), c.aligned_alloc(64, 64)):
        c.free(ctypes.c_void_p(memory))
print(allocations_per_call(three, 50), allocations_per_call(lambda: np.empty(10_000), 50),
      allocations_per_call(lambda: (1.5, [1]), 50))
"""


def test_allocations_of_a_process_are_counted_and_those_of_the_loop_left_out() -> None:
    with counted() as environment:
        command = [sys.executable, "-c", COUNTED]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.split() == ["3.0", "1.0", "0.0"]
    assert allocations_per_call(lambda: None, 1) is None  # nothing counts in this process


def test_without_a_compiler_nothing_counts_and_threads_are_told_all_the_same(
    made: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocations, "find_compiler", lambda: None)
    found = allocations.count_steps(made.path, "numpy", calls=3)
    assert found["allocations_per_call"] is None and found["threads"] == found["threads_before"]
    with pytest.raises(BundleError, match="counting the allocations of lisp fails: KeyError"):
        allocations.count_steps(made.path, "lisp")


def test_paced_steps_keep_absolute_deadlines() -> None:
    """A late step does not move the ones after it, and is counted."""
    steps = iter([0.0, 0.012, 0.0, 0.0, 0.0, 0.0])
    start = time.perf_counter()
    times, late, overruns, bias = latency._paced(lambda row: time.sleep(next(steps)), {}, 200.0, 6)
    assert len(times) == len(late) == 6 and max(times) >= 12_000
    assert overruns >= 1 and late[2] >= 6_500  # due 5 ms after a step that took 12
    assert time.perf_counter() - start >= 0.005 + 0.025
    assert min(late) >= 0 and bias < 5_000


def test_memory_is_told_in_bytes(made: Bundle) -> None:
    c = latency.memory_report(made)["targets"]["c99"]
    assert c["weights"] == made.manifest["c"]["weight_bytes"] and c["state"] == 4 * (1 + 8 + 8)
    assert c["scratch"] == sum(4 * m["size"] for m in made.manifest["c"]["scratch"]) > 0
    for name in ("stack_at_most", "code", "constants"):
        assert c[name] is None or c[name] > 0
    files = latency.memory_report(made)["targets"]["numpy"]["file"]
    assert files == sum((made.path / n).stat().st_size for n in ("graph.json", "weights.safetensors", "runtime.py"))


@pytest.mark.parametrize("name", ["b", "b.zip"])
def test_the_command_prints_and_writes_into_the_bundle(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(gru(), tmp_path / name, START, contract=CONTRACT, targets=("numpy",))
    command = ["bundle-bench", str(tmp_path / name), "--calls", "20", "--seconds", "0.02"]
    assert main(command) == 0 and "reports/latency.json" not in load(tmp_path / name).manifest["files"]
    assert main([*command, "--rate", "200", "--write"]) == 0
    text = capsys.readouterr().out
    for part in ("numpy", "p99.9", "paced at 50 Hz", "paced at 200 Hz", "allocations a call", "overruns", "memory"):
        assert part in text, part
    bundle = load(tmp_path / name)
    report = json.loads((bundle.path / "reports" / "latency.json").read_text())
    assert report["rate_hz"] == 200 and report["targets"]["numpy"]["hot"]["calls"] == 20
    assert (bundle.path / "reports" / "memory.json").is_file() and "numpy" in verify(tmp_path / name).errors


def test_without_a_rate_the_command_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    contract = replace(CONTRACT, rate_hz=None, observations=None)
    export(gru(), tmp_path / "b", START, contract=contract, targets=("numpy",))
    assert main(["bundle-bench", str(tmp_path / "b")]) == 2
    assert "states no rate_hz: give --rate" in capsys.readouterr().err


def test_beside_a_busy_process_the_c_is_timed_on_one_thread_and_allocates_nothing(made: Bundle) -> None:
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as busy:
        try:
            found = measure_c(made.path, "policy", calls=10_000, flags=("-O1",))
        finally:
            busy.kill()
    assert found.hot.calls == 10_000 and 0 < found.hot.p50 <= found.hot.p99 <= found.hot.p999 <= found.hot.max
    assert found.allocations == 0 and found.threads == found.threads_before
