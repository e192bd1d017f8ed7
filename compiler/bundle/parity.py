"""How far a runtime is from float64 on the golden vectors: rows one by one, and a sequence. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from graphrl.compiler.bundle.runtime import start_of

__all__ = ["Carried", "Parity", "Player", "Row", "Run", "measure"]

Row = list[np.ndarray]
"""One value for each of a program's inputs, or outputs, in its order."""
Run = Callable[[Sequence[np.ndarray]], Sequence[Any]]
"""A program as a function of one row."""


class Player(Protocol):
    """A runtime that keeps its own recurrent state."""

    def reset(self) -> None:
        """Start an episode."""

    def step(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Outputs by key, recurrent values left out."""


@dataclass(frozen=True)
class Parity:
    """Largest errors of one runtime.

    relative: on single rows, a part of the output's usual size (or the row's own, where larger); absolute: the same,
    in the output's unit. sequence: relative, along the golden sequence with the runtime's own state; ``None`` where
    there is none. where: the row or step of the largest relative error, and the output.
    """

    relative: float = 0.0
    absolute: float = 0.0
    sequence: float | None = None
    where: str = "no row"

    @property
    def worst(self) -> float:
        """The larger of the relative errors."""
        return max(self.relative, self.sequence or 0.0)


class Carried:
    """A :class:`Player` around a runtime that takes recurrent values in and gives them out."""

    def __init__(self, manifest: Mapping[str, Any], run: Run) -> None:
        self.inputs, self.outputs, self._run = manifest["inputs"], manifest["outputs"], run
        self.recurrent = manifest["contract"]["recurrent"] or ()
        self.reset()

    def reset(self) -> None:
        """Recurrent values as the contract puts them."""
        ports = {p["key"]: p for p in self.inputs}
        self._state = {s["key"]: start_of(s["initial"], ports[s["key"]]) for s in self.recurrent}

    def step(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """All outputs by key."""
        given = {**observation, **self._state}
        found = self._run([given[p["key"]] for p in self.inputs])
        named = {p["key"]: np.asarray(value) for p, value in zip(self.outputs, found, strict=True)}
        self._state = {s["key"]: named[s["next_key"]].reshape(self._state[s["key"]].shape) for s in self.recurrent}
        return named


def measure(
    golden: Mapping[str, np.ndarray], manifest: Mapping[str, Any], run: Run, player: Player | None = None
) -> Parity:
    """Replay the golden vectors. NaN where the reference is finite counts as infinite.

    run: the program's inputs in order to its outputs in order. player: for the sequence; default: ``run``, carried.
    """
    inputs, outputs = ([p["key"] for p in manifest[side]] for side in ("inputs", "outputs"))
    worst = absolute = 0.0
    where = "no row"
    for i in range(len(golden["kind"])):
        found = run([golden[f"in/{key}"][i] for key in inputs])
        for key, value in zip(outputs, found, strict=True):
            wanted = golden[f"out/{key}"][i]
            relative, by = _errors(value, wanted, float(golden[f"scale/{key}"]))
            absolute = max(absolute, by)
            if relative > worst:
                worst, where = relative, f"row {i}, {key!r}"
    if "sequence/reset" not in golden:
        return Parity(worst, absolute, None, where)
    sequence, player = 0.0, player or Carried(manifest, run)
    for t, start in enumerate(golden["sequence/reset"]):
        if start:
            player.reset()
        result = player.step({k: golden[f"sequence/in/{k}"][t] for k in inputs if f"sequence/in/{k}" in golden})
        for key in (k for k in outputs if f"sequence/out/{k}" in golden):
            relative, by = _errors(result[key], golden[f"sequence/out/{key}"][t], float(golden[f"scale/{key}"]))
            absolute, sequence = max(absolute, by), max(sequence, relative)
            if relative > worst and relative == sequence:
                where = f"step {t} of the sequence, {key!r}"
    return Parity(worst, absolute, sequence, where)


def _errors(found: Any, wanted: np.ndarray, scale: float) -> tuple[float, float]:
    """Relative and absolute; a discrete output that differs counts as 1."""
    if not wanted.size:
        return 0.0, 0.0
    if wanted.dtype.kind != "f":
        return (float((np.asarray(found).reshape(wanted.shape) != wanted).any()),) * 2
    by = float(np.abs(np.asarray(found).reshape(wanted.shape).astype(np.float64) - wanted).max())
    by = by if np.isfinite(by) else float("inf")
    return by / max(scale, float(np.abs(wanted).max())), by
