"""Checking a bundle where it will run: numpy, and a C compiler or ONNX Runtime. torch is not imported."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphrl.compiler.bundle.c_policy import CPolicy, find_compiler
from graphrl.compiler.bundle.files import sha256
from graphrl.compiler.bundle.load import Bundle, load
from graphrl.errors import BundleError

__all__ = ["Verification", "run_c_row", "verify"]

Row = list[np.ndarray]


@dataclass(frozen=True)
class Verification:
    """What was checked: files by hash, and the largest relative error of each runtime that could be run here."""

    bundle: Bundle
    files: int
    errors: dict[str, float]
    skipped: dict[str, str]

    def __str__(self) -> str:
        ran = ", ".join(f"{name} within {error:.1e}" for name, error in self.errors.items()) or "no runtime was run"
        left = "".join(f"; {name} not run: {why}" for name, why in self.skipped.items())
        return f"{self.bundle.path}: {self.files} files intact, {ran}{left}"


def verify(path: str | Path) -> Verification:
    """Check every hash, compile the C and run its self-test, replay the golden vectors in each runtime at hand.

    Raises :class:`BundleError` naming the file or runtime that fails.
    """
    bundle = load(path)
    _check_one_contract(bundle)
    golden = _read_golden(bundle)
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    targets = bundle.manifest["targets"]
    if "c99" in targets:
        if find_compiler() is None:
            skipped["c99"] = "no C compiler here"
        else:
            errors["c99"] = _replay(bundle, golden, _c99(bundle), "c99")
    if "onnx" in targets:
        if importlib.util.find_spec("onnxruntime") is None:
            skipped["onnx"] = "onnxruntime is not installed"
        else:
            errors["onnx"] = _replay(bundle, golden, _onnx(bundle), "onnx")
    return Verification(bundle, len(bundle.manifest["files"]), errors, skipped)


def _check_one_contract(bundle: Bundle) -> None:
    """Every file carries the same contract hash, and the manifest the hashes of graph and weights."""
    manifest, folder = bundle.manifest, bundle.path
    wanted = manifest["contract_hash"]
    for name, key in (("graph.json", "program_hash"), ("weights.safetensors", "weight_hash")):
        if sha256((folder / name).read_bytes()) != manifest[key]:
            raise BundleError(f"{folder / name} is not the one the manifest's {key} names")
    found = {name: json.loads((folder / name).read_text()).get("contract_hash")
             for name in ("graph.json", "reports/parity.json")}  # fmt: skip
    found["weights.safetensors"] = _safetensors_metadata(folder / "weights.safetensors").get("contract_hash")
    with np.load(folder / "golden.npz", allow_pickle=False) as golden:
        found["golden.npz"] = str(golden["contract_hash"])
    if manifest.get("c"):
        name = f"c/{manifest['c']['prefix']}.h"
        found[name] = wanted if wanted in (folder / name).read_text() else "another"
    for name, value in found.items():
        if value != wanted:
            raise BundleError(f"{folder / name} belongs to another contract ({value}): this bundle's is {wanted}")


def _safetensors_metadata(file: Path) -> dict[str, str]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)).get("__metadata__", {})  # type: ignore[no-any-return]


def _read_golden(bundle: Bundle) -> tuple[list[Row], list[Row]]:
    """Rows of inputs and of float64 outputs."""
    sides = []
    with np.load(bundle.path / "golden.npz", allow_pickle=False) as data:
        for side, ports in (("in", bundle.manifest["inputs"]), ("out", bundle.manifest["outputs"])):
            columns = [data[f"{side}/{port['key']}"] for port in ports]
            sides.append([[c[i] for c in columns] for i in range(len(data["kind"]))])
    return sides[0], sides[1]


def _replay(bundle: Bundle, golden: tuple[list[Row], list[Row]], run: Callable[[Row], Row], name: str) -> float:
    rows_in, rows_out = golden
    usual = [np.median([np.abs(row[i]).max(initial=0.0) for row in rows_out]) for i in range(len(rows_out[0]))]
    worst = 0.0
    for number, (inputs, wanted) in enumerate(zip(rows_in, rows_out, strict=True)):
        for got, ref, scale in zip(run(inputs), wanted, usual, strict=True):
            if not ref.size:
                continue
            size = max(float(scale), float(np.abs(ref).max()), 1e-6) if ref.dtype.kind == "f" else 1.0
            error = float(np.abs(got.reshape(ref.shape).astype(np.float64) - ref).max()) / size
            if not error <= bundle.manifest["tolerance"]:
                raise BundleError(f"{name} of {bundle.path} differs on golden row {number} by {error:.2e} of its scale")
            worst = max(worst, error)
    return worst


def _c99(bundle: Bundle) -> Callable[[Row], Row]:
    try:
        policy = CPolicy(bundle.path)
    except (RuntimeError, ValueError, OSError) as error:
        raise BundleError(f"{bundle.path / 'c'} does not compile here: {error}") from error
    failures = policy.selftest()
    if failures:
        raise BundleError(f"{bundle.path / 'c'}: the self-test fails on {failures} golden rows")
    return lambda inputs: run_c_row(policy, inputs)


def run_c_row(policy: CPolicy, inputs: Sequence[np.ndarray]) -> Row:
    """One golden row through the compiled C: recurrent values are put into, and taken from, the state struct."""
    interface = policy.manifest["c"]
    state = policy.state_arrays()
    policy.reset()
    observation: dict[str, Any] = {}
    for member, value in zip(interface["inputs"], inputs, strict=True):
        if member["place"] == "state":
            state[member["name"]][...] = np.asarray(value).reshape(-1)
        else:
            observation[member["key"]] = value
    result = policy(observation)
    commands = [m for m in interface["outputs"] if m["place"] == "command"]
    named = result if len(commands) > 1 else {commands[0]["key"]: result} if commands else {}
    return [
        np.array(state[m["name"]] if m["place"] == "state" else named[m["key"]]).reshape(m["shape"])
        for m in interface["outputs"]
    ]


def _onnx(bundle: Bundle) -> Callable[[Row], Row]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    file = str(bundle.path / "model.onnx")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    if metadata.get("contract_hash") != bundle.manifest["contract_hash"]:
        raise BundleError(f"{file} belongs to another contract")
    kept = {i.name for i in session.get_inputs()}
    names = [p["key"] for p in bundle.manifest["inputs"]]
    outputs = [o.name for o in session.get_outputs()]
    return lambda inputs: session.run(outputs, {n: v for n, v in zip(names, inputs, strict=True) if n in kept})  # type: ignore[no-any-return]
