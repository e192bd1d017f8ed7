"""Reading a bundle back: no pickle, nothing trusted before its hash is checked."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrl.compiler.bundle import runtime
from graphrl.compiler.bundle.c_policy import CPolicy, check_files
from graphrl.compiler.bundle.files import unpack
from graphrl.errors import BundleError

if TYPE_CHECKING:
    from graphrl.compiler.program import Program

__all__ = ["SCHEMA_VERSION", "Bundle", "load"]

SCHEMA_VERSION = runtime.SCHEMA_VERSION


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

    @property
    def checks(self) -> str:
        """One line on what the checks said: how many passed, and which were waived or had nothing to look at."""
        said: dict[str, str] = self.manifest["checks"]
        idle = [name for name, text in said.items() if text.startswith("nothing to check")]
        waived = [name for name, text in said.items() if text.startswith("waived")]
        line = f"checks: {len(said) - len(idle) - len(waived)} passed"
        line += f", {len(waived)} waived ({', '.join(waived)})" if waived else ""
        line += f", {len(idle)} had nothing to check ({', '.join(idle)})" if idle else ""
        return line + (": fill the contract" if any("contract" in said[name] for name in idle) else "")

    def __repr__(self) -> str:
        return f"Bundle({str(self.source)!r}, targets={list(self.manifest['targets'])})"

    def __str__(self) -> str:
        lines = [f"bundle {self.source}: {', '.join(self.manifest['targets'])}"]
        lines += [f"  {name}: largest error {error:.1e} against float64" for name, error in self.parity.items()]
        moved = self.manifest["reports"]["parity"].get("rounding")
        lines += [f"  weights in {self.manifest['weights']}: rounding moved the action by "
                  f"{max(moved['relative'], moved['sequence'] or 0.0):.1e} of its spread"] if moved else []  # fmt: skip
        lines += [self.checks] if self.manifest.get("checks") else []
        return "\n".join(lines)

    def policy(self) -> CPolicy:
        """The bundle's C, compiled and loaded. Needs a C compiler."""
        return CPolicy(self.path)

    def program(self) -> Program:
        """The traced program, rebuilt from ``graph.json`` and ``weights.safetensors``. Needs torch."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from graphrl.compiler.bundle.graph_json import program_from_json

        try:
            data = runtime.read_graph(self.path, self.manifest)
            return program_from_json(data, load_file(self.path / "weights.safetensors"))
        except (AssertionError, AttributeError, LookupError, RuntimeError, SafetensorError, SyntaxError, TypeError,
                ValueError) as error:  # fmt: skip
            raise BundleError(f"{self.source}: graph.json and its weights are no program: {error}") from error


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
    """The manifest, checked for schema and its own hash, its contract for the contract's."""
    try:
        manifest = runtime.read_manifest(folder)
    except ValueError as error:
        raise BundleError(str(error)) from None
    numbers = {str: float}
    reports = {"parity": {"max_relative_error": numbers, "scale": numbers}}
    if problem := runtime.misfit(manifest, {"tools": dict, "reports": reports}):
        raise BundleError(f"{folder / 'manifest.json'} is damaged: {problem}")
    return manifest
