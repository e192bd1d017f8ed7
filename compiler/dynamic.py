"""One program for any batch size: built with the first dim open, checked against the eager graph at several sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from graphrl.compiler.program import Program, StateSlot
from graphrl.compiler.shapes import batch_limit
from graphrl.compiler.undo import kept_random_state
from graphrl.compiler.verify import relative_error, vary
from graphrl.errors import ParityError

__all__ = ["check_sizes", "largest_batch"]

SIZES = (2, 3, 17, 64, 131)
"""Batch sizes at which a program is compared with eager before its first use: small, prime, a power of two, larger."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Two runs in the same dtype may round differently; a wrong size shows far above this."""

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def largest_batch(*programs: Program) -> int:
    """The largest batch size the programs hold for. Raises :class:`TraceError` where they hold for some sizes only."""
    modes = [program.placeholders()[0].meta["val"].fake_mode for program in programs]
    limits = [limit for mode in modes if (limit := batch_limit(mode)) is not None]
    return min(limits, default=sys.maxsize)


def check_sizes(program: Program, module: nn.Module, example: Sequence[Tensor], compiled: Run, eager: Run) -> float:
    """Run ``compiled`` and the eager ``module`` at several batch sizes; return the largest relative difference.

    Compares outputs, written state and, with gradients enabled, the gradients of inputs and parameters that require
    them. Everything is put back. Raises :class:`ParityError` naming the size.
    """
    worst, limit = 0.0, largest_batch(program)
    written = [slot for slot in program.state if slot.mutated]
    parameters = [p for p in module.parameters() if p.requires_grad]
    for rows in (example[0].shape[0], *(n for n in SIZES if n <= limit)):
        inputs = _resized(example, rows)
        expected = _outcome(eager, inputs, written, parameters)
        found = _outcome(compiled, inputs, written, parameters)
        for what, wanted, results in zip(("an output", "a gradient", "a state"), expected, found, strict=True):
            for own, got in zip(wanted, results, strict=True):
                error = relative_error(got, own)
                worst = max(worst, error)
                if got.dtype != own.dtype or not error <= _TOLERANCE.get(own.dtype, 0.0):
                    raise ParityError(f"{what} at batch size {rows} is off by {error:.1e} from eager")
    return worst


def _resized(example: Sequence[Tensor], rows: int) -> list[Tensor]:
    """``rows`` rows near those of the example."""
    generator, index = torch.Generator().manual_seed(rows), torch.arange(rows) % example[0].shape[0]
    with torch.no_grad():
        fresh = [vary(t[index.to(t.device)], generator) for t in example]
    return [
        t.requires_grad_(old.requires_grad and torch.is_grad_enabled()) for t, old in zip(fresh, example, strict=True)
    ]


def _outcome(
    run: Run, inputs: Sequence[Tensor], written: Sequence[StateSlot], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, gradients and written state of one seeded run; the state is put back."""
    before = [slot.read().detach().clone() for slot in written]
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with kept_random_state():
        torch.manual_seed(0)
        outputs = list(run(leaves))
    gradients: list[Tensor] = []
    carrying = [t for t in outputs if t.requires_grad]
    if carrying:
        wanted = [*(t for t in leaves if t.requires_grad), *parameters]
        cotangents = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in carrying]
        found = torch.autograd.grad(carrying, wanted, cotangents, allow_unused=True)
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    state = [slot.read().detach().clone() for slot in written]
    with torch.no_grad():
        for slot, value in zip(written, before, strict=True):
            slot.read().copy_(value)
    return [t.detach() for t in outputs], gradients, state
