"""The AOTInductor package of a bundle: written, judged by the golden vectors, and bound to its contract."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from small_gru import CONTRACT, START, gru

from graphrl.compiler.bundle import Bundle, export, latency, verify
from graphrl.compiler.bundle.files import hash_files
from graphrl.errors import BundleError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(gru(), tmp_path_factory.mktemp("pt2") / "b", START, contract=CONTRACT, targets=("pt2",))


@pytest.mark.slow
def test_a_package_is_written_judged_and_bound_to_its_contract(bundle: Bundle, tmp_path: Path) -> None:
    assert bundle.manifest["pt2"]["torch"] == torch.__version__ and "differ" in bundle.manifest["pt2"]["bytes"]
    assert set(bundle.parity) == {"eager", "pt2"} and set(verify(bundle.path).errors) == {"pt2"}
    assert bundle.manifest["reports"]["parity"]["sequence_relative_error"]["pt2"] < 1e-6
    loaded = torch._inductor.aoti_load_package(str(bundle.path / "model.pt2"))
    action, following = loaded(torch.ones(1, 3), torch.full((1, 8), 0.5))
    wanted = gru()(START.clone().update({"observation": torch.ones(1, 3), "h": torch.full((1, 8), 0.5)}))
    named = dict(zip([p["key"] for p in bundle.manifest["outputs"]], (action, following), strict=True))
    torch.testing.assert_close(named["action"], wanted["action"].detach())
    torch.testing.assert_close(named["next/h"], wanted["next", "h"].detach())

    mixed = Path(shutil.copytree(bundle.path, tmp_path / "mixed"))
    ours = bundle.manifest["contract_hash"].encode()
    with zipfile.ZipFile(bundle.path / "model.pt2") as old, zipfile.ZipFile(mixed / "model.pt2", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(ours, ours[::-1]))
    refused(mixed, "model.pt2 belongs to another contract")
    (mixed / "model.pt2").write_bytes(b"PK")
    refused(mixed, "model.pt2 is damaged")


@pytest.mark.slow
def test_a_package_is_timed_and_its_allocations_are_counted(bundle: Bundle) -> None:
    report = latency.bench_bundle(bundle, rate_hz=500, calls=50, seconds=0.01)
    found = report["targets"]["pt2"]
    assert found["hot"]["calls"] == 50 and 0 < found["hot"]["p50"] <= found["hot"]["max"] and found["threads"] >= 1
    assert found["allocations_per_call"] > 10  # each tensor takes a few
    size = latency.memory_report(bundle)["targets"]["pt2"]["file"]
    assert size == (bundle.path / "model.pt2").stat().st_size


def refused(folder: Path, message: str) -> None:
    """Even with the hashes of a manifest that was written for it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = hash_files(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        verify(folder)
