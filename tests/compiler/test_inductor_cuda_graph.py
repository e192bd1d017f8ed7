"""CUDA graphs: results that stay, weights that move, updates in place, and a host that never waits."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.compiler.backends.cuda_graph import CudaGraph, captured
from graphrl.compiler.backends.eager import BACKEND as eager
from graphrl.graph import KeyedGraph

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)


def test_on_the_cpu_a_program_stays_as_it_is():
    program = grl.trace(KeyedGraph((network("cpu"), ["x"], ["y"])), TensorDict(x=torch.zeros(3, 5), batch_size=[3]))
    run = eager.lower(program)
    assert captured(program, run) is run


@pytest.mark.gpu
@gpu
def test_results_stay_and_weights_are_live():
    net = network("cuda")
    graph = KeyedGraph((net, ["x"], ["y"]))
    batches = [TensorDict(x=torch.randn(8, 5, device="cuda"), batch_size=[8]) for _ in range(3)]
    fast = grl.compile(graph, batches[0], backend="inductor", strict=True)
    assert "one CUDA graph" in str(grl.explain(fast))
    with torch.no_grad():
        found = [fast(td.clone())["y"] for td in batches]
        for y, td in zip(found, batches, strict=True):
            torch.testing.assert_close(y, graph(td.clone())["y"], rtol=1e-4, atol=1e-5)
        net[0].weight.mul_(2)  # in place, then moved
        torch.testing.assert_close(fast(batches[0].clone())["y"], graph(batches[0].clone())["y"], rtol=1e-4, atol=1e-5)
        net.load_state_dict({k: v.clone() + 1 for k, v in net.state_dict().items()}, assign=True)
        torch.testing.assert_close(fast(batches[1].clone())["y"], graph(batches[1].clone())["y"], rtol=1e-4, atol=1e-5)
        torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
        try:
            fast(batches[2].clone())
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@gpu
def test_an_update_writes_state_in_place():
    def make():
        net = network("cuda")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

        def step(td):
            loss = net(td["x"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        return net, optimizer, step

    td = TensorDict(x=torch.randn(64, 5, device="cuda"), batch_size=[64])
    (net, optimizer, step), (other, other_optimizer, wanted_step) = make(), make()
    before = copy.deepcopy(net.state_dict())
    fast = grl.compile_update(step, td, strict=True)
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)
    for rate in (0.01, 0.01, 0.003):
        for o in (optimizer, other_optimizer):
            o.param_groups[0]["lr"] = rate
        torch.testing.assert_close(fast(td)["loss"], wanted_step(td)["loss"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(net.state_dict()), dict(other.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@gpu
def test_weights_that_keep_moving_run_without_a_graph():
    net = network("cuda")
    program = grl.trace(KeyedGraph((net, ["x"], ["y"])), TensorDict(x=torch.zeros(3, 5), batch_size=[3]).cuda())
    run = captured(program, eager.lower(program))
    assert isinstance(run, CudaGraph)
    x = torch.randn(3, 5, device="cuda")
    with torch.no_grad():
        for _ in range(20):
            net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
            torch.testing.assert_close(run(program.arguments([x]))[0], net(x), rtol=1e-4, atol=1e-5)
