"""Times of one call of each kernel: ``pytest tests/benchmarks --benchmark-only``. Peers are in the suite kernels."""

from __future__ import annotations

import pytest
import torch

from graphrl.kernels import SumTree, categorical_projection, discounted_sum, n_step_return, td_lambda, vtrace

SIZES = [(8, 128), (1000, 1000)]
CALLS = {
    "td_lambda": lambda r, v, w, d, e: td_lambda(r, w, d, e, 0.99, 0.95),
    "vtrace": lambda r, v, w, d, e: vtrace(r, v, w, d, e, v.abs(), 0.99),
    "discounted_sum": lambda r, v, w, d, e: discounted_sum(r, d, 0.99),
    "n_step_return": lambda r, v, w, d, e: n_step_return(r, d, e, 0.99, 3),
}


@pytest.fixture(autouse=True)
def only_when_asked(request):
    if not request.config.getoption("benchmark_only", default=False):
        pytest.skip("a benchmark: run with --benchmark-only")


def time_call(benchmark, group, call, small):
    benchmark.group = group
    benchmark.pedantic(call, rounds=40, iterations=50 if small else 1, warmup_rounds=5)


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", list(CALLS))
def test_over_trajectories(benchmark, name, size):
    shape = (*size, 1)
    floats = [torch.randn(shape) for _ in range(3)]
    terminated, truncated = (torch.rand(shape) < 0.0005 for _ in range(2))
    data = (*floats, terminated | truncated, terminated)
    time_call(benchmark, f"{size[0]}x{size[1]} float32", lambda: CALLS[name](*data), terminated.numel() < 10_000)


@pytest.mark.parametrize("rows", [32, 4096])
def test_categorical_projection(benchmark, rows):
    probs, reward = torch.randn(rows, 51).softmax(-1), torch.randn(rows, 1)
    terminated, support = torch.rand(rows, 1) < 0.1, torch.linspace(-10, 10, 51)
    call = lambda: categorical_projection(probs, reward, terminated, 0.99, support)  # noqa: E731
    time_call(benchmark, f"projection {rows}x51", call, rows < 1000)


@pytest.mark.parametrize("what", ["sample", "update"])
def test_sum_tree(benchmark, what):
    tree = SumTree(1_000_000)
    tree.build(torch.rand(1_000_000))
    index, priority = torch.randint(0, 1_000_000, (256,)), torch.rand(256, dtype=torch.float64)
    call = {"sample": lambda: tree.sample(256), "update": lambda: tree.update(index, priority)}[what]
    time_call(benchmark, "sum tree of 1000000, 256 at once", call, True)
