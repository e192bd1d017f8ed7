"""Robots' policies at batch 1, one thread: a bundle's C, ONNX and numpy beside what PyTorch offers for the same graph.

A table a policy, then what the C takes of memory, then whether the goals are met. Steps back to back (``hot``): the
runtimes take turns in blocks. Steps at the policy's rate (``paced``): absolute deadlines, and as many runtimes as fit
have one step each in every period, so between two steps of one the others run, as a robot's other work does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from graphrl.bench.robot_policies import POLICIES, Policy, make_policy
from graphrl.bench.robot_runtimes import SAME_C, C, Runtime, Subject, count_allocations, makers
from graphrl.bench.tables import BenchOptions, TextTable, installed
from graphrl.compiler.benchmark import BenchmarkRow, machine
from graphrl.compiler.bundle import Bundle, Contract, export
from graphrl.compiler.bundle.c_bench import FLAGS, Latency, c_memory
from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.compiler.bundle.latency import wait_until
from graphrl.compiler.bundle.parity import measure
from graphrl.errors import GraphRLError
from graphrl.models import LSTMModule
from graphrl.training.threads import torch_threads

__all__ = ["CMemoryTable", "GoalsTable", "Measured", "PolicyTable", "suite"]

BLOCKS = 20
"""Turns of each runtime in the hot part."""
HOT_S = 5.0
"""A runtime too slow for all its calls in this time makes fewer, and the table says how many."""
GROUP_S = 2.0
"""The shortest paced part of a group of runtimes."""
TWICE_AS_FAST = {"MLP": 200_000, "LSTM": 100_000}
"""Parameters up to which the C is to be twice as fast as the best other runtime; elsewhere not slower."""


@dataclass(frozen=True)
class Measured:
    """One runtime on one policy: microseconds, allocations a step, seconds to build, error against float64."""

    name: str
    hot: Latency
    paced: Latency
    allocations: float | None
    build_s: float | None
    error: float


@dataclass(frozen=True)
class PolicyTable(TextTable):
    """All runtimes on one policy. ``rows`` hold the hot times; ``memory`` is that of the C, in bytes."""

    policy: str
    kind: str
    parameters: int
    rate_hz: float
    found: tuple[Measured, ...]
    refused: Mapping[str, str]
    memory: Mapping[str, int | None]

    def of(self, name: str) -> Measured:
        """The runtime called ``name``."""
        return next(m for m in self.found if m.name == name)

    @property
    def best_other(self) -> Measured:
        """The runtime with the lowest hot median, but for the C; ``native`` is the same C, called through Python."""
        return min((m for m in self.found if m.name not in (C, SAME_C)), key=lambda m: m.hot.p50)

    @property
    def ratio(self) -> float:
        """How many times faster the C is than the best other runtime, hot medians."""
        return self.best_other.hot.p50 / self.of(C).hot.p50

    @property
    def goal(self) -> float:
        """The ratio to reach."""
        return 2.0 if self.parameters <= TWICE_AS_FAST.get(self.kind, 0) else 1.0

    @property
    def met(self) -> bool:
        """Whether the C is as fast as its goal asks, and allocates nothing."""
        return self.ratio >= self.goal and self.of(C).allocations == 0

    def verdict(self) -> str:
        """The C beside the best other runtime, and what did not run."""
        best = self.best_other
        said = f"The C takes {_us(self.of(C).hot.p50)} us, {best.name} {_us(best.hot.p50)} us: {self.ratio:.1f} times"
        return ". ".join([said, *(f"{name} did not run: {why}" for name, why in self.refused.items())])

    def cells(self) -> list[list[str]]:
        """A line a runtime."""
        lines = [["", *(f"{part} {p}" for part in ("hot", "paced") for p in ("p50", "p99", "p99.9", "calls")),
                  "mallocs", "build s", "error"]]  # fmt: skip
        for m in self.found:
            times = [x for part in (m.hot, m.paced) for x in (*map(_us, (part.p50, part.p99, part.p999)),
                                                              f"{part.calls:,}")]  # fmt: skip
            build = "" if m.build_s is None else f"{m.build_s:.1f}"
            lines.append([m.name, *times, _count(m.allocations), build, f"{m.error:.0e}"])
        return lines


@dataclass(frozen=True)
class CMemoryTable(TextTable):
    """What the C of each policy takes, in bytes."""

    policies: tuple[PolicyTable, ...]

    def cells(self) -> list[list[str]]:
        """A line a policy."""
        columns = ("source", "object", "weights", "state", "scratch", "stack")
        lines = [["policy", "parameters", *(f"{name} bytes" for name in columns), "build s", "error"]]
        for table in self.policies:
            c, sizes = table.of(C), (_count(table.memory[name]) for name in columns)
            lines.append([table.policy, f"{table.parameters:,}", *sizes, f"{c.build_s or 0:.1f}", f"{c.error:.0e}"])
        return lines

    def verdict(self) -> str:
        """What the columns are."""
        return ("Source: policy.c and policy.h; object: code and constants; stack: of a step at most, all its "
                f"functions together; compiled with {' '.join(FLAGS)}")  # fmt: skip


@dataclass(frozen=True)
class GoalsTable(TextTable):
    """The C of each policy against its goal."""

    policies: tuple[PolicyTable, ...]

    def cells(self) -> list[list[str]]:
        """A line a policy."""
        lines = [["policy", "kind", "parameters", "C hot p50", "paced p50", "best other runtime", "hot p50", "ratio",
                  "goal", "C allocates", ""]]  # fmt: skip
        for t in self.policies:
            best, c = t.best_other, t.of(C)
            lines.append([t.policy, t.kind, f"{t.parameters:,}", _us(c.hot.p50), _us(c.paced.p50), best.name,
                          _us(best.hot.p50), f"{t.ratio:.2f}", f"{t.goal:g}", _count(c.allocations),
                          "met" if t.met else "not met"])  # fmt: skip
        return lines

    def verdict(self) -> str:
        """How many goals are met."""
        missed = [t.policy for t in self.policies if not t.met]
        said = f"{len(self.policies) - len(missed)} of {len(self.policies)} goals are met"
        return f"{said}; not met: {', '.join(missed)}" if missed else said


def suite(
    options: BenchOptions, names: Sequence[str] = tuple(POLICIES), *, calls: int = 20_000, paced_s: float = 6.0,
    shrink: int = 1,
) -> Iterator[TextTable]:  # fmt: skip
    """Measure each policy, and yield its table as soon as it is done; two tables of all of them at the end.

    calls: hot steps of each runtime. paced_s: about how long the paced part of a policy takes. shrink: divides the
    hidden sizes. ``repeats`` plays no part. Raises :class:`GraphRLError` for a GPU, and without a C compiler.
    """
    if options.device != "cpu":
        raise GraphRLError(f"device {options.device!r}: the deploy suite measures on the cpu only")
    if find_compiler() is None:
        raise GraphRLError("the deploy suite needs a C compiler: install gcc or clang, or set CC")
    tables = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad(), torch_threads(options.threads or 1):
            tables.append(_policy_table(make_policy(name, shrink), Path(folder), options, calls, paced_s, shrink))
        yield tables[-1]
    rows = tuple(replace(table.rows[0], name=table.policy, ratio=table.ratio) for table in tables)
    yield CMemoryTable("memory of the C", rows, tables[0].machine, tuple(tables))
    yield GoalsTable("goals: hot medians of the C", rows, tables[0].machine, tuple(tables))


def _policy_table(
    policy: Policy, folder: Path, options: BenchOptions, calls: int, paced_s: float, shrink: int
) -> PolicyTable:
    refused: dict[str, str] = {}
    subject, package_s = _bundles(policy, folder, options, refused)
    runtimes, seconds, errors = _built(subject, refused)
    if (loading := seconds.get("AOTInductor from Python")) is not None:
        seconds["AOTInductor from Python"] = loading + package_s
    hot = _hot(runtimes, calls)
    slowest = max(statistics.median(us) for us in hot.values())
    paced = _paced(runtimes, policy.rate_hz, paced_s, sharing=int(1e6 / policy.rate_hz / (4 * slowest)))
    counts = count_allocations(subject, shrink)
    found = tuple(
        Measured(name, Latency.of(hot[name]), Latency.of(paced[name]), counts.get(name), seconds[name], errors[name])
        for name in runtimes
    )
    parameters = sum(p.numel() for p in policy.graph.parameters())
    title = f"{policy.name}, {parameters:,} parameters, {policy.rate_hz:g} Hz, us a step"
    rows = tuple(_row(m, hot[m.name], hot[C]) for m in found)
    return PolicyTable(title, rows, machine(), policy.name, _kind(policy.graph), parameters, policy.rate_hz, found,
                       refused, _memory(subject.bundle))  # fmt: skip


def _bundles(policy: Policy, folder: Path, options: BenchOptions, refused: dict[str, str]) -> tuple[Subject, float]:
    """The policy's bundle, one more with the AOTInductor package, and the seconds that the latter took."""
    contract = Contract(rate_hz=policy.rate_hz)
    example = torch.cat([*policy.episode(4)])
    onnx = all(installed(package, options) for package in ("onnx", "onnxruntime"))
    if options.peers and not onnx:
        refused["ONNX Runtime"] = "onnx or onnxruntime is not installed: pip install 'graphrl[onnx]'"
    targets = ("c99", *(("onnx",) if onnx else ()), "numpy")
    bundle = export(policy.graph, folder / "bundle", example, targets=targets, contract=contract)
    start, package = time.perf_counter(), None
    try:
        package = export(policy.graph, folder / "package", example, targets=("pt2",), contract=contract)
    except Exception as error:  # as for every runtime that does not work here
        refused["AOTInductor"] = _reason(error)
    return Subject(policy, bundle, package), time.perf_counter() - start


def _built(
    subject: Subject, refused: dict[str, str]
) -> tuple[dict[str, Runtime], dict[str, float | None], dict[str, float]]:
    """Runtimes that work here, the seconds that building each took, and each one's largest error along the vectors."""
    runtimes, seconds, errors, golden = {}, {}, {}, _golden(subject)
    for name, make in makers(subject).items():
        start = time.perf_counter()
        try:
            runtime = make()
            runtime.step()
        except Exception as error:  # one that does not work with this policy or machine has its reason in the table
            refused[name] = _reason(error)
            continue
        seconds[name] = time.perf_counter() - start if runtime.run is not None else None
        runtimes[name] = runtime
        found = runtime.run and measure(golden, subject.bundle.manifest, runtime.run).worst
        errors[name] = subject.bundle.parity["eager"] if found is None else found
    return runtimes, seconds, errors


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _golden(subject: Subject) -> dict[str, np.ndarray]:
    with np.load(subject.bundle.path / "golden.npz", allow_pickle=False) as file:
        return dict(file)


def _hot(runtimes: Mapping[str, Runtime], calls: int) -> dict[str, list[float]]:
    """Microseconds of single steps, all runtimes in turn, in blocks that begin with a few steps that do not count."""
    warm_up = min(20, calls)
    usual = {name: statistics.median(runtime.timed(warm_up)[warm_up // 2 :]) for name, runtime in runtimes.items()}
    times: dict[str, list[float]] = {name: [] for name in runtimes}
    for _ in range(BLOCKS):
        for name, runtime in runtimes.items():
            fitting = min(calls, max(int(1e6 * HOT_S / usual[name]), BLOCKS))
            runtime.timed(warm_up)
            times[name] += runtime.timed(-(-fitting // BLOCKS))
    return times


def _paced(runtimes: Mapping[str, Runtime], rate_hz: float, seconds: float, sharing: int) -> dict[str, list[float]]:
    """Microseconds of steps at the rate; ``sharing`` runtimes step in each period, with deadlines evenly apart."""
    names, slots = list(runtimes), max(1, min(sharing, len(runtimes)))
    groups = [names[i : i + slots] for i in range(0, len(names), slots)]
    steps = max(1, round(rate_hz * max(seconds / len(groups), min(seconds, GROUP_S))))
    times: dict[str, list[float]] = {name: [] for name in names}
    for group in groups:
        begin = time.perf_counter() + 1 / rate_hz
        for k in range(steps):
            for i, name in enumerate(group):
                wait_until(begin + (k + i / slots) / rate_hz)
                times[name] += runtimes[name].timed(1)
    return times


def _kind(graph: nn.Module) -> str:
    """What a goal goes by: ``LSTM``, ``MLP`` (linear layers and their normalisation alone), or ``other``."""
    owners = [m for m in graph.modules() if next(m.parameters(recurse=False), None) is not None]
    if any(isinstance(m, LSTMModule) for m in graph.modules()):
        return "LSTM"
    return "MLP" if all(isinstance(m, (nn.Linear, nn.LayerNorm)) for m in owners) else "other"


def _memory(bundle: Bundle) -> dict[str, int | None]:
    made = c_memory(bundle.path, bundle.manifest["c"], FLAGS)
    source = sum(bundle.path.joinpath("c", f"policy.{end}").stat().st_size for end in "ch")
    code, constants = made["code"], made["constants"]
    size = None if code is None or constants is None else code + constants
    return {"source": source, "object": size, "weights": made["weights"], "state": made["state"],
            "scratch": made["scratch"], "stack": made["stack_at_most"]}  # fmt: skip


def _row(found: Measured, us: Sequence[float], of_c: Sequence[float]) -> BenchmarkRow:
    low, median, high = statistics.quantiles(us, n=4) if len(us) > 1 else (us[0],) * 3
    ratio = statistics.median(of_c) / median
    return BenchmarkRow(found.name, median, low, high, ratio, found.build_s, found.error)


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _count(value: float | None) -> str:
    if value is None:
        return "not counted"
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"
