import os
import signal
import subprocess
import sys
import time

import pytest

from graphrl.cli import main
from graphrl.training.checkpoint import load_checkpoint

FAST = (
    "--env.id Pendulum-v1 --env.num-envs 2 --frames-per-batch 64 --minibatch 32 --epochs 1 --policy-backend eager "
    "--update-backend eager --eval-episodes 0"
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


def test_debug_lets_the_error_through(tmp_path):
    from graphrl.errors import EnvError

    with pytest.raises(EnvError):
        train("--env.id", "Pendulun-v1", "--out", tmp_path / "run", "--debug")


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
        deadline = time.monotonic() + 120
        csv = run / "progress.csv"
        while not (csv.exists() and len(csv.read_text().splitlines()) > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
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
