"""How many threads a program gets: by its work, by measuring, or as told."""

from __future__ import annotations

import re
import time

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.compiler.backends import inductor, threads
from graphrl.errors import CompileError
from graphrl.graph import KeyedGraph


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.delenv("GRAPHRL_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def square(rows):
    """A program of ``2 * 64 * 64`` operations a row and a little more."""
    graph = KeyedGraph((nn.Linear(64, 64), ["x"], ["y"]))
    return grl.trace(graph, TensorDict(x=torch.zeros(rows, 64), batch_size=[rows]))


def slow_on(slow, made):
    """A stand-in for compiling: what it makes takes 5 ms on ``slow`` threads and 1 ms on another number."""

    def compiled_for(n):
        made.append(n)

        def run(values):
            values[-1].add_(1)
            time.sleep(5e-3 if n == slow else 1e-3)
            return [torch.get_num_threads()]

        return run

    return compiled_for


@pytest.mark.parametrize(("rows", "slow", "expected"), [(2000, 2, 1), (2000, 1, 2)])
def test_near_the_border_the_faster_one_is_kept(rows, slow, expected):
    program, made = square(rows), []
    arguments = inductor.example_arguments(program)
    kept = [t.detach().clone() for t in arguments]
    run = threads.on_fastest(program, arguments, slow_on(slow, made))
    assert made == [1, 2] and run([torch.zeros(1)]) == [expected] and torch.get_num_threads() == 2
    assert all(torch.equal(a, b) for a, b in zip(arguments, kept, strict=True))  # timed on copies
    note = program.graph_module.meta["how"]
    figures = re.fullmatch(rf"{expected} threads? \(1 thread: (.*) ms, 2 threads: (.*) ms\)", note)
    assert figures and (float(figures[1]) < float(figures[2])) == (expected == 1)


@pytest.mark.parametrize(("rows", "expected"), [(4, 1), (100_000, 2)])
def test_far_from_the_border_nothing_is_measured(rows, expected):
    program, made = square(rows), []
    threads.on_fastest(program, [torch.zeros(1)], slow_on(0, made))
    assert made == [expected] and program.graph_module.meta["how"].startswith(f"{expected} thread")


def test_the_number_can_be_fixed(monkeypatch):
    for told in ("1", "2"):
        monkeypatch.setenv("GRAPHRL_THREADS", told)
        made = []
        threads.on_fastest(square(2000), [torch.zeros(1)], slow_on(0, made))
        assert made == [int(told)]
    monkeypatch.setenv("GRAPHRL_THREADS", "many")
    with pytest.raises(CompileError, match="GRAPHRL_THREADS is 'many': expected a number of threads"):
        threads.estimated_threads(square(4))


def test_a_program_that_fails_on_the_example_values_goes_by_its_work():
    def compiled_for(n):
        return lambda values: torch.linalg.cholesky(torch.zeros(2, 2)) if values else [torch.get_num_threads()]

    run = threads.on_fastest(square(2000), [torch.zeros(1)], compiled_for)
    assert run([]) == [1]


def test_integer_division_is_not_tried_on_zeros():
    graph = KeyedGraph((lambda x, n: (x @ x.t()).sum() + (n // n).sum(), ["x", "n"], ["y"]))
    td = TensorDict(x=torch.randn(500, 64), n=torch.ones(8, dtype=torch.int64), batch_size=[])
    program, made = grl.trace(graph, td), []
    threads.on_fastest(program, inductor.example_arguments(program), slow_on(0, made))
    assert len(made) == 1


def test_an_update_is_measured_without_updating_and_explained():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

    def step(td):
        loss = net(td["x"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    before = {k: v.clone() for k, v in net.state_dict().items()}
    fast = grl.compile_update(step, TensorDict(x=torch.randn(1500, 32), batch_size=[1500]), strict=True)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()) and torch.get_num_threads() == 2
    text = " ".join(str(grl.explain(fast)).split())
    assert re.search(r"threads +\d threads? \(1 thread: [\d.]+ ms, 2 threads: [\d.]+ ms\)", text)
