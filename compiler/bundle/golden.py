"""Golden vectors: inputs worth replaying, their outputs in float64, and how far a runtime is from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphrl.compiler.program import Program
from graphrl.compiler.verify import float64_reference
from graphrl.errors import BundleError
from graphrl.keys import encode_key

__all__ = ["Golden", "make_golden", "parity_error"]

RANDOM_ROWS = 16
EXAMPLE_ROWS = 16
EXTREMES = (0.0, 1.0, -1.0, 10.0, -10.0, 1e3, -1e3, 1e-40)
"""A row each, filled with one number; the last is subnormal."""


@dataclass(frozen=True)
class Golden:
    """Rows of inputs, what they are, the float64 outputs of each row, and the usual size of each output."""

    kinds: tuple[str, ...]
    inputs: tuple[tuple[Tensor, ...], ...]
    outputs: tuple[tuple[Tensor, ...], ...]
    scales: tuple[float, ...]

    def arrays(self, program: Program) -> dict[str, np.ndarray]:
        """As named arrays: ``kind``, ``in/KEY`` in the program's dtype, ``out/KEY`` in float64, a row each."""
        made = {"kind": np.array(self.kinds)}
        for side, ports, rows in (("in", program.inputs, self.inputs), ("out", program.outputs, self.outputs)):
            for i, port in enumerate(ports):
                made[f"{side}/{encode_key(port.key)}"] = np.stack([row[i].numpy() for row in rows])
        return made

    def rows(self) -> list[list[np.ndarray]]:
        """Each row as its inputs, then its outputs."""
        return [[t.numpy() for t in (*a, *b)] for a, b in zip(self.inputs, self.outputs, strict=True)]


def make_golden(program: Program, examples: Sequence[Sequence[Tensor]]) -> Golden:
    """Random, example and extreme rows for ``program``. ``examples``: recorded inputs, one sequence a row.

    Random rows have the mean and spread of the examples where there are several, and a spread of 1 and 3 otherwise.
    Inputs that are not floats take the examples' values. No row whose reference is not finite is kept;
    raises :class:`BundleError` when none is left.
    """
    examples = [tuple(row) for row in examples[:EXAMPLE_ROWS]]
    generator = torch.Generator().manual_seed(20240229)
    rows = [("example", row) for row in examples]
    stacked = [torch.stack([row[i] for row in examples]) for i in range(len(program.inputs))]
    for n in range(RANDOM_ROWS):
        spread = 1.0 if n % 2 == 0 else 3.0
        rows.append(("random", tuple(_random(s, examples[n % len(examples)][i], spread, generator)
                                     for i, s in enumerate(stacked))))  # fmt: skip
    for value in EXTREMES:
        rows.append(("extreme", tuple(torch.full_like(t, value) if t.is_floating_point() else t for t in examples[0])))
    kept: list[Any] = []
    for kind, inputs in rows:
        outputs = tuple(t.double() if t.is_floating_point() else t for t in float64_reference(program, list(inputs)))
        if all(torch.isfinite(t).all() and (t.abs() < 1e37).all() for t in outputs):
            kept.append((kind, inputs, outputs))
    if not kept:
        raise BundleError("the policy's output is not finite for any golden input, the example among them")
    usual = [k for k in kept if k[0] != "extreme"] or kept
    scales = []
    for i in range(len(program.outputs)):
        sizes = [float(outputs[i].abs().max()) if outputs[i].numel() else 0.0 for _, _, outputs in usual]
        scales.append(max(float(np.median(sizes)) if sizes else 0.0, 1e-6))
    columns: list[Any] = list(zip(*kept, strict=True))
    return Golden(columns[0], columns[1], columns[2], tuple(scales))


def _random(stacked: Tensor, like: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like
    noise = torch.randn(like.shape, generator=generator, dtype=torch.float32) * spread
    if stacked.shape[0] > 1:
        noise = stacked.mean(0) + noise * stacked.std(0).clamp_min(1e-6)
    return noise.to(like.dtype)


def parity_error(golden: Golden, run: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> float:
    """Largest error of ``run`` over all rows, relative to the larger of the output's usual size and the row's own.

    A discrete output that differs counts as 1. NaN where the reference is finite counts as infinite.
    """
    worst = 0.0
    for inputs, wanted in zip(golden.inputs, golden.outputs, strict=True):
        for got, ref, scale in zip(run(inputs), wanted, golden.scales, strict=True):
            if not ref.numel():
                continue
            if not ref.is_floating_point():
                worst = max(worst, float((got.reshape(ref.shape) != ref).any()))
                continue
            error = (got.double().reshape(ref.shape) - ref).abs().max() / max(scale, float(ref.abs().max()))
            worst = max(worst, float(error)) if torch.isfinite(error) else float("inf")
    return worst
