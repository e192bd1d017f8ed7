"""Files of a bundle: hashes, bytes that do not depend on the day, and a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphrl.errors import BundleError

__all__ = ["dump_json", "dump_npz", "hash_files", "sha256", "whole_folder"]


def sha256(data: bytes) -> str:
    """Hash of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def dump_json(data: Any) -> str:
    """Readable JSON, keys in the order given."""
    return json.dumps(data, indent=1, allow_nan=True) + "\n"


def dump_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An ``.npz`` file without time stamps."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            part = io.BytesIO()
            np.lib.format.write_array(part, np.asanyarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0)), part.getvalue())
    return out.getvalue()


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` by relative path, the manifest left out, sorted."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    names = {p.relative_to(folder).as_posix(): p for p in found}
    return {name: sha256(path.read_bytes()) for name, path in names.items() if name != "manifest.json"}


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name when the block ends well, and vanishes otherwise.

    With ``overwrite`` the old folder stays until then. Raises :class:`BundleError` for a folder that exists or cannot
    be written.
    """
    if target.exists() and not overwrite:
        raise BundleError(f"{target} exists: choose another path, or pass overwrite=True")
    if target.exists() and not (target / "manifest.json").is_file():
        raise BundleError(f"{target} exists and is not a bundle (it has no manifest.json): it will not be replaced")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        temporary.chmod(0o755)
    except OSError as error:
        raise BundleError(f"cannot write beside {target}: {error}") from error
    try:
        yield temporary
        old = temporary.with_name(f"{temporary.name}.old")
        if target.exists():
            os.rename(target, old)
        try:
            os.rename(temporary, target)
        except OSError:
            if old.exists():
                os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
