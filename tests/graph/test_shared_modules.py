"""A module at several nodes: saved once, loaded everywhere."""

import torch
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph


def twice(layer=None):
    layer = layer or nn.Linear(3, 3)
    return KeyedGraph((layer, ["x"], ["h"]), (torch.tanh, ["h"], ["h"]), (layer, ["h"], ["y"]))


def zeroed(module):
    return {name: torch.zeros_like(value) for name, value in module.state_dict().items()}


def test_two_parameters_are_two_entries():
    graph = twice()
    assert list(graph.state_dict()) == ["nodes.0.module.weight", "nodes.0.module.bias"]
    assert len(list(graph.parameters())) == 2
    assert list(grl.compile(graph, backend="eager").state_dict()) == list(graph.state_dict())


def test_they_load_strictly_also_through_a_compiled_graph_and_with_assignment():
    graph = twice()
    fast = grl.compile(graph, backend="eager")
    for module, assign in ((graph, False), (graph, True), (fast, False), (fast, True)):
        module.load_state_dict(twice().state_dict(), strict=True, assign=assign)
        assert graph[0].module is graph[2].module
        with torch.no_grad():
            x = torch.ones(2, 3)
            torch.testing.assert_close(fast(x)[1], graph(x)[1])
            assert (graph(x)[1] != 0).any()
            module.load_state_dict(zeroed(module), strict=True, assign=assign)
            assert (fast(x)[1] == 0).all() and (graph(x)[1] == 0).all()


def test_checkpoints_with_an_entry_for_each_node_load():
    graph, value = twice(), torch.full((3, 3), 2.0)
    old = {f"nodes.{i}.module.{name}": t for i in (0, 2) for name, t in (("weight", value), ("bias", value[0]))}
    graph.load_state_dict(old, strict=True)
    assert (graph[0].module.weight == 2).all() and len(old) == 4


def test_nested_graphs_and_prefixes():
    layer = nn.Linear(3, 3)
    outer = nn.ModuleDict({"policy": KeyedGraph(twice(layer), (layer, ["y"], ["z"]))})
    assert list(outer.state_dict()) == ["policy.nodes.0.nodes.0.module.weight", "policy.nodes.0.nodes.0.module.bias"]
    outer.load_state_dict(zeroed(outer), strict=True)
    assert (layer.weight == 0).all()


def test_a_selected_graph_and_its_source_exchange_checkpoints():
    graph = twice()
    part = graph.select(in_keys=["h"], out_keys=["y"])
    assert list(part.state_dict()) == ["nodes.2.module.weight", "nodes.2.module.bias"]
    layer = graph[0].module
    part.load_state_dict(zeroed(graph), strict=False)
    assert (layer.weight == 0).all()
    graph.load_state_dict({name: t + 1 for name, t in zeroed(part).items()}, strict=True)
    assert (layer.weight == 1).all()


def test_what_is_missing_or_too_much_is_still_an_error():
    graph = twice()
    for wrong, message in (({}, "Missing key"), ({**graph.state_dict(), "extra": torch.zeros(1)}, "Unexpected key")):
        try:
            graph.load_state_dict(wrong, strict=True)
        except RuntimeError as error:
            assert message in str(error)
        else:
            raise AssertionError(f"{message} expected")
