"""The fused kernel: interpreted on the CPU, compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import pytest
import torch
from interpreted import needs_triton, run_interpreted
from test_mlp_forward import layers

from graphrl.kernels import mlp_forward
from graphrl.kernels.mlp.reference import ACTIVATIONS, mlp_reference

SHAPES = [  # leading shape of x, sizes of the layers
    ((1,), (3, 2)),
    ((37,), (17, 64, 64, 6)),
    ((2, 9), (1, 65, 15, 130, 1)),
    ((16,), (512, 512)),
    ((0,), (4, 8, 2)),
    ((3,), (0, 5, 2)),
    ((4100,), (3, 1)),  # the larger block of rows
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def judge(x, weights, biases, kinds):
    wide = [w.double() for w in weights], [b if b is None else b.double() for b in biases]
    return mlp_reference(x.double(), *wide, kinds)


def assert_near(found, wanted, dtype):
    assert found.dtype == dtype and found.shape == wanted.shape and found.is_contiguous()
    if found.numel():
        scale = max(1.0, float(wanted.abs().max()))
        assert float((found.double() - wanted).abs().max()) <= TOLERANCE[dtype] * scale


def compare_interpreted() -> None:
    """Runs in the interpreter."""
    from graphrl.kernels.mlp.triton import mlp_forward as fused

    kinds = list(ACTIVATIONS)
    for i, (lead, sizes) in enumerate(SHAPES):
        large = max(*lead, *sizes) > 500  # a second each: one dtype has to do
        for dtype in [torch.float32] if large else TOLERANCE:
            weights, biases = layers(sizes, dtype, biased=i % 2 == 0)
            chosen = [kinds[(i + j) % len(kinds)] for j in range(len(weights))]
            x = torch.randn(*lead, sizes[0]).to(dtype)
            assert_near(fused(x, weights, biases, chosen), judge(x, weights, biases, chosen), dtype)
    for kind in kinds:  # the whole range of each activation, near zero with full relative precision
        x = torch.cat([torch.linspace(-30, 30, 301), torch.logspace(-7, -0.5, 50), torch.tensor([torch.nan])])[:, None]
        one = [torch.ones(1, 1)], [None]
        found, wanted = fused(x, *one, [kind])[:, 0].double(), judge(x, *one, [kind])[:, 0]
        torch.testing.assert_close(
            found, wanted, rtol=2e-6 if kind in ("tanh", "relu") else 1e-4, atol=3e-7, equal_nan=True
        )
    strided = torch.randn(17, 5).t()
    weights, biases = layers((17, 8, 2))
    weights[0] = weights[0].t().contiguous().t()
    assert_near(
        fused(strided, weights, biases, ["elu", "tanh"]),
        judge(strided, weights, biases, ["elu", "tanh"]),
        torch.float32,
    )


@needs_triton
def test_the_interpreted_kernel_equals_the_float64_reference():
    run_interpreted(__file__)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rows", [16, 100_000])
def test_the_kernel_compiles_for_a_gpu_that_is_not_there(capability, dtype, rows):
    from graphrl.kernels._gpu import compile_without_gpu
    from graphrl.kernels.mlp import triton as module

    kinds = ("tanh", "elu", "silu", "identity")
    constants = {"SIZES": (17, 512, 256, 100, 6), "KINDS": kinds, "LAYERS": 4, **module._plan(rows)}
    types = {"x": f"*{dtype}", "out": f"*{dtype}", "scratch": f"*{dtype}", "rows": "i32", "half": "i32"}
    types |= {"weights": (f"*{dtype}",) * 4, "biases": (f"*{dtype}", "constexpr", f"*{dtype}", f"*{dtype}")}
    resources = compile_without_gpu(module._mlp_kernel, types, constants, capability, **module.OPTIONS)
    print(f"sm_{capability} {dtype} {constants['ROWS']} rows: {resources}")
    assert f".target sm_{capability}" in resources.ptx and ".local" not in resources.ptx  # nothing spilled
    assert "tf32" not in resources.ptx and ("mma" in resources.ptx) == (dtype != "fp32")
    # Below the 255 a thread may have, so nothing is spilled; two programs at least in 65,536 registers and 48 KiB.
    assert 0 < resources.registers < 255
    assert resources.shared_bytes <= 24 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("lead", "sizes"), [*SHAPES, ((10_000,), (48, 512, 256, 128, 12))], ids=str)
def test_gpu_equals_the_float64_reference_and_leaves_the_stream_alone(lead, sizes, dtype):
    weights, biases = layers(sizes, dtype, device="cuda", biased=False)
    kinds = [*["tanh", "elu", "silu", "gelu"][: len(weights) - 1], "identity"]
    x = torch.randn(*lead, sizes[0], device="cuda", dtype=dtype)
    torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
    try:
        found = mlp_forward(x, weights, biases, kinds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_near(found.cpu(), judge(x, weights, biases, kinds).cpu(), dtype)


if __name__ == "__main__":
    compare_interpreted()
