"""What a compiled graph does to the batch it is given, and what it returns."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.errors import GraphError

BACKENDS = ["eager", "inductor", "native", "onnx"]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_is_never_overwritten_by_a_later_call(backend):
    pytest.importorskip("onnxruntime") if backend == "onnx" else None
    graph = KeyedGraph((lambda x: (x**3, x + 1), ["x"], ["cube", "next"]))
    fast = grl.compile(graph, backend=backend, strict=True)
    kept = []
    for i in range(1, 6):
        x = torch.full((2, 1), float(i))
        td = fast(TensorDict(x=x, batch_size=[2]))
        kept.append((i, *fast.call(x), td["cube"], td["next"], x))
    for i, cube, after, cube_entry, after_entry, x in kept:
        assert (cube == i**3).all() and (cube_entry == i**3).all() and (x == i).all()
        assert (after == i + 1).all() and (after_entry == i + 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_into_an_output_changes_nothing_else(backend):
    pytest.importorskip("onnxruntime") if backend == "onnx" else None
    graph = KeyedGraph((nn.Linear(2, 2), ["x"], ["y"]), (lambda y: y * 1.0, ["y"], ["z"]))
    fast = grl.compile(graph, backend=backend)
    x = torch.randn(3, 2)
    expected = [t.clone() for t in fast.call(x)]
    for t in fast.call(x):
        t.fill_(7.0)
    for found, own in zip(fast.call(x), expected, strict=True):
        torch.testing.assert_close(found, own)


def test_a_locked_batch_is_left_as_it_was_and_a_memory_mapped_one_is_read(tmp_path):
    graph = KeyedGraph((nn.Linear(2, 2), ["x"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    td = TensorDict(x=torch.randn(3, 2), batch_size=[3]).memmap_(tmp_path)
    for module in (graph, fast):
        with pytest.raises((RuntimeError, GraphError), match="[Ll]ocked"):
            module(td)
        assert td.is_locked and set(td.keys()) == {"x"}
    torch.testing.assert_close(fast(td.clone(recurse=False).unlock_())["y"], graph(td["x"]))


def test_names_device_and_batch_size_of_the_batch_are_kept():
    fast = grl.compile(KeyedGraph((nn.Linear(2, 2), ["x"], [("out", "y")])), backend="eager")
    td = TensorDict(x=torch.randn(3, 4, 2), batch_size=[3, 4], device="cpu", names=["env", "time"])
    out = fast(td)
    assert out is td and td.names == ["env", "time"] and td.device == torch.device("cpu")
    assert td["out"].batch_size == torch.Size([3, 4]) and td["out", "y"].device == td.device


def test_data_that_is_no_tensor_passes_through():
    graph = KeyedGraph((nn.Linear(2, 2), ["x"], ["y"]), (torch.tanh, ["y"], [("deep", "z")]))
    fast = grl.compile(graph, backend="eager")
    for n in (3, 5, 4):
        td = TensorDict(
            {"x": torch.randn(n, 2), "task": "walk", "note": NonTensorData({"a": 1}, batch_size=[n]),
             "deep": TensorDict(label="run", batch_size=[n])}, batch_size=[n]
        )  # fmt: skip
        expected = graph(td.clone())
        out = fast(td)
        assert out["task"] == "walk" and out["note"] == {"a": 1} and out["deep", "label"] == "run"
        assert set(out.keys(True, True)) == set(expected.keys(True, True))
        torch.testing.assert_close(out["deep", "z"], expected["deep", "z"])
    assert len(fast.entries()) == 2


def test_stacks_of_batches_with_different_keys_are_read_and_written():
    graph = KeyedGraph((nn.Linear(2, 2), ["x"], ["y"]))
    fast = grl.compile(graph, backend="eager")
    parts = [TensorDict({"x": torch.randn(2), f"only_{i}": torch.zeros(1)}, batch_size=[]) for i in range(3)]
    td = TensorDict.lazy_stack(parts)
    torch.testing.assert_close(fast(td)["y"], graph(td["x"]))
    assert torch.equal(parts[1]["y"], td["y"][1])


def test_the_batch_itself_is_not_written_beyond_its_out_keys():
    graph = KeyedGraph((nn.Linear(2, 2), ["x"], ["h"]), (torch.tanh, ["h"], ["y"]), out_keys=["y"])
    fast = grl.compile(graph, backend="eager")
    td = TensorDict(x=torch.randn(3, 2), h=torch.zeros(3, 1), batch_size=[3])
    before = td.clone()
    fast(td)
    assert set(td.keys()) == {"x", "h", "y"} and torch.equal(td["h"], before["h"]) and torch.equal(td["x"], before["x"])
