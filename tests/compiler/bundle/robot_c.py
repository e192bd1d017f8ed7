"""The C of every robot policy without the rest of its bundle, and one program that runs all their self-tests."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from graphrl.bench.robot_policies import POLICIES, make_policy
from graphrl.compiler.bundle import Contract
from graphrl.compiler.bundle.c_text import write_c
from graphrl.compiler.bundle.golden import make_golden
from graphrl.compiler.bundle.state import acting_graph
from graphrl.compiler.bundle.write import TOLERANCE
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace

STRICT = "-std=c99 -Wall -Wextra -Werror -pedantic -Wconversion -Wdouble-promotion".split()
SANITIZERS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def write_robot_c(folder: Path, shrink: int = 16, names: Sequence[str] = tuple(POLICIES)) -> dict[str, Path]:
    """By policy: a folder with its C files. Names in C start with the policy's, so all of them link together."""
    made = {}
    for name in names:
        policy = make_policy(name, shrink)
        graph, contract, _ = acting_graph(policy.graph, "action", Contract(rate_hz=policy.rate_hz))
        with torch.no_grad():
            live = run_passes(trace(graph, policy.example))
            rows = [tuple(td[key] for key in live.in_keys) for td in policy.episode(4)]
            golden = make_golden(live, rows, contract.recurrent or ())
            text = write_c(run_passes(live, deploy=True), contract, golden.rows(), TOLERANCE, golden.scales, name)
        made[name] = folder / name
        made[name].mkdir(parents=True)
        for file, content in text.files.items():
            (made[name] / file).write_text(content)
    return made


def run(*command: object) -> str:
    """Run a program that must succeed; what it printed."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout + result.stderr


def includes(sources: dict[str, Path]) -> list[str]:
    """Compiler options by which every policy's header is found."""
    return [f"-I{folder}" for folder in sources.values()]


def assert_selftests_pass(
    compiler: str, flags: Sequence[str], sources: dict[str, Path], folder: Path, emulator: Sequence[str] = ()
) -> None:
    """Compile every policy and its self-test into one program without a warning, and run it."""
    lines = [f'#include "{name}.h"' for name in sources]
    lines += ["#include <stdio.h>", "", "int main(void)", "{", "    int failures = 0;"]
    for name in sources:
        lines += [f"    static {name}_state {name};", f"    const int {name}_failed = (int){name}_selftest(&{name});",
                  f'    printf("{name}: %d golden rows fail\\n", {name}_failed);',
                  f"    failures += {name}_failed;"]  # fmt: skip
    (folder / "all.c").write_text("\n".join([*lines, "    return failures != 0;", "}", ""]))
    files = [path / file for name, path in sources.items() for file in (f"{name}.c", "selftest.c")]
    program = folder / "all"
    said = run(compiler, *STRICT, *flags, *includes(sources), folder / "all.c", *files, "-lm", "-o", program)
    assert not said, said
    assert run(*emulator, program) == "".join(f"{name}: 0 golden rows fail\n" for name in sources)
