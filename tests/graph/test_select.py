import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from graphrl import KeyedGraph
from graphrl.errors import GraphError


def linear(reads, writes):
    return TensorDictModule(nn.Linear(3, 3), in_keys=[reads], out_keys=[writes])


def rows(n=2, **more):
    return TensorDict({"x": torch.randn(n, 3), **more}, batch_size=[n])


def chain():
    """x -> h -> h -> y, and h -> z."""
    return KeyedGraph(linear("x", "h"), (torch.relu, ["h"], ["h"]), linear("h", "y"), linear("h", "z"))


def names_are_kept(cut, graph):
    whole = graph.state_dict()
    return all(torch.equal(whole[name], value) for name, value in cut.state_dict().items())


def test_only_the_live_producers_of_the_last_version_are_kept():
    graph = chain()
    cut = graph.select(out_keys=["y"])
    assert list(cut.nodes) == ["0", "1", "2"] and cut.out_keys == ["y"] and cut.in_keys == ["x"]
    td = rows()
    assert torch.equal(cut(td.clone())["y"], graph(td.clone())["y"])
    assert set(cut(td.clone()).keys()) == {"x", "y"}
    assert names_are_kept(cut, graph) and len(cut.state_dict()) == 4


def test_the_original_is_left_as_it_was():
    graph = chain()
    before = (list(graph.nodes), list(graph.in_keys), list(graph.out_keys), copy.deepcopy(graph.state_dict()))
    graph.select(out_keys=["y"]), graph.select(in_keys=["h"]), graph.rename(x="obs")
    after = (list(graph.nodes), list(graph.in_keys), list(graph.out_keys), graph.state_dict())
    assert before[:3] == after[:3] and all(torch.equal(before[3][k], v) for k, v in after[3].items())
    assert set(graph(rows()).keys()) == {"x", "h", "y", "z"}


def test_a_given_key_cuts_its_producers():
    graph = chain()
    cut = graph.select(in_keys=["h"], out_keys=["y"])
    assert cut.in_keys == ["h"]
    h = torch.randn(2, 3)
    assert torch.equal(cut(h), graph[2].module(torch.relu(h)))


def test_in_keys_alone_keep_what_can_be_computed():
    graph = KeyedGraph(linear("x", "h"), (torch.add, ["h", "goal"], ["y"]), linear("h", "z"))
    cut = graph.select(in_keys=["x"])
    assert cut.in_keys == ["x"] and cut.out_keys == ["h", "z"] and list(cut.nodes) == ["0", "2"]


def test_hidden_keys_stay_hidden():
    graph = KeyedGraph(linear("x", "h"), linear("h", "y"), out_keys=["y"])
    assert graph.select().out_keys == ["y"] and graph.select(in_keys=["x"]).out_keys == ["y"]
    assert set(graph.select(in_keys=["x"])(rows()).keys()) == {"x", "y"}


@pytest.mark.parametrize("sequence", [KeyedGraph, TensorDictSequential])
def test_nested_sequences_are_cut_and_keep_their_names(sequence):
    inner = sequence(linear("x", "h"), linear("x", "unused"), linear("h", "y"))
    graph = KeyedGraph(KeyedGraph(inner), linear("y", "z"))
    cut = graph.select(out_keys=["z"])
    assert names_are_kept(cut, graph) and len(cut.state_dict()) == 6
    again = cut.select(out_keys=["y"])
    assert names_are_kept(again, graph) and len(again.state_dict()) == 4
    td = rows()
    assert torch.equal(again(td.clone())["y"], graph(td.clone())["y"])
    graph.load_state_dict(cut.state_dict(), strict=False)
    cut.load_state_dict({k: v for k, v in graph.state_dict().items() if k in cut.state_dict()}, strict=True)


def test_a_cut_may_leave_a_value_unread_inside_a_nested_graph():
    inner = KeyedGraph((lambda x: (x, x + 1), ["x"], ["h", "k"]), (torch.neg, ["h"], ["z"]), (torch.neg, ["k"], ["h"]))
    td = rows()
    assert torch.equal(KeyedGraph(inner).select(out_keys=["h"])(td)["h"], -(td["x"] + 1))


def test_modes_are_kept():
    graph = chain().eval()
    assert not any(m.training for m in graph.select(out_keys=["y"]).modules())
    assert not any(m.training for m in KeyedGraph(graph).eval().select(out_keys=["y"]).modules())
    assert all(m.training for m in graph.train().select(out_keys=["y"]).modules())


def test_weights_are_shared():
    graph = chain()
    with torch.no_grad():
        graph.select(out_keys=["y"])[0].module.weight.zero_()
    assert (graph[0].module.weight == 0).all()


def test_rename():
    graph = chain()
    other = graph.rename({"y": ("agents", "y")}, x="obs")
    assert other.in_keys == ["obs"] and other.out_keys == ["h", ("agents", "y"), "z"]
    td = rows()
    out = other(TensorDict(obs=td["x"], batch_size=[2]))
    assert torch.equal(out["agents", "y"], graph(td)["y"]) and "x" not in out.keys()


def test_rename_may_swap_two_names():
    graph = KeyedGraph((torch.sub, ["a", "b"], ["c"]))
    swapped = graph.rename(a="b", b="a")
    assert swapped(a=torch.tensor(1.0), b=torch.tensor(5.0)).item() == 4.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.select(out_keys=["hh"]), r"no node writes 'hh'.*Did you mean 'h'"),
        (
            lambda g: g.select(in_keys=["xx"], out_keys=["y"]),
            r"in_keys has 'xx', which no node reads.*Did you mean 'x'",
        ),
        (lambda g: g.select(in_keys=["y"], out_keys=["z"]), r"cannot be computed from in_keys \['y'\]"),
        (lambda g: g.rename(xx="obs"), r"no key 'xx' in this graph.*Did you mean 'x'"),
        (lambda g: g.rename(x="y"), r"two keys would be called 'y'"),
    ],
)
def test_what_cannot_be_derived_is_an_error_with_the_nearest_name(call, message):
    with pytest.raises(GraphError, match=message):
        call(chain())
