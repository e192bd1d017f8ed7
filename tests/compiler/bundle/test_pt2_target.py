"""The AOTInductor package of a bundle: written, judged by the golden vectors, bound to its contract, run from C++."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from small_gru import CONTRACT, START, gru

from graphrl.compiler.backends import aot
from graphrl.compiler.bundle import Bundle, export, latency, load, verify
from graphrl.compiler.bundle.diff import diff
from graphrl.compiler.bundle.files import dump_zip, hash_files, sealed
from graphrl.compiler.bundle.replay import replay
from graphrl.errors import BundleError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("pt2") / "bundle"
    return export(gru(), folder, START, contract=CONTRACT, targets=("pt2", "numpy"))


def test_a_package_is_written_judged_and_bound_to_its_contract(bundle: Bundle, tmp_path: Path) -> None:
    assert bundle.manifest["pt2"]["torch"] == torch.__version__ and "differ" in bundle.manifest["pt2"]["bytes"]
    assert set(bundle.parity) == {"eager", "pt2", "numpy"} and set(verify(bundle.path).errors) == {"pt2", "numpy"}
    assert bundle.manifest["reports"]["parity"]["sequence_relative_error"]["pt2"] < 1e-6
    loaded = torch._inductor.aoti_load_package(str(bundle.path / "model.pt2"))
    action, following = loaded(torch.ones(1, 3), torch.full((1, 8), 0.5))
    wanted = gru()(START.clone().update({"observation": torch.ones(1, 3), "h": torch.full((1, 8), 0.5)}))
    named = dict(zip([p["key"] for p in bundle.manifest["outputs"]], (action, following), strict=True))
    torch.testing.assert_close(named["action"], wanted["action"].detach())
    torch.testing.assert_close(named["next/h"], wanted["next", "h"].detach())

    mixed = Path(shutil.copytree(bundle.path, tmp_path / "mixed"))
    of_another_contract(bundle, mixed)
    refused(mixed, "model.pt2 belongs to another contract")
    (mixed / "model.pt2").write_bytes(b"PK")
    refused(mixed, "model.pt2 is damaged")


def test_a_bundle_with_a_package_is_replayed_compared_and_zipped(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped = tmp_path / "bundle.zip"
    zipped.write_bytes(dump_zip(bundle.path))
    assert set(verify(zipped).errors) == {"pt2", "numpy"}
    assert diff(bundle, load(zipped)) == []
    run = torch._inductor.aoti_load_package(str(bundle.path / "model.pt2"))
    h, observation, action = torch.full((1, 8), 0.25), torch.randn(6, 3), []
    places = [p["key"] for p in bundle.manifest["outputs"]]
    for row in observation:
        found = dict(zip(places, run(row[None], h), strict=True))
        h, action = found["next/h"], [*action, found["action"]]
    np.savez(tmp_path / "log.npz", observation=observation.numpy(), action=torch.cat(action).numpy())
    replayed = replay(load(zipped), tmp_path / "log.npz")
    assert replayed.steps == 6 and replayed.divergence is None

    other = {**aot.package_host(), "torch": "2.0.0"}
    monkeypatch.setattr(aot, "package_host", lambda: other)  # a machine with another torch
    assert "is for torch" in verify(bundle.path).skipped["pt2"]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake (package cmake)")
def test_the_runner_in_cpp_replays_the_golden_vectors(bundle: Bundle, tmp_path: Path) -> None:
    source, build = bundle.path / "cpp", tmp_path / "build"
    call("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
         "-DCMAKE_CXX_FLAGS_RELEASE=-O0")  # fmt: skip
    call("cmake", "--build", build)
    code, out = ran(build, bundle.path)
    rows, steps = (float(e) for e in re.findall(r"largest error (\S+) of", out))
    assert code == 0 and 0 < rows < 1e-5 and 0 < steps < 1e-5, out
    reported = bundle.manifest["reports"]["parity"]
    assert rows == pytest.approx(reported["max_relative_error"]["pt2"], rel=1e-4)
    assert steps == pytest.approx(reported["sequence_relative_error"]["pt2"], rel=1e-4)

    other = Path(shutil.copytree(bundle.path, tmp_path / "other"))
    golden = (other / "cpp" / "golden.bin").read_bytes()
    (other / "cpp" / "golden.bin").write_bytes(golden[:-8] + np.float64(7.0).tobytes())  # the last action
    code, out = ran(build, other)
    assert code == 1 and "step 19, action" in out
    (other / "cpp" / "golden.bin").write_bytes(golden[:-8])
    assert ran(build, other) == (2, f"{other}/cpp/golden.bin cannot be read, or is too short\n")
    code, out = ran(build, bundle.path, ATEN_CPU_CAPABILITY="default")
    if bundle.manifest["pt2"]["instruction_set"] != "DEFAULT":
        assert code == 2 and "this one has DEFAULT: export the bundle again on this kind of processor" in out
    of_another_contract(bundle, other)
    assert ran(build, other) == (2, f"{other}/model.pt2 belongs to another contract\n")
    rewritten(bundle, other, torch.__version__, "1.9.9")
    code, out = ran(build, other)
    assert code == 2 and "model.pt2 is for torch 1.9.9, this program is built with " in out


def call(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def ran(build: Path, folder: Path, **environment: str) -> tuple[int, str]:
    command = [str(build / "runner"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    return done.returncode, done.stdout + done.stderr


def of_another_contract(bundle: Bundle, other: Path) -> None:
    ours = bundle.manifest["contract_hash"]
    rewritten(bundle, other, ours, ours[::-1])


def rewritten(bundle: Bundle, other: Path, old: str, new: str) -> None:
    """The package in ``other``, with ``new`` in place of ``old`` in its metadata."""
    with zipfile.ZipFile(bundle.path / "model.pt2") as a, zipfile.ZipFile(other / "model.pt2", "w") as b:
        for name in a.namelist():
            data = a.read(name)
            b.writestr(name, data.replace(old.encode(), new.encode()) if name.endswith("metadata.json") else data)


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
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(BundleError, match=message):
        verify(folder)
