"""Where the C keeps its memory: a small stack, scratch in the caller's state, nothing kept in it between steps."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from small_gru import CONTRACT, START, gru
from tensordict import TensorDict

from graphrl.bench.robot_policies import POLICIES, make_policy
from graphrl.compiler.backends.c99 import generate
from graphrl.compiler.bundle import Bundle, Contract, CPolicy, RecurrentState, export
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph

GCC, CC = shutil.which("gcc"), shutil.which("cc")
HEAD = "#include <math.h>\n#include <stdint.h>\n\n"
STRICT = "-std=c99 -Wall -Wextra -Werror -pedantic -Wconversion -Wdouble-promotion".split()


def stack_of(name: str, shrink: int, folder: Path, *levels: str) -> int:
    """Bytes of stack of all functions, the most over ``levels``. Tables, slow to compile, are only declared."""
    policy = make_policy(name, shrink)
    made = generate(run_passes(trace(policy.graph, policy.example), deploy=True), embed=True)
    tables = re.sub(r"static (const .*?\]) = \{.*?\};", r"extern \1;", made.tables, flags=re.DOTALL)
    call = made.function.replace("static void run(", f"void {name}(", 1)
    head = call.split("\n{", 1)[0]
    (folder / "run.c").write_text(f"{HEAD}{made.helpers}\n{tables}\n{head};\n{call}\n")
    found = []
    for level in levels:
        command = [str(GCC), *STRICT, level, "-fstack-usage", "-c", "run.c", "-o", "run.o"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:2000]
        lines = [line.split("\t") for line in (folder / "run.su").read_text().splitlines()]
        assert lines and all(kind == "static" for _, _, kind in lines), lines  # of a size known when compiled
        found.append(sum(int(size) for _, size, _ in lines))
    return max(found)


@pytest.mark.skipif(GCC is None, reason="reads gcc's report of stack usage: apt-get install gcc")
@pytest.mark.parametrize("name", ["g1_lstm", "depth_parkour", "digit"])
def test_a_step_takes_little_stack(name: str, tmp_path: Path) -> None:
    assert stack_of(name, 8, tmp_path, "-O1") < 2048


@pytest.mark.slow
@pytest.mark.skipif(GCC is None, reason="reads gcc's report of stack usage: apt-get install gcc")
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_takes_little_stack_at_real_size(name: str, tmp_path: Path) -> None:
    # digit's attention at -O3: a kilobyte of sums, and 1.8 KB of registers that gcc spills in one long function
    assert stack_of(name, 1, tmp_path, "-O3") < (3072 if name == "digit" else 2048)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(gru(), tmp_path_factory.mktemp("m") / "b", START, contract=CONTRACT, targets=("c99",))


INTERLEAVED = r"""
#include "policy.h"
#include <stdio.h>
#include <string.h>

static void poison(policy_state *const st) /* what is no state is anything at all before a step */
{
    memset(st->scratch, 0xFF, sizeof st->scratch);
}

static float seen(const int who, const int t, const int i) { return 0.1f * (float)(t + 1) * (float)(i - who); }

int main(void)
{
    static policy_state both[2], alone;
    static policy_command wanted[2][6], command;
    policy_obs obs;
    for (int who = 0; who < 2; ++who) {
        policy_init(&alone);
        for (int t = 0; t < 6; ++t) {
            for (int i = 0; i < 3; ++i) { obs.observation[i] = seen(who, t, i); }
            if (t == 4) { policy_reset(&alone); }
            (void)policy_step(&alone, &obs, &wanted[who][t]);
        }
    }
    for (int who = 0; who < 2; ++who) { poison(&both[who]); policy_init(&both[who]); }
    for (int t = 0; t < 6; ++t) {
        for (int who = 0; who < 2; ++who) {
            for (int i = 0; i < 3; ++i) { obs.observation[i] = seen(who, t, i); }
            poison(&both[who]);
            if (t == 4) { policy_reset(&both[who]); }
            if (policy_step(&both[who], &obs, &command) != 0u) { return 1; }
            if (memcmp(&command, &wanted[who][t], sizeof command) != 0) { return 2; }
        }
    }
    if (memcmp(&wanted[0][3], &wanted[1][3], sizeof command) == 0) { return 3; }
    printf("%u %u %u\n", (unsigned)policy_state_size(), (unsigned)sizeof alone.scratch, POLICY_SCRATCH_BYTES + 0u);
    return 0;
}
"""


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_interleaved_instances_keep_nothing_in_scratch(made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "both.c").write_text(INTERLEAVED)
    program = str(tmp_path / "both")
    files = [str(tmp_path / "both.c"), str(made.path / "c" / "policy.c")]
    command = [str(CC), *STRICT, "-O2", f"-I{made.path / 'c'}", *files, "-lm", "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:2000]
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0
    size, scratch, stated = map(int, ran.stdout.split())
    assert scratch == stated == sum(4 * m["size"] for m in made.manifest["c"]["scratch"]) > 0
    assert size == 4 + 4 * (8 + 8) + scratch  # steps, h and its next value


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_a_state_may_have_the_name_of_a_member(tmp_path: Path) -> None:
    graph = KeyedGraph((lambda x, s, n: (x + s + n, s * 0.5 + x, n + 1.0), ["x", "scratch", "steps"],
                        ["action", ("next", "scratch"), ("next", "steps")]))  # fmt: skip
    td = TensorDict(x=torch.ones(1, 2), scratch=torch.zeros(1, 2), steps=torch.zeros(1, 2), batch_size=[1])
    kept = tuple(RecurrentState(key, ("next", key)) for key in ("scratch", "steps"))
    bundle = export(graph, tmp_path / "b", td, contract=Contract(rate_hz=50, recurrent=kept), targets=("c99",))
    policy = CPolicy(bundle.path, flags=("-O0",))
    assert {"scratch_", "steps_"} <= set(policy.state_arrays())
    assert [float(policy([1.0, 1.0])[0]) for _ in range(3)] == [1.0, 3.0, 4.5]
