"""Several threads that compile at once: each gets its own program, and torch's switches stay as they were."""

import threading

import torch
from tensordict import TensorDict
from torch import nn, optim

import graphrl as grl


def in_threads(work, count=4):
    errors = []

    def run(i):
        try:
            work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_graphs_compile_in_several_threads_at_once():
    before = torch._C._get_mkldnn_enabled(), torch.distributions.Distribution._validate_args

    def work(i):
        for width in range(1, 9):
            linear = nn.Sequential(nn.Linear(i + 1, 8), nn.Tanh(), nn.Linear(8, width)).double()
            fast = grl.compile(grl.KeyedGraph((linear, ["x"], ["y"])), backend="eager", verify=False)
            x = torch.randn(3, i + 1, dtype=torch.float64)
            assert torch.allclose(fast.call(x)[0], linear(x))

    assert in_threads(work) == []
    assert (torch._C._get_mkldnn_enabled(), torch.distributions.Distribution._validate_args) == before


def test_updates_compile_in_several_threads_at_once():
    def work(i):
        net = nn.Linear(4, 4)
        optimizer = optim.Adam(net.parameters(), 0.01)

        def step(td):
            loss = net(td["x"]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        before = net.weight.detach().clone()
        grl.compile_update(step, backend="eager")(TensorDict({"x": torch.ones(3, 4)}, [3]))
        assert torch.allclose(before - net.weight, torch.full_like(before, 0.01), atol=1e-4)

    assert in_threads(work) == []
    assert not torch.compiler._is_compiling_flag
