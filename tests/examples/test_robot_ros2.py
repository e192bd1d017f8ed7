"""The ROS 2 templates of examples/robot: syntax and types only, against stub headers; nothing of them runs here."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ros2_stubs import HEADERS
from tensordict import TensorDict

import graphrl as grl
from graphrl.compiler.bundle import ActionContract, Bundle, Contract, Normalizer, ObservationTerm

SCRIPT = Path(__file__).parents[2] / "examples" / "robot" / "ros2_nodes.py"
CXX = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def ros2() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ros2_nodes", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["ros2_nodes"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def bundle_of(path: Path, **contract: Any) -> Bundle:
    graph = grl.KeyedGraph((lambda q, v, goal: q - v + goal, ["joint_pos", "joint_vel", "goal"], ["action"]))
    td = TensorDict({key: torch.randn(2, 2) for key in ("joint_pos", "joint_vel", "goal")}, batch_size=[2])
    return grl.export(graph, path, td, targets=("c99", "numpy"), contract=Contract(**contract))


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
    compile(files["policy_node.py"], "policy_node.py", "exec")
    if CXX is None:
        pytest.skip("no C++ compiler: the Python node alone was checked")
    for name, text in HEADERS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("policy_node.cpp", "policy_controller.cpp")[: 2 if which == "named" else 1]:
        flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable"]
        command = [CXX, *flags, f"-I{tmp_path}", f"-I{bundle.path / 'c'}", str(tmp_path / "out" / name)]
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
    assert "LOW, HIGH = -np.inf, np.inf" in ros2.ros2_files(plain.manifest)["policy_node.py"]


def test_a_bundle_that_the_templates_cannot_serve_is_refused(
    ros2: Any, plain: Bundle, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    manifest = {**plain.manifest, "contract": {**plain.manifest["contract"], "rate_hz": None}}
    with pytest.raises(ValueError, match=r"need the target 'c99' in the bundle and Contract\(rate_hz"):
        ros2.ros2_files(manifest)
    assert ros2.main(str(tmp_path), str(tmp_path / "out")) == 1 and "manifest.json" in capsys.readouterr().err
