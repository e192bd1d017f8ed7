"""Is a compiled update the eager step? Both run on the same batch, from the same weights and the same draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import torch
from tensordict import TensorDictBase
from torch import Tensor

from graphrl.compiler.backends import Lowered
from graphrl.compiler.program import Program
from graphrl.compiler.undo import kept_random_state
from graphrl.compiler.verify import product_rounding
from graphrl.errors import ParityError
from graphrl.keys import Key

__all__ = ["verify_update"]


def verify_update(
    program: Program,
    lowered: Lowered,
    backend: str,
    inputs: Sequence[Tensor],
    keys: Sequence[Key],
    eager: Callable[[TensorDictBase], list[Tensor]],
    batch: TensorDictBase,
) -> None:
    """Compare ``lowered`` with the step it was traced from. No tensor of the caller's changes.

    ``eager(batch)``: metrics (called ``keys``) and written state after one eager step, which it undoes, random draws
    included. Where both
    differ by more than rounding allows, the step itself is run again, and on a batch moved by rounding: a step that
    differs from itself depends on more than its batch. Of a program with bfloat16 products the metrics and the
    optimiser's moments are compared, not the parameters: Adam's first step is the sign of a gradient, and rounding
    turns some signs. Raises :class:`ParityError`.
    """
    with kept_random_state():
        clones = [t.detach().clone() for t in program.arguments(inputs)]
    found = list(lowered(list(clones)))[: len(keys)]
    rounding = product_rounding(program)
    mutated = [i for i, slot in enumerate(program.state) if slot.mutated]
    names = [repr(key) for key in keys] + [program.state[i].name for i in mutated]
    found += [clones[len(inputs) + i] for i in mutated]
    compared = [True] * len(keys) + [not rounding or program.state[i].kind != "parameter" for i in mutated]
    names, found = list(compress(names, compared)), list(compress(found, compared))

    def step(on: TensorDictBase) -> list[Tensor]:
        return list(compress(eager(on), compared))

    expected = step(batch)
    distance = partial(_distance, rounding=rounding)
    wrong = [n for n, a, b in zip(names, found, expected, strict=True) if not distance(a, b) <= 1]
    if wrong:
        again, shaken = step(batch), step(_shaken(batch, rounding))
        runs = zip(names, found, expected, again, shaken, strict=True)
        wrong = [
            name
            for name, got, want, same, moved in runs
            if not distance(same, want) <= 1 or not distance(got, want) <= max(1.0, 10 * distance(moved, want))
        ]
    if wrong:
        raise ParityError(
            f"the compiled update ({backend}) and the eager step disagree on {', '.join(wrong[:3])}. Does the step "
            "depend on Python state that changes from call to call, or on gradients left by the call before (is "
            "zero_grad missing)?"
        )


def _shaken(batch: TensorDictBase, rounding: float) -> TensorDictBase:
    """The batch with its floating-point entries moved by a rounding error, or by ``rounding`` if that is larger."""
    generator = torch.Generator().manual_seed(0)

    def shake(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        return tensor * (1 + max(torch.finfo(tensor.dtype).eps, rounding) * noise)

    return batch.apply(shake)


def _distance(found: Tensor, expected: Tensor, rounding: float) -> float:
    """Distance in the Euclidean norm, as a multiple of what rounding allows; ``rounding``: of the products alone.

    A first optimiser step amplifies rounding in single entries, and a KL of 1e-9 is all rounding: hence a norm over the
    whole tensor, and an absolute floor.
    """
    if not found.numel():
        return 0.0
    a, b = found.double(), expected.double()
    relative, absolute = (1e-6, 1e-12) if expected.dtype == torch.float64 else (2e-2, 1e-5)
    relative += rounding
    return float((a - b).norm() / (relative * b.norm() + absolute * a.numel() ** 0.5))
