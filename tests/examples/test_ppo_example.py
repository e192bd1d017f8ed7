import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "ppo.py"


def test_it_fits_on_a_page():
    assert len(SCRIPT.read_text().splitlines()) <= 200


def test_it_runs_as_a_script():
    options = "--env-id Pendulum-v1 --num-envs 2 --total-frames 512 --frames-per-batch 256 --epochs 2 --eval-episodes 2"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split()], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "512 frames" in result.stdout and "return of the deterministic policy" in result.stdout
