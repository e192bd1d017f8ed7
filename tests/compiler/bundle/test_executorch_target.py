"""The ExecuTorch program of a bundle. Its package is large: CI does not install it, and skips what runs a program."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_gru import CONTRACT, START, gru

from graphrl.compiler.bundle import Bundle, export, load, verify
from graphrl.compiler.bundle.diff import diff
from graphrl.compiler.bundle.files import dump_zip, hash_files
from graphrl.compiler.bundle.latency import bench_bundle, memory_report
from graphrl.compiler.bundle.parity import Carried
from graphrl.compiler.bundle.runners import RUNNERS, why_not_here
from graphrl.errors import BundleError

needed = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="needs executorch: pip install 'graphrl[executorch]'"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("executorch") / "bundle"
    return export(gru(), folder, START, contract=CONTRACT, targets=("executorch",))


def test_without_its_package_the_target_is_refused_and_a_bundle_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "executorch" else found(name))
    with pytest.raises(BundleError, match=r"target 'executorch' needs executorch: run  pip install 'graphrl\[exec"):
        export(gru(), tmp_path / "b", START, contract=CONTRACT, targets=("executorch",))
    assert not (tmp_path / "b").exists()
    assert why_not_here("executorch", {}) == "executorch is not installed"


@needed
def test_a_program_is_written_judged_and_bound_to_its_contract(bundle: Bundle, tmp_path: Path) -> None:
    assert set(bundle.parity) == {"eager", "executorch"} and 0 < bundle.parity["executorch"] < 1e-5
    assert set(verify(bundle.path).errors) == {"executorch"}
    assert bundle.manifest["tools"]["executorch"]
    run, _ = RUNNERS["executorch"](bundle.path, bundle.manifest)
    player = Carried(bundle.manifest, run)
    policy, h = gru(), torch.full((1, 8), 0.25)
    for observation in torch.randn(5, 1, 3):
        td = policy(START.clone().update({"observation": observation, "h": h}))
        found, h = player.step({"observation": observation.numpy()}), td["next", "h"].detach()
        np.testing.assert_allclose(found["action"], td["action"].detach(), rtol=1e-5, atol=1e-6)

    mixed = Path(shutil.copytree(bundle.path, tmp_path / "mixed"))
    ours = bundle.manifest["contract_hash"].encode()
    (mixed / "model.pte").write_bytes((mixed / "model.pte").read_bytes().replace(ours, ours[::-1]))
    manifest = json.loads((mixed / "manifest.json").read_text())
    manifest["files"] = hash_files(mixed)
    (mixed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"model.pte belongs to another contract"):
        verify(mixed)


@needed
def test_the_same_policy_gives_the_same_bytes_and_a_zip_is_verified_and_timed(bundle: Bundle, tmp_path: Path) -> None:
    again = export(gru(), tmp_path / "again", START, contract=CONTRACT, targets=("executorch",))
    assert diff(bundle, again) == []
    zipped = tmp_path / "b.zip"
    zipped.write_bytes(dump_zip(bundle.path))
    assert set(verify(zipped).errors) == {"executorch"}
    found = bench_bundle(load(zipped), rate_hz=1000.0, calls=50, seconds=0.02)["targets"]["executorch"]
    assert found["hot"]["p50"] > 0 and found["threads"] == found["threads_before"]
    assert memory_report(bundle)["targets"]["executorch"]["file"] == (bundle.path / "model.pte").stat().st_size


@needed
def test_a_program_that_cannot_be_lowered_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(BundleError, match="executorch: ExecuTorch could not lower this program: no such operator$"):
        export(gru(), tmp_path / "b", START, contract=CONTRACT, targets=("executorch",))
