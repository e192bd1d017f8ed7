import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph


def graph():
    return KeyedGraph((nn.Linear(3, 2), ["x"], ["h"]), (lambda h: h.tanh() + h.tanh(), ["h"], ["y"]), out_keys=["y"])


def rows(n=4):
    return TensorDict(x=torch.zeros(n, 3), batch_size=[n])


def test_a_compiled_graph():
    fast = grl.compile(graph(), rows(), backend="eager")
    with torch.no_grad():
        fast(rows(5))
    text = str(grl.explain(fast))
    assert "KeyedGraph: 2 program(s), 1 retrace(s)" in text and "flowchart LR" in text
    assert "program 0 on eager" in text and "4 operations, " in text and "error " in text and "against float64" in text
    assert "merge_common_subexpressions" in text and "5 -> 4" in text
    assert "retrace: batch size 4 -> 5: call with x: f32[5, 3]; one program for any batch size from 2" in text


def test_a_program_and_an_update():
    program = grl.trace(graph(), rows())
    assert "program: 1 program(s)" in str(grl.explain(program)) and "not lowered" in str(grl.explain(program))

    def train(td):
        return {"mean": td["x"].mean()}

    update = grl.compile_update(train, rows(), backend="eager")
    text = str(grl.explain(update))
    assert "update train: 1 program(s), 0 retrace(s)" in text and "first call with x: f32[4, 3]" in text


def test_brackets_in_shapes_survive_the_printing():
    assert "f32[4, 3]" in str(grl.explain(grl.compile(graph(), rows(), backend="eager")))


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="not a Linear"):
        grl.explain(nn.Linear(1, 1))


def test_a_differentiable_program_counts_both_halves():
    fast = grl.compile(graph(), backend="eager")
    fast(rows())
    (entry,) = fast.entries()
    assert entry.differentiable
    whole, forward = entry.program.history[-1].nodes_after, entry.program.node_count()
    text = str(grl.explain(fast))
    assert f"forward {forward} operations, backward {whole - forward}" in text and whole > forward
    assert "forward and backward together" in text
