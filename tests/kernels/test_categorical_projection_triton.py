"""The Triton version: interpreted on the CPU, compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import pytest
import torch
from interpreted import needs_triton, run_interpreted
from test_categorical_projection import DTYPES, random_update, rounding

from graphrl.kernels import categorical_projection
from graphrl.kernels.categorical_projection.reference import categorical_projection_reference

CASES = [  # leading shape, atoms, uniform
    ((1,), 2, True),
    ((7,), 51, True),
    ((3, 5), 21, False),
    ((17,), 11, True),
    ((3,), 70, False),
    ((0,), 51, True),
]


def judge(u, weight):
    """target and the gradient of next_probs, in float64."""
    probs = u.next_probs.double().requires_grad_()
    target = categorical_projection_reference(probs, *u[1:])
    return target.detach(), torch.autograd.grad(target, probs, weight.double())[0]


def compare_interpreted() -> None:
    """Runs in the interpreter."""
    from graphrl.kernels.categorical_projection.triton import categorical_projection as kernel

    for i, (lead, atoms, uniform) in enumerate(CASES):
        for dtype in DTYPES[: 4 if i < 2 else 2]:
            u = random_update(lead, atoms, dtype, uniform, per_row=i % 2 == 1)
            u.next_probs.masked_fill_(u.terminated, float("nan"))
            weight = torch.randn(*lead, atoms).to(dtype)
            discount = torch.as_tensor(u.discount, dtype=u.support.dtype)
            rest = (u.reward, u.terminated, discount, u.support)
            expected = judge(u, weight)
            for x, y in zip((kernel(u.next_probs, *rest, False), kernel(weight, *rest, True)), expected, strict=True):
                assert x.dtype == dtype and x.shape == (*lead, atoms)
                torch.testing.assert_close(x.double(), y, rtol=rounding(u), atol=4 * rounding(u))
    probs, support = torch.full((2, 5), 0.2), torch.linspace(-2, 2, 5)
    for reward, ended, found in (([0.0, float("nan")], [0, 0], 0), ([float("inf"), float("nan")], [1, 1], 1)):
        flags = torch.tensor(ended).bool()
        out = kernel(probs, torch.tensor(reward), flags, torch.tensor(1.0), support, False)
        expected = probs[0] if found == 0 else torch.tensor([0.0, 0, 0, 0, 1])
        assert torch.equal(out[0], expected) and out[1].isnan().all()
        out = kernel(probs, torch.tensor(reward), flags, torch.tensor(1.0), support.flip(0), False)
        assert out.isnan().all()


@needs_triton
def test_interpreted_kernel_equals_the_float64_reference():
    run_interpreted(__file__)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "rows", "atoms"), [("fp32", 256, 51), ("bf16", 32, 255), ("fp64", 4096, 51)])
def test_kernel_compiles_for_a_gpu_that_is_not_there(capability, dtype, rows, atoms):
    import triton.language as tl

    from graphrl.kernels._gpu import compile_without_gpu
    from graphrl.kernels.categorical_projection import triton as module

    exact = "fp64" if dtype == "fp64" else "fp32"
    for transpose in (False, True):
        _, constants = module._plan(rows, atoms)
        constants |= {"PER_ROW": True, "TRANSPOSE": transpose, "ACC": getattr(tl, f"float{exact[2:]}")}
        types = {"source": f"*{dtype}", "out": f"*{dtype}", "terminated": "*u8", "rows": "i32", "atoms": "i32"}
        types |= dict.fromkeys(("reward", "discount", "support"), f"*{exact}")
        resources = compile_without_gpu(module._kernel, types, constants, capability, **module.OPTIONS)
        print(f"sm_{capability} {dtype} transpose={transpose}: {resources}")
        assert f".target sm_{capability}" in resources.ptx and ".local" not in resources.ptx  # nothing spilled
        assert "\tatom." not in resources.ptx and "\tred." not in resources.ptx  # sums have one order
        # Two programs of four warps on a multiprocessor at least: 65,536 registers, 48 KiB without opting in.
        assert 0 < resources.registers < 255
        assert resources.shared_bytes <= 24 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lead", "atoms", "uniform"), [*CASES, ((4096,), 51, True), ((33,), 601, False)], ids=str)
def test_gpu_equals_the_float64_reference_and_leaves_the_stream_alone(lead, atoms, uniform, dtype):
    u = random_update(lead, atoms, dtype, uniform, per_row=True)
    weight = torch.randn(*lead, atoms).to(dtype)
    device = [x.cuda() for x in u]
    probs, on_device = device[0].requires_grad_(), weight.cuda()
    torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
    try:
        target = categorical_projection(probs, *device[1:])
        (grad,) = torch.autograd.grad(target, probs, on_device)
        again = categorical_projection(*device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(target, again)  # to the bit
    for x, y in zip((target, grad), judge(u, weight), strict=True):
        torch.testing.assert_close(x.detach().cpu().double(), y, rtol=rounding(u), atol=4 * rounding(u))


if __name__ == "__main__":
    compare_interpreted()
