"""Opaque nodes: plain calls between two programs."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import graphrl as grl
from graphrl.errors import TraceError

calls = []


def branching(h):
    calls.append(tuple(h.shape))
    if h.sum() > 0:  # no program can hold this
        return h * 2
    return h - 1


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, h):
        return h * self.scale if float(h.detach().sum()) > 0 else h - self.scale


def chain(node, dtype=torch.float64):
    torch.manual_seed(0)
    graph = grl.KeyedGraph(
        (nn.Linear(4, 8), ["x"], ["h"]),
        (torch.tanh, ["h"], ["h"]),
        (node, ["h"], ["h"]),
        (nn.Linear(8, 2), ["h"], ["y"]),
        (torch.relu, ["y"], [("next", "y")]),
        out_keys=["y", ("next", "y")],
    )
    return graph.to(dtype)


def batch(n=3, sign=1.0):
    generator = torch.Generator().manual_seed(n)
    return TensorDict(x=sign * torch.rand(n, 4, generator=generator, dtype=torch.float64), batch_size=[n])


@pytest.mark.parametrize("node", [lambda: branching, Branching], ids=["function", "module"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_values_and_gradients_are_eager_s_on_both_branches(node, backend):
    graph = chain(grl.opaque(node()))
    eager, fast = copy.deepcopy(graph), grl.compile(graph, backend=backend, strict=True)
    for sign in (1.0, -1.0):
        a, b = fast(batch(sign=sign)), eager(batch(sign=sign))
        assert set(a.keys(True, True)) == set(b.keys(True, True)) == {"x", "y", ("next", "y")}
        torch.testing.assert_close(a["y"], b["y"])
        (a["y"].square().sum() + a["next", "y"].sum()).backward()
        (b["y"].square().sum() + b["next", "y"].sum()).backward()
    for p, q in zip(graph.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert len(fast.entries()) == 2 and fast.retraces == []


def test_an_opaque_node_runs_once_a_call_and_programs_lie_around_it():
    fast = grl.compile(chain(grl.opaque(branching)), batch(), backend="inductor")
    assert [e.program.out_keys for e in fast.entries()] == [["h"], ["y", ("next", "y")]]
    calls.clear()
    with torch.no_grad():
        fast(batch())
        y, _ = fast.call(batch()["x"])
        out = torch.empty_like(y), torch.empty_like(y)
        fast.call_into((batch()["x"],), out)
        fast.bind_rows([(batch()["x"],)], [out])(0)
    assert calls == [(3, 8)] * 4 and torch.equal(out[0], y)
    assert "opaque branching" in str(grl.explain(fast))


def test_weights_names_copies_and_pickles_are_the_graph_s():
    graph = chain(grl.opaque(Branching()))
    fast = grl.compile(graph, batch(), backend="eager")
    assert list(fast.state_dict()) == list(graph.state_dict())
    wanted = fast(batch())["y"]
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(other) is type(fast) and torch.equal(other(batch())["y"], wanted)
    with torch.no_grad():
        for p in fast.parameters():
            p.zero_()
    assert fast(batch())["y"].eq(0).all()


def test_marking_leaves_the_node_itself_as_it_was():
    module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
    marked = grl.opaque(module)
    assert marked.module.weight is module.module.weight and list(marked.state_dict()) == list(module.state_dict())
    td = TensorDict(x=torch.ones(1, 2), batch_size=[1])
    assert type(grl.compile(module)) is grl.CompiledGraph
    assert torch.equal(grl.compile(marked)(td.clone())["y"], grl.compile(module, backend="eager")(td.clone())["y"])


def test_an_opaque_node_deep_inside_sequences_and_graphs():
    inner = TensorDictSequential(
        TensorDictModule(torch.sin, ["x"], ["h"]), TensorDictModule(grl.opaque(branching), ["h"], ["h"])
    )
    hiding = grl.KeyedGraph(inner, (torch.cos, ["h"], ["z"]), out_keys=["z"])
    graph = grl.KeyedGraph(hiding, (torch.exp, ["z"], ["y"]))
    fast, x = grl.compile(graph, backend="eager"), batch()
    a, b = fast(x.clone()), graph(x.clone())
    assert torch.equal(a["y"], b["y"]) and set(a.keys()) == set(b.keys()) == {"x", "z", "y"}


def test_plain_tensors_where_an_output_lacks_their_batch_dim():
    total = grl.opaque(lambda h: h.sum())
    graph = grl.KeyedGraph((torch.sin, ["x"], ["h"]), (total, ["h"], ["t"]), (torch.exp, ["t"], ["y"]))
    x = batch()["x"]
    (h, t, y) = grl.compile(graph, backend="eager").call(x)
    assert torch.equal(y, x.sin().sum().exp()) and torch.equal(h, x.sin()) and torch.equal(t, x.sin().sum())


def test_one_program_cannot_hold_an_opaque_node():
    graph = chain(grl.opaque(branching))
    with pytest.raises(TraceError, match="nodes.2 is opaque and cannot be part of one program"):
        grl.trace(graph, batch())
    with pytest.raises(TraceError, match="is opaque"):
        grl.compile_update(lambda td: {"loss": graph(td)["y"].sum()}, batch())
