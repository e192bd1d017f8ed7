"""Reading a bundle back: no pickle, nothing trusted before its hash is checked."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrl.compiler.bundle.c_policy import CPolicy, check_files
from graphrl.compiler.bundle.contract import hash_contract
from graphrl.compiler.bundle.files import unpack
from graphrl.errors import BundleError

if TYPE_CHECKING:
    from graphrl.compiler.program import Program

__all__ = ["SCHEMA_VERSION", "Bundle", "load"]

SCHEMA_VERSION = 2


@dataclass(frozen=True, repr=False)
class Bundle:
    """A bundle on disk whose files have the hashes its manifest states.

    path: its folder. source: what was opened; of a ``.zip``, ``path`` is a copy that goes when the bundle does.
    """

    path: Path
    manifest: dict[str, Any]
    source: Path

    @property
    def contract(self) -> dict[str, Any]:
        """The contract as plain data; null where nothing is known."""
        return self.manifest["contract"]  # type: ignore[no-any-return]

    @property
    def parity(self) -> dict[str, float]:
        """Largest relative error of each runtime against float64, as measured when the bundle was written."""
        return self.manifest["reports"]["parity"]["max_relative_error"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"Bundle({str(self.source)!r}, targets={list(self.manifest['targets'])})"

    def __str__(self) -> str:
        lines = [f"bundle {self.source}: {', '.join(self.manifest['targets'])}"]
        lines += [f"  {name}: largest error {error:.1e} against float64" for name, error in self.parity.items()]
        moved = self.manifest["reports"]["parity"].get("rounding")
        lines += [f"  weights in {self.manifest['weights']}: rounding moved an output by "
                  f"{max(moved['relative'], moved['sequence'] or 0.0):.1e}"] if moved else []  # fmt: skip
        return "\n".join(lines)

    def policy(self) -> CPolicy:
        """The bundle's C, compiled and loaded. Needs a C compiler."""
        return CPolicy(self.path)

    def program(self) -> Program:
        """The traced program, rebuilt from ``graph.json`` and ``weights.safetensors``. Needs torch."""
        from safetensors.torch import load_file

        from graphrl.compiler.bundle.graph_json import program_from_json

        data = json.loads((self.path / "graph.json").read_text())
        return program_from_json(data, load_file(self.path / "weights.safetensors"))


def load(path: str | Path) -> Bundle:
    """Open a bundle, a folder or a ``.zip``, and check every file against the manifest.

    Raises :class:`BundleError` naming the file that is missing, changed, or does not belong to the bundle.
    """
    source = Path(path)
    if not source.is_file():
        return _load_folder(source, source)
    folder = Path(tempfile.mkdtemp(prefix="graphrl-bundle-"))
    try:
        unpack(source, folder)
        bundle = _load_folder(folder, source)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, BundleError):
            raise BundleError(str(error).replace(str(folder), str(source))) from None
        raise
    weakref.finalize(bundle, shutil.rmtree, folder, ignore_errors=True)
    return bundle


def _load_folder(folder: Path, source: Path) -> Bundle:
    manifest = read_manifest(folder)
    try:
        check_files(folder)
    except ValueError as error:
        raise BundleError(str(error)) from None
    return Bundle(folder, manifest, source)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked for schema, and its contract for its hash."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
    except OSError as error:
        raise BundleError(f"{folder} is no bundle: {file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BundleError(f"{file} is damaged: {error}") from error
    wanted = ("contract", "contract_hash", "program_hash", "weight_hash", "files", "targets", "tolerance", "reports")
    lacking = [k for k in ("schema_version", *wanted) if not isinstance(manifest, dict) or k not in manifest]
    if lacking:
        raise BundleError(f"{file} is not a bundle's manifest: it lacks {lacking}")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise BundleError(
            f"{file} has schema version {manifest['schema_version']}, this graphrl reads {SCHEMA_VERSION}"
        )
    if hash_contract(manifest["contract"]) != manifest["contract_hash"]:
        raise BundleError(
            f"{file}: the contract is not the one its hash {manifest['contract_hash'][:12]}... was made of"
        )
    return manifest  # type: ignore[no-any-return]
