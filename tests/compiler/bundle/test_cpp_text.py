"""The C++ files of a bundle without a compiler: the interface they state, and golden vectors read back byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from graphrl.compiler.bundle.cpp_text import write_cpp

MANIFEST: dict[str, Any] = {
    "contract_hash": "ab" * 32,
    "tolerance": 1e-5,
    "contract": {"recurrent": [{"key": "h", "next_key": "next/h", "initial": [0.25, -1.0]}]},
    "inputs": [
        {"key": "h", "shape": [1, 2], "dtype": "float32"},
        {"key": "is_init", "shape": [1, 1], "dtype": "bool"},
        {"key": "x", "shape": [1, 3], "dtype": "float32"},
    ],
    "outputs": [
        {"key": "action", "shape": [1], "dtype": "int64"},
        {"key": "next/h", "shape": [1, 2], "dtype": "float32"},
    ],
}
RNG = np.random.default_rng(0)
GOLDEN: dict[str, np.ndarray] = {
    "kind": np.array(["random", "extreme"]),
    "in/h": RNG.normal(size=(2, 1, 2)).astype(np.float32),
    "in/is_init": np.array([[[True]], [[False]]]),
    "in/x": RNG.normal(size=(2, 1, 3)).astype(np.float32),
    "out/action": np.array([[3], [-1]]),
    "out/next/h": RNG.normal(size=(2, 1, 2)),
    "scale/action": np.array(3.0),
    "scale/next/h": np.array(0.5),
    "sequence/reset": np.array([True, False, True]),
    "sequence/in/is_init": np.array([[[True]], [[False]], [[True]]]),
    "sequence/in/x": RNG.normal(size=(3, 1, 3)).astype(np.float32),
    "sequence/out/action": np.array([[0], [1], [2]]),
}


def test_the_interface_states_ports_state_and_sizes(tmp_path: Path) -> None:
    write_cpp(tmp_path / "cpp", MANIFEST, GOLDEN)
    assert {p.name for p in (tmp_path / "cpp").iterdir()} == {
        "policy.hpp", "runner.cpp", "CMakeLists.txt", "interface.h", "golden.bin",
    }  # fmt: skip
    text = (tmp_path / "cpp" / "interface.h").read_text()
    for line in (
        '    {"h", {1, 2}, at::kFloat, 1, {0.25, -1.0}, 0.0},',  # the second output is its next value
        '    {"is_init", {1, 1}, at::kBool, -1, {}, 0.0},',
        '    {"action", {1}, at::kLong, -1, {}, 3.0},',
        f'inline constexpr char contract_hash[] = "{"ab" * 32}";',
        "inline constexpr int golden_rows = 2;",
        "inline constexpr int golden_steps = 3;",
        "inline constexpr double tolerance = 1e-05;",
    ):
        assert line in text.splitlines(), line


def test_golden_vectors_are_rows_and_then_steps(tmp_path: Path) -> None:
    write_cpp(tmp_path / "cpp", MANIFEST, GOLDEN)
    data = (tmp_path / "cpp" / "golden.bin").read_bytes()
    assert data[:64].decode() == "ab" * 32
    row = np.dtype([("h", "<f4", 2), ("is_init", "?"), ("x", "<f4", 3), ("action", "<f8"), ("next", "<f8", 2)])
    step = np.dtype([("reset", "?"), ("is_init", "?"), ("x", "<f4", 3), ("action", "<f8")])
    assert len(data) == 64 + 2 * row.itemsize + 3 * step.itemsize
    rows, steps = np.frombuffer(data, row, 2, 64), np.frombuffer(data, step, 3, 64 + 2 * row.itemsize)
    for found, name in ((rows["h"], "in/h"), (rows["is_init"], "in/is_init"), (rows["x"], "in/x"),
                        (rows["action"], "out/action"), (rows["next"], "out/next/h"),
                        (steps["reset"], "sequence/reset"), (steps["is_init"], "sequence/in/is_init"),
                        (steps["x"], "sequence/in/x"), (steps["action"], "sequence/out/action")):  # fmt: skip
        np.testing.assert_array_equal(found.reshape(-1), GOLDEN[name].reshape(-1), err_msg=name)
