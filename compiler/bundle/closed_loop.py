"""The bundle in its environment: returns beside the policy's own, and its actions on what it saw judged in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphrl.compiler.bundle.checks import Subject
from graphrl.compiler.bundle.parity import Player, _errors
from graphrl.compiler.bundle.runtime import start_of
from graphrl.compiler.verify import float64_reference
from graphrl.errors import BundleError
from graphrl.keys import Key, decode_key, encode_key

__all__ = ["Drive", "Seat", "closed_loop", "play"]

Drive = Callable[[Player], Sequence[float]]
"""Runs episodes of an environment with a player, always the same ones, and gives their returns."""
JUDGED = 1000
"""Steps whose actions are judged in float64: spread over all episodes, or the first where there is a state."""


@dataclass
class Seat:
    """A player for an environment: takes what the policy reads from all that is observed, and keeps a record of it."""

    player: Player
    ports: Sequence[Mapping[str, Any]]
    typed: bool = True  # the player converts numbers itself
    resets: list[bool] = field(default_factory=list)
    seen: list[dict[str, np.ndarray]] = field(default_factory=list)
    done: list[dict[str, np.ndarray]] = field(default_factory=list)
    _fresh: bool = True

    def reset(self) -> None:
        """Start an episode."""
        self._fresh = True
        self.player.reset()

    def step(self, observation: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """The action for an observation as the environment gives it."""
        lacking = [p["key"] for p in self.ports if p["key"] not in observation]
        if lacking:
            raise BundleError(f"the policy reads {lacking}, which the environment does not give: {list(observation)}")
        numbers = {p["key"]: np.asarray(observation[p["key"]], p["dtype"]).reshape(p["shape"]) for p in self.ports}
        raw = {p["key"]: observation[p["key"]] for p in self.ports}
        result = self.player.step(raw if self.typed else numbers)
        self.resets.append(self._fresh)
        self.seen.append(numbers)
        self.done.append({key: np.array(value) for key, value in result.items()})
        self._fresh = False
        return result

    def recording(self) -> dict[Key, Any]:
        """What was seen, as recorded data: [T, ...] by key, and where episodes start."""
        if not self.seen:
            raise BundleError("closed_loop ran no step: expected at least one episode")
        rows = {decode_key(key): np.stack([step[key] for step in self.seen]) for key in self.seen[0]}
        return {**rows, "reset": np.array(self.resets)}


def play(drive: Drive, player: Player, ports: Sequence[Mapping[str, Any]], typed: bool) -> tuple[Seat, list[float]]:
    """The record of a player's episodes, and their returns."""
    seat = Seat(player, ports, typed)
    return seat, [float(total) for total in drive(seat)]


def closed_loop(subject: Subject, drive: Drive, eager: Sequence[float]) -> dict[str, Any]:
    """Run the bundle's C, or its numpy runtime, in the environment, on the raw observations.

    Its actions are compared with float64 on the observations it saw itself, its state carried along. The returns stand
    beside those of the eager policy on the same episodes; they may differ where the actions do not: what is left of
    rounding grows in a chaotic environment. Raises :class:`BundleError` where an action is beyond the tolerance.
    """
    name = next((n for n in ("c99", "numpy") if n in subject.runs), None)
    if name is None:
        return {"runtime": None, "return": {"eager": _summary(eager)}}
    player = subject.players[name]
    reads = [p for p in subject.manifest["inputs"] if p["key"] not in {encode_key(k) for k in subject.initial}]
    seat, returns = play(drive, player, reads, typed=True)
    relative, absolute, steps, where = _judge(subject, seat)
    report = {
        "runtime": name,
        "episodes": len(returns),
        "steps": len(seat.resets),
        "judged_steps": steps,
        "return": {name: _summary(returns), "eager": _summary(eager)},
        "max_relative_error": relative,
        "max_absolute_error": absolute,
    }
    if not relative <= subject.tolerance:
        raise BundleError(
            f"check 'parity': in closed loop {name} differs from the float64 reference by {relative:.2e} of the "
            f"action's scale ({where}); {subject.tolerance:.0e} is allowed. Returns: {report['return']}"
        )
    return report


def _summary(returns: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(returns)), "std": float(np.std(returns))}


def _judge(subject: Subject, seat: Seat) -> tuple[float, float, int, str]:
    """Largest error of the action, relative and absolute, how many steps were judged, and where it is largest.

    A choice is right where float64 or the program's own precision makes it: two of the same worth are a matter of
    rounding.
    """
    live, carried = subject.live, {s.key: s for s in subject.contract.recurrent or ()}
    position, port = list(live.out_keys).index(subject.action), encode_key(subject.action)
    total = len(seat.resets)
    steps = range(min(total, JUDGED)) if carried else sorted({int(t) for t in np.linspace(0, total - 1, JUDGED)})
    state: dict[Key, torch.Tensor] = {}
    worst = (0.0, 0.0, "no step")
    for t in steps:
        if seat.resets[t]:
            state = {p.key: torch.from_numpy(start_of(carried[p.key].initial, {"shape": p.shape, "dtype": _name(p)}))
                     for p in live.inputs if p.key in carried}  # fmt: skip
        row = [state[p.key] if p.key in carried else torch.from_numpy(seat.seen[t][encode_key(p.key)])
               for p in live.inputs]  # fmt: skip
        found = float64_reference(live, row)
        named = dict(zip(live.out_keys, found, strict=True))
        state = {key: named[s.next_key] for key, s in carried.items()}
        wanted = found[position].double() if found[position].is_floating_point() else found[position]
        relative, absolute = _errors(seat.done[t][port], wanted.numpy(), subject.golden.scales[position])
        if relative and not wanted.is_floating_point():
            near = [v.to(p.dtype) for v, p in zip(row, live.inputs, strict=True)]
            relative = absolute = _errors(seat.done[t][port], live.run(*near)[position].numpy(), 1.0)[0]
        worst = max(worst, (relative, absolute, f"step {t}"))
    return worst[0], worst[1], len(steps), worst[2]


def _name(port: Any) -> str:
    return str(port.dtype).removeprefix("torch.")
