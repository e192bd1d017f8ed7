"""The Triton version: interpreted on the CPU, compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trajectories import random_trajectory

from graphrl.kernels import gae

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CASES = [  # shape, time_dim, dtype, per-step coefficients
    ((3, 7, 1), -2, torch.float32, False),
    ((2, 1100, 1), -2, torch.float32, True),
    ((2, 9, 5, 1), -3, torch.float64, True),
    ((70, 4), 0, torch.bfloat16, False),
    ((0, 4, 1), -2, torch.float32, False),
]


def compare_interpreted() -> None:
    """Runs in a subprocess: TRITON_INTERPRET must be set before triton is imported."""
    from graphrl.kernels.gae.triton import backward, forward

    for shape, time_dim, dtype, per_step in CASES:
        t = random_trajectory(shape, dtype)
        t.next_value[t.terminated] = float("nan")
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        gamma = torch.rand(shape, dtype=exact) if per_step else torch.tensor(0.99, dtype=exact)
        lmbda = torch.tensor(0.95, dtype=exact)
        expected = torch.ops.graphrl.gae(*t, gamma, lmbda, time_dim)
        found = forward(*t, gamma, lmbda, time_dim)
        grads = random_trajectory(shape, dtype, seed=1)[:2]
        tail = (t.next_value, expected[0], t.done, t.terminated, gamma, lmbda, time_dim)
        full = (*tail[:4], gamma.expand(shape), lmbda.expand(shape), time_dim)
        for flag in (False, True):
            found += tuple(backward(*grads, *tail, flag))
            expected += torch.ops.graphrl.gae_backward(*grads, *full, flag)[: 5 if flag else 3]
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


@needs_triton
def test_interpreted_kernels_equal_the_cpu_version():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def compile_kernel(name: str, capability: int, dtype: str, shape: tuple[int, ...], **constants):
    import triton.language as tl

    from graphrl.kernels._gpu import compile_without_gpu
    from graphrl.kernels.gae import triton as module

    kernel = getattr(module, name)
    _, sizes, blocks = module._plan(torch.Size(shape), -2)
    exact = "fp64" if dtype == "fp64" else "fp32"
    constants |= {**blocks, "GAMMA": False, "LMBDA": False, "ACC": getattr(tl, f"float{exact[2:]}")}
    names = ("rows", "steps", "row_stride", "time_stride", "outer_stride")
    constants |= {n: 1 for n, size in zip(names, sizes, strict=True) if size == 1}  # as a launch specialises it
    types = {n: f"*{exact if 'gamma' in n or 'lmbda' in n else dtype}" for n in kernel.arg_names}
    types |= dict.fromkeys(("done", "terminated"), "*u8") | dict.fromkeys(names, "i32")
    return compile_without_gpu(kernel, types, constants, capability, **module.OPTIONS)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "shape"), [("fp32", (1000, 1000, 1)), ("bf16", (64, 128, 16)), ("fp64", (4096, 24, 1))], ids=str
)
def test_kernels_compile_for_a_gpu_that_is_not_there(capability, dtype, shape):
    for name, constants in (("_forward_kernel", {}), ("_backward_kernel", {"COEFFICIENTS": True})):
        resources = compile_kernel(name, capability, dtype, shape, **constants)
        print(f"{name} sm_{capability} {dtype}: {resources}")
        assert f".target sm_{capability}" in resources.ptx and ".local" not in resources.ptx  # nothing spilled
        # Four programs of four warps on a multiprocessor at least: 65,536 registers, 48 KiB without opting in.
        assert 0 < resources.registers <= 65_536 // (4 * resources.warps * 32 * 2) * 2 * 2
        assert resources.shared_bytes <= 12 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "time_dim"), [((1000, 1000, 1), -2), ((64, 300, 5, 1), -3), ((128, 4096), 0)])
def test_gpu_equals_cpu_and_leaves_the_stream_alone(shape, time_dim, dtype):
    t = random_trajectory(shape, dtype, end=0.01)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_() for x in t[:3]]
        flags = [x.to(device) for x in t[3:]]
        gamma = torch.tensor(0.99, device=device, requires_grad=True)
        torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
        try:
            out = gae(*inputs, *flags, gamma, 0.95, time_dim=time_dim)
            grads = torch.autograd.grad(out[0].sum() + out[1].square().sum(), [*inputs, gamma])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([x.cpu() for x in (*out, *grads[:3])])
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    compare_interpreted()
