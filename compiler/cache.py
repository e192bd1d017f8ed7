"""Compiled programs kept on disk: one folder an entry, with a record in clear of what it was compiled from.

    $GRAPHRL_CACHE_DIR (else ~/.cache/graphrl)/programs/<key>/record.json    the key's parts, when, how long, checksums
                                                         .../program.py     the program's text
                                                         .../<artifacts>    what the backend needs to run it again

An entry is used only where every part of its key is what it would be now and every file has the bytes it was written
with. Anything else counts as absent and is compiled and written again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from graphrl._version import __version__
from graphrl.compiler.program import Program

__all__ = ["CacheEntry", "CacheKey", "cache_key", "clear", "entries", "load", "outcome", "programs_dir", "store"]

RECORD, TEXT = "record.json", "program.py"
_NEW = ".new-"


@dataclass(frozen=True)
class CacheKey:
    """What a compiled program depends on, part by part."""

    program: Program
    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The name of the entry's folder."""
        return hashlib.sha256(json.dumps(dict(self.parts), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache. ``intact``: whether every file has the bytes the record tells."""

    folder: Path
    record: Mapping[str, Any]
    files: Mapping[str, bytes]
    intact: bool

    @property
    def size(self) -> int:
        """Bytes on disk."""
        with contextlib.suppress(OSError):
            return sum(f.stat().st_size for f in self.folder.iterdir())
        return 0

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self.record["created"] if self.intact else self.folder.stat().st_mtime))
        return 0.0


def programs_dir() -> Path:
    """Where the entries are: below ``$GRAPHRL_CACHE_DIR``, else below ``~/.cache/graphrl``."""
    return Path(os.environ.get("GRAPHRL_CACHE_DIR") or Path.home() / ".cache" / "graphrl") / "programs"


# ---- the key


def cache_key(program: Program, backend: str, cxx: str | None, **settings: Any) -> CacheKey | None:
    """The key of ``program`` compiled by ``backend``; ``None`` where its text does not tell all there is to it.

    cxx: the C or C++ compiler that would be run. settings: whatever else changes the code, in values that print alike
    in every process.
    """
    constants = _constants(program.graph_module)
    if constants is None:
        return None
    layouts = [slot.read().stride() for slot in program.state] + [n.strides for n in program.noise]
    on_gpu = any(port.device.type != "cpu" for port in program.signature)
    parts = {
        "program": _sha256(program.code.encode()),
        "layouts": repr(layouts),
        "constants": constants,
        "backend": backend,
        "settings": json.dumps(settings, sort_keys=True, default=str),
        "pipeline": f"{__version__} {_sources()}",
        "torch": f"{torch.__version__} {torch.version.git_version or ''}",
        "torch flags": _torch_flags(),
        "python": f"{sys.implementation.cache_tag} {platform.system()}",
        "cpu": _cpu(),
        "compiler": _compiler_version(cxx) if cxx else "none",
        "gpu": _gpu() if on_gpu else "none",
    }
    return CacheKey(program, parts)


def _constants(module: fx.GraphModule) -> str | None:
    """A digest of the tensors the graph holds as attributes: its text only names them."""
    digest = hashlib.sha256()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if not isinstance(value, Tensor) or value.is_sparse or value.is_quantized:
                return None
            digest.update(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}".encode())
            digest.update(bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _torch_flags() -> str:
    flags = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }
    return json.dumps(flags, sort_keys=True)


@functools.cache
def _sources() -> str:
    """A digest of the compiler's own source: passes, lowerings and generators of code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _cpu() -> str:
    """What ``-march=native`` and the vector width depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    name = next((line.partition(":")[2].strip() for line in wanted if line.startswith("model name")), "")
    return f"{platform.machine()} {name} {_sha256(''.join(wanted).encode())[:16]}"


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        result = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    except OSError:
        return "none"
    return result.stdout.strip()


def _gpu() -> str:
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return f"{torch.cuda.get_device_name()} {capability} CUDA {torch.version.cuda}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---- one entry


def load(key: CacheKey | None) -> CacheEntry | None:
    """The intact entry for ``key``, its files read; ``None`` where there is none."""
    if key is None:
        return None
    entry = _read(programs_dir() / key.digest)
    if entry is None or not entry.intact or entry.record["key"] != dict(key.parts):
        return None
    return entry


def store(key: CacheKey, files: Mapping[str, bytes], seconds: float) -> CacheEntry | None:
    """Write an entry, which took ``seconds`` to compile; ``None`` where the disk does not take it.

    The folder is filled under another name and renamed when it is whole. Where another process was faster, its entry
    is the one that stays.
    """
    root, target = programs_dir(), programs_dir() / key.digest
    files = {TEXT: key.program.code.encode(), **files}
    folder = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=root))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / RECORD).write_text(json.dumps(_record(key, files, seconds), indent=1))
        for _ in range(3):
            try:
                folder.rename(target)
                break
            except OSError:  # one lies there: another process was faster, or it is broken
                if (entry := load(key)) is not None:
                    return entry
                _remove(target)
        return load(key)
    except OSError:
        return None
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _record(key: CacheKey, files: Mapping[str, bytes], seconds: float) -> dict[str, Any]:
    program = key.program
    return {
        "name": program.name,
        "backend": key.parts["backend"],
        "inputs": [str(p) for p in program.inputs],
        "outputs": [str(p) for p in program.outputs],
        "operations": program.node_count(),
        "created": time.time(),
        "compile_seconds": round(seconds, 3),
        "key": dict(key.parts),
        "files": {name: {"sha256": _sha256(content), "bytes": len(content)} for name, content in files.items()},
    }


def _read(folder: Path) -> CacheEntry | None:
    """The entry in ``folder``, intact or not; ``None`` where there is no folder."""
    if not folder.is_dir():
        return None
    record: Any = {}
    files: dict[str, bytes] = {}
    try:
        record = json.loads((folder / RECORD).read_text())
        for name, told in record["files"].items():
            if Path(name).name == name:
                files[name] = (folder / name).read_bytes()
            intact = name in files and _sha256(files[name]) == told["sha256"]
            if not intact:
                return CacheEntry(folder, record, {}, False)
        whole = isinstance(record["key"], dict) and isinstance(record["created"], float) and TEXT in files
        return CacheEntry(folder, record, files, whole)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return CacheEntry(folder, record if isinstance(record, dict) else {}, {}, False)


def _remove(folder: Path) -> None:
    """Take a folder away in one step, then delete it: nobody sees half of it."""
    with contextlib.suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder.parent))
        folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


# ---- all entries


def entries() -> Iterator[CacheEntry]:
    """All entries, broken ones too, the newest first."""
    root = programs_dir()
    folders = [f for f in root.iterdir() if not f.name.startswith(".")] if root.is_dir() else []
    found = [entry for folder in folders if (entry := _read(folder)) is not None]
    yield from sorted(found, key=lambda entry: entry.age_s)


def clear(older_than_s: float = 0.0, name: str = "") -> tuple[int, int]:
    """Delete entries at least ``older_than_s`` old whose key starts with ``name``; how many, and bytes freed.

    Running programs keep what they have loaded.
    """
    count = freed = 0
    for entry in entries():
        if entry.folder.name.startswith(name) and entry.age_s >= older_than_s:
            count, freed = count + 1, freed + entry.size
            _remove(entry.folder)
    root = programs_dir()
    for left in root.glob(f"{_NEW}*") if root.is_dir() and not name else ():  # of processes that were killed
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
    return count, freed


# ---- what happened, for explain

_outcomes: weakref.WeakKeyDictionary[fx.GraphModule, str] = weakref.WeakKeyDictionary()


def note_outcome(program: Program, what: str) -> None:
    """Remember whether ``program`` was found in the cache."""
    _outcomes[program.graph_module] = what


def outcome(program: Program) -> str:
    """Where this process's lowering of ``program`` came from; empty for a backend that keeps nothing."""
    return _outcomes.get(program.graph_module, "")
