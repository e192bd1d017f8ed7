"""The pass that breaks a program is found, by the command as well."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from graphrl import KeyedGraph
from graphrl.cli.app import main
from graphrl.compiler.bisect import bisect_passes
from graphrl.compiler.passes import pipeline

aten = torch.ops.aten


def swap_tanh(program):
    """A pass that computes a sine where a tanh is asked for."""
    graph = program.copy_graph()
    for node in graph.nodes:
        if node.target is aten.tanh.default:
            node.target = aten.sin.default
    return program.with_graph(graph)


def forget_a_gradient(program):
    """A pass that keeps values and loses a factor of the backward half."""
    graph = program.copy_graph()
    output = list(graph.nodes)[-1]
    last = output.args[0][-1]
    with graph.inserting_before(output):
        half = graph.call_function(aten.mul.Tensor, (last, 0.5))
        half.meta["val"] = last.meta["val"]
    output.args = ((*output.args[0][:-1], half),)
    return program.with_graph(graph)


def lose_the_meta(program):
    graph = program.copy_graph()
    next(n for n in graph.nodes if n.op == "call_function").meta.clear()
    return program.with_graph(graph)


def stumble(program):
    raise ValueError("no such node")


def graph_and_batch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return KeyedGraph((net, ["x"], ["y"])), TensorDict(x=torch.randn(5, 3), batch_size=[5])


@pytest.mark.parametrize("deploy", [False, True])
def test_sound_passes_pass(deploy):
    stages = bisect_passes(*graph_and_batch(), deploy=deploy)
    assert [s.name for s in stages] == ["trace", *(p.__name__ for p in pipeline.passes(deploy, None))]
    assert all(s.problem == "" and s.error <= 1 for s in stages)


@pytest.mark.parametrize("broken", [swap_tanh, forget_a_gradient, lose_the_meta, stumble], ids=lambda p: p.__name__)
@pytest.mark.parametrize("place", [0, 2])
def test_the_broken_pass_is_named_and_the_search_ends_there(broken, place, monkeypatch):
    monkeypatch.setattr(pipeline, "LIVE", (*pipeline.LIVE[:place], broken, *pipeline.LIVE[place:]))
    stages = bisect_passes(*graph_and_batch())
    assert stages[-1].name == broken.__name__ and stages[-1].problem and len(stages) == place + 2
    assert not any(s.problem for s in stages[:-1])


def test_a_backend_that_computes_wrongly_is_found(monkeypatch):
    from graphrl.compiler.backends.eager import BACKEND

    lower = type(BACKEND).lower
    monkeypatch.setattr(type(BACKEND), "lower", lambda self, p: lambda v: [1.1 * t for t in lower(self, p)(v)])
    stages = bisect_passes(*graph_and_batch(), backend="eager")
    assert len(stages) == 1 and "differs on eager" in stages[0].problem


def test_bfloat16_is_judged_by_its_own_rounding():
    stages = bisect_passes(*graph_and_batch(), precision="bf16")
    assert stages[-1].name == "lower_precision" and 0 < stages[-1].error <= 1


FILE = """
import torch
from graphrl import KeyedGraph
graph = KeyedGraph((torch.tanh, ['x'], ['y']))
batch = {'x': torch.linspace(-1, 1, 6).view(2, 3)}
number = 3
"""


def test_the_command(tmp_path, capsys, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert main(["bisect", f"{file}:graph", "--example", "batch", "--backend", "eager"]) == 0
    out = capsys.readouterr().out
    assert all(p.__name__ in out for p in pipeline.LIVE) and "differs" not in out
    monkeypatch.setattr(pipeline, "LIVE", (*pipeline.LIVE[:1], swap_tanh, *pipeline.LIVE[1:]))
    assert main(["bisect", f"{file}:graph", "--example", "batch"]) == 2
    shown = capsys.readouterr()
    assert "swap_tanh" in shown.out and "eliminate_dead_code" not in shown.out
    assert "swap_tanh is the first to go wrong" in shown.err
    for wrong, message in ((f"{file}:number", "is a int"), (f"{file}:grahp", "Did you mean 'graph'"), ("x", "FILE")):
        assert main(["bisect", wrong, "--example", "batch"]) == 2
        assert message in capsys.readouterr().err
