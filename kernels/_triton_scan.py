"""What the Triton versions of the linear recurrences share: tiles, the scan within one, and the sizes of blocks.

A program owns a few rows and walks them in blocks of time. Inside a block the recurrence is an associative scan over
pairs (c, d), x -> c x + d; the last element of one block is carried into the next. Nothing is read back by the host.

Block sizes come from a small table, timed once per kernel, dtypes and power of two of rows and steps. That first call
waits for the GPU and the choice may differ between processes, in the last bits of the result too; so a fixed rule
decides where waiting is illegal (CUDA graph capture) or pointless (the interpreter), and under
``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["block_table", "coefficient", "flag", "launch", "layout", "offsets", "scan"]

BLOCK = 1024  # elements of one program's block under the rule: four warps, eight elements a thread
MAX_ROWS = 64
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns unless fusion is chosen

_chosen: dict[Any, dict[str, int]] = {}


@triton.jit
def _compose(c_first, d_first, c_then, d_then):
    """``x -> c_then (c_first x + d_first) + d_then``. A zero coefficient lets nothing through, not even NaN."""
    return c_then * c_first, d_then + tl.where(c_then == 0, 0.0, c_then * d_first)


@triton.jit
def scan(c, d, carry, lane, REVERSE: tl.constexpr):
    """``x = d + c * x_neighbour`` along a block that ``carry`` enters, and the carry that leaves it."""
    c, d = tl.associative_scan((c, d), 1, _compose, reverse=REVERSE)
    x = d + tl.where(c == 0, 0.0, c * carry)
    last = 0 if REVERSE else x.shape[1] - 1
    return x, tl.sum(tl.where(lane == last, x, 0.0), 1, keep_dims=True)


@triton.jit
def offsets(row_stride, outer_stride, rows, ROWS: tl.constexpr):
    """Offsets of this program's rows, and which of them exist. int64: a rollout may hold over 2^31 elements."""
    blocks = tl.cdiv(rows, ROWS)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (outer * outer_stride + row * row_stride)[:, None], (row < rows)[:, None]


@triton.jit
def coefficient(pointer, at, live, PER_STEP: tl.constexpr):
    """gamma or lmbda: a tile of them, or the one number all steps share."""
    if PER_STEP:
        return tl.load(pointer + at, mask=live, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def flag(pointer, at, live):
    """Where a flag is set, or there is no step; a pointer of None sets none."""
    if pointer is None:
        return live == 0
    else:
        return tl.load(pointer + at, mask=live, other=1) != 0


def layout(shape: torch.Size, time_dim: int) -> tuple[int, tuple[int, int, int, int, int]]:
    """outer; rows, steps and the strides of a row, a step and an outer block, for contiguous tensors of ``shape``."""
    time_dim %= len(shape)
    outer, steps, inner = prod(shape[:time_dim]), shape[time_dim], prod(shape[time_dim + 1 :])
    if inner == 1:  # time is fastest
        return 1, (outer, steps, steps, 1, 0)
    return outer, (inner, steps, 1, inner, steps * inner)  # rows lie side by side in memory


def _blocks(rows: int, steps: int, block: int, most_rows: int, most_time: int, warps: int) -> dict[str, int]:
    time = min(triton.next_power_of_2(steps), most_time)
    block_rows = min(triton.next_power_of_2(rows), most_rows, max(1, block // time))
    return {"ROWS": block_rows, "TIME": time, "num_warps": warps}


def block_table(rows: int, steps: int, time_stride: int) -> list[dict[str, int]]:
    """Block sizes worth trying, that of the fixed rule first."""
    if time_stride == 1:  # long blocks of time
        tries = [(BLOCK, 64, 1024, 4), (512, 64, 128, 4), (BLOCK, 64, 256, 4), (512, 64, 512, 2), (2048, 64, 2048, 8)]
    else:  # wide blocks of rows
        tries = [(BLOCK, 16, 64, 4), (512, 32, 16, 4), (BLOCK, 64, 16, 4), (2048, 32, 64, 8), (256, 16, 16, 2)]
    if time_stride != 1 and rows < 16:  # few rows leave room for more time
        tries[0] = (BLOCK, 16, BLOCK // triton.next_power_of_2(rows), 4)
    table = [_blocks(rows, steps, *sizes) for sizes in tries]
    return [x for i, x in enumerate(table) if x not in table[:i]]


def launch(
    kernel: Any,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[float],
    time_dim: int,
    accumulate: torch.dtype,
    **per_step: bool,
) -> None:
    """Run ``kernel(*tensors, *numbers, rows, steps, row_stride, time_stride, outer_stride, constants)``.

    The constants are one flag per coefficient (``GAMMA``: is it per element?), ACC, ROWS and TIME. All tensors are
    contiguous and of the first one's shape, or 0-d coefficients, or None; the kernel writes no tensor that it reads.
    """
    constants = {**per_step, "ACC": tl.float64 if accumulate == torch.float64 else tl.float32}
    first = tensors[0]
    assert first is not None
    outer, sizes = layout(first.shape, time_dim)

    def run(blocks: dict[str, int]) -> None:
        grid = (triton.cdiv(sizes[0], blocks["ROWS"]) * outer,)
        kernel[grid](*tensors, *numbers, *sizes, **constants, **blocks, **OPTIONS)

    table = block_table(sizes[0], sizes[1], sizes[3])
    run(table[0] if _fixed(kernel) else _fastest(run, table, _key(kernel, tensors, constants, sizes)))


def _fixed(kernel: Any) -> bool:
    """True where the rule decides, not a measurement."""
    return (
        not isinstance(kernel, triton.JITFunction)  # interpreted
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.is_current_stream_capturing()
    )


def _key(kernel: Any, tensors: Sequence[Tensor | None], constants: dict[str, Any], sizes: tuple[int, ...]) -> Any:
    kinds = tuple(x if x is None else x.dtype for x in tensors)
    device = next(x.device for x in tensors if x is not None)
    buckets = (sizes[0] - 1).bit_length(), (sizes[1] - 1).bit_length(), sizes[3] == 1
    return id(kernel), device, kinds, tuple(constants.items()), buckets


def _fastest(run: Callable[[dict[str, int]], None], table: list[dict[str, int]], key: Any) -> dict[str, int]:
    """The entry of ``table`` that took least time for the first call with this ``key``."""
    if key not in _chosen:
        _chosen[key] = min(table, key=lambda blocks: _time(run, blocks)) if len(table) > 1 else table[0]
    return _chosen[key]


def _time(run: Callable[[dict[str, int]], None], blocks: dict[str, int], repeats: int = 5) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(blocks)  # compiles
    start.record()
    for _ in range(repeats):
        run(blocks)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
