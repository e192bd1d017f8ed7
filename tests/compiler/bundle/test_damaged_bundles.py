"""Bundles edited by hand, their hashes made to fit: one error that names the file, never a reader's inside."""

from __future__ import annotations

import json
import shutil
import zipfile
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
from graphrl.compiler.bundle.files import hash_files, sealed, whole_folder
from graphrl.compiler.bundle.replay import replay
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
    file.write_text(json.dumps(sealed(manifest)))


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(file.read_text())
    changed = change(data)
    data = data if changed is None else changed
    file.write_text(json.dumps(sealed(data) if file.name == "manifest.json" else data))


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
    file.write_text(whole.replace('"c_type": "float"', '"c_type": "double"'))
    with pytest.raises(ValueError, match="was changed: it is not the one its manifest_hash"):
        CPolicy(copy)


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x[0],x[1],x[2],flag,action[0],action[1],action[2]\n", "holds no step"),
        ("x[0],x[1],x[2],flag,action[0],action[1],action[2]\n1,2,3,1,1,2\n", "row 2 has 6 columns, the head 7"),
        ("x[0];x[1];x[2];flag;action[0];action[1];action[2]\n", "not divided by commas"),
        ("x[0],x[1],x[2],flag,action[0],action[1],action[2]\n1,2,3,0.5,1,2,3\n", "'flag' has a value that a bool"),
        ("x[0],x[1],x[2],flag,action[0],action[1],action[2],reset\n1,2,3,1,1,2,3,nan\n", "'reset' has"),
    ],
)
def test_a_log_that_cannot_be_compared_is_refused(text: str, said: str, made: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text)
    with pytest.raises(BundleError, match=said):
        replay(load(made), log)


def test_a_log_with_a_byte_order_mark_true_and_false_and_an_empty_line_is_read(made: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    head = "\ufeffx[0],x[1],x[2],flag,action[0],action[1],action[2],reset\n"
    log.write_text(head + "1,2,3,True,1,2,3,True\n\n1,2,3,False,-1,-2,-3,False\n", encoding="utf-8")
    found = replay(load(made), log)
    assert found.steps == 2 and found.divergence is None
    with pytest.raises(BundleError, match="tolerance is nan"):
        replay(load(made), log, float("nan"))
    for data in (b"", log.read_bytes(), b"PK\3\4"):
        (tmp_path / "log.npz").write_bytes(data)
        with pytest.raises(BundleError, match=r"cannot be read: expected an \.npz"):
            replay(load(made), tmp_path / "log.npz")


def test_a_compiler_that_is_none_is_not_replaced_by_another(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (
        ("no-such-cc", "no program on the path"),
        ("gcc -m64", "without arguments"),
        ("true", "no library"),
    ):
        monkeypatch.setenv("CC", name)
        with pytest.raises(BundleError, match=said):
            verify(made)


@pytest.mark.parametrize("manifest", ["[" * 99999, '{"files": 3}', '{"files": [[1]]}'])
def test_a_zip_whose_manifest_is_none_is_damaged(manifest: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("manifest.json", manifest)
    with pytest.raises(BundleError, match="damaged"):
        load(tmp_path / "b.zip")


def test_a_folder_that_appeared_meanwhile_is_not_replaced_and_a_link_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "b"
    with pytest.raises(BundleError, match="appeared while"):
        with whole_folder(target, overwrite=False):
            target.mkdir()
    (target / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(target)
    with whole_folder(tmp_path / "link", overwrite=True) as folder:
        (folder / "new").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "link"] and (tmp_path / "link" / "new").exists()
    assert (target / "manifest.json").exists()
