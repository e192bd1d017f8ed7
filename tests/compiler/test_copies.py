"""Compiled graphs that are copied, sent to another process, or shared by threads."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.models import GaussianActor


def policy():
    return KeyedGraph((nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), ["x"], ["y"]))


def answer(fast, x, results):
    """Run in a spawned process."""
    with torch.no_grad():
        results.put((fast.call(x)[0].numpy(), fast(TensorDict(x=x[:3], batch_size=[3]))["y"].numpy(), fast.dynamic))


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_spawned_process_gets_the_same_results(backend):
    fast, x = grl.compile(policy(), backend=backend, dynamic=False), torch.randn(5, 3)
    with torch.no_grad():
        expected = fast.call(x)[0].numpy()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=answer, args=(fast, x, results))
    process.start()
    whole, part, dynamic = results.get(timeout=300)
    process.join(60)
    assert process.exitcode == 0 and dynamic is False
    assert abs(whole - expected).max() < 1e-6 and abs(part - expected[:3]).max() < 1e-6


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copy_computes_the_same_and_keeps_its_options(clone):
    fast = grl.compile(policy(), backend="eager", dynamic=False, verify=False)
    x = torch.randn(4, 3)
    with torch.no_grad():
        expected = fast.call(x)[0]
        other = clone(fast)
        assert torch.equal(other.call(x)[0], expected)
    assert (other.backend, other.dynamic, other.verify, other.strict) == ("eager", False, False, False)
    assert list(other.state_dict()) == list(fast.state_dict())


def test_a_copy_of_a_training_graph_trains_by_itself():
    fast = grl.compile(policy(), backend="eager")
    other = copy.deepcopy(fast)
    other(torch.randn(4, 3)).sum().backward()
    assert all(p.grad is None for p in fast.parameters()) and all(p.grad is not None for p in other.parameters())


def test_copies_made_while_other_threads_call():
    fast = grl.compile(policy(), TensorDict(x=torch.zeros(4, 3), batch_size=[4]), backend="eager")
    xs = [torch.randn(4, 3) for _ in range(40)]

    def work(x):
        with torch.no_grad():
            return copy.deepcopy(fast).call(x)[0], fast.call(x)[0]

    with ThreadPoolExecutor(4) as pool, torch.no_grad():
        for x, (of_copy, own) in zip(xs, pool.map(work, xs), strict=True):
            expected = fast.graph(x)
            torch.testing.assert_close(of_copy, expected), torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("backend", ["eager", "inductor", "native"])
@pytest.mark.parametrize("dynamic", [None, False])
def test_threads_with_batches_of_different_size_get_their_own_results(backend, dynamic):
    graph = policy()
    fast = grl.compile(graph, backend=backend, dynamic=dynamic)
    sizes = [2, 5, 1, 9]

    def work(n):
        with torch.no_grad():
            for _ in range(100):
                x = torch.randn(n, 3)
                torch.testing.assert_close(fast.call(x)[0], graph(x))
                td = TensorDict(x=x, batch_size=[n])
                torch.testing.assert_close(fast(td)["y"], graph(x))
        return n

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, sizes)) == sizes


def test_threads_that_sample_at_different_sizes_keep_their_draws_apart():
    actor = GaussianActor(3, 2)
    fast = grl.compile(actor, backend="eager", dynamic=True)

    def work(n):
        with torch.no_grad():
            for _ in range(100):
                td = fast(TensorDict(observation=torch.zeros(n, 3), batch_size=[n]))
                error = (td["action"] - td["loc"]) / td["scale"]
                log_prob = torch.distributions.Normal(td["loc"], td["scale"]).log_prob(td["action"]).sum(-1)
                torch.testing.assert_close(log_prob, td["action_log_prob"])
                assert error.shape == (n, 2) and error.unique().numel() == 2 * n
        return n

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, [2, 5, 9])) == [2, 5, 9]


def test_threads_with_and_without_gradients():
    graph = policy()
    fast = grl.compile(graph, backend="eager")

    def work(grad):
        with torch.set_grad_enabled(grad):
            for n in (3, 5, 4) * 20:
                y = fast.call(torch.randn(n, 3))[0]
                assert y.requires_grad == grad
        return grad

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [True, False])) == [True, False]
