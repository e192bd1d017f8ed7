"""The C++ files of a bundle: a runner of ``model.pt2`` for libtorch, its interface, and golden vectors in binary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["write_cpp"]

SOURCES = ("policy.hpp", "runner.cpp", "CMakeLists.txt")

KINDS = {
    "float16": "kHalf", "float32": "kFloat", "float64": "kDouble", "bool": "kBool", "uint8": "kByte", "int8": "kChar",
    "int16": "kShort", "int32": "kInt", "int64": "kLong",
}  # fmt: skip
"""ATen's names of the dtypes that numpy has."""


def write_cpp(folder: Path, manifest: Mapping[str, Any], golden: Mapping[str, np.ndarray]) -> None:
    """Write ``folder``: the sources, ``interface.h`` with what ``manifest`` says, and ``golden.bin``."""
    folder.mkdir()
    for name in SOURCES:
        (folder / name).write_bytes((Path(__file__).parent / "cpp" / name).read_bytes())
    (folder / "interface.h").write_text(_interface(manifest, golden))
    (folder / "golden.bin").write_bytes(_binary(manifest, golden))


def _interface(manifest: Mapping[str, Any], golden: Mapping[str, np.ndarray]) -> str:
    places = {p["key"]: i for i, p in enumerate(manifest["outputs"])}
    carried = {s["key"]: s for s in manifest["contract"]["recurrent"] or ()}
    ports: dict[str, list[str]] = {"inputs": [], "outputs": []}
    for side, lines in ports.items():
        for p in manifest[side]:
            state = carried.get(p["key"]) if side == "inputs" else None
            follows = places[state["next_key"]] if state else -1
            initial = ", ".join(repr(float(v)) for v in np.atleast_1d(state["initial"])) if state else ""
            scale = float(golden[f"scale/{p['key']}"]) if side == "outputs" else 0.0
            shape = ", ".join(map(str, p["shape"]))
            lines.append(f"    {{{json.dumps(p['key'])}, {{{shape}}}, at::{KINDS[p['dtype']]}, {follows}, "
                         f"{{{initial}}}, {scale!r}}},")  # fmt: skip
    return f"""// What the package of this bundle takes and gives.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace policy {{

struct Port {{
    const char *key;
    std::vector<std::int64_t> shape;
    at::ScalarType dtype;
    int follows; // of an input: the place of the output that it is at the next step; -1 where it is an observation
    std::vector<double> initial; // of a recurrent input, at a reset: one number, or one for each entry
    double scale; // of an output: its usual size
}};

inline const std::vector<Port> inputs = {{
{chr(10).join(ports["inputs"])}
}};
inline const std::vector<Port> outputs = {{
{chr(10).join(ports["outputs"])}
}};

inline constexpr char contract_hash[] = "{manifest["contract_hash"]}";
inline constexpr int golden_rows = {len(golden["kind"])};
inline constexpr int golden_steps = {len(golden.get("sequence/reset", ()))};
inline constexpr double tolerance = {manifest["tolerance"]!r};

}} // namespace policy
"""


def _binary(manifest: Mapping[str, Any], golden: Mapping[str, np.ndarray]) -> bytes:
    """Rows, then steps, each with its inputs and then its outputs, in the manifest's order; little-endian."""
    parts = [manifest["contract_hash"].encode()]
    for group, start in (("", None), ("sequence/", golden.get("sequence/reset"))):
        columns = [golden[f"{group}{side}/{p['key']}"].astype(np.dtype(p["dtype"] if side == "in" else "float64"))
                   for side, ports in (("in", manifest["inputs"]), ("out", manifest["outputs"]))
                   for p in ports if f"{group}{side}/{p['key']}" in golden]  # fmt: skip
        for i in range(len(columns[0]) if columns else 0):
            if start is not None:
                parts.append(bytes([bool(start[i])]))
            parts += [np.ascontiguousarray(c[i]).astype(c.dtype.newbyteorder("<")).tobytes() for c in columns]
    return b"".join(parts)
