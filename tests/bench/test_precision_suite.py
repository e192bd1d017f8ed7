import pytest

from graphrl.bench import precision, run_suites, to_markdown
from graphrl.bench.precision import LearningTable, Training
from graphrl.bench.tables import BenchOptions
from graphrl.compiler.benchmark import table_of
from graphrl.errors import GraphRLError


def table(full: list[float], low: list[float], start: float = -1000.0) -> LearningTable:
    ends = {"float32": full, "bf16": low}
    trainings = [Training(p, i, (start, end), (1.0, 1.0)) for p in ends for i, end in enumerate(ends[p])]
    speed = table_of("made up", {"float32": [1e-4, 1e-4], "bf16": [2e-4, 2e-4]})
    return LearningTable(speed.title, speed.rows, speed.machine, tuple(trainings))


def test_both_tasks_train_in_both_precisions_from_the_same_start(monkeypatch):
    # The interpreter runs the same rounded programs and compiles nothing.
    for name in ("compile", "compile_update"):
        function = getattr(precision, name)
        monkeypatch.setattr(precision, name, lambda *a, f=function, **k: f(*a, **{**k, "backend": "eager"}))
    tables = precision.suite(BenchOptions(), seeds=[3], ppo_frames=256, sac_frames=64)
    assert [t.title for t in tables] == ["PPO on Pendulum-v1, 256 frames", "SAC on Pendulum-v1, 64 frames"]
    for found in tables:
        full, low = found.trainings
        assert (full.precision, full.seed, low.precision, low.seed) == ("float32", 3, "bf16", 3)
        assert full.returns[0] == low.returns[0] and full.returns[-1] != full.returns[0]
        assert full.returns[-1] != low.returns[-1]  # bf16 was at work
        assert found.row("float32").median_us > 0 and found.row("bf16").median_us > 0
        assert f"{low.returns[-1]:.1f}" in str(found)
    assert to_markdown(tables).count("| bf16 | 3 |") == 2


@pytest.mark.parametrize(
    ("low", "fine"),
    [([-215.0, -255.0], True), ([-230.0, -300.0], True), ([-280.0, -320.0], False), ([-9.0, -9.0], True)],
)
def test_no_worse_allows_a_tenth_of_the_gain_or_the_spread(low, fine):
    found = table([-180.0, -220.0], low)
    assert found.no_worse is fine
    assert found.verdict().startswith("bf16 is no worse" if fine else "bf16 is worse")
    assert f"| bf16 | mean | -1000.0 | {sum(low) / 2:.1f} | 200 |" in found.to_markdown()


def test_what_is_allowed_is_the_larger_of_gain_and_spread():
    assert table([-200.0, -200.0], [-200.0, -200.0]).allowed == pytest.approx(80)
    spread = table([-200.0, -200.0], [-400.0, 0.0])
    assert spread.allowed == pytest.approx(((0 + 80000) / 2) ** 0.5)
    assert table([-1100.0], [-1100.0]).allowed == 0  # nothing was learned


def test_the_suite_runs_when_named_and_on_the_cpu():
    with pytest.raises(GraphRLError, match="Did you mean 'precision'"):
        list(run_suites(["precison"]))
    with pytest.raises(GraphRLError, match="cpu only"):
        precision.suite(BenchOptions(device="cuda"))
