"""Times of one GAE call beside its peers' in one run: ``pytest tests/benchmarks --benchmark-only``."""

from __future__ import annotations

import pytest
import torch

from graphrl.bench import gae_peers
from graphrl.kernels import gae

SIZES = [(1000, 1000), (64, 2048), (1, 1_000_000), (8, 128)]


@pytest.fixture(autouse=True)
def only_when_asked(request):
    if not request.config.getoption("benchmark_only", default=False):
        pytest.skip("a benchmark: run with --benchmark-only")


@pytest.fixture(params=SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def rollout(request):
    generator = torch.Generator().manual_seed(0)
    shape = (*request.param, 1)
    floats = [torch.randn(shape, generator=generator) for _ in range(3)]
    terminated, truncated = (torch.rand(shape, generator=generator) < 0.0005 for _ in range(2))
    # glibc gives large blocks back to the system, and pays a page fault per 4 KiB to have them again, until it has
    # seen a larger one freed, as any training program does. Without this every row here is 2 ms longer.
    del generator
    torch.empty(16 << 20, dtype=torch.uint8).fill_(0)
    return [*floats, terminated | truncated, terminated]


def time_call(benchmark, rollout, call, name, rounds=40):
    benchmark.group = f"gae {rollout[0].shape[0]}x{rollout[0].shape[1]} float32"
    benchmark.name = name
    inner = 200 if rollout[0].numel() < 10_000 else 1
    benchmark.pedantic(call, rounds=rounds, iterations=inner, warmup_rounds=5)


def test_copy_of_the_same_bytes(benchmark, rollout):
    arrays = [*rollout, rollout[0], rollout[0]]
    into = [torch.empty_like(x) for x in arrays]
    time_call(benchmark, rollout, lambda: [y.copy_(x) for x, y in zip(arrays, into, strict=True)], "copy")


def test_gae(benchmark, rollout):
    time_call(benchmark, rollout, lambda: gae(*rollout, 0.99, 0.95), "graphrl")


def test_gae_with_gradient(benchmark, rollout):
    reward, value, next_value = (x.clone().requires_grad_() for x in rollout[:3])
    weight = torch.ones_like(reward)

    def call():
        out = gae(reward, value, next_value, *rollout[3:], 0.99, 0.95)
        torch.autograd.grad(out, (reward, value, next_value), (weight, weight))

    time_call(benchmark, rollout, call, "graphrl, forward and backward")


@pytest.mark.peers
def test_numba_loop(benchmark, rollout):
    pytest.importorskip("numba")
    time_call(benchmark, rollout, gae_peers.numba_loop(rollout), "numba")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_torchrl(benchmark, rollout):
    pytest.importorskip("torchrl")
    if rollout[0].shape[1] > 10_000:
        pytest.skip("minutes a call")
    time_call(benchmark, rollout, gae_peers.torchrl(rollout, vectorised=True), "torchrl", rounds=20)
