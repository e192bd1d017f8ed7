import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from graphrl import KeyedGraph
from graphrl.cli import main
from graphrl.cli.export import within_bounds
from graphrl.compiler.bundle import load
from graphrl.models import RunningNorm
from graphrl.specs import Bounded, Unbounded
from graphrl.training import PPOConfig, load_config, load_policy, preset
from graphrl.training.checkpoint import load_checkpoint

FAST = (
    "--env.id Pendulum-v1 --env.num-envs 2 --frames-per-batch 64 --minibatch 32 --epochs 1 --policy-backend eager "
    "--update-backend eager --eval-episodes 0 "
    "--no-tensorboard --no-curve"
).split()


def train(*arguments):
    return main(["train", "ppo", *FAST, "--total-frames", "64", *map(str, arguments)])


def error_line(capsys):
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("error:") == 1
    return err[err.index("error:") :].strip()


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("train", "bench", "explain", "export", "verify", "demo"))


def test_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert "Did you mean 'train'" in error_line(capsys)


def test_unknown_algorithm(capsys):
    assert main(["train", "pop"]) == 2
    assert "Did you mean 'ppo'" in error_line(capsys)


def test_train_then_resume_then_export_then_verify(tmp_path, capsys):
    run = tmp_path / "run"
    assert train("--out", run) == 0
    assert main(["train", "ppo", "--resume", str(run), "--total-frames", "128", "--quiet"]) == 0
    assert "128 frames" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "bundle"), "--targets", "c99"]) == 0
    assert main(["verify", str(tmp_path / "bundle")]) == 0
    (tmp_path / "bundle" / "golden.npz").write_bytes(b"")
    assert main(["verify", str(tmp_path / "bundle")]) == 2


def test_unknown_environment(tmp_path, capsys):
    assert train("--env.id", "Pendulun-v1", "--out", tmp_path / "run") == 2
    assert "Did you mean 'Pendulum-v1'" in error_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train("--out", tmp_path / "file" / "run") == 2
    assert "cannot write" in error_line(capsys)


def test_a_corrupt_checkpoint(tmp_path, capsys):
    assert train("--out", tmp_path / "run") == 0
    capsys.readouterr()
    (path,) = (tmp_path / "run" / "checkpoint").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    for arguments in (["train", "ppo", "--resume", str(tmp_path / "run")], ["export", str(tmp_path / "run"), "x"]):
        assert main(arguments) == 2
        assert "damaged" in error_line(capsys)


def test_a_missing_extra(tmp_path, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else real(name, *a))
    assert train("--out", tmp_path / "run", "--tensorboard") == 2
    assert "graphrl[tensorboard]" in error_line(capsys)
    assert not (tmp_path / "run").exists()
    assert train("--out", tmp_path / "run", "--tensorboard", "None") == 0


def test_debug_lets_the_error_through(tmp_path):
    from graphrl.errors import EnvError

    with pytest.raises(EnvError):
        train("--env.id", "Pendulun-v1", "--out", tmp_path / "run", "--debug")


def test_settings_of_an_environment_are_defaults_and_announced(tmp_path, capsys):
    small = ["--total-frames", "16", "--frames-per-batch", "16", "--minibatch", "16", "--epochs", "1"]
    eager = ["--policy-backend", "eager", "--update-backend", "eager", "--eval-episodes", "0", "--no-tensorboard"]
    out = tmp_path / "run"
    assert main(["train", "ppo", "--env.id=Pendulum-v1", *small, *eager, "--lr", "0.01", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "settings for Pendulum-v1: env.num_envs 8, gamma 0.95, reward_scale 0.1\n" in said.err
    assert "compiling" in said.err
    config = load_config(out)
    assert (config.env.num_envs, config.gamma, config.lr, config.total_frames) == (8, 0.95, 0.01, 16)
    assert (out / "curve.png").exists() == ("curve.png" in said.out) == bool(find_spec("matplotlib"))
    assert PPOConfig() == preset("HalfCheetah-v5")


@pytest.mark.parametrize("other", [["--env.id", "CartPole-v1"], ["--num-cells", "8"]])
def test_resume_as_another_run_is_refused_before_anything_is_touched(tmp_path, capsys, other):
    run = tmp_path / "run"
    assert train("--out", run) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", "ppo", "--resume", str(run), *other]) == 2
    line = error_line(capsys)
    assert ("'Pendulum-v1'" in line and "'CartPole-v1'" in line) or ("(64, 64)" in line and "(8,)" in line)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_resuming_a_finished_run_says_so(tmp_path, capsys):
    assert train("--out", tmp_path / "run", "--total-frames", "60") == 0
    assert "total_frames 60 rounded up to 64" in capsys.readouterr().err
    assert main(["train", "ppo", "--resume", str(tmp_path / "run")]) == 0
    assert "nothing left to do: 64 of 64 frames; raise --total-frames" in capsys.readouterr().out


def test_an_environment_of_one_s_own(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_own_envs.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import MountainCarEnv\n"
        "gymnasium.register('MyOwn-v0', entry_point=MountainCarEnv, max_episode_steps=20)\n"
    )
    (tmp_path / "broken_envs.py").write_text("import my_own_envz\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert train("--env.id", "my_own_envs:MyOwn-v0", "--out", "run") == 0
    assert main(["export", "run", "bundle", "--targets", "c99"]) == 1  # the environment tells no rate
    line = error_line(capsys)
    assert "check 'rate'" in line and "rate_hz" in line and "--waive rate)" in line and "waive=" not in line
    assert main(["export", "run", "bundle", "--targets", "c99", "--rate-hz", "50"]) == 0
    assert main(["export", "run", "bundle", "--targets", "c99", "--rate-hz", "50"]) == 2
    assert "--overwrite" in error_line(capsys)
    assert "clip" not in load("bundle").contract["notes"]
    for module, reason in (("no_such_envs", "No module named"), ("broken_envs", "my_own_envz")):
        assert train("--env.id", f"{module}:MyOwn-v0", "--out", "other") == 2
        line = error_line(capsys)
        assert module in line and reason in line


def test_export_fills_the_contract(tmp_path):
    assert train("--out", tmp_path / "run") == 0
    contract = contract_of_export(tmp_path)
    assert contract["rate_hz"] == pytest.approx(20)
    action, (term,) = contract["action"], contract["observations"]
    assert (action["names"], action["low"], action["high"]) == (["action_0"], [-2.0], [2.0])
    assert (action["clip"], action["inside"]) == ([-2.0, 2.0], ["clip"])  # as the environment does
    policy, _ = load_policy(tmp_path / "run")
    norm = next(m for m in policy.modules() if isinstance(m, RunningNorm))
    assert term["normalizer"]["where"] == "inside"
    assert term["normalizer"]["mean"] == norm.mean.tolist() and norm.count > 0
    assert term["normalizer"]["std"] == pytest.approx((norm.var + norm.eps).sqrt().tolist())


def test_an_exported_action_is_clipped_to_its_bounds():
    policy = KeyedGraph((lambda x: x * 3, ["observation"], ["action"]))
    spec = Bounded(torch.tensor([[-2.0, -1.0]]), torch.tensor([[2.0, float("inf")]]), shape=(1, 2))
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert within_bounds(policy, spec)(observation=x).tolist() == [[2.0, 3.0], [-2.0, -1.0]]
    assert within_bounds(policy, Unbounded((1, 2))) is policy


def contract_of_export(folder):
    assert main(["export", str(folder / "run"), str(folder / "bundle"), "--targets", "c99", "--episodes", "1"]) == 0
    return load(folder / "bundle").contract


def test_export_takes_fields_from_a_file_and_runs_episodes(tmp_path, capsys):
    assert train("--out", tmp_path / "run") == 0
    fields = '{"observations": [{"key": "observation", "frame": "world"}], "action": {"unit": "N m"}}'
    (tmp_path / "more.json").write_text(fields)
    (tmp_path / "wrong.json").write_text('{"acton": {}}')
    command = ["export", str(tmp_path / "run"), str(tmp_path / "bundle"), "--targets", "numpy"]
    capsys.readouterr()
    assert main([*command, "--contract", str(tmp_path / "wrong.json")]) == 2
    assert "no field 'acton'" in (line := error_line(capsys)) and "Did you mean 'action'" in line
    assert main([*command, "--contract", str(tmp_path / "more.json"), "--episodes", "1"]) == 0
    assert "1 episodes: return numpy" in capsys.readouterr().out
    contract = load(tmp_path / "bundle").contract
    assert (contract["action"]["unit"], contract["observations"][0]["frame"]) == ("N m", "world")
    assert main(["inspect", str(tmp_path / "bundle")]) == 0 and "in its environment" in capsys.readouterr().out
    assert main([*command, "--episodes", "0", "--overwrite"]) == 0
    assert load(tmp_path / "bundle").manifest["reports"]["parity"]["closed_loop"] is None


def test_explain_lists_a_file_and_calls_only_functions(tmp_path, capsys):
    file = tmp_path / "room.py"
    file.write_text(
        "import torch\nfrom graphrl import KeyedGraph\n"
        "graph = KeyedGraph((torch.tanh, ['x'], ['y']))\nnet = torch.nn.Linear(1, 1)\nnumber = 3\n"
        "def make():\n    return graph\n"
        "def sized(size):\n    return graph\n"
    )
    assert main(["explain", str(file)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split("#")[0].split(":")[1].strip() for line in listed] == ["graph", "make"]
    assert main(["explain", f"{file}:make"]) == 0
    capsys.readouterr()
    for name, message in (("net", "a Linear has no keys"), ("sized", "sized needs size")):
        assert main(["explain", f"{file}:{name}"]) == 2
        assert message in error_line(capsys)


def test_explain(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom graphrl import KeyedGraph\n"
        "graph = KeyedGraph((torch.tanh, ['x'], ['y']))\nbatch = {'x': torch.zeros(2, 3)}\nnumber = 3\n"
    )
    assert main(["explain", f"{file}:graph"]) == 0
    assert "flowchart" in capsys.readouterr().out
    assert main(["explain", f"{file}:graph", "--example", "batch", "--backend", "eager"]) == 0
    assert "program 0 on eager" in capsys.readouterr().out
    for wrong, message in ((f"{file}:grahp", "Did you mean 'graph'"), (f"{file}:number", "is a int"), ("x", "FILE")):
        assert main(["explain", wrong]) == 2
        assert message in error_line(capsys)


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to send")
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "graphrl", "train", "ppo", *FAST, "--total-frames", "100000000", "--out", str(run)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        csv = run / "progress.csv"
        while not (csv.exists() and len(csv.read_text().splitlines()) > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "interrupted" in line]
    assert f"--resume {run}" in line
    _, data = load_checkpoint(run / "checkpoint")
    assert data["collector"]["frames"] == 64 * data["batches"] > 0
    assert sorted(p.suffix for p in (run / "checkpoint").iterdir()) == [".json", ".safetensors"]
    total = str(data["collector"]["frames"] + 64)
    assert main(["train", "ppo", "--resume", str(run), "--total-frames", total, "--quiet"]) == 0
