"""Each rule of a legal program is broken once, and named."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.check_program import check_program
from graphrl.compiler.passes import pipeline
from graphrl.errors import CompileError

aten = torch.ops.aten


def batch_norm():
    graph = KeyedGraph((nn.BatchNorm1d(3), ["x"], ["y"]), (lambda y: y + torch.rand(4, 3), ["y"], ["z"]))
    return grl.trace(graph, TensorDict(x=torch.randn(4, 3), batch_size=[4]))


def first(graph, target):
    return next(n for n in graph.nodes if n.target is target)


def placeholder_behind(program, graph):
    places = [n for n in graph.nodes if n.op == "placeholder"]
    first(graph, aten.add.Tensor).append(places[-1])
    return program


def in_place(program, graph):
    node = first(graph, aten.add.Tensor)
    node.target = aten.add_.Tensor
    return program


def no_value(program, graph):
    first(graph, aten.add.Tensor).meta.clear()
    return program


def write_early(program, graph):
    write = first(graph, aten.copy_.default)
    list(n for n in graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default)[-1].append(write)
    last = [n for n in graph.nodes if n.op == "call_function"][-1]
    with graph.inserting_after(last):
        extra = graph.call_function(aten.tanh.default, (last.args[0],))
        extra.meta["val"] = last.args[0].meta["val"]
    return program


def write_into_a_result(program, graph):
    write = first(graph, aten.copy_.default)
    write.args = (write.args[1], write.args[1])
    return program


def wrong_port(program, graph):
    return replace(program, outputs=(replace(program.outputs[0], shape=(7,)), *program.outputs[1:]))


def missing_state(program, graph):
    return replace(program, state=program.state[:-1])


def unmarked_write(program, graph):
    return replace(program, state=tuple(replace(s, mutated=False) for s in program.state))


CASES = {
    placeholder_behind: "a placeholder stands behind|used before",
    in_place: "works in place",
    no_value: "does not say what it returns",
    write_early: "stands behind a write",
    write_into_a_result: "something else than a placeholder",
    wrong_port: r"signature says .*\[7\]",
    missing_state: "placeholders for",
    unmarked_write: "its slot says otherwise",
}


@pytest.mark.parametrize("damage", CASES, ids=lambda f: f.__name__)
def test_a_broken_rule_is_named_with_the_pass(damage):
    program = batch_norm()
    assert check_program(program) is program
    broken = replace(program, graph_module=torch.fx.GraphModule(program.graph_module, program.copy_graph()))
    broken = damage(broken, broken.graph_module.graph)
    with pytest.raises(CompileError, match=f"after mine: .*({CASES[damage]})"):
        check_program(broken, "mine")


def test_the_pipeline_checks_every_pass_when_asked(monkeypatch):
    def damaged(program):
        return wrong_port(program, None)

    monkeypatch.setattr(pipeline, "LIVE", (damaged,))
    monkeypatch.setenv("GRAPHRL_CHECK_PASSES", "0")
    pipeline.run_passes(batch_norm())
    monkeypatch.setenv("GRAPHRL_CHECK_PASSES", "1")
    with pytest.raises(CompileError, match="after damaged"):
        pipeline.run_passes(batch_norm())
