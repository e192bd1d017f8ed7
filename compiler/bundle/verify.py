"""Checking a bundle where it will run: numpy, a C compiler, ONNX Runtime; torch or ExecuTorch for their files alone."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphrl.compiler.bundle.files import sha256
from graphrl.compiler.bundle.load import Bundle, load
from graphrl.compiler.bundle.parity import measure
from graphrl.compiler.bundle.runners import RUNNERS, CPlayer, why_not_here
from graphrl.errors import BundleError

__all__ = ["Verification", "verify"]


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
        return f"{self.bundle.source}: {self.files} files intact, {ran}{left}"


def verify(path: str | Path) -> Verification:
    """Check every hash, compile the C and run its self-test, replay the golden vectors in each runtime at hand.

    Raises :class:`BundleError` naming the file or runtime that fails.
    """
    bundle = load(path)
    try:
        return _verify(bundle)
    except BundleError:
        raise
    except Exception as error:  # whatever a file with the right hash may hold: one line, not a reader's inside
        raise BundleError(f"{bundle.source} has its hashes, but a file is damaged: {error!r}") from error


def _verify(bundle: Bundle) -> Verification:
    _check_one_contract(bundle)
    with np.load(bundle.path / "golden.npz", allow_pickle=False) as file:
        golden = {name: file[name] for name in file.files}
    if not len(golden["kind"]):
        raise BundleError(f"{bundle.path / 'golden.npz'} holds no row")
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for target in bundle.manifest["targets"]:
        if target not in RUNNERS:
            raise BundleError(f"the manifest names target {target!r}; there are {list(RUNNERS)}")
        if (reason := why_not_here(target, bundle.manifest)) is not None:
            skipped[target] = reason
            continue
        if target == "numpy":
            errors[target] = _isolated(bundle)
            continue
        run, player = RUNNERS[target](bundle.path, bundle.manifest)
        if isinstance(player, CPlayer) and (failures := player.failures()):
            raise BundleError(f"{bundle.path / 'c'}: the self-test fails on {failures} golden rows")
        parity = measure(golden, bundle.manifest, run, player)
        if not parity.worst <= bundle.manifest["tolerance"]:
            raise BundleError(f"{target} of {bundle.path} differs by {parity.worst:.2e} of its scale: {parity.where}")
        errors[target] = parity.worst
    return Verification(bundle, len(bundle.manifest["files"]), errors, skipped)


def _check_one_contract(bundle: Bundle) -> None:
    """Every file carries the same contract hash, and the manifest the hashes of graph and weights."""
    manifest, folder = bundle.manifest, bundle.path
    wanted = manifest["contract_hash"]
    for name, key in (("graph.json", "program_hash"), ("weights.safetensors", "weight_hash")):
        if sha256((folder / name).read_bytes()) != manifest[key]:
            raise BundleError(f"{folder / name} is not the one the manifest's {key} names")
    found, report = {}, {}
    for name in ("graph.json", "reports/parity.json"):
        report = json.loads((folder / name).read_text())
        found[name] = report.get("contract_hash")
    if report.get("tolerance") != manifest["tolerance"]:
        raise BundleError(f"the manifest allows {manifest['tolerance']}, reports/parity.json {report.get('tolerance')}")
    found["weights.safetensors"] = _safetensors_metadata(folder / "weights.safetensors").get("contract_hash")
    with np.load(folder / "golden.npz", allow_pickle=False) as golden:
        found["golden.npz"] = str(golden["contract_hash"])
    names = [f"c/{manifest['c']['prefix']}.h"] if manifest.get("c") else []
    if "pt2" in manifest["targets"]:
        found["model.pt2"] = _package_metadata(folder / "model.pt2").get("contract_hash")
        names += ["cpp/interface.h", "cpp/golden.bin"]
    names += ["model.pte"] if "executorch" in manifest["targets"] else []
    found |= {name: wanted if wanted.encode() in (folder / name).read_bytes() else "another" for name in names}
    for name, value in found.items():
        if value != wanted:
            raise BundleError(f"{folder / name} belongs to another contract ({value}): this bundle's is {wanted}")


def _safetensors_metadata(file: Path) -> dict[str, str]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)).get("__metadata__", {})  # type: ignore[no-any-return]


def _package_metadata(file: Path) -> dict[str, str]:
    """What AOTInductor wrote beside the library; read without torch."""
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(n for n in archive.namelist() if n.endswith("wrapper_metadata.json"))
            return json.loads(archive.read(name))  # type: ignore[no-any-return]
    except (zipfile.BadZipFile, StopIteration) as error:
        raise BundleError(f"{file} is damaged: {error or 'it has no metadata'}") from error


def _isolated(bundle: Bundle) -> float:
    """The self-test of the bundle's own ``runtime.py``, in a Python that finds neither torch nor graphrl."""
    code = (
        "import runpy, sys; sys.modules.update(torch=None, graphrl=None);"
        "print(repr(runpy.run_path(sys.argv[1])['Policy'].load(sys.argv[2]).selftest()))"
    )
    command = [sys.executable, "-I", "-c", code, str(bundle.path / "runtime.py"), str(bundle.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise BundleError(f"numpy of {bundle.path} fails: {(result.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return float(result.stdout)
