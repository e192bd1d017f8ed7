import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from graphrl import KeyedGraph
from graphrl.errors import GraphError
from graphrl.graph import KeyVersion


def linear(i, o, reads, writes):
    return TensorDictModule(nn.Linear(i, o), in_keys=[reads], out_keys=[writes])


def rows(*batch, features=3, key="x"):
    return TensorDict({key: torch.randn(*batch, features)}, batch_size=batch)


def double(x):
    return 2 * x


def sampler(action="action"):
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=[action], distribution_class=torch.distributions.Normal
    )


def test_a_key_is_read_overwritten_and_read_again():
    graph = KeyedGraph(
        (lambda x: x + 1, ["x"], ["h"]),
        (lambda h: h * 10, ["h"], ["h"]),
        (lambda x, h: x + h, ["x", "h"], ["y"]),
    )
    assert graph.in_keys == ["x"] and graph.out_keys == ["h", "y"]
    out = graph(TensorDict(x=torch.tensor([1.0]), batch_size=[1]))
    assert out["h"].item() == 20.0 and out["y"].item() == 21.0
    assert graph.versions() == [
        ([KeyVersion("x", 0)], [KeyVersion("h", 1)]),
        ([KeyVersion("h", 1)], [KeyVersion("h", 2)]),
        ([KeyVersion("x", 0), KeyVersion("h", 2)], [KeyVersion("y", 1)]),
    ]


def test_an_input_may_be_overwritten():
    graph = KeyedGraph((double, ["x"], ["x"]), (double, ["x"], ["y"]))
    assert graph.in_keys == ["x"]
    out = graph(TensorDict(x=torch.tensor([1.0]), batch_size=[1]))
    assert out["x"].item() == 2.0 and out["y"].item() == 4.0


def test_graphs_nest_and_open_flat():
    inner = KeyedGraph(linear(3, 4, "x", "h"), (torch.relu, ["h"], ["h"]))
    outer = KeyedGraph(inner, linear(4, 2, "h", "y"))
    assert len(outer) == 2 and outer[0] is inner and len(outer.flat_nodes()) == 3
    assert outer.in_keys == ["x"] and outer.out_keys == ["h", "y"]
    td = rows(5)
    expected = outer[1].module(torch.relu(inner[0].module(td["x"])))
    assert torch.equal(outer(td)["y"], expected)
    assert outer.node_of("y") is outer[1] and outer.node_of("x") is None


@pytest.mark.parametrize("batch", [(), (0,), (3, 4), (1,)])
def test_any_batch_size(batch):
    graph = KeyedGraph(linear(3, 2, "x", "y"))
    out = graph(rows(*batch))
    assert out["y"].shape == (*batch, 2) and out.batch_size == torch.Size(batch)


def test_plain_tensors_by_position_by_keyword_and_under_nested_names():
    graph = KeyedGraph((torch.sub, ["x", ("next", "x")], ["difference"]))
    a, b = torch.ones(3), torch.zeros(3)
    assert torch.equal(graph(a, b), a - b)
    assert torch.equal(graph(x=a, next_x=b), a - b)


def test_several_outputs_come_as_a_tuple_in_key_order():
    graph = KeyedGraph((lambda x: (x + 1, x + 2), ["x"], ["b", "a"]))
    b, a = graph(torch.zeros(1))
    assert b.item() == 1 and a.item() == 2


def test_a_discarded_output_is_thrown_away():
    graph = KeyedGraph((lambda x: x.max(-1), ["x"], ["largest", "_"]))
    assert graph.out_keys == ["largest"]
    assert set(graph(rows(2)).keys()) == {"x", "largest"}


def test_a_dotted_name_and_a_nested_key_are_two_keys():
    graph = KeyedGraph((double, ["x"], ["a.b"]), (torch.neg, ["x"], [("a", "b")]))
    out = graph(TensorDict(x=torch.ones(1), batch_size=[1]))
    assert out["a.b"].item() == 2 and out["a", "b"].item() == -1


def test_a_layer_used_at_two_nodes_is_stored_once_and_gets_both_gradients():
    layer = nn.Linear(3, 3)
    graph = KeyedGraph((layer, ["x"], ["h"]), (layer, ["h"], ["y"]))
    assert len(list(graph.parameters())) == 2
    td = rows(4)
    graph(td)["y"].sum().backward()
    one, two = copy.deepcopy(layer), copy.deepcopy(layer)
    one.zero_grad(), two.zero_grad()
    two(one(td["x"])).sum().backward()
    torch.testing.assert_close(layer.weight.grad, one.weight.grad + two.weight.grad)


def test_hidden_keys_are_computed_but_not_written():
    graph = KeyedGraph((double, ["x"], ["h"]), (double, ["h"], ["y"]), out_keys=["y"])
    td = rows(2)
    assert graph.out_keys == ["y"] and set(graph(td).keys()) == {"x", "y"}
    assert torch.equal(td["y"], 4 * td["x"])


def test_a_hidden_key_does_not_overwrite_one_of_the_batch():
    graph = KeyedGraph((double, ["x"], ["h"]), (double, ["h"], ["y"]), out_keys=["y"])
    td = rows(2).set("h", torch.zeros(2, 1))
    assert (graph(td)["h"] == 0).all()
    outer = KeyedGraph(graph, (double, ["h"], ["z"]))
    assert outer.in_keys == ["x", "h"] and (outer(td)["z"] == 0).all()


def test_the_distribution_is_that_of_the_last_probabilistic_node():
    graph = KeyedGraph(
        (lambda x: (x, x.exp()), ["x"], ["loc", "scale"]),
        sampler("first"),
        (lambda a: (a * 0 + 7, a.exp()), ["first"], ["loc", "scale"]),
        sampler("second"),
    )
    td = rows(2)
    assert (graph.get_dist(td).loc == 7).all()
    assert set(td.keys()) == {"x"}
    assert (KeyedGraph(graph).get_dist(td).loc == 7).all()
    assert (graph.rename(x="obs").get_dist(rows(2, key="obs")).loc == 7).all()


def test_a_graph_without_a_distribution_says_so():
    with pytest.raises(GraphError, match=r"no node of this graph has a distribution.*0 \(double\)"):
        KeyedGraph((double, ["x"], ["y"])).get_dist(rows(1))


def test_mermaid_text():
    graph = KeyedGraph(
        linear(3, 4, "x", "h"), (torch.relu, ["h"], ["h"]), (torch.add, ["h", ("next", "x")], ["y"]), out_keys=["y"]
    )
    assert graph.to_mermaid() == "\n".join(
        [
            "flowchart LR",
            '    n0["Linear"]',
            '    in0(["x"])',
            '    in0 -- "x" --> n0',
            '    n1["relu"]',
            '    n0 -- "h" --> n1',
            '    n2["add"]',
            '    n1 -- "h" --> n2',
            '    in3(["next/x"])',
            '    in3 -- "next/x" --> n2',
            '    n2 -- "y" --> out0(["y"])',
        ]
    )


def test_runs_inside_tensordict_sequences():
    graph = KeyedGraph((lambda x: (x, x.exp()), ["x"], ["loc", "scale"]))
    sequence = ProbabilisticTensorDictSequential(graph, sampler())
    assert sequence(rows(5))["action"].shape == (5, 3)
    plain = TensorDictSequential(linear(3, 3, "x", "h"), KeyedGraph((double, ["h"], ["y"])))
    td = rows(2)
    assert torch.equal(plain(td)["y"], 2 * td["h"])


@pytest.mark.peers
def test_runs_inside_torchrl_sequences():
    modules = pytest.importorskip("torchrl.modules")
    graph = KeyedGraph((lambda x: (x, x.exp()), ["x"], ["loc", "scale"]))
    actor = modules.ProbabilisticActor(
        graph, in_keys=["loc", "scale"], distribution_class=torch.distributions.Normal, return_log_prob=True
    )
    torch.distributions.Distribution.set_default_validate_args(True)  # importing torchrl switches it off
    assert actor(rows(5))["action"].shape == (5, 3)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_a_copy_computes_the_same_with_weights_of_its_own(clone):
    graph = KeyedGraph(linear(3, 4, "x", "h"), (torch.relu, ["h"], ["h"]), KeyedGraph(linear(4, 2, "h", "y")))
    for other in (clone(graph), clone(graph.select(out_keys=["y"]))):
        td = rows(5)
        assert torch.equal(other(td.clone())["y"], graph(td.clone())["y"])
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert next(graph.parameters()).abs().sum() > 0


def test_modules_with_keys_of_their_own_are_nodes():
    class Doubler(nn.Module):
        in_keys, out_keys = ["x"], ["y"]

        def forward(self, x):
            return 2 * x

    td = rows(2)
    assert torch.equal(KeyedGraph(Doubler())(td)["y"], 2 * td["x"])
