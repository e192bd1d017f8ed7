"""A bundle as one file: the same bytes each time, and nothing unpacked that does not belong."""

from __future__ import annotations

import gc
import json
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from small_gru import CONTRACT, START, gru

from graphrl.cli import main
from graphrl.compiler.bundle import Bundle, export, load, verify
from graphrl.compiler.bundle.c_policy import check_files
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError


def write(path: Path, seed: int = 0, **options: bool) -> Bundle:
    return export(gru(seed), path, START, contract=CONTRACT, targets=("numpy",), **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("zip") / "policy.zip").source


def test_one_file_with_the_bytes_of_the_folder(made: Path, tmp_path: Path) -> None:
    again, folder = write(tmp_path / "again.zip"), write(tmp_path / "folder")
    assert again.source.read_bytes() == made.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.zip", "folder"]
    assert again.manifest == folder.manifest and again.source == tmp_path / "again.zip"
    with zipfile.ZipFile(made) as archive:
        assert archive.namelist() == sorted(["manifest.json", *folder.manifest["files"]])
        assert all(archive.read(name) == (folder.path / name).read_bytes() for name in archive.namelist())


def test_it_loads_verifies_and_prints(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(verify(made)).startswith(f"{made}: ") and "numpy within" in str(verify(made))
    assert main(["verify", str(made)]) == 0 and main(["inspect", str(made)]) == 0
    text = capsys.readouterr().out
    assert "runtime.py" in text and "normalizer" in text and "passed" in text
    assert main(["diff", str(made), str(made)]) == 0


def test_the_unpacked_copy_goes_with_the_bundle(made: Path) -> None:
    bundle = load(made)
    folder = bundle.path
    assert folder.is_dir() and folder != made and repr(bundle).startswith(f"Bundle('{made}'")
    del bundle
    gc.collect()
    assert not folder.exists()


def test_another_bundle_is_replaced_and_nothing_else(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.zip"
    target.write_bytes(made.read_bytes())
    with pytest.raises(BundleError, match="exists.*overwrite=True"):
        write(target, 1)
    assert write(target, 1, overwrite=True).manifest["weight_hash"] != load(made).manifest["weight_hash"]
    target.write_bytes(b"my thesis")
    with pytest.raises(BundleError, match="is not a bundle"):
        write(target, overwrite=True)
    assert target.read_bytes() == b"my thesis"


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system, entry.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return entry


BAD: dict[str, tuple[str | zipfile.ZipInfo, str]] = {
    "above": ("../evil.txt", "'../evil.txt': expected a file name below"),
    "deeper": ("c/../../evil.txt", "expected a file name below"),
    "absolute": ("/tmp/evil.txt", "expected a file name below"),
    "drive": ("C:/evil.txt", "expected a file name below"),
    "backslash": ("..\\evil.txt", "expected a file name below"),
    "link": (link("golden.npz"), "a link or device"),
    "stranger": ("extra.pkl", "extra.pkl does not belong"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_name_that_leads_elsewhere_is_not_unpacked(
    bad: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, message = BAD[bad]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "in"))
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(tmp_path / "bad.zip", "w") as new:
        manifest = json.loads(old.read("manifest.json"))
        if bad != "stranger":
            manifest["files"][name if isinstance(name, str) else name.filename] = "0" * 64
        new.writestr("manifest.json", json.dumps(manifest))
        new.writestr(name, b"evil")
    with pytest.raises(BundleError, match=message):
        load(tmp_path / "bad.zip")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["bad.zip", "in"]


def rewritten(made: Path, path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if (data := change(name, old.read(name))) is not None:
                new.writestr(name, data)
    return path


def test_damage_is_named(made: Path, tmp_path: Path) -> None:
    cases: list[tuple[Callable[[str, bytes], bytes | None], str]] = [
        (lambda name, data: data + b" " if name == "graph.json" else data, "bad.zip/graph.json was changed"),
        (lambda name, data: None if name == "golden.npz" else data, "bad.zip/golden.npz is missing"),
        (lambda name, data: None if name == "manifest.json" else data, "holds no manifest.json"),
        (lambda name, data: b"[1]" if name == "manifest.json" else data, "is damaged"),
    ]
    for change, message in cases:
        with pytest.raises(BundleError, match=message):
            load(rewritten(made, tmp_path / "bad.zip", change))
    (tmp_path / "bad.zip").write_bytes(made.read_bytes()[:-30])
    with pytest.raises(BundleError, match="bad.zip is (damaged|no bundle)"):
        load(tmp_path / "bad.zip")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as twice:
        twice.writestr("manifest.json", '{"files": {}}')
        with pytest.warns(UserWarning, match="Duplicate"):
            twice.writestr("manifest.json", '{"files": {}}')
    with pytest.raises(BundleError, match="twice"):
        load(tmp_path / "bad.zip")


def test_one_that_unpacks_to_far_more_than_it_takes_is_not_read(made: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "b.zip"
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    data = bytearray(bomb.read_bytes())
    place = data.rindex(b"PK\x01\x02")  # the last entry of the directory, and the size it declares
    data[place + 24 : place + 28] = (0xF0000000).to_bytes(4, "little")
    bomb.write_bytes(data)
    with pytest.raises(BundleError, match=r"unpacks to 402\d+ bytes: more than 1073741824"):
        load(bomb)
    for read in (Policy.load, check_files):
        with pytest.raises(ValueError, match="unpacks to"):
            read(bomb)
