"""Runs a policy bundle's C from Python: numpy, ctypes and a C compiler; no torch, no graphrl.

This file is complete in itself: copy it beside a bundle, or run the copy inside one.

    policy = CPolicy("policy_bundle")
    action = policy(observation)          # one observation, numpy in, numpy out
    python c_policy.py policy_bundle      # check every file's hash, replay the golden vectors; or a .zip
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

C_TYPES = {"float": (ctypes.c_float, np.float32), "double": (ctypes.c_double, np.float64),
           "int64_t": (ctypes.c_int64, np.int64), "int32_t": (ctypes.c_int32, np.int32),
           "unsigned char": (ctypes.c_ubyte, np.uint8)}  # fmt: skip

LARGEST = 1 << 30
"""Bytes that a ``.zip`` may unpack to, unless it takes a quarter of them itself."""


class CPolicy:
    """One instance of a bundle's compiled policy.

    bundle: its folder, or its ``.zip``. cc: C compiler, default ``$CC`` or cc, gcc, clang. flags: how to compile.
    ``status`` holds the status bits of the last step: 1 non-finite observation, 2 non-finite output, 4 out of range,
    8 non-finite state.
    """

    def __init__(
        self, bundle: str | Path, cc: str | None = None, flags: tuple[str, ...] = ("-O3", "-march=native")
    ) -> None:
        with as_folder(bundle) as folder:
            self.manifest = read_manifest(folder)
            interface = self.manifest["c"]
            if interface is None:
                raise ValueError(f"{bundle} holds no C: its targets are {self.manifest['targets']}")
            self.prefix: str = interface["prefix"]
            self.library = compile_library(folder / "c", self.prefix, cc, flags)
        self.inputs = [m for m in interface["inputs"] if m["place"] == "obs"]
        self.outputs = [m for m in interface["outputs"] if m["place"] == "command"]
        self._obs = _struct(self.inputs)()
        self._command = _struct(self.outputs)()
        carried = [m for m in (*interface["inputs"], *interface["outputs"]) if m["place"] == "state"]
        self._carried = carried
        self._state = _struct([*carried, *interface["scratch"]], (("steps", ctypes.c_uint32),))()
        if ctypes.sizeof(self._state) != self._function("state_size", ctypes.c_size_t)():
            raise ValueError("the C code's state struct is not the one the manifest describes")
        self._init = self._function("init", None)
        self._reset = self._function("reset", None)
        self._step = self._function("step", ctypes.c_uint32)
        self._into = {m["key"]: _array(self._obs, m) for m in self.inputs}
        self._dtypes = {p["key"]: np.dtype(p["dtype"]) for p in self.manifest["inputs"]}
        self._from = {m["key"]: _array(self._command, m) for m in self.outputs}
        self._arguments = (ctypes.byref(self._state), ctypes.byref(self._obs), ctypes.byref(self._command))
        self.status = 0
        found = self._function("contract_hash", ctypes.c_char_p)().decode()
        if found != self.manifest["contract_hash"]:
            raise ValueError(f"the C code is of contract {found}, the manifest of {self.manifest['contract_hash']}")
        self._init(self._arguments[0])

    def __call__(self, observation: Any) -> Any:
        """The action for one observation: an array for a single input, or a dict by key; likewise for the result."""
        if not isinstance(observation, Mapping):
            if len(self.inputs) != 1:
                raise ValueError(f"this policy reads {list(self._into)}: pass a dict")
            observation = {self.inputs[0]["key"]: observation}
        for key, target in self._into.items():
            if key not in observation:
                raise ValueError(f"{key!r} is missing: this policy reads {list(self._into)}, got {list(observation)}")
            if observation[key] is None:
                raise ValueError(f"{key!r} is None: no reading came? Expected an array of shape {target.shape}")
            value = np.asarray(observation[key])
            row = target.shape[1:] if target.shape[:1] == (1,) else target.shape
            if value.shape not in (target.shape, row, (1, *target.shape)):
                raise ValueError(f"{key!r} has shape {value.shape}, expected {target.shape}")
            dtype = self._dtypes[key]
            if value.dtype.kind not in ("fiub" if dtype.kind == "f" else "iub"):
                raise ValueError(f"{key!r} is {value.dtype}, expected {dtype}, real numbers")
            with np.errstate(all="ignore"):
                target[...] = value.reshape(target.shape).astype(dtype)
            if dtype.kind != "f" and (target != value.reshape(target.shape)).any():
                raise ValueError(f"{key!r} holds {value.min()} to {value.max()}, more than a {dtype} can")
        strangers = [key for key in observation if key not in self._into]
        if strangers:
            raise ValueError(f"this policy has no observation {strangers[0]!r}; it reads {list(self._into)}")
        self.status = self._step(*self._arguments)
        result = {key: source.copy() for key, source in self._from.items()}
        return next(iter(result.values())) if len(result) == 1 else result

    def reset(self) -> None:
        """Start an episode: recurrent values go back to where the contract puts them."""
        self._reset(self._arguments[0])

    def selftest(self) -> int:
        """Number of golden rows that fail in the compiled code; 0 is well. Resets the policy."""
        failures = int(self._function("selftest", ctypes.c_int32)(self._arguments[0]))
        self._init(self._arguments[0])
        return failures

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The recurrent values in the state struct, flat, by C name; writing to them changes the state."""
        dtypes = {m["name"]: C_TYPES[m["c_type"]][1] for m in self._carried}
        return {name: np.frombuffer(getattr(self._state, name), dtype=dtype) for name, dtype in dtypes.items()}

    def _function(self, name: str, result: Any) -> Any:
        function = getattr(self.library, f"{self.prefix}_{name}", None)
        if function is None:
            raise ValueError(f"the C code has no function {self.prefix}_{name}")
        function.restype = result
        return function


@contextlib.contextmanager
def as_folder(bundle: str | Path) -> Iterator[Path]:
    """The bundle's folder; the files of a ``.zip`` in a temporary one. Raises ``ValueError`` where it is neither."""
    if not Path(bundle).is_file():
        yield Path(bundle)
        return
    with tempfile.TemporaryDirectory() as temporary:
        try:
            with zipfile.ZipFile(bundle) as archive:
                check_size(bundle, archive)
                archive.extractall(temporary)  # names that lead elsewhere lose what leads there
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"{bundle} is no bundle: {error}") from None
        yield Path(temporary)


def check_size(file: str | Path, archive: zipfile.ZipFile) -> None:
    """Raises ``ValueError`` where a ``.zip`` unpacks to more than :data:`LARGEST`, and than four times its size."""
    size = sum(entry.file_size for entry in archive.infolist())
    if size > max(LARGEST, 4 * Path(file).stat().st_size):
        raise ValueError(f"{file} unpacks to {size} bytes: more than {LARGEST}, and than four times its own size")


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own ``manifest_hash``, written with sorted keys and no spaces."""
    rest = {name: value for name, value in manifest.items() if name != "manifest_hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle's folder. Raises ``ValueError`` where it is not there, damaged or changed."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
        seal = manifest.get("manifest_hash")
    except OSError as error:
        raise ValueError(f"{folder} is no bundle: {file} cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if hash_manifest(manifest) != seal:
        raise ValueError(f"{file} was changed: it is not the one its manifest_hash was made of")
    return manifest  # type: ignore[no-any-return]


def check_files(bundle: str | Path) -> int:
    """Compare every file of a bundle, a folder or ``.zip``, with the manifest; returns how many there are.

    Raises ``ValueError`` naming the first that is missing, changed, or does not belong to the bundle.
    """
    with as_folder(bundle) as folder:
        try:
            return _check_folder(folder)
        except ValueError as error:
            raise ValueError(str(error).replace(str(folder), str(bundle))) from None


def _check_folder(folder: Path) -> int:
    listed: dict[str, str] = read_manifest(folder)["files"]
    for name, wanted in listed.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing: the manifest lists it")
        if hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
            raise ValueError(f"{file} was changed or damaged: its SHA-256 is not the manifest's {wanted[:12]}...")
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        alien = (file.is_symlink() or not file.is_dir()) and name not in listed and "__pycache__" not in file.parts
        if alien and name != "manifest.json":
            raise ValueError(f"{file} does not belong to this bundle: the manifest does not list it")
    return len(listed)


def find_compiler() -> str | None:
    """``$CC``, else cc, gcc or clang on the path. Raises ``FileNotFoundError`` where CC names no program."""
    chosen = os.environ.get("CC")
    if chosen and shutil.which(chosen) is None:
        raise FileNotFoundError(f"CC is {chosen!r}, no program on the path: name one compiler, without arguments")
    return next((found for name in (chosen, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


def compile_library(folder: Path, prefix: str, cc: str | None, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a bundle's ``c`` folder into a shared library and load it; nothing is left on disk."""
    compiler = cc or find_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler: install gcc or clang, or set CC")
    with tempfile.TemporaryDirectory() as temporary:
        target = str(Path(temporary, f"{prefix}.so"))
        sources = [str(folder / f"{prefix}.c"), str(folder / "selftest.c")]
        base = [compiler, "-std=c99", "-shared", "-fPIC", "-o", target, *sources, "-lm"]
        result = subprocess.run([*base, *flags], capture_output=True, text=True)
        if result.returncode and "-march=native" in flags:  # some targets do not know the flag
            result = subprocess.run([*base, "-O3"], capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{compiler} failed on {folder}:\n{result.stderr[:2000]}")
        if not Path(target).is_file():
            raise RuntimeError(f"{compiler} wrote no library: is it a C compiler?")
        return ctypes.CDLL(target)


def _struct(members: list[dict[str, Any]], first: tuple[Any, ...] = ()) -> type[ctypes.Structure]:
    fields = list(first) + [(m["name"], C_TYPES[m["c_type"]][0] * max(m["size"], 1)) for m in members]
    return type("Members", (ctypes.Structure,), {"_fields_": fields or [("unused", ctypes.c_ubyte)]})


def _array(struct: ctypes.Structure, member: dict[str, Any]) -> np.ndarray:
    """The member's memory as an array, without the leading batch dim of one."""
    shape = member["shape"][1:] if member["shape"][:1] == [1] and len(member["shape"]) > 1 else member["shape"]
    flat = np.frombuffer(getattr(struct, member["name"]), dtype=C_TYPES[member["c_type"]][1])
    return flat[: member["size"]].reshape(shape)


def main(arguments: list[str]) -> int:
    """Check the bundle named on the command line, or the one this file lies in; the exit status."""
    where = arguments[0] if arguments else str(Path(__file__).parent)
    try:
        files = check_files(where)
        failed = CPolicy(where).selftest()
    except (OSError, RuntimeError, ValueError) as error:
        print(error)
        return 1
    print(f"{where}: {files} files intact, {f'{failed} golden rows fail' if failed else 'golden vectors agree'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
