"""A collector's whole batch bound at once: every row is computed from its own inputs, with live weights."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import graphrl as grl
from graphrl.models import GaussianActor, RunningNorm


def _rows(count, *widths):
    columns = [torch.randn(count, 2, w) for w in widths]
    return list(zip(*(c.unbind(0) for c in columns), strict=True))


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_each_row_equals_the_eager_graph(backend):
    graph = grl.KeyedGraph(TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["action"]))
    fast = grl.compile(graph, backend=backend, strict=True)
    inputs, outputs = _rows(5, 3), _rows(5, 4)
    with torch.no_grad():
        step = fast.bind_rows(inputs, outputs)
        for t in range(5):
            step(t)
        for (x,), (y,) in zip(inputs, outputs, strict=True):
            torch.testing.assert_close(y, graph(TensorDict(observation=x, batch_size=[2]))["action"])


@pytest.mark.parametrize("assign", [False, True])
def test_binding_again_sees_new_weights(assign):
    graph = grl.KeyedGraph(TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["action"]))
    fast = grl.compile(graph, backend="native", strict=True)
    inputs, outputs = _rows(3, 3), _rows(3, 4)
    with torch.no_grad():
        fast.bind_rows(inputs, outputs)(0)
        zeros = {name: torch.zeros_like(value) for name, value in graph.state_dict().items()}
        graph.load_state_dict(zeros, assign=assign)
        step = fast.bind_rows(inputs, outputs)
        for t in range(3):
            step(t)
    assert all(bool((y == 0).all()) for (y,) in outputs)


def test_draws_differ_by_row_and_repeat_under_a_seed():
    actor = GaussianActor(3, 2, normalizer=RunningNorm(3))
    fast = grl.compile(actor, backend="native", strict=True)
    width = {"loc": 2, "scale": 2, "action": 2}
    inputs = [(torch.ones(2, 3),)] * 400
    values = {k: torch.zeros(400, 2, *((width[k],) if k in width else ())) for k in fast.out_keys}
    outputs = list(zip(*(v.unbind(0) for v in values.values()), strict=True))

    def collect():
        torch.manual_seed(3)
        with torch.no_grad():
            step = fast.bind_rows(inputs, outputs)
            for t in range(400):
                step(t)
        return {k: v.clone() for k, v in values.items()}

    first, second = collect(), collect()
    assert all(torch.equal(first[k], second[k]) for k in first)
    noise = (first["action"] - first["loc"]) / first["scale"]
    assert abs(float(noise.mean())) < 0.1 and abs(float(noise.std()) - 1) < 0.1
    exact = torch.distributions.Normal(first["loc"], first["scale"]).log_prob(first["action"]).sum(-1)
    torch.testing.assert_close(first["action_log_prob"], exact)


def test_float64_statistics_run_in_generated_c():
    norm = RunningNorm(3)
    norm.update(100 + 10 * torch.randn(64, 3))
    graph = grl.KeyedGraph(TensorDictModule(norm, in_keys=["observation"], out_keys=["normalized"]))
    fast = grl.compile(graph, backend="native", strict=True)
    x = 100 + 10 * torch.randn(4, 3)
    torch.testing.assert_close(fast.call(x)[0], norm(x))
    norm.update(torch.zeros(1000, 3))  # statistics are read live
    torch.testing.assert_close(fast.call(x)[0], norm(x))
