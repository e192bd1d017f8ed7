"""The Triton versions: interpreted on the CPU, compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import importlib

import pytest
import torch
from families import FAMILIES, as_tuple
from interpreted import needs_triton, run_interpreted
from trajectories import random_trajectory

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

CASES = [  # shape, time_dim, dtype, coefficients per step, flags
    ((3, 7, 1), -2, torch.float32, False, True),
    ((2, 150, 1), -2, torch.float32, True, True),
    ((2, 9, 5, 1), -3, torch.float64, True, False),
    ((70, 4), 0, torch.bfloat16, False, True),
    ((3, 20, 1), -2, torch.float16, False, False),
    ((0, 4, 1), -2, torch.float32, False, True),
]


def operator_arguments(family, shape, dtype, per_step, flags):
    """As the operator takes them: NaN behind each terminal step, gamma per step or not, lmbda a 0-d tensor."""
    drawn = family.draw(shape, dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    drawn["gamma"] = torch.rand(shape, dtype=exact) if per_step else torch.tensor(0.99, dtype=exact)
    if "lmbda" in drawn:
        drawn["lmbda"] = torch.tensor(0.95, dtype=exact)
    if not flags and family.recurrence.optional_flags:
        drawn |= dict.fromkeys(family.recurrence.flags)
    elif "next_value" in drawn:
        drawn["next_value"][drawn["terminated"]] = float("nan")
    return drawn


def compare_interpreted(name: str) -> None:
    """Runs in the interpreter."""
    from graphrl.kernels import _triton_scan

    _triton_scan.BLOCK = 64  # the interpreter is slow, and small blocks have more carries
    family, ops = FAMILIES[name], torch.ops.graphrl
    recurrence = family.recurrence
    for shape, time_dim, dtype, per_step, flags in CASES:
        drawn = operator_arguments(family, shape, dtype, per_step, flags)
        options = [1.0] * len(recurrence.options)
        args = (*drawn.values(), time_dim, *options)
        expected = as_tuple(getattr(ops, name)(*args))
        found = as_tuple(recurrence.forward_triton(*args))
        random = random_trajectory(shape, dtype, seed=1)[: len(recurrence.outputs)]
        read = [drawn[x] for x in recurrence.read] + [expected[0]]
        tail = [drawn[x] for x in (*recurrence.constants, *recurrence.flags, *recurrence.coefficients)]
        for wants in (True, False) if flags and per_step else (True,):
            call = (*random, *read, *tail, time_dim, *options, wants)
            expected += as_tuple(getattr(ops, f"{name}_backward")(*call))
            found += as_tuple(recurrence.backward_triton(*call))
        for x, y in zip(found, expected, strict=True):
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, msg=lambda m: f"{name} {shape} {dtype}: {m}")  # noqa: B023


@needs_triton
def test_interpreted_kernels_equal_the_cpu_version():
    run_interpreted(__file__)


def compile_kernel(family, kernel, blocks, sizes, capability, dtype, **constants):
    import triton.language as tl

    from graphrl.kernels import _triton_scan
    from graphrl.kernels._gpu import compile_without_gpu

    exact = "fp64" if dtype == "fp64" else "fp32"
    constants |= {"ROWS": blocks["ROWS"], "TIME": blocks["TIME"], "ACC": getattr(tl, f"float{exact[2:]}")}
    constants |= {x.upper(): False for x in family.coefficients}
    names = ("rows", "steps", "row_stride", "time_stride", "outer_stride")
    constants |= {n: 1 for n, size in zip(names, sizes, strict=True) if size == 1}  # as a launch specialises it
    types = {n: f"*{exact if 'gamma' in n or 'lmbda' in n else dtype}" for n in kernel.arg_names}
    types |= dict.fromkeys(("done", "terminated"), "*u8") | dict.fromkeys(names, "i32")
    types |= dict.fromkeys(family.recurrence.options, "fp64")  # as annotated in the kernels
    return compile_without_gpu(
        kernel, types, constants, capability, num_warps=blocks["num_warps"], **_triton_scan.OPTIONS
    )


def assert_fits(resources, capability):
    assert f".target sm_{capability}" in resources.ptx and ".local" not in resources.ptx  # nothing spilled
    # Eight warps of a multiprocessor find room at least: 65,536 registers, 48 KiB of shared memory without opting in.
    programs = 65_536 // (resources.registers * resources.warps * 32)
    assert resources.registers and programs * resources.warps >= 8
    assert resources.shared_bytes <= 24 * 1024


@needs_triton
@every_family
@pytest.mark.parametrize(
    ("capability", "dtype", "shape"),
    [(80, "fp32", (1000, 1000, 1)), (90, "bf16", (64, 128, 16))],
    ids=str,
)
def test_kernels_compile_for_a_gpu_that_is_not_there(family, capability, dtype, shape):
    from graphrl.kernels._triton_scan import block_table, layout

    module = importlib.import_module(f"graphrl.kernels.{family.name}.triton")
    sizes = layout(torch.Size(shape), 1)[1]
    blocks = block_table(sizes[0], sizes[1], sizes[3])[0]
    for name in ("forward_kernel", "backward_kernel"):
        resources = compile_kernel(family, getattr(module, name), blocks, sizes, capability, dtype)
        print(f"{family.name} {name} sm_{capability} {dtype} {blocks}: {resources}")
        assert_fits(resources, capability)


@needs_triton
@pytest.mark.parametrize("shape", [(1000, 1000, 1), (64, 128, 300)], ids=str)
def test_every_block_size_of_the_table_compiles(shape):
    from graphrl.kernels._triton_scan import block_table, layout
    from graphrl.kernels.td_lambda.triton import backward_kernel

    sizes = layout(torch.Size(shape), 1)[1]
    table = block_table(sizes[0], sizes[1], sizes[3])
    assert len(table) == 5
    for blocks in table[1:]:
        assert_fits(compile_kernel(FAMILIES["td_lambda"], backward_kernel, blocks, sizes, 90, "fp32"), 90)


@needs_triton
def test_block_table_fits_its_shape():
    from graphrl.kernels._triton_scan import block_table

    for rows, steps, stride in ((1, 1, 1), (3, 7, 1), (5, 10**6, 1), (4096, 24, 1), (2, 300, 2), (10**6, 5, 10**6)):
        table = block_table(rows, steps, stride)
        assert 1 <= len(table) <= 5
        for blocks in table:
            assert blocks["ROWS"] * blocks["TIME"] <= 1024
            assert blocks["ROWS"] < 2 * rows and blocks["TIME"] < 2 * steps


@needs_triton
def test_block_sizes_are_timed_once_per_power_of_two(monkeypatch):
    from graphrl.kernels import _triton_scan
    from graphrl.kernels.gae.triton import forward_kernel

    timed = []
    monkeypatch.setattr(_triton_scan, "_chosen", {})
    monkeypatch.setattr(_triton_scan, "_time", lambda run, blocks: timed.append(blocks) or -len(timed))

    def choose(rows, steps, dtype=torch.float32, kernel=forward_kernel):
        sizes = (rows, steps, steps, 1, 0)
        key = _triton_scan._key(kernel, [torch.empty(0, dtype=dtype), None], {"GAMMA": False}, sizes)
        return _triton_scan._fastest(None, _triton_scan.block_table(rows, steps, 1), key)

    first = choose(1000, 1000)
    assert first == timed[-1] and len(timed) == 5
    assert choose(520, 1024) == first and len(timed) == 5
    for other in ((2000, 1000), (1000, 1025), (1000, 1000, torch.float64), (1000, 1000, torch.float32, None)):
        before = len(timed)
        choose(*other)
        assert len(timed) == before + 5


@needs_triton
def test_the_rule_decides_where_a_measurement_may_not(monkeypatch):
    from graphrl.kernels._triton_scan import _fixed
    from graphrl.kernels.gae.triton import forward_kernel

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not _fixed(forward_kernel) and _fixed(lambda: None)  # interpreted kernels are of another class
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert _fixed(forward_kernel)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert _fixed(forward_kernel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "time_dim"), [((1000, 1000, 1), -2), ((64, 300, 5, 1), -3), ((128, 4096), 0)])
def test_gpu_equals_cpu_and_leaves_the_stream_alone(family, shape, time_dim, dtype):
    def run(device):
        drawn = family.draw(shape, dtype, end=0.01)
        arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in drawn.items()}
        leaves = [x.to(device).detach().requires_grad_() for x in family.leaves(arguments)]
        arguments |= dict(zip((*family.differentiable, *family.coefficients), leaves, strict=True))

        def step():
            out = family(arguments, time_dim)
            return [*out, *torch.autograd.grad(sum(x.square().sum() for x in out), leaves)]

        step()  # block sizes are chosen
        torch.cuda.set_sync_debug_mode("error")  # any wait of the host raises
        try:
            results = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [x.cpu() for x in results[: len(out_and_data(family))]]

    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(run("cuda"), run("cpu"), rtol=tolerance, atol=tolerance)


def out_and_data(family):
    return (*family.recurrence.outputs, *family.recurrence.data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_family
def test_a_first_call_inside_graph_capture_takes_the_rule(family):
    from graphrl.kernels import _triton_scan

    arguments = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in family.draw((37, 211, 1)).items()}
    family({k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})  # loads the module
    chosen, graph = dict(_triton_scan._chosen), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = family(arguments)
    graph.replay()
    assert _triton_scan._chosen == chosen
    for found, expected in zip(out, family.judge({**family.draw((37, 211, 1))}), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


if __name__ == "__main__":
    for name in FAMILIES:
        compare_interpreted(name)
