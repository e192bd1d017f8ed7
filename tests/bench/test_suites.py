import json
import os

import pytest
import torch

from graphrl.bench import ensemble, run_suites
from graphrl.bench.collector import frames_per_second, suite
from graphrl.bench.tables import BenchOptions, cold_caches, installed
from graphrl.cli import main
from graphrl.errors import GraphRLError

OPTIONS = BenchOptions(peers=False, repeats=2, round_s=0.0)


def test_collector_without_peers():
    pytest.importorskip("mujoco")
    (table,) = suite(OPTIONS, frames=20)
    assert len(table.rows) == 4 and all(rate > 0 for rate in frames_per_second(table).values())


def test_ensemble_of_two_small_critics(monkeypatch):
    monkeypatch.setattr(ensemble, "REDQ_CRITICS", 2)
    options = BenchOptions(repeats=2, round_s=0.0)
    table = ensemble._table("small", ensemble._redq, ensemble._torchrl_redq, ensemble._batch("cpu"), 4, options)
    compiled = table.row("graphrl, compile_update")
    assert compiled.median_us > 0 and compiled.compile_s > 0 and not compiled.note
    if installed("torchrl", options):
        assert table.row("torchrl, eager").median_us > 0
        row = table.row("torchrl's loss, compile_update")  # compiled, or with the reason why it is not
        assert row.median_us > 0 or row.note


def test_a_sac_step_moves_what_it_should():
    step = ensemble._sac(8, "cpu", False)
    cells = dict(zip(step.__code__.co_freevars, (c.cell_contents for c in step.__closure__), strict=True))
    watched = {name: [p.detach().clone() for p in cells[name].parameters()] for name in ("critics", "targets")}
    batch = ensemble._batch("cpu")
    assert all(value.isfinite() for value in step(batch).values())
    for name, before in watched.items():
        assert all(not torch.equal(a, b) for a, b in zip(before, cells[name].parameters(), strict=True))


def test_compile_times_are_of_cold_caches(monkeypatch):
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with cold_caches():
        assert os.environ["GRAPHRL_CACHE_DIR"] != "mine" and "TORCHINDUCTOR_CACHE_DIR" in os.environ
    assert os.environ["GRAPHRL_CACHE_DIR"] == "mine" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_policy_and_update_through_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, page, plot = tmp_path / "bench.json", tmp_path / "bench.md", tmp_path / "bench.png"
    arguments = ["bench", "--suite", "policy,update", "--no-peers", "--repeats", "2"]
    assert main([*arguments, "--json", str(file), "--markdown", str(page), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    policy, update = json.loads(file.read_text())
    names = [row["name"] for row in policy["rows"]]
    assert {"eager, TensorDict", "inductor, call", "native, call", "nn.Sequential, eager"} <= set(names)
    assert {"plain PyTorch, eager", "graphrl, compile_update"} <= {row["name"] for row in update["rows"]}
    assert page.read_text().count("###") == 2 and "PPO update" in capsys.readouterr().out


def test_wrong_names_are_found_first():
    with pytest.raises(GraphRLError, match="Did you mean 'policy'"):
        list(run_suites(["polcy"]))
    with pytest.raises(GraphRLError, match="device"):
        list(run_suites(["kernels"], device="tpu"))
