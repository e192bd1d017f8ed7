"""Checkpoints on disk: tensors in safetensors, the rest in JSON; no pickle, no half-written file, no silent damage.

A checkpoint folder holds ``state.json`` and one ``state-HASH.safetensors`` it names. The tensors are written first,
under a temporary name, then renamed; replacing ``state.json`` is the one step that makes the new checkpoint current.
A crash at any moment leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from graphrl._version import __version__
from graphrl.errors import CheckpointError

__all__ = ["check_writable", "has_checkpoint", "load_checkpoint", "remove_checkpoint", "save_checkpoint"]

FORMAT = "graphrl checkpoint"
VERSION = 1
INDEX = "state.json"


def check_writable(folder: Path) -> None:
    """Create ``folder`` and prove that files can be written in it. Raises :class:`CheckpointError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            pass
    except OSError as error:
        raise CheckpointError(f"cannot write in {folder}: {error.strerror or error}") from error


def has_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` holds a checkpoint, sound or not."""
    return (folder / INDEX).exists()


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """Write ``tensors`` (copied to the CPU) and ``data`` (plain JSON values) as the current checkpoint of ``folder``.

    Raises :class:`CheckpointError` when it cannot be written; the previous checkpoint then stays current.
    """
    from safetensors.torch import save

    content = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"state-{digest[:16]}.safetensors"
    body = {
        "format": FORMAT,
        "version": VERSION,
        "graphrl": __version__,
        "tensors": {"file": name, "sha256": digest},
        "data": data,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / name, content)
        text = json.dumps({**body, "sha256": _digest(body)}, indent=2)
        _replace(folder / INDEX, text.encode())
        for old in folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint in {folder}: {error.strerror or error}") from error


def remove_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of ``folder``, if there is one; other files stay."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.glob("state-*.safetensors"):
        path.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the data of the current checkpoint, after checking both against their SHA-256.

    Raises :class:`CheckpointError` for a folder without a checkpoint, a damaged file, or another format.
    """
    from safetensors.torch import load

    data = read_index(folder)
    path = folder / data["tensors"]["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint in {folder} is incomplete") from error
    if hashlib.sha256(content).hexdigest() != data["tensors"]["sha256"]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {INDEX}")
    return load(content), data["data"]


def read_index(folder: Path) -> dict[str, Any]:
    """``state.json``, checked. Raises :class:`CheckpointError`."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        found = index.pop("sha256")
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint in {folder}: expected {path}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {error}") from error
    if index.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a {FORMAT}: its format is {index.get('format')!r}")
    if index.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {index.get('version')}; this graphrl reads version {VERSION}")
    if _digest(index) != found:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one it states")
    name = str(index["tensors"]["file"])
    if Path(name).name != name:
        raise CheckpointError(f"{path} names a file outside its folder: {name!r}")
    return index


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Write beside ``path``, flush to the disk, rename over it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
