"""Bundles edited by hand, their hashes made to fit: one error that names the file, never a reader's inside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from graphrl import KeyedGraph
from graphrl.compiler.bundle import CPolicy, export, load, verify
from graphrl.compiler.bundle.diff import diff
from graphrl.compiler.bundle.files import hash_files
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = TensorDict(x=torch.randn(2, 3), flag=torch.tensor([[True], [False]]), batch_size=[2])
    graph = KeyedGraph((lambda x, flag: torch.where(flag & (x > 0), x, -x), ["x", "flag"], ["action"]))
    return export(graph, tmp_path_factory.mktemp("made") / "b", x, targets=("c99", "numpy")).path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def rehash(folder: Path) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"] = hash_files(folder)
    manifest["program_hash"] = manifest["files"]["graph.json"]
    manifest["weight_hash"] = manifest["files"]["weights.safetensors"]
    file.write_text(json.dumps(manifest))


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(file.read_text())
    changed = change(data)
    file.write_text(json.dumps(data if changed is None else changed))


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [1], {"a": 1}])
def test_every_field_of_a_manifest_has_its_kind(value: Any, copy: Path) -> None:
    file = copy / "manifest.json"
    whole = file.read_text()
    for name in ("contract_hash", "program_hash", "inputs", "targets", "tolerance", "files", "reports", "tools"):
        if isinstance(value, (type(json.loads(whole)[name]), int if name == "tolerance" else bool)):
            continue
        edit(file, lambda m, name=name: m.update({name: value}))
        with pytest.raises(BundleError, match=r"manifest\.json"):
            str(load(copy))
        if name not in ("reports", "tools"):
            with pytest.raises(ValueError, match=r"manifest\.json|was changed"):
                Policy.load(copy)
        file.write_text(whole)
    edit(file, lambda m: m["c"]["inputs"][0].update(shape=value))
    with pytest.raises(ValueError, match="damaged|struct|reshape|broadcast"):
        CPolicy(copy)([0.0, 0.0, 0.0])


GRAPHS: list[Callable[[Any], Any]] = [
    lambda g: [],
    lambda g: None if g.pop("nodes") else None,
    lambda g: g.update(nodes=[]),
    lambda g: None if g["nodes"].pop(0) else None,
    lambda g: g["nodes"][0].update(op="aten.no_such_thing.default"),
    lambda g: g["nodes"][0].update(args=[{"node": "nobody"}]),
    lambda g: g["nodes"][-1].update(args=[]),
    lambda g: g["nodes"][-1].update(args=[[{"node": "nobody"}]]),
    lambda g: g["inputs"].reverse(),
    lambda g: g.update(placeholders=["x"]),
]


@pytest.mark.parametrize("i", range(len(GRAPHS)))
def test_a_graph_that_is_none_is_one_error_everywhere(i: int, copy: Path, made: Path) -> None:
    edit(copy / "graph.json", GRAPHS[i])
    rehash(copy)
    with pytest.raises(ValueError, match=r"graph\.json|this runtime has no|the graph"):
        Policy.load(copy)
    with pytest.raises(BundleError, match=r"graph\.json"):
        load(copy).program()
    with pytest.raises(BundleError, match=r"copy"):
        verify(copy)
    try:
        assert diff(load(copy), load(made))
    except BundleError as error:
        assert "graph.json" in str(error)


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b"\xff", b'{"__metadata__":3}', b'{"w":{"dtype":[]}}', b"[" * 99999]
)
def test_a_weights_file_that_is_none_is_one_error(header: bytes, copy: Path) -> None:
    (copy / "weights.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    rehash(copy)
    with pytest.raises(ValueError, match="weights"):
        Policy.load(copy)
    for read in (lambda: load(copy).program(), lambda: verify(copy), lambda: diff(load(copy), load(copy))):
        with pytest.raises(BundleError):
            read()


@pytest.mark.parametrize("change", ["in/x", "kind", "out/action", "scale/action", "contract_hash", "no row", "pickle"])
def test_golden_vectors_that_lack_something_do_not_verify(change: str, copy: Path) -> None:
    with np.load(copy / "golden.npz") as file:
        arrays = dict(file)
    if change == "no row":
        arrays["kind"] = arrays["kind"][:0]
    elif change == "pickle":
        arrays["in/x"] = np.array([{}], dtype=object)
    else:
        del arrays[change]
    np.savez(copy / "golden.npz", **arrays)
    rehash(copy)
    with pytest.raises(BundleError, match="damaged|no row"):
        verify(copy)
    with pytest.raises(ValueError, match="damaged|no row|Object arrays"):
        Policy.load(copy).selftest()


def test_a_link_and_a_wider_tolerance_do_not_pass(copy: Path) -> None:
    (copy / "aside").symlink_to("/nowhere")
    with pytest.raises(BundleError, match="aside does not belong"):
        load(copy)
    (copy / "aside").unlink()
    edit(copy / "manifest.json", lambda m: m.update(tolerance=1e9))
    with pytest.raises(BundleError, match=r"allows 1000000000\.0, reports/parity\.json 1e-05"):
        verify(copy)
