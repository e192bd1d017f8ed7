"""Every pass, in the order it runs, with the reason it stands there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from graphrl.compiler.check_program import check_program
from graphrl.compiler.passes.eliminate_dead_code import drop_unread_draws, eliminate_dead_code
from graphrl.compiler.passes.expand_normalizations import expand_normalizations
from graphrl.compiler.passes.fold_constants import fold_constants, freeze_state
from graphrl.compiler.passes.fold_normalizer import fold_normalizer
from graphrl.compiler.passes.fuse_parallel_networks import fuse_parallel_networks
from graphrl.compiler.passes.lower_precision import check_precision, lower_precision
from graphrl.compiler.passes.merge_common_subexpressions import merge_common_subexpressions
from graphrl.compiler.passes.remove_noops import remove_noops
from graphrl.compiler.program import PassRecord, Program

__all__ = ["DEPLOY", "LIVE", "passes", "run_passes"]

Pass = Callable[[Program], Program]

LIVE: tuple[Pass, ...] = (
    remove_noops,  # first: an alias between two equal expressions would hide that they are equal
    merge_common_subexpressions,  # before folding, so that each constant is computed once
    fold_constants,  # literals only: weights must stay live
    eliminate_dead_code,  # it removes what the others made unread
    fuse_parallel_networks,  # last: chains must have their shortest form, and no dead lane, to be equal
)
"""For programs whose weights go on changing."""

DEPLOY: tuple[Pass, ...] = (
    freeze_state,  # a robot's weights are constants: every later pass profits
    expand_normalizations,  # before folding: what comes of fixed statistics is a constant
    *LIVE[:3],
    fold_normalizer,  # after folding: the standard deviation, and W.T, must each be one constant
    merge_common_subexpressions,  # two heads behind one normaliser now read the same source
    eliminate_dead_code,
    drop_unread_draws,  # last: a draw may just have become unread
)
"""For a policy that leaves for a robot: weights become constants."""


def passes(deploy: bool, precision: str | None) -> tuple[Pass, ...]:
    """The passes that :func:`run_passes` runs."""
    return (DEPLOY if deploy else LIVE) + ((lower_precision,) if check_precision(precision) else ())


def run_passes(
    program: Program, *, deploy: bool = False, precision: str | None = None, without: Sequence[Pass] = ()
) -> Program:
    """Run the pipeline; the result's ``history`` holds each pass's name, time and node counts.

    precision: ``"bf16"`` adds :func:`lower_precision`, last: casts would hide patterns from the others.
    without: passes to leave out.

    ``GRAPHRL_PASS_LIMIT=n`` stops after ``n`` passes, to find the one that breaks something (``graphrl bisect`` does).
    ``GRAPHRL_CHECK_PASSES=1`` puts the result of each to :func:`check_program`.
    """
    limit = os.environ.get("GRAPHRL_PASS_LIMIT")
    check = os.environ.get("GRAPHRL_CHECK_PASSES") == "1"
    chosen = [step for step in passes(deploy, precision) if step not in without]
    for step in chosen[: int(limit) if limit else None]:
        before, start = program, time.perf_counter()
        program = check_program(step(program), step.__name__) if check else step(program)
        seconds = time.perf_counter() - start
        record = PassRecord(step.__name__, seconds, before.node_count(), program.node_count(), before)
        program = replace(program, history=(*program.history, record))
    return program
