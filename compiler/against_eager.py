"""Compare a compiled program with the eager graph, at its own batch size or at several, before its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from graphrl.compiler.program import Program, StateSlot
from graphrl.compiler.reachable import loose_tensors, modules_of
from graphrl.compiler.shapes import batch_range
from graphrl.compiler.undo import kept_random_state
from graphrl.compiler.verify import ROUNDING, product_rounding, relative_error, vary
from graphrl.errors import ParityError

__all__ = ["check_against_eager", "resized", "served_sizes"]

SIZES = (2, 3, 17, 64, 131)
"""Batch sizes at which a program for many is tried: small, prime, a power of two, larger."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Two runs in one dtype may round differently; a wrong size or a wrong formula shows far above this."""

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def served_sizes(program: Program) -> tuple[int, int]:
    """The smallest and largest batch size a dynamic program holds for. Raises :class:`TraceError` where it has gaps."""
    return batch_range(program.placeholders()[0].meta["val"].fake_mode)


def resized(example: Sequence[Tensor], smallest: int, largest: int) -> list[list[Tensor]]:
    """Batches near the example, of its own size and of others between the bounds."""
    batches = []
    for rows in (example[0].shape[0], *(n for n in SIZES if smallest <= n <= largest)):
        generator, index = torch.Generator().manual_seed(rows), torch.arange(rows) % example[0].shape[0]
        with torch.no_grad():
            fresh = [vary(t[index.to(t.device)], generator) for t in example]
        batches.append([t.requires_grad_(old.requires_grad) for t, old in zip(fresh, example, strict=True)])
    return batches


def check_against_eager(
    program: Program, module: nn.Module, batches: Iterable[Sequence[Tensor]], compiled: Run, eager: Run
) -> None:
    """Run both on each batch under the same seed and put everything back.

    Compares outputs, written state and, with gradients enabled, the gradients of the inputs and parameters that
    require them. Raises :class:`ParityError`.
    """
    rounding = 4 * product_rounding(program)  # the backward half multiplies about twice as often
    written = [slot for slot in program.state if slot.mutated]
    parameters: list[Tensor] = [p for _, root in modules_of(module) for p in root.parameters() if p.requires_grad]
    parameters += [t for _, t in loose_tensors(module)]
    for inputs in batches:
        expected = _outcome(eager, inputs, written, parameters)
        found = _outcome(compiled, inputs, written, parameters)
        for what, wanted, results in zip(("an output", "a gradient", "a state"), expected, found, strict=True):
            scale = max((float(t.abs().max()) for t in wanted if t.is_floating_point() and t.numel()), default=0.0)
            for own, got in zip(wanted, results, strict=True):
                error = relative_error(got, own)
                if error > 0 and torch.allclose(got, own, rtol=0, atol=ROUNDING.get(own.dtype, 0.0) * scale):
                    continue  # a gradient that is zero but for rounding, as a bias before a normalisation has
                if got.dtype != own.dtype or not error <= _TOLERANCE.get(own.dtype, 0.0) + rounding:
                    size = list(inputs[0].shape[:1])
                    raise ParityError(
                        f"{what} of {program.name}, {own.dtype} {list(own.shape)}, is off by {error:.1e} from eager at "
                        f"batch size {size}. Use backend='eager' and dynamic=False, and report this graph"
                    )


def _outcome(
    run: Run, inputs: Sequence[Tensor], written: Sequence[StateSlot], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, gradients and written state of one seeded run; the state is put back."""
    before = [slot.read().detach().clone() for slot in written]
    try:
        return _results(run, inputs, written, parameters)
    finally:
        with torch.no_grad():
            for slot, value in zip(written, before, strict=True):
                slot.read().copy_(value)


def _results(
    run: Run, inputs: Sequence[Tensor], written: Sequence[StateSlot], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    leaves = [t.detach().clone().requires_grad_(t.requires_grad and torch.is_grad_enabled()) for t in inputs]
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
    # copies: an output may be the state itself, which is put back next
    return [t.detach().clone() for t in outputs], gradients, [slot.read().detach().clone() for slot in written]
