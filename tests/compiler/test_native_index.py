"""Indices out of range in generated C: an error as in eager, before anything is written."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import graphrl as grl
from graphrl.compiler.backends.native import find_compiler
from graphrl.errors import GraphError
from graphrl.graph import KeyedGraph

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

TABLE = torch.arange(4.0)


class Look(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, i: Tensor) -> Tensor:
        return self.table(i)


LOOKUPS = {
    "embedding": Look(),
    "gather": lambda i: TABLE.gather(0, i),
    "index_select": lambda i: TABLE.index_select(0, i),
    "index": lambda i: TABLE[i],
}


def rows(*indices):
    return TensorDict(i=torch.tensor(indices), batch_size=[len(indices)])


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_out_of_range_is_an_error_and_the_next_call_is_right(name):
    graph = KeyedGraph((LOOKUPS[name], ["i"], ["y"]))
    fast = grl.compile(graph, rows(0, 3), backend="native", strict=True)
    with torch.no_grad():
        for bad in (4, -5, *([] if name == "index" else [-1])):
            with pytest.raises(GraphError):
                graph(rows(0, bad))
            with pytest.raises(IndexError, match="native: an index in program is out of range"):
                fast(rows(0, bad))
        good = rows(3, -1) if name == "index" else rows(3, 1)
        assert torch.equal(fast(good.clone())["y"], graph(good.clone())["y"])


def test_a_bound_row_raises_too():
    fast = grl.compile(KeyedGraph((LOOKUPS["index"], ["i"], ["y"])), rows(0, 3), backend="native", strict=True)
    outs = [[torch.zeros(2)] for _ in range(2)]
    with torch.no_grad():
        step = fast.bind_rows([[torch.tensor([1, 2])], [torch.tensor([9, 2])]], outs)
        step(0)
        assert outs[0][0].tolist() == [1.0, 2.0]
        with pytest.raises(IndexError):
            step(1)
        with pytest.raises(IndexError):
            fast.call_into([torch.tensor([9, 2])], outs[0])


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, i: Tensor) -> Tensor:
        self.total += 1
        return TABLE[i] + self.total


def test_state_is_not_written_when_an_index_is_out_of_range():
    module = Counts()
    fast = grl.compile(KeyedGraph((module, ["i"], ["y"])), rows(0, 3), backend="native", strict=True)
    with torch.no_grad():
        fast(rows(0, 1))
        with pytest.raises(IndexError):
            fast(rows(0, 7))
    assert module.total.tolist() == [1.0, 1.0]
