"""The generated header, as a robot's own program includes it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from graphrl.compiler.bundle import ActionContract, Contract, Normalizer, ObservationTerm, export
from graphrl.graph import KeyedGraph

CC = shutil.which("gcc") or shutil.which("cc")
STRICT = "-std=c99 -Wall -Wextra -Werror -pedantic -Wconversion -Wdouble-promotion".split()


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_the_header_has_the_place_of_every_named_entry(tmp_path: Path) -> None:
    graph = KeyedGraph((lambda x, y: x - y, [("arm", "position"), "target"], ["action"]))
    data = TensorDict({("arm", "position"): torch.randn(4, 2), "target": torch.randn(4, 2)}, batch_size=[4])
    none = Normalizer("none")
    terms = (
        ObservationTerm(("arm", "position"), names=("left hip", "2"), normalizer=none),
        ObservationTerm("target", normalizer=none),
    )
    action = ActionContract(joint_names=("2", 'a "right" hip?\u00e9'), low=(-1.0, None), high=(1.0, 2.0), inside=(),
                            default_pose=(0.25, -0.5))  # fmt: skip
    contract = Contract(rate_hz=50.0, observations=terms, action=action)
    bundle = export(graph, tmp_path / "b", data, targets=("c99",), contract=contract)
    (tmp_path / "use.c").write_text(
        '#include "policy.h"\n'
        "typedef char positions[POLICY_arm__position__left_u20_hip == 0 && POLICY_arm__position__2 == 1 ? 1 : -1];\n"
        "static const float low[] = POLICY_LOW_action, high[] = POLICY_HIGH_action;\n"
        "static const float pose[] = POLICY_DEFAULT_POSE_action;\n"
        "static const char *const names[] = POLICY_NAMES_action, *const sensors[] = POLICY_NAMES_arm__position;\n"
        "const char *f(int i);\n"
        "const char *f(int i) { return low[i] < high[i] && pose[i] < 9.0f ? names[i] : sensors[i]; }\n"
        "typedef char first[POLICY_action__2 == 0 ? 1 : -1];\n"
        "typedef char second[POLICY_action__a_u20__u22_right_u22__u20_hip_u3F__uE9_ == 1 ? 1 : -1];\n"
    )
    command = [str(CC), *STRICT, "-fsyntax-only", "-I", str(bundle.path / "c"), str(tmp_path / "use.c")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "target" not in (bundle.path / "c" / "policy.h").read_text().split("enum {")[1].split("}")[0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_key_breaks_the_header_in_c_or_cplusplus(tmp_path: Path) -> None:
    """A word of C++, and keys that would open or close a comment."""
    keys = ["class", "a/*b", ("c", "*d"), "e*", ("f*", "g")]
    graph = KeyedGraph((lambda *x: sum(x), keys, ["action"]))
    data = TensorDict({key: torch.randn(2, 1) for key in keys}, batch_size=[2])
    bundle = export(graph, tmp_path / "b", data, targets=("c99",))
    use = ['#include "policy.h"', "float *f(policy_obs *o);", "float *f(policy_obs *o) { return o->class_; }", ""]
    (tmp_path / "use.c").write_text("\n".join(use))
    for compiler in (
        [str(CC), *STRICT],
        ["g++", "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic"],
    ):
        command = [*compiler, "-fsyntax-only", "-I", str(bundle.path / "c"), str(tmp_path / "use.c")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
