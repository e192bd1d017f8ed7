import json

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.benchmark import table_of, time_interleaved
from graphrl.errors import MissingExtraError


@pytest.fixture
def graph():
    return KeyedGraph((nn.Linear(3, 2), ["x"], ["y"]))


def test_the_table_has_a_row_for_each_way_of_calling(graph):
    td = TensorDict(x=torch.randn(4, 3), batch_size=[4])
    weights = graph[0].module.weight.detach().clone()
    calls = []
    table = grl.benchmark(graph, td, backends=("eager",), others={"mine": lambda: calls.append(1)}, repeats=4)
    names = ["eager, TensorDict", "interpreter, TensorDict", "interpreter, call", "mine"]
    assert [row.name for row in table.rows] == names
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


def test_the_ratio_has_its_own_quartiles_from_the_rounds():
    table = table_of("t", {"a": [4.0, 2.0, 8.0, 6.0], "b": [1.0, 1.0, 4.0, 1.0]})  # ratios 4, 2, 2, 6
    row = table.row("b")
    assert row.ratio == 3.0 and row.ratio_quartile_1 == 2.0 and row.ratio_quartile_3 == 5.5
    assert table.row("a").ratio == table.row("a").ratio_quartile_1 == 1.0
    assert "3.0 (2.0-5.5)" in table.to_markdown()


def test_others_that_return_the_outputs_have_an_error(graph):
    td = TensorDict(x=torch.randn(4, 3), batch_size=[4])
    linear = graph[0].module
    others = {
        "tensor": lambda: linear(td["x"]),
        "arrays": lambda: [linear(td["x"]).numpy()],
        "tensordict": lambda: graph(td.copy()),
        "wrong": lambda: linear(td["x"]) + 1,
        "another shape": lambda: linear(td["x"]).sum(),
        "nothing": lambda: None,
    }
    table = grl.benchmark(graph, td, backends=(), others=others, repeats=2)
    assert all(table.row(name).error < 1e-5 for name in ("tensor", "arrays", "tensordict"))
    assert table.row("wrong").error > 0.1
    assert table.row("another shape").error is None and table.row("nothing").error is None


def test_backends_side_by_side_and_what_came_from_disk(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHRL_CACHE_DIR", str(tmp_path))
    td = TensorDict(x=torch.randn(2, 3), batch_size=[2])
    first, second = (grl.benchmark(graph, td, backends=("eager", "native"), repeats=2) for _ in range(2))
    ours = [f"{who}, {how}" for who in ("interpreter", "native") for how in ("TensorDict", "call")]
    names = ["eager, TensorDict", *ours]
    assert [row.name for row in first.rows] == names
    if not first.row("native, call").note:
        assert not first.row("native, call").from_disk and second.row("native, call").from_disk
        assert "(disk)" in second.to_markdown() and not second.row("interpreter, call").from_disk


def test_a_plot(graph, tmp_path):
    pytest.importorskip("matplotlib")
    td = TensorDict(x=torch.randn(0, 3), batch_size=[0])
    table = grl.benchmark(graph, td, backends=("inductor",), repeats=2)  # one row did not run
    assert table.plot(tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(graph, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    table = table_of("t", {"a": [1.0, 1.0], "b": [1.0, 2.0]})
    with pytest.raises(MissingExtraError, match=r"pip install 'graphrl\[plot\]'"):
        table.plot(tmp_path / "one.png")


def test_a_note_on_a_measured_row_stands_below_the_table():
    table = table_of("t", {"a": [4.0, 2.0], "b": [1.0, 1.0]}, notes={"b": "not the same work"})
    assert table.to_markdown().splitlines()[-2:] == ["", "- b: not the same work"]
    assert "| b | 1000000 |" in table.to_markdown() and "b: not the same work" in str(table)
    assert json.loads(table.to_json())["rows"][1]["note"] == "not the same work"
