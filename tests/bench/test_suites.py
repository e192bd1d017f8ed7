import json

import pytest

from graphrl.bench import run_suites, to_markdown
from graphrl.bench.collector import frames_per_second, suite
from graphrl.bench.gae import suite as gae_suite
from graphrl.bench.tables import BenchOptions
from graphrl.cli import main
from graphrl.errors import GraphRLError

OPTIONS = BenchOptions(peers=False, repeats=2, round_s=0.0)


def test_gae_without_peers():
    (table,) = gae_suite(OPTIONS, size=20)
    assert [row.name for row in table.rows] == ["graphrl", "numpy, loop over time", "torch copy of the same bytes"]
    assert all(row.median_us > 0 for row in table.rows)
    assert "| graphrl |" in to_markdown([table])


def test_collector_without_peers():
    pytest.importorskip("mujoco")
    (table,) = suite(OPTIONS, frames=20)
    assert len(table.rows) == 4 and all(rate > 0 for rate in frames_per_second(table).values())


def test_policy_and_update_through_the_command(tmp_path, capsys):
    file, page = tmp_path / "bench.json", tmp_path / "bench.md"
    arguments = ["bench", "--suite", "policy,update", "--no-peers", "--repeats", "2"]
    assert main([*arguments, "--json", str(file), "--markdown", str(page)]) == 0
    policy, update = json.loads(file.read_text())
    names = [row["name"] for row in policy["rows"]]
    assert {"eager, TensorDict", "inductor, call", "native, call", "nn.Sequential, eager"} <= set(names)
    assert {"plain PyTorch, eager", "graphrl, compile_update"} <= {row["name"] for row in update["rows"]}
    assert page.read_text().count("###") == 2 and "PPO update" in capsys.readouterr().out


def test_wrong_names_are_found_first():
    with pytest.raises(GraphRLError, match="Did you mean 'policy'"):
        list(run_suites(["polcy"]))
    with pytest.raises(GraphRLError, match="device"):
        list(run_suites(["gae"], device="tpu"))
