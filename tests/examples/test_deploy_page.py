"""docs/deploy.md, followed word by word: its commands run, its programs compile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import why_no_loopback

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
SHORTER = {
    "--total-frames 131072": "--total-frames 2048 --update-backend eager --quiet",
    "--seconds 60": "--seconds 3",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    blocks = re.findall(r"```(bash|c|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    kinds = "bash c bash bash python bash python bash bash bash bash bash python bash python"
    assert [kind for kind, _ in blocks] == kinds.split()
    (tmp_path / "bin").mkdir()
    (tmp_path / "examples").symlink_to(PAGE.parents[1] / "examples")
    for name, line in (("graphrl", f'"{sys.executable}" -m graphrl'), ("python", f'"{sys.executable}"')):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(PAGE.parents[1]), os.environ.get("PYTHONPATH", "")])
    told, no_loopback = "", why_no_loopback()
    for i, (kind, text) in enumerate(blocks):
        if no_loopback and "robot.py" in text:
            continue
        if kind == "c":
            (tmp_path / "robot.c").write_text(text)
            continue
        if kind == "python":
            (tmp_path / "record.py").write_text(text)
            command = [sys.executable, "-B", "record.py"]
        else:
            for long, short in SHORTER.items():
                text = text.replace(long, short)
            command = ["sh", "-ec", text]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, f"block {i}:\n{text}\n{result.stdout}\n{result.stderr}"
        told += result.stdout
    for part in ("status 0, action", "0 of ", "1000 steps: p50", "files intact, c99 within", "golden vectors agree",
                 "do not differ", "50 steps agree, within 0.0e+00", "" if no_loopback else "steps 60\n",
                 "paced at 50 Hz", "stack at most", "is_init 1.0 first step", "\npaced: 50 calls, p50"):  # fmt: skip
        assert part in told, part
    returns = re.findall(r"return (\S+) over 5 episodes", told)  # of the arm, driven in Python and in C
    assert no_loopback or (len(returns) == 2 and returns[0] == returns[1])
