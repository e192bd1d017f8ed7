"""The suite of robots' policies: runtimes agree and carry their state, steps keep their times, goals are judged."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from graphrl.bench import deploy, run_suites, to_markdown
from graphrl.bench.deploy import GoalsTable, Measured, PolicyTable, suite
from graphrl.bench.robot_policies import POLICIES, make_policy
from graphrl.bench.robot_runtimes import SAME_C, C, Runtime, makers
from graphrl.bench.tables import BenchOptions
from graphrl.compiler.benchmark import machine
from graphrl.compiler.bundle.c_bench import Latency
from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.errors import BundleError, GraphRLError

needs_cc = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


def measured(name: str, us: float, allocations: float | None = 0.0) -> Measured:
    return Measured(name, Latency.of([us] * 4), Latency.of([3 * us] * 2), allocations, None, 1e-7)


def table(c: Measured, *others: Measured, kind: str = "MLP", parameters: int = 1000) -> PolicyTable:
    memory = dict.fromkeys(("source", "object", "weights", "state", "scratch", "stack"), 8)
    return PolicyTable("made up", (), machine(), "made up", kind, parameters, 50.0, (c, *others), {}, memory)


@pytest.mark.parametrize(
    ("kind", "parameters", "c", "other", "met"),
    [
        ("MLP", 200_000, 1.0, 2.0, True), ("MLP", 200_000, 1.0, 1.9, False), ("MLP", 200_001, 1.0, 1.0, True),
        ("LSTM", 100_000, 1.0, 1.9, False), ("LSTM", 100_001, 1.0, 1.9, True), ("other", 10, 1.0, 0.9, False),
    ],
)  # fmt: skip
def test_a_goal_goes_by_kind_and_size(kind: str, parameters: int, c: float, other: float, met: bool) -> None:
    found = table(measured(C, c), measured("slow", 9.0), measured("other", other), kind=kind, parameters=parameters)
    assert found.best_other.name == "other" and found.ratio == pytest.approx(other / c) and found.met is met


def test_the_same_c_is_no_other_runtime_and_an_allocation_misses_the_goal() -> None:
    fine = table(measured(C, 1.0), measured(SAME_C, 0.5), measured("other", 2.0))
    wasteful = replace(fine, policy="wasteful", found=(measured(C, 1.0, 1.0), *fine.found[1:]))
    uncounted = replace(fine, policy="uncounted", found=(measured(C, 1.0, None), *fine.found[1:]))
    assert fine.best_other.name == "other" and (fine.met, wasteful.met, uncounted.met) == (True, False, False)
    goals = GoalsTable("goals", (), machine(), (fine, wasteful, uncounted))
    assert goals.verdict() == "1 of 3 goals are met; not met: wasteful, uncounted"
    assert "| made up | MLP | 1,000 | 1.00 | 3.00 | other | 2.00 | 2.00 | 2 | 0 | met |" in goals.to_markdown()


def test_kinds_are_those_of_the_goals() -> None:
    kinds = {name: deploy._kind(make_policy(name, 16).graph) for name in POLICIES}
    assert {name for name, kind in kinds.items() if kind == "LSTM"} == {"h1_lstm", "g1_lstm", "g1_29_lstm"}
    assert {name for name, kind in kinds.items() if kind == "other"} == {"depth_parkour", "digit"}


def test_paced_steps_share_a_period_and_keep_their_deadlines() -> None:
    begun: list[tuple[str, float]] = []
    runtimes = {n: Runtime(lambda n=n: begun.append((n, time.perf_counter()))) for n in "abc"}  # type: ignore[misc]
    start = time.perf_counter()
    times = deploy._paced(runtimes, 100.0, 0.06, sharing=2)
    assert [n for n, _ in begun] == ["a", "b"] * 6 + ["c"] * 6 and all(len(us) == 6 for us in times.values())
    for at, due in ((0, 0.01), (1, 0.015), (10, 0.06), (11, 0.065), (17, 0.125)):
        assert begun[at][1] >= start + due  # never early; late is the machine's own affair


def test_a_slow_runtime_makes_fewer_calls_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "HOT_S", 0.04)
    times = deploy._hot({"slow": Runtime(lambda: time.sleep(1e-3)), "fast": Runtime(lambda: None)}, 200)
    assert 20 <= len(times["slow"]) <= 40 and len(times["fast"]) == 200


@needs_cc
def test_runtimes_agree_and_carry_their_state(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    whole = deploy.export

    def no_package(*arguments, targets, **options):
        if "pt2" in targets:
            raise BundleError("no package today")
        return whole(*arguments, targets=targets, **options)

    monkeypatch.setattr(deploy, "export", no_package)
    refused: dict[str, str] = {}
    subject, _ = deploy._bundles(make_policy("g1_lstm", 16), tmp_path, BenchOptions(), refused)
    assert refused == {"AOTInductor": "no package today"} and subject.package is None
    with torch.no_grad():
        made = {name: make() for name, make in makers(subject).items() if "inductor" not in name}  # takes seconds
        for _ in range(5):
            last = {name: runtime.step() for name, runtime in made.items()}
    wanted, at = last["eager graph"]["action"], subject.keys("outputs").index("action")
    assert not torch.equal(wanted, made["eager graph"].step()["action"])  # the state still moves
    found = {n: last[n][at] for n in ("TorchScript, frozen", "ONNX Runtime, run", SAME_C)}
    found["ONNX Runtime, IO binding"] = last["ONNX Runtime, IO binding"].copy_outputs_to_cpu()[at]
    found["numpy runtime"] = last["numpy runtime"]["action"]
    for name, action in found.items():
        torch.testing.assert_close(torch.as_tensor(action).reshape(wanted.shape), wanted, msg=name)
    with torch.no_grad():
        error = {n: deploy.measure(deploy._golden(subject), subject.bundle.manifest, r.run).worst
                 for n, r in made.items() if r.run}  # fmt: skip
    assert len(made[C].timed(7)) == 7 and min(made[C].timed(7)) > 0
    assert set(error) == {*found, C} and max(error.values()) < 1e-5


@needs_cc
@pytest.mark.slow
def test_the_suite_measures_every_runtime() -> None:
    pytest.importorskip("onnxruntime")
    found, memory, goals = suite(BenchOptions(), ["h1_lstm"], calls=40, paced_s=0.05, shrink=16)
    assert not found.refused and len(found.found) == len(found.rows) == 9
    assert all(m.hot.p50 > 0 and m.paced.calls > 0 and m.error < 1e-5 for m in found.found)
    others = [m.allocations for m in found.found if m.name not in (C, SAME_C)]
    assert found.of(C).allocations == 0 and min(others) > 1
    assert found.of("AOTInductor from Python").build_s > found.of("ONNX Runtime, run").build_s > 0
    assert all(size > 0 for size in found.memory.values())
    assert json.loads(found.to_json())["found"][0]["hot"]["calls"] == 40
    assert goals.policies == memory.policies == (found,)
    page = to_markdown([found, memory, goals])
    assert "| ONNX Runtime, IO binding |" in page and "goals are met" in page and "state bytes" in page


def test_the_suite_runs_when_named_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphRLError, match="Did you mean 'deploy'"):
        list(run_suites(["deply"]))
    with pytest.raises(GraphRLError, match="cpu only"):
        list(suite(BenchOptions(device="cuda")))
    monkeypatch.setattr(deploy, "find_compiler", lambda: None)
    with pytest.raises(GraphRLError, match="needs a C compiler"):
        list(suite(BenchOptions()))
