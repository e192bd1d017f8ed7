"""The Triton version: interpreted on the CPU, compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import pytest
import torch
from interpreted import needs_triton, run_interpreted

from graphrl.kernels import SumTree
from graphrl.kernels.sum_tree.op import _search_cpu, _update_cpu
from graphrl.kernels.sum_tree.reference import sum_tree_search_reference, sum_tree_update_reference


def compare_interpreted() -> None:
    """Runs in the interpreter."""
    from graphrl.kernels.sum_tree.triton import search, update

    torch.manual_seed(0)
    for dtype, sizes in ((torch.float64, (9, 4097)), (torch.float32, (1, 2, 3, 7, 8, 9, 1000, 4097))):
        for n in sizes:
            tree, other = SumTree(n, dtype=dtype), SumTree(n, dtype=dtype)
            for count in (0, 200):  # into few leaves: most are written many times
                index = torch.cat([torch.randint(n, (count,)), torch.tensor([n // 2])])
                priority = (torch.rand(count + 1, dtype=dtype) * 3).floor() / 4
                priority[-1] += 0.5
                leaves = sum_tree_update_reference(tree.leaves, index, priority)
                update(tree.leaves, tree.inner, index, priority)
                _update_cpu(other.leaves, other.inner, index, priority)
                assert torch.equal(tree.leaves.double(), leaves)
                assert torch.equal(tree.inner, other.inner)
            edges = torch.cat([leaves.cumsum(0)[-50:], torch.tensor([-1.0, 0.0, 1e9])]).to(dtype)
            assert torch.equal(search(tree.leaves, tree.inner, edges, 0)[0], sum_tree_search_reference(leaves, edges))
            for strata in (1, 7):
                uniform = torch.rand(150, dtype=dtype)
                pairs = zip(
                    search(tree.leaves, tree.inner, uniform, strata),
                    _search_cpu(tree.leaves, tree.inner, uniform, strata),
                    strict=True,
                )
                assert all(torch.equal(x, y) for x, y in pairs), (n, dtype, strata)
    refusals(SumTree(4097), search, update)


def refusals(tree: SumTree, search, update) -> None:
    before = tree.leaves.clone(), tree.inner.clone()
    nan = torch.tensor(float("nan"))
    for index, priority in ((0, nan), (0, -1.0), (0, float("inf")), (4097, 1.0), (-1, 1.0)):
        with pytest.raises(RuntimeError, match="index outside the tree, or a priority"):
            update(tree.leaves, tree.inner, torch.tensor([5, index]), torch.tensor([1.0, priority]).double())
    assert torch.equal(tree.leaves, before[0]) and torch.equal(tree.inner, before[1])
    for broken, prefix in ((tree, nan), (SumTree(9), torch.tensor(0.0))):
        with pytest.raises(RuntimeError, match="sum of all priorities is 0 or infinite, or a prefix is NaN"):
            search(broken.leaves, broken.inner, prefix.double(), 0)


@needs_triton
def test_interpreted_kernels_equal_cpu_and_reference():
    run_interpreted(__file__)


ONE = {"count": 1, "capacity": 1, "width": 8, "leaves_of_node": 1, "below": 0, "at": 0, "strata": 1, "levels": 0}
KERNELS = [("_claim_kernel", {}), ("_write_kernel", {}), ("_search_kernel", {})] + [
    ("_recompute_kernel", {"ABOVE_LEAVES": flag}) for flag in (True, False)
]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_kernels_compile_for_a_gpu_that_is_not_there(capability, dtype):
    from graphrl.kernels._gpu import compile_without_gpu
    from graphrl.kernels.sum_tree import triton as module

    types = dict.fromkeys(("leaves", "inner", "priority", "prefix"), f"*{dtype}") | dict.fromkeys(ONE, "i32")
    types |= {"index": "*i64", "owner": "*i32", "fine": "*i32"}
    for name, constants in KERNELS:
        kernel = getattr(module, name)
        constants = {**constants, "FAN": module.FANOUT, "BLOCK": module.BLOCK}
        constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
        resources = compile_without_gpu(kernel, types, constants, capability, **module.OPTIONS)
        print(f"{name} sm_{capability} {dtype}: {resources}")
        assert f".target sm_{capability}" in resources.ptx and ".local" not in resources.ptx  # nothing spilled
        assert "fma" not in resources.ptx  # a fused product would choose another leaf than the CPU does
        assert 0 < resources.registers <= 64 and resources.shared_bytes == 0


@needs_triton
def test_kernels_compile_for_the_smallest_tree():
    """A launch makes constants of integers that are 1."""
    from graphrl.kernels._gpu import compile_without_gpu
    from graphrl.kernels.sum_tree import triton as module

    types = dict.fromkeys(("leaves", "inner", "priority", "prefix"), "*fp64") | dict.fromkeys(ONE, "i32")
    types |= {"index": "*i64", "owner": "*i32", "fine": "*i32"}
    for name, constants in KERNELS:
        kernel = getattr(module, name)
        constants = {**constants, "FAN": 8, "BLOCK": 128} | {k: v for k, v in ONE.items() if v == 1}
        constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
        assert compile_without_gpu(kernel, types, constants, 80, **module.OPTIONS).registers > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 9, 4097, 1_000_000])
def test_gpu_equals_cpu_and_leaves_the_stream_alone(n, dtype):
    tree, other = SumTree(n, dtype=dtype), SumTree(n, dtype=dtype, device="cuda")
    for _ in range(3):
        index = torch.randint(n, (5000,))
        priority, uniform = torch.rand(5000, dtype=dtype), torch.rand(999, dtype=dtype)
        inputs = [x.cuda() for x in (index, priority, uniform)]
        tree.update(index, priority)
        expected = tree.search(uniform * tree.total)
        torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
        try:
            other.update(*inputs[:2])
            found = other.search(inputs[2] * other.total)
            other.sample(100, stratified=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(other.leaves.cpu(), tree.leaves) and torch.equal(other.inner.cpu(), tree.inner)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))


if __name__ == "__main__":
    compare_interpreted()
