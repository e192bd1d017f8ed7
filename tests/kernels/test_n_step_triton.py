"""The Triton version of n-step returns: interpreted, compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import pytest
import torch
from interpreted import needs_triton, run_interpreted
from trajectories import random_trajectory

from graphrl.kernels import n_step_return

CASES = [  # shape, time_dim, dtype, gamma per step, horizons
    ((3, 7, 1), -2, torch.float32, False, False),
    ((2, 700, 1), -2, torch.float32, True, True),
    ((2, 9, 5, 1), -3, torch.float64, True, False),
    ((70, 4), 0, torch.bfloat16, False, True),
    ((0, 4, 1), -2, torch.float32, False, False),
]


def compare_interpreted() -> None:
    """Runs in the interpreter."""
    from graphrl.kernels.n_step.triton import backward, forward

    for shape, time_dim, dtype, per_step, horizons in CASES:
        t = random_trajectory(shape, dtype)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        gamma = torch.rand(shape, dtype=exact) if per_step else torch.tensor(0.99, dtype=exact)
        horizon = torch.randint(0, 9, shape) if horizons else None
        args = (t.done, t.terminated, gamma, horizon, 4 if horizon is None else 2**31 - 1, time_dim)
        found = (*forward(t.reward, *args), backward(t.value, *args))
        expected = (
            *torch.ops.graphrl.n_step_return(t.reward, *args),
            torch.ops.graphrl.n_step_return_backward(t.value, *args),
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


@needs_triton
def test_interpreted_kernels_equal_the_cpu_version():
    run_interpreted(__file__)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "extras"), [(80, "fp32", False), (90, "bf16", True), (90, "fp64", True)], ids=str
)
def test_kernels_compile_for_a_gpu_that_is_not_there(capability, dtype, extras):
    import triton.language as tl

    from graphrl.kernels._gpu import compile_without_gpu
    from graphrl.kernels.n_step import triton as module

    exact = "fp64" if dtype == "fp64" else "fp32"
    constants = {"GAMMA": extras, "HORIZON": extras, "BLOCK": module.BLOCK, "ACC": getattr(tl, f"float{exact[2:]}")}
    for kernel in (module.forward_kernel, module.backward_kernel):
        types = {n: f"*{dtype}" for n in kernel.arg_names} | {"gamma": f"*{exact}", "horizon": "*i64", "index": "*i64"}
        types |= dict.fromkeys(("done", "terminated"), "*u8") | dict.fromkeys(("n", "size", "steps", "inner"), "i32")
        resources = compile_without_gpu(kernel, types, constants, capability, **module.OPTIONS)
        print(f"{kernel.__name__} sm_{capability} {dtype}: {resources}")
        assert f".target sm_{capability}" in resources.ptx and ".local" not in resources.ptx  # nothing spilled
        # Two programs of four warps on a multiprocessor at least: 65,536 registers, 48 KiB without opting in.
        assert 0 < resources.registers <= 65_536 // (2 * resources.warps * 32)
        assert resources.shared_bytes <= 24 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "time_dim"), [((1000, 1000, 1), -2), ((64, 300, 5, 1), -3), ((128, 4096), 0)])
def test_gpu_equals_cpu_and_leaves_the_stream_alone(shape, time_dim, dtype):
    t = random_trajectory(shape, dtype, end=0.01)
    results = []
    for device in ("cpu", "cuda"):
        reward, done, terminated = (x.to(device) for x in (t.reward, t.done, t.terminated))
        reward.requires_grad_()
        torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
        try:
            out = n_step_return(reward, done, terminated, 0.99, 10, time_dim=time_dim)
            grad = torch.autograd.grad(out[0].square().sum(), reward)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([x.cpu() for x in (*out, *grad)])
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    compare_interpreted()
