"""The runtimes that open a bundle's zip themselves, and a manifest that tells of any edit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_gru import CONTRACT, START, gru

from graphrl.compiler.bundle import CPolicy, c_policy, export, load, runtime
from graphrl.compiler.bundle.files import sealed
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError

NEEDS_C = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(gru(), tmp_path_factory.mktemp("z") / "p.zip", START, contract=CONTRACT,
                  targets=("c99", "numpy")).source  # fmt: skip


def test_the_numpy_runtime_reads_the_zip_in_memory(made: Path) -> None:
    folder, x = load(made), np.array([0.1, -0.2, 0.3])
    wanted, policy = Policy.load(folder.path), Policy.load(str(made))
    for _ in range(3):
        assert (policy.step({"observation": x})["action"] == wanted.step({"observation": x})["action"]).all()
    assert policy.selftest() <= 1e-5 and runtime.check_files(made) == len(folder.manifest["files"])


@NEEDS_C
def test_the_c_runtime_unpacks_the_zip(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([0.1, -0.2, 0.3], np.float32)
    assert np.allclose(CPolicy(made)(x), Policy.load(made).step({"observation": x})["action"], atol=1e-6)
    assert c_policy.main([str(made)]) == 0 and "golden vectors agree" in capsys.readouterr().out


def test_the_runtime_is_a_program_for_a_zip_too(made: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        archive.extract("runtime.py", tmp_path)
    command = [sys.executable, "-I", str(tmp_path / "runtime.py"), str(made)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "files intact" in result.stdout and "1000 steps" in result.stdout
    (tmp_path / "no.zip").write_bytes(b"no zip")
    result = subprocess.run([*command[:-1], str(tmp_path / "no.zip")], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1 and "no.zip is no bundle" in result.stderr


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(tolerance=1.0),
        lambda m: m["reports"]["parity"].update(rows=1000),
        lambda m: m["checks"].update(state="passed, honestly"),
        lambda m: m["tools"].update(torch="9.9"),
        lambda m: m.update(extra=None),
        lambda m: m.pop("manifest_hash"),
    ],
)
def test_an_edit_of_any_field_is_refused_by_every_loader(
    edit: Callable[[dict[str, Any]], Any], made: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "b")
    manifest = json.loads((tmp_path / "b/manifest.json").read_text())
    assert sealed(manifest) == manifest  # its own hash, before the edit
    edit(manifest)
    (tmp_path / "b/manifest.json").write_text(json.dumps(manifest, indent=1))
    for opened, kind in ((load, BundleError), (Policy.load, ValueError), (CPolicy, ValueError),
                         (c_policy.check_files, ValueError), (runtime.check_files, ValueError)):  # fmt: skip
        with pytest.raises(kind, match="manifest.json was changed: .*manifest_hash"):
            opened(tmp_path / "b")


def test_what_an_archive_lacks_or_holds_twice_is_named(made: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(tmp_path / "less.zip", "w") as less:
        for name in old.namelist():
            if name != "weights.safetensors":
                less.writestr(name, old.read(name))
    for opened in (Policy.load, runtime.check_files, c_policy.check_files):
        with pytest.raises(ValueError, match="weights.safetensors.* is missing"):
            opened(tmp_path / "less.zip")
    shutil.copy(made, tmp_path / "more.zip")
    with zipfile.ZipFile(tmp_path / "more.zip", "a") as more:
        more.writestr("evil.py", b"")
    for opened in (runtime.check_files, c_policy.check_files):
        with pytest.raises(ValueError, match="evil.py does not belong"):
            opened(tmp_path / "more.zip")


def test_a_bundle_without_c_says_so(tmp_path: Path) -> None:
    bundle = export(gru(), tmp_path / "b", START, contract=CONTRACT, targets=("numpy",))
    with pytest.raises(ValueError, match=r"holds no C: its targets are \['numpy'\]"):
        CPolicy(bundle.path)
