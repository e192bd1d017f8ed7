"""The ROS 2 templates of examples/robot: syntax and types only, against stub headers; nothing of them runs here."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from robot_scripts import robot_scripts
from ros2_stubs import HEADERS
from tensordict import TensorDict

import graphrl as grl
from graphrl.compiler.bundle import ActionContract, Bundle, Contract, Normalizer, ObservationTerm

CXX = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def ros2() -> Iterator[ModuleType]:
    with robot_scripts("ros2_nodes") as scripts:
        yield scripts.ros2_nodes


def bundle_of(path: Path, waive: tuple[str, ...] = (), **contract: Any) -> Bundle:
    graph = grl.KeyedGraph((lambda q, v, goal: q - v + goal, ["joint_pos", "joint_vel", "goal"], ["action"]))
    td = TensorDict({key: torch.randn(2, 2) for key in ("joint_pos", "joint_vel", "goal")}, batch_size=[2])
    return grl.export(graph, path, td, targets=("c99", "numpy"), contract=Contract(**contract), waive=waive)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    names = ("hip", "knee")
    none = Normalizer("none")
    terms = [ObservationTerm(key, names=names, normalizer=none) for key in ("joint_pos", "joint_vel")]
    terms.append(ObservationTerm("goal", normalizer=none))
    action = ActionContract(names=names, unit="N m", low=(-2.0, -3.0), high=(2.0, 3.0), inside=())
    path = tmp_path_factory.mktemp("named") / "b"
    return bundle_of(path, rate_hz=50.0, observations=tuple(terms), action=action)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of(tmp_path_factory.mktemp("plain") / "b", rate_hz=50.0)


@pytest.mark.parametrize("which", ["named", "plain"])
def test_the_files_are_well_formed(ros2: Any, which: str, request: Any, tmp_path: Path) -> None:
    bundle = request.getfixturevalue(which)
    assert ros2.main(str(bundle.path), str(tmp_path / "out")) == 0
    files = {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}
    assert sorted(files) == ["policy_controller.cpp", "policy_node.cpp", "policy_node.py"]
    for text in files.values():
        assert bundle.manifest["contract_hash"] in text and "not run on ROS 2" in text and "@" not in text
    check_syntax(files, bundle, tmp_path)


def check_syntax(files: dict[str, str], bundle: Bundle, folder: Path) -> None:
    compile(files["policy_node.py"], "policy_node.py", "exec")
    if CXX is None:
        pytest.skip("no C++ compiler: the Python node alone was checked")
    sources = {name: text for name, text in files.items() if name.endswith(".cpp")}
    for name, text in {**HEADERS, **sources}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in sources:
        flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable"]
        command = [CXX, *flags, f"-I{folder}", f"-I{bundle.path / 'c'}", str(folder / name)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[:3000]


def test_names_rate_and_bounds_come_from_the_contract(ros2: Any, named: Bundle, plain: Bundle) -> None:
    files = ros2.ros2_files(named.manifest)
    assert (
        '"hip/position", "knee/position", "hip/velocity", "knee/velocity", "goal/0", "goal/1"'
        in (files["policy_controller.cpp"])
    )
    assert 'COMMANDS = {"hip/effort", "knee/effort"}' in files["policy_controller.cpp"]
    assert "std::max(command_.action[1], static_cast<float>(-3.0))" in files["policy_controller.cpp"]
    assert "std::chrono::nanoseconds(20000000)" in files["policy_node.cpp"]
    assert "RATE_HZ = 50.0" in files["policy_node.py"] and "('joint_states', 'velocity')" in files["policy_node.py"]
    assert "AFTER = []" in ros2.ros2_files(plain.manifest)["policy_node.py"]


def test_what_the_contract_leaves_to_the_caller_is_done_by_the_nodes(ros2: Any, tmp_path: Path) -> None:
    outside = Normalizer("outside", mean=(1.0, 2.0), std=(0.5, 4.0), clip=5.0)
    terms = (ObservationTerm("joint_pos", names=("hip", "knee"), scale=2.0, clip=(-3.0, 3.0), normalizer=outside),
             *(ObservationTerm(key, normalizer=Normalizer("none")) for key in ("joint_vel", "goal")))  # fmt: skip
    action = ActionContract(
        squash="tanh", scale=(0.25, 0.5), offset=0.1, low=(-0.15, None), high=(0.35, 0.6), inside=()
    )
    bundle = bundle_of(tmp_path / "b", rate_hz=50.0, observations=terms, action=action, waive=("action",))
    files = ros2.ros2_files(bundle.manifest)
    python: dict[str, Any] = {}
    text = files["policy_node.py"]
    exec(text[text.index("BEFORE = ") : text.index("class PolicyNode")], {"np": np}, python)
    apply, x = python["apply"], np.array([0.25, -3.0])
    np.testing.assert_allclose(apply(python["BEFORE"]["joint_pos"], x), [(0.5 - 1) / 0.5, (-3 - 2) / 4])
    np.testing.assert_allclose(
        apply(python["AFTER"], x), [max(np.tanh(0.25) * 0.25 + 0.1, -0.15), np.tanh(-3) * 0.5 + 0.1]
    )
    check_syntax(files, bundle, tmp_path)
    for line in ("obs_.joint_pos[1] = obs_.joint_pos[1] / static_cast<float>(4.0);",
                 "command_.action[0] = std::tanh(command_.action[0]);",
                 "command_.action[1] = command_.action[1] * static_cast<float>(0.5);",
                 "policy_reset(&state_);"):  # fmt: skip
        assert line in files["policy_node.cpp"] and line in files["policy_controller.cpp"]
    unsaid = {**bundle.contract["action"], "inside": None}
    manifest = {**bundle.manifest, "contract": {**bundle.contract, "action": unsaid}}
    with pytest.raises(ValueError, match=r"states the action's \['squash', 'scale', 'offset'\], and not which"):
        ros2.ros2_files(manifest)


def test_a_bundle_that_the_templates_cannot_serve_is_refused(
    ros2: Any, plain: Bundle, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    manifest = {**plain.manifest, "contract": {**plain.manifest["contract"], "rate_hz": None}}
    with pytest.raises(ValueError, match=r"need the target 'c99' in the bundle and Contract\(rate_hz"):
        ros2.ros2_files(manifest)
    assert ros2.main(str(tmp_path), str(tmp_path / "out")) == 1 and "manifest.json" in capsys.readouterr().err
