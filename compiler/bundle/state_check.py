"""The check of a policy's state: what an episode's first step and the steps after it depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphrl.compiler.bundle.contract import FIRST_STEP, RecurrentState
from graphrl.compiler.verify import float64_reference
from graphrl.errors import BundleError, ContractError
from graphrl.keys import encode_key

if TYPE_CHECKING:
    from graphrl.compiler.bundle.checks import Subject

__all__ = ["check_state"]


def check_state(subject: Subject) -> None:
    """A reset starts afresh in every runtime; the state starts where training's does, and matters."""
    rows = [subject.row()] + [list(r) for r in subject.golden.inputs[1:4]]
    for target, player in subject.players.items():
        first, second = (_episode(subject, player, rows) for _ in range(2))
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
            raise BundleError(f"{target}: the same observations after a reset give another action: stale state")
    recurrent = subject.contract.recurrent or ()
    if not recurrent:
        return
    keys, outputs = list(subject.live.in_keys), list(subject.live.out_keys)
    flags = [keys.index(s.key) for s in recurrent if s.reset_rule == FIRST_STEP]
    values = [s for s in recurrent if s.reset_rule != FIRST_STEP]
    quiet = {i: torch.zeros_like(subject.row()[i]) for i in flags}
    fresh = subject.row(quiet)
    if flags:
        _check_first_step(subject, values, fresh)
    after = float64_reference(subject.live, fresh)
    carried = {keys.index(s.key): after[outputs.index(s.next_key)] for s in values}
    later = float64_reference(subject.live, subject.row({**quiet, **carried}))
    pairs = list(zip(later, after, strict=True))  # a choice may well stay the same: the state then moves
    if subject.live.outputs[outputs.index(subject.action)].dtype.is_floating_point:
        pairs = [pairs[outputs.index(subject.action)]]
    if values and all(torch.equal(a, b) for a, b in pairs):
        raise BundleError(f"the second step's action is the same with and without {[s.key for s in values]}: it is "
                          "not fed back, or has no effect")  # fmt: skip


def _check_first_step(subject: Subject, values: Sequence[RecurrentState], fresh: Sequence[Tensor]) -> None:
    """An episode's first step depends on no state left behind, and starts from the contract's initial values."""
    start = subject.row()
    left = {list(subject.live.in_keys).index(s.key): s for s in values}
    other = subject.row({i: start[i] + 0.5 for i in left})
    wanted = subject.command(start)
    if not torch.allclose(subject.command(other), wanted, rtol=1e-6, atol=1e-9):
        raise BundleError(f"an episode's first step depends on what {[s.key for s in values]} held before: the policy "
                          "does not reset it where is_init is set")  # fmt: skip
    if not values or any(s.reset_rule not in (None, "initial value") for s in values):
        return  # the flag itself is all there is, or the first step makes its state of its input
    if not torch.allclose(subject.command(fresh), wanted, rtol=1e-6, atol=1e-9):
        raise ContractError("an episode's first step as the policy itself starts it (is_init) differs from one "
                            "with the contract's initial state: is RecurrentState.initial training's?")  # fmt: skip


def _episode(subject: Subject, player: Any, rows: Sequence[Sequence[Tensor]]) -> list[np.ndarray]:
    player.reset()
    return [np.array(player.step(subject.seen(row))[encode_key(subject.action)]) for row in rows]
