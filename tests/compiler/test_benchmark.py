import json

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.benchmark import time_interleaved


@pytest.fixture
def graph():
    return KeyedGraph((nn.Linear(3, 2), ["x"], ["y"]))


def test_the_table_has_a_row_for_each_way_of_calling(graph):
    td = TensorDict(x=torch.randn(4, 3), batch_size=[4])
    weights = graph[0].module.weight.detach().clone()
    calls = []
    table = grl.benchmark(graph, td, backends=("eager",), others={"mine": lambda: calls.append(1)}, repeats=4)
    assert [row.name for row in table.rows] == ["eager, TensorDict", "eager, call", "mine"] or len(table.rows) == 4
    assert all(0 < row.quartile_1_us <= row.median_us <= row.quartile_3_us for row in table.rows)
    assert table.rows[0].ratio == 1.0 and calls
    assert all(row.error < 1e-5 for row in table.rows if row.error is not None)
    assert set(td.keys()) == {"x"} and torch.equal(weights, graph[0].module.weight)
    data = json.loads(table.to_json())
    assert data["machine"]["torch"] == torch.__version__ and len(data["rows"]) == len(table.rows)
    assert "mine" in str(table) and table.to_markdown().count("\n") == len(table.rows) + 1
    assert table.row("mine").compile_s is None


def test_a_refusing_backend_has_its_reason_in_the_table(graph):
    table = grl.benchmark(graph, TensorDict(x=torch.randn(0, 3), batch_size=[0]), backends=("inductor",), repeats=2)
    assert "empty" in table.row("inductor").note and "empty" in str(table)


def test_a_graph_with_random_draws_has_no_error_column():
    noisy = KeyedGraph((lambda x: x + torch.randn_like(x), ["x"], ["y"]))
    table = grl.benchmark(noisy, TensorDict(x=torch.zeros(2), batch_size=[2]), backends=("eager",), repeats=2)
    assert all(row.error is None for row in table.rows)


def test_competitors_take_turns():
    order = []
    times = time_interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, round_s=1e-5)
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3}
    tail = "".join(order).lstrip("a").lstrip("b")
    assert tail.count("ab") == 3
