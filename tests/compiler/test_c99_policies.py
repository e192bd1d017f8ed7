"""Every robot policy as strict C: episodes with a reset in the middle, state fed back step by step."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from test_c99 import CC, build, call, source

from graphrl.bench.robot_policies import POLICIES, Policy, make_policy
from graphrl.compiler.backends.c99 import generate
from graphrl.compiler.backends.c99.emit import Emitter
from graphrl.compiler.backends.c99.layout import plan
from graphrl.compiler.backends.c99.nodes import C_TYPES
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace

pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")


def deployed(name: str, shrink: int) -> tuple[Policy, Program]:
    policy = make_policy(name, shrink)
    return policy, run_passes(trace(policy.graph, policy.example), deploy=True)


def worst_error(policy: Policy, program: Program, library: object, name: str) -> float:
    """Largest error of the action over an episode with a reset in the middle, as a part of the largest action."""
    wide = copy.deepcopy(policy.graph).double()
    state, reference = TensorDict({}), TensorDict({})
    errors, sizes = [], []
    for td in policy.episode(9, starts=(0, 5)):
        inputs = td.clone().update(state)
        found = dict(
            zip(program.out_keys, call(library, name, program, [inputs[k] for k in program.in_keys]), strict=True)
        )
        with torch.no_grad():
            wanted = wide(td.apply(lambda t: t.double() if t.is_floating_point() else t).update(reference))
        errors.append((found["action"].double() - wanted["action"]).abs().max())
        sizes.append(wanted["action"].abs().max())
        state = TensorDict({key: found[after] for key, after in policy.state})
        reference = TensorDict({key: wanted[after].clone() for key, after in policy.state})
    return float(max(errors) / max(sizes))


@pytest.fixture(scope="module")
def narrow() -> dict[str, tuple[Policy, Program]]:
    """Hidden sizes a sixteenth: the operations and loops are those of the real ones."""
    return {name: deployed(name, 16) for name in POLICIES}


@pytest.fixture(scope="module")
def library(narrow: dict[str, tuple[Policy, Program]], tmp_path_factory: pytest.TempPathFactory) -> object:
    return build(tmp_path_factory.mktemp("c"), {name: source(p, name) for name, (_, p) in narrow.items()}, "-O1")


@pytest.mark.parametrize("name", POLICIES)
def test_episode_equals_eager_in_float64(name: str, narrow: dict[str, tuple[Policy, Program]], library: object) -> None:
    policy, program = narrow[name]
    assert worst_error(policy, program, library, name) <= 1e-5
    assert ("history" in policy.graph.in_keys or "recurrent_state" in policy.graph.in_keys) == bool(policy.state)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_real_sizes(name: str, tmp_path: Path) -> None:
    policy, program = deployed(name, 1)
    text = {name: source(program, name)}
    for compiler, *flags in (("gcc", "-O3", "-march=native"), ("clang", "-O2")):
        if shutil.which(compiler) is not None:
            folder = tmp_path / compiler
            folder.mkdir()
            assert worst_error(policy, program, build(folder, text, *flags, compiler=compiler), name) <= 1e-5


@pytest.mark.parametrize("name", ["go1", "g1_lstm", "depth_parkour", "digit"])
def test_values_alive_together_never_share_memory(name: str, narrow: dict[str, tuple[Policy, Program]]) -> None:
    emitter = Emitter(narrow[name][1], embed=True)
    generated = emitter.run("run", "")
    types = {b: C_TYPES[b.dtype] for s in emitter.steps for b in s.reads | s.writes if b.kind == "scratch"}
    layout = plan(emitter.steps, types)
    alive: dict[object, list[int]] = {}
    for at, step in enumerate(emitter.steps):
        for buffer in (step.reads | step.writes) & set(types):
            alive.setdefault(buffer, []).append(at)
    spans = {b: (layout.offsets[b], layout.offsets[b] + b.size, min(t), max(t)) for b, t in alive.items()}
    for a, (start, end, born, dies) in spans.items():
        for b, (other_start, other_end, other_born, other_dies) in spans.items():
            if a is not b and types[a] == types[b] and born <= other_dies and other_born <= dies:
                assert end <= other_start or other_end <= start, (a.name, b.name)
    most = max(sum(b.size * b.dtype.itemsize for b, (_, _, born, dies) in spans.items() if born <= t <= dies)
               for t in range(len(emitter.steps)))  # fmt: skip
    everything = sum(b.size * b.dtype.itemsize for b in spans)
    assert most <= generated.scratch_bytes < everything


@pytest.mark.parametrize("name", POLICIES)
def test_reported_bytes_are_those_of_the_text(name: str, narrow: dict[str, tuple[Policy, Program]]) -> None:
    generated = generate(narrow[name][1], embed=True)
    width = {"float": 4, "double": 8, "int64_t": 8, "int32_t": 4, "unsigned char": 1}
    assert sum(width[kind] * n for _, kind, n in generated.scratch) == generated.scratch_bytes > 0
    tables = re.findall(r"^static const (unsigned char|\w+) \w+\[(\d+)\] = ", generated.tables, re.MULTILINE)
    assert sum(width[kind] * int(n) for kind, n in tables) == generated.weight_bytes
    local = [int(n) for n in re.findall(r"^ +float acc\[(\d+)\];", generated.function, re.MULTILINE)]
    assert max(local) <= 128  # what is on the stack beside scratch: one panel of sums


def test_no_heap_recursion_or_changing_statics(narrow: dict[str, tuple[Policy, Program]]) -> None:
    for _, program in narrow.values():
        text = generate(program, embed=True).code
        assert not re.search(r"\b(malloc|calloc|realloc|free|alloca|printf|goto|while)\b", text)
        assert not re.search(r"^static (?!const|inline|void)", text, re.MULTILINE)
        assert "static" not in generate(program, embed=True).function.replace("static void run", "", 1)
        assert "#pragma" not in text
        declared = re.findall(r"\b(?:float|double|int|int32_t|int64_t|char) \w+\[([^\]]+)\](?:;| =)", text)
        assert declared and all(size.isdigit() for size in declared)  # no array of a size known only at run time
