"""Golden vectors: inputs worth replaying, and their outputs in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphrl.compiler.bundle.contract import FIRST_STEP, RecurrentState
from graphrl.compiler.bundle.recorded import Recording
from graphrl.compiler.bundle.state import start_like
from graphrl.compiler.program import Program
from graphrl.compiler.verify import float64_reference
from graphrl.errors import BundleError
from graphrl.keys import Key, encode_key

__all__ = ["Golden", "Rollout", "make_golden"]

RANDOM_ROWS = 16
EXAMPLE_ROWS = 16
RECORDED_ROWS = 16
EXTREMES = (0.0, 1.0, -1.0, 10.0, -10.0, 1e3, -1e3, 1e-40)
"""A row each, filled with one number; the last is subnormal."""

LOST = 2e-6
"""Relative error of float32 from which an extreme row says nothing of a runtime: sums of large numbers that cancel."""

EPISODES, STEPS = 2, 10


@dataclass(frozen=True)
class Rollout:
    """Steps of a recurrent policy, several episodes on end: the state starts anew where ``resets`` says so.

    inputs and outputs: by key, a step each, recurrent values left out. The reference carries its state in float64.
    """

    resets: tuple[bool, ...]
    inputs: tuple[dict[Key, Tensor], ...]
    outputs: tuple[dict[Key, Tensor], ...]


@dataclass(frozen=True)
class Golden:
    """Rows of inputs, what they are, the float64 outputs of each row, the usual size of each output; and a sequence."""

    kinds: tuple[str, ...]
    inputs: tuple[tuple[Tensor, ...], ...]
    outputs: tuple[tuple[Tensor, ...], ...]
    scales: tuple[float, ...]
    sequence: Rollout | None = None

    def arrays(self, program: Program) -> dict[str, np.ndarray]:
        """As named arrays: ``kind``, ``in/KEY`` in the program's dtype, ``out/KEY`` in float64, a row each.

        ``scale/KEY``: an output's usual size. ``sequence/reset``, ``sequence/in/KEY`` and ``sequence/out/KEY``: a step
        each.
        """
        made = {"kind": np.array(self.kinds)}
        for side, ports, rows in (("in", program.inputs, self.inputs), ("out", program.outputs, self.outputs)):
            for i, port in enumerate(ports):
                made[f"{side}/{encode_key(port.key)}"] = np.stack([row[i].numpy() for row in rows])
        made.update(
            {f"scale/{encode_key(p.key)}": np.array(s) for p, s in zip(program.outputs, self.scales, strict=True)}
        )
        if self.sequence is not None:
            made["sequence/reset"] = np.array(self.sequence.resets)
            for side, steps in (("in", self.sequence.inputs), ("out", self.sequence.outputs)):
                for key in steps[0]:
                    made[f"sequence/{side}/{encode_key(key)}"] = np.stack([step[key].numpy() for step in steps])
        return made

    def rows(self) -> list[list[np.ndarray]]:
        """Each row as its inputs, then its outputs."""
        return [[t.numpy() for t in (*a, *b)] for a, b in zip(self.inputs, self.outputs, strict=True)]


def make_golden(
    program: Program,
    examples: Sequence[Sequence[Tensor]],
    recurrent: Sequence[RecurrentState] = (),
    recorded: Recording | None = None,
) -> Golden:
    """Random, example, recorded and extreme rows for ``program``. ``examples``: inputs, one sequence a row.

    With ``recurrent`` values, also two episodes on end over those rows, and two as they were recorded. Random rows have
    the mean and spread of the recording, else of the examples where there are several, else a spread of 1 and 3; a
    recurrent value is the policy's own work, and stays within -1 and 1 in both random and extreme rows. Inputs that are
    not floats take the examples' values; the flag of an episode's first step is true in some random rows. No row whose
    reference is not finite is kept, and no extreme row on which float32 itself has lost the answer; raises
    :class:`BundleError` when none is left.
    """
    examples = [tuple(row) for row in examples[:EXAMPLE_ROWS]]
    generator = torch.Generator().manual_seed(20240229)
    rows = [("example", row) for row in examples]
    if recorded is not None:
        places = sorted({int(t) for t in np.linspace(0, len(recorded.resets) - 1, RECORDED_ROWS)})
        rows += [("recorded", recorded.row(t, program.in_keys, examples[0])) for t in places]
    carried = [port.key in {s.key for s in recurrent} for port in program.inputs]
    flags = {s.key for s in recurrent if s.reset_rule == FIRST_STEP}
    usual_rows = [row for kind, row in rows if kind == "recorded"] or examples
    stacked = [torch.stack([row[i] for row in usual_rows]) for i in range(len(program.inputs))]
    for n in range(RANDOM_ROWS):
        spread = 1.0 if n % 2 == 0 else 3.0
        like = examples[n % len(examples)]
        made = [_random(s, like[i], spread, generator, carried[i]) for i, s in enumerate(stacked)]
        made = [torch.full_like(t, n % 4 == 0) if p.key in flags else t
                for t, p in zip(made, program.inputs, strict=True)]  # fmt: skip
        rows.append(("random", tuple(made)))
    for value in EXTREMES:
        limits = [1.0 if c else float("inf") for c in carried]
        filled = [torch.full_like(t, max(-most, min(value, most))) if t.is_floating_point() else t
                  for t, most in zip(examples[0], limits, strict=True)]  # fmt: skip
        rows.append(("extreme", tuple(filled)))
    kept: list[Any] = []
    for kind, inputs in rows:
        outputs = _wanted(program, inputs)
        if outputs and all(torch.isfinite(t).all() and (t.double().abs() < 1e37).all() for t in outputs):
            kept.append((kind, inputs, outputs))
    if not any(kind == "example" for kind, _, _ in kept):
        raise BundleError("the policy's output is not finite for any golden input that is a row of the example")
    usual = [k for k in kept if k[0] != "extreme"] or kept
    scales = []
    for i in range(len(program.outputs)):
        sizes = [float(outputs[i].double().abs().max()) if outputs[i].numel() else 0.0 for _, _, outputs in usual]
        scales.append(max(float(np.median(sizes)) if sizes else 0.0, 1e-6))
    kept = [k for k in kept if k[0] != "extreme" or _float32_holds(program, k[1], k[2], scales)]
    columns: list[Any] = list(zip(*kept, strict=True))
    steps = [(t % STEPS == 0, usual[t % len(usual)][1]) for t in range(EPISODES * STEPS)]
    if recorded is not None:
        steps += [
            (start, recorded.row(t, program.in_keys, examples[0])) for start, t in recorded.starts(EPISODES, STEPS)
        ]
    sequence = _rollout(program, steps, recurrent) if recurrent else None
    return Golden(columns[0], columns[1], columns[2], tuple(scales), sequence)


def _wanted(program: Program, row: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The reference of a row; nothing where it has none: a random row may be a matrix without an inverse."""
    try:
        found = float64_reference(program, list(row))
    except torch.linalg.LinAlgError:
        return ()
    return tuple(t.double() if t.is_floating_point() else t for t in found)


def _float32_holds(program: Program, row: Sequence[Tensor], wanted: Sequence[Tensor], scales: Sequence[float]) -> bool:
    """Whether the interpreter in the program's own dtypes is near float64 on a row."""
    return all(
        bool((found.double() - ref).abs().max() <= LOST * max(scale, float(ref.abs().max())))
        for found, ref, scale in zip(program.run(*row), wanted, scales, strict=True)
        if ref.is_floating_point() and ref.numel()
    )


def _rollout(
    program: Program, steps: Sequence[tuple[bool, tuple[Tensor, ...]]], recurrent: Sequence[RecurrentState]
) -> Rollout:
    carried, written = {s.key: s for s in recurrent}, {s.next_key for s in recurrent}
    state: dict[Key, Tensor] = {}
    resets, inputs, outputs = [], [], []
    for start, row in steps:
        given = dict(zip(program.in_keys, row, strict=True))
        resets.append(start)
        if start:
            state = {key: start_like(given[key], s.initial) for key, s in carried.items()}
        found = float64_reference(program, [state.get(key, value) for key, value in given.items()])
        named = dict(zip(program.out_keys, found, strict=True))
        state = {key: named[s.next_key] for key, s in carried.items()}
        inputs.append({key: value for key, value in given.items() if key not in carried})
        outputs.append({key: value for key, value in named.items() if key not in written})
    return Rollout(tuple(resets), tuple(inputs), tuple(outputs))


def _random(stacked: Tensor, like: Tensor, spread: float, generator: torch.Generator, carried: bool) -> Tensor:
    if not like.is_floating_point() or not like.numel():
        return like
    noise = torch.randn(like.shape, generator=generator, dtype=torch.float32) * spread
    if carried:  # the examples' own are the initial state, most often
        noise = noise.clamp(-1, 1)
    elif stacked.shape[0] > 1:
        noise = stacked.mean(0) + noise * stacked.std(0).clamp_min(1e-6)
    return noise.to(like.dtype)
