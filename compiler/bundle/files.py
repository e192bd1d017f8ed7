"""Files of a bundle: hashes, bytes that do not depend on the day, and a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphrl.compiler.bundle.c_policy import check_size, hash_manifest
from graphrl.compiler.files import replace_file
from graphrl.errors import BundleError

__all__ = ["dump_json", "dump_npz", "dump_zip", "hash_files", "sealed", "sha256", "unpack", "whole_folder"]

EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time that every file of an archive bears: the same input gives the same bytes."""


def sha256(data: bytes) -> str:
    """Hash of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def dump_json(data: Any) -> str:
    """Readable JSON, keys in the order given."""
    return json.dumps(data, indent=1, allow_nan=True) + "\n"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the hash of everything else in it as ``manifest_hash``, last: an edit of any field shows."""
    rest = {name: value for name, value in manifest.items() if name != "manifest_hash"}
    return {**rest, "manifest_hash": hash_manifest(rest)}


def dump_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An ``.npz`` file without time stamps."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            part = io.BytesIO()
            np.lib.format.write_array(part, np.asanyarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", date_time=EPOCH), part.getvalue())
    return out.getvalue()


def dump_zip(folder: Path) -> bytes:
    """Every file below ``folder``, sorted, not compressed: the bytes do not depend on a version of zlib."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), date_time=EPOCH)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    return out.getvalue()


def unpack(file: Path, into: Path) -> None:
    """Write the files of a zipped bundle below ``into``: the manifest, and what it lists, nothing else.

    Raises :class:`BundleError` for a file that is no zip, a name that leads elsewhere, a name twice, a link, a file
    that the manifest does not list, or one that unpacks to far more than it takes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            check_size(file, archive)
            names = [e.filename for e in archive.infolist()]
            if "manifest.json" not in names:
                raise BundleError(f"{file} is no bundle: it holds no manifest.json")
            listed = {"manifest.json", *json.loads(archive.read("manifest.json")).get("files", ())}
            for entry in archive.infolist():
                _check_entry(file, entry, names, listed)
                target = into / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RecursionError, TypeError, ValueError,
            AttributeError) as error:  # fmt: skip
        raise BundleError(f"{file} is damaged: {error}") from error


def _check_entry(file: Path, entry: zipfile.ZipInfo, names: list[str], listed: set[str]) -> None:
    name = entry.filename
    kind = stat.S_IFMT(entry.external_attr >> 16)
    parts = name.split("/")
    if "\\" in name or ":" in name or name.startswith("/") or any(p in ("", ".", "..") for p in parts):
        raise BundleError(f"{file} holds {name!r}: expected a file name below the bundle's folder; it is not unpacked")
    if kind not in (0, stat.S_IFREG):
        raise BundleError(f"{file} holds {name!r}, a link or device: expected plain files; it is not unpacked")
    if names.count(name) > 1:
        raise BundleError(f"{file} holds {name!r} twice: it is not unpacked")
    if name not in listed:
        raise BundleError(f"{file}: {name} does not belong to this bundle: the manifest does not list it")


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` by relative path, the manifest left out, sorted."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    names = {p.relative_to(folder).as_posix(): p for p in found}
    return {name: sha256(path.read_bytes()) for name, path in names.items() if name != "manifest.json"}


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name when the block ends well, and vanishes otherwise.

    Where ``target`` ends in ``.zip`` its files become that file. With ``overwrite`` the old bundle stays until then.
    Raises :class:`BundleError` for a path that exists or cannot be written.
    """
    zipped = target.suffix == ".zip"
    if target.exists() and not overwrite:
        raise BundleError(f"{target} exists: choose another path, or pass overwrite=True")
    if target.exists() and not (_is_bundle_file(target) if zipped else (target / "manifest.json").is_file()):
        raise BundleError(f"{target} exists and is not a bundle (it has no manifest.json): it will not be replaced")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        temporary.chmod(0o755)
    except OSError as error:
        raise BundleError(f"cannot write beside {target}: {error}") from error
    try:
        yield temporary
        if zipped:
            replace_file(target, dump_zip(temporary))
        else:
            _replace_folder(target, temporary, overwrite)
    except OSError as error:
        raise BundleError(f"writing {target} failed, and nothing is left of it: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(target: Path, temporary: Path, overwrite: bool) -> None:
    old = temporary.with_name(f"{temporary.name}.old")
    if target.exists() and not overwrite:
        raise BundleError(f"{target} appeared while its bundle was made: another export to the same path?")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    if old.is_symlink():
        old.unlink()
    shutil.rmtree(old, ignore_errors=True)


def _is_bundle_file(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return "manifest.json" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
