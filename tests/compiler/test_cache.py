"""The on-disk cache: what makes a key differ, what is never loaded, and that another process is served."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler import cache
from graphrl.compiler.backends import get_backend, inductor
from graphrl.compiler.backends.native import find_compiler
from graphrl.compiler.passes.pipeline import run_passes

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


def program(rows=2, dtype=torch.float32, layers=None):
    torch.manual_seed(0)
    layers = layers or nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    graph = KeyedGraph((layers.to(dtype), ["x"], ["y"]))
    return run_passes(grl.trace(graph, TensorDict(x=torch.ones(rows, 3, dtype=dtype), batch_size=[rows])))


def key_of(made=None, backend="native", cxx="cc", **settings):
    return cache.cache_key(made or program(), backend, cxx, **(settings or {"threads": 1}))


def stored():
    key = key_of()
    assert cache.store(key, {"a.bin": b"artifact"}, 1.5) is not None
    return key


OTHERS = {
    "another layer": lambda patch: key_of(program(layers=nn.Sequential(nn.Linear(3, 4), nn.ReLU()))),
    "another shape": lambda patch: key_of(program(rows=3)),
    "another dtype": lambda patch: key_of(program(dtype=torch.float64)),
    "another backend": lambda patch: key_of(backend="inductor"),
    "another number of threads": lambda patch: key_of(threads=2),
    "another compiler": lambda patch: patch.setattr(cache, "_compiler_version", lambda c: "cc 99") or key_of(),
    "no compiler": lambda patch: key_of(cxx=None),
    "another cpu": lambda patch: patch.setattr(cache, "_cpu", lambda: "another") or key_of(),
    "another vector width": lambda patch: patch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"
    ) or key_of(),
    "other compiler sources": lambda patch: patch.setattr(cache, "_sources", lambda: "0") or key_of(),
    "another graphrl": lambda patch: patch.setattr(cache, "__version__", "0.0") or key_of(),
    "another torch": lambda patch: patch.setattr(torch, "__version__", "9.9") or key_of(),
    "another matmul precision": lambda patch: patch.setattr(
        torch, "get_float32_matmul_precision", lambda: "medium"
    ) or key_of(),
    "another python": lambda patch: patch.setattr(sys.implementation, "cache_tag", "cpython-399") or key_of(),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_each_part_of_the_key_counts(change, monkeypatch):
    key = stored()
    other = OTHERS[change](monkeypatch)
    assert cache.load(other) is None and other.digest != key.digest
    monkeypatch.undo()


def test_every_part_changes_the_name(monkeypatch):
    key = stored()
    assert cache.load(key) is not None and cache.load(key_of()) is not None
    for part in key.parts:
        assert replace(key, parts={**key.parts, part: "other"}).digest != key.digest


def test_a_program_on_a_gpu_asks_for_the_gpu(monkeypatch):
    made = program()
    monkeypatch.setattr(cache, "_gpu", lambda: "H200 9.0")
    on_gpu = replace(made, outputs=tuple(replace(p, device=torch.device("cuda")) for p in made.outputs))
    assert key_of(on_gpu).parts["gpu"] == "H200 9.0" and key_of(made).parts["gpu"] == "none"


def test_the_layout_of_weights_counts():
    turned = nn.Linear(3, 4)
    turned.weight = nn.Parameter(turned.weight.detach().t().contiguous().t())
    assert key_of(program(layers=turned)).parts["layouts"] != key_of(program(layers=nn.Linear(3, 4))).parts["layouts"]


def with_attribute(value):
    """A program that adds a tensor it holds as an attribute, which its text only names."""
    made = program()
    made.graph_module.held = value
    graph = made.copy_graph()
    (output,) = (n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        total = graph.call_function(torch.ops.aten.add.Tensor, (output.args[0][0], graph.get_attr("held")))
    total.meta["val"] = output.args[0][0].meta["val"]
    output.args = ((total,),)
    return made.with_graph(graph)


def test_the_values_of_constants_count():
    one, two = with_attribute(torch.ones(4)), with_attribute(torch.full((4,), 2.0))
    assert one.code == two.code and key_of(one).digest != key_of(two).digest
    assert key_of(one).digest == key_of(with_attribute(torch.ones(4))).digest


BREAKS = {
    "a byte flipped": lambda f: (f / "a.bin").write_bytes(b"Artifact"),
    "cut short": lambda f: (f / "a.bin").write_bytes(b"art"),
    "a file missing": lambda f: (f / "a.bin").unlink(),
    "the text changed": lambda f: (f / "program.py").write_text("other"),
    "the record is no JSON": lambda f: (f / "record.json").write_text('{"key": '),
    "the record is a list": lambda f: (f / "record.json").write_text("[]"),
    "the record is empty": lambda f: (f / "record.json").write_text("{}"),
    "the time is no number": lambda f: (f / "record.json").write_text(
        (f / "record.json").read_text().replace('"created": ', '"created": "x", "was": ')
    ),
    "no record": lambda f: (f / "record.json").unlink(),
    "from another torch": lambda f: (f / "record.json").write_text(
        (f / "record.json").read_text().replace(torch.__version__, "1.0")
    ),
    "files outside the folder": lambda f: (f / "record.json").write_text(
        (f / "record.json").read_text().replace('"a.bin"', '"../a.bin"')
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_entry_is_not_loaded_and_is_written_again(how, folder):
    key = stored()
    BREAKS[how](folder / key.digest)
    assert cache.load(key) is None and len(list(cache.entries())) == 1
    entry = cache.store(key, {"a.bin": b"artifact"}, 1.0)
    assert entry is not None and cache.load(key).files["a.bin"] == b"artifact"
    assert [f.name for f in folder.iterdir()] == [key.digest]


def test_the_first_of_two_writers_stays(folder):
    key = stored()
    assert cache.store(key, {"a.bin": b"second"}, 9.0).files["a.bin"] == b"artifact"
    assert len(list(folder.iterdir())) == 1


def test_a_graph_whose_text_hides_something_is_not_kept():
    made = program()
    made.graph_module.held = nn.Linear(1, 1)
    graph = made.copy_graph()
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.create_node("get_attr", "held")
    assert key_of(made.with_graph(graph)) is None and cache.load(None) is None


def test_clearing(folder):
    key = stored()
    assert cache.clear(older_than_s=3600) == (0, 0) and cache.clear(name="zz") == (0, 0)
    (folder / ".new-left").mkdir()
    os.utime(folder / ".new-left", (0, 0))
    count, freed = cache.clear()
    assert count == 1 and freed > len(b"artifact") and cache.load(key) is None and list(folder.iterdir()) == []


def test_an_unwritable_place_costs_nothing_but_the_keeping(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", str(tmp_path / "file"))
    assert cache.store(key_of(), {"a.bin": b""}, 1.0) is None and list(cache.entries()) == []


# ---- backends


def test_what_inductor_made_is_found_again(monkeypatch):
    made = program()
    arguments = made.arguments([torch.randn(2, 3)])
    first = get_backend("inductor").lower(made)
    assert cache.outcome(made) == "miss, now kept"
    monkeypatch.setattr(inductor, "_compile_afresh", lambda *_: pytest.fail("compiled again"))
    second = get_backend("inductor").lower(made)
    assert cache.outcome(made).startswith("hit")
    with torch.no_grad():
        (one,), (two,), (expected,) = first(list(arguments)), second(list(arguments)), made.graph_module(*arguments)
    assert torch.equal(one, two)
    torch.testing.assert_close(two, expected, rtol=1e-5, atol=1e-6)


PROCESS = """
import sys, torch, graphrl as grl
from tensordict import TensorDict
from torch import nn
from graphrl.compiler import cache
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
graph = grl.KeyedGraph((layers, ["x"], ["y"]))
batch = TensorDict(x=torch.linspace(-1, 1, 15).reshape(3, 5), batch_size=[3])
fast = grl.compile(graph, batch, backend=sys.argv[1], strict=True)
with torch.no_grad():
    error = (fast(batch.copy())["y"] - layers(batch["x"])).abs().max().item()
print(cache.outcome(fast.entries()[0].program).split(",")[0], error < 1e-5)
"""


def start(backend, **env):
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), **env}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, backend], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def answer(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


@needs_compiler
@pytest.mark.parametrize("backend", ["native", "inductor"])
def test_two_processes_at_once_and_a_third_that_runs_no_compiler(backend, folder, tmp_path):
    both = [start(backend), start(backend)]
    assert all(answer(process) in ("miss True", "hit True") for process in both)
    (entry,) = cache.entries()
    assert entry.intact and entry.record["backend"] == backend and entry.record["compile_seconds"] > 0
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("cc", "gcc", "g++", "clang", "clang++"):
        if real := shutil.which(name):
            (bin_ / name).write_text(f'#!/bin/sh\n[ "$*" = --version ] && exec {real} --version\nexit 1\n')
            (bin_ / name).chmod(0o755)
    third = start(backend, PATH=f"{bin_}{os.pathsep}{os.environ['PATH']}", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "t"))
    assert answer(third) == "hit True"


@needs_compiler
def test_a_broken_library_is_compiled_again(folder):
    made = program()
    lowered = get_backend("native").lower(made)
    expected = lowered(made.arguments([torch.ones(2, 3)]))[0]
    (entry,) = cache.entries()
    library = entry.folder / "program.so"
    library.rename(entry.folder / "old")  # the process has it mapped: a file in place of it, not in it
    library.write_bytes((entry.folder / "old").read_bytes()[:-100])
    again = get_backend("native").lower(made)
    assert cache.outcome(made).startswith("miss") and json.loads((entry.folder / "record.json").read_text())
    assert torch.equal(again(made.arguments([torch.ones(2, 3)]))[0], expected)
