"""The check of the action: what the program does behind the last layer, against what the contract says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from graphrl.compiler.bundle.contract import ActionContract
from graphrl.compiler.bundle.subject import Skipped, Subject
from graphrl.compiler.bundle.tail import CLIPS, FAR, SQUASHES, clips, factors, reach, squashes
from graphrl.errors import BundleError, ContractError

__all__ = ["check_action"]

RANGES = {"tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}
"""What a squash gives."""


def check_action(subject: Subject) -> None:
    """Squash, scale, offset and clip are where the contract says, once, and their numbers the program's."""
    action = subject.contract.action
    if action is None:
        raise Skipped("the contract does not state the action")
    stated = [n for n in ("low", "high", "squash", "scale", "offset", "clip") if getattr(action, n) is not None]
    if not stated and not action.inside:
        raise Skipped("the contract states neither bounds nor scaling of the action")
    if action.inside is None:
        raise ContractError(f"the contract states the action's {stated}, but not which of squash, scale, offset and "
                            "clip the program performs: say inside=(...), () for none")  # fmt: skip
    found = squashes(subject.live, subject.action)
    twice = f"the action ends in {' and '.join(found)}"
    if found and action.squash == "none":
        raise ContractError(f"{twice}, and the contract says that there is no squash")
    if len(found) > 1 and "squash" in action.inside:
        raise BundleError(f"{twice}: a squash doubled")
    if action.squash in found and "squash" not in action.inside:
        raise BundleError(f"{twice}, and the contract leaves the {action.squash} to the caller: a squash doubled?")
    _check_squash(subject, action, found)
    _check_factors(subject, action, bool(found))
    if {"squash", "clip"} & set(action.inside):
        _check_clip(subject, action, found)
        _check_reach(subject, action, found)
        _check_bounds(subject, action)


def _check_squash(subject: Subject, action: ActionContract, found: list[str]) -> None:
    if "squash" not in (action.inside or ()):
        return
    if found and action.squash is None:
        raise ContractError(f"inside=(..., 'squash'), but not which: the program ends in {found[0]}, so say "
                            f"squash={found[0]!r}")  # fmt: skip
    if found and action.squash not in found:
        raise ContractError(f"the contract's squash is {action.squash!r}, and the program ends in {found[0]!r}")
    if not found and not _has(subject, SQUASHES):
        raise ContractError("the contract says that a squash happens inside, and the program has none: a squash "
                            "missing? Without one leave 'squash' out of inside")  # fmt: skip


def _check_factors(subject: Subject, action: ActionContract, squashed: bool) -> None:
    """Scale and offset of the contract are those behind the squash, entry by entry."""
    inside = action.inside or ()
    scale, offset = factors(subject.live, subject.action)
    for name, real, idle in (("scale", scale, 1.0), ("offset", offset, 0.0)):
        number = getattr(action, name)
        if not squashed and (name == "offset" or np.allclose(real, idle)):
            continue  # without a squash, this may be part of the last layer
        shown = tuple(round(float(v), 6) for v in real)
        if name not in inside:
            if "squash" in inside and not np.allclose(real, idle, rtol=0, atol=1e-6):
                raise ContractError(f"the program has a {name} of {shown} behind its squash, and inside={inside} "
                                    f"leaves the {name} to the caller: doubled? If not, say {name}={shown}, and add "
                                    f"{name!r} to inside")  # fmt: skip
        elif number is None:
            pose = " (default_pose is not added to the action)" if name == "offset" and action.default_pose else ""
            raise ContractError(f"inside has {name!r}, but no {name} is stated{pose}: the program's is {shown}, so say "
                                f"{name}={shown}")  # fmt: skip
        elif not np.allclose(np.broadcast_to(number, real.shape), real, rtol=1e-4, atol=1e-6):
            raise ContractError(f"the contract's {name} is {number}, and the program's {shown}: a {name} missing, "
                                "doubled, or of another robot?")  # fmt: skip


def _check_clip(subject: Subject, action: ActionContract, found: list[str]) -> None:
    """The contract's clip is where the program's action ends, wherever it is what ends it."""
    if "clip" not in (action.inside or ()) or action.clip is None or _blind(subject, action, found):
        return
    low, high = (np.clip(v, *action.clip) for v in _unclipped(subject, found))
    for wanted, got in zip((low, high), reach(subject.live, subject.action), strict=True):
        if not _same(got, wanted, action.clip):
            raise ContractError(f"the contract clips the action to {tuple(action.clip)} inside: it would reach "
                                f"{_shown(wanted)}; the program's action reaches {_shown(got)}: a clip missing, or "
                                "with other limits?")  # fmt: skip


def _check_reach(subject: Subject, action: ActionContract, found: list[str]) -> None:
    """Low and high are what the command can be, where nothing is left to the caller."""
    rest = [n for n in ("squash", "scale", "offset", "clip")
            if getattr(action, n) not in (None, "none") and n not in (action.inside or ())]  # fmt: skip
    if rest or _blind(subject, action, found):
        return
    got = reach(subject.live, subject.action)
    span = float((got[1] - got[0]).max())
    for name, real in zip(("low", "high"), got, strict=True):
        stated = getattr(action, name)
        if stated is None or span >= FAR or None in stated or _same(real, np.array(stated), (0.0, span)):
            continue
        raise BundleError(
            f"the contract's {name} is {_shown(stated)}, and the program can reach {_shown(real)}. low and high are "
            "what the command can be, offset +- scale and then clip, not the joint's mechanical limits: say "
            f"low={_shown(got[0])}, high={_shown(got[1])}. If those are not the action that was trained, a squash or "
            "scale is missing or doubled"
        )


def _unclipped(subject: Subject, found: list[str]) -> Any:
    """Lowest and highest action without the clip."""
    scale, offset = factors(subject.live, subject.action)
    ends = [v * scale + offset for v in (RANGES[found[-1]] if found else (-FAR, FAR))]
    return np.minimum(*ends), np.maximum(*ends)


def _blind(subject: Subject, action: ActionContract, found: list[str]) -> bool:
    """Whether a squash or clip happens too early for the tail to show it: golden rows are then all there is."""
    inside = action.inside or ()
    squash = "squash" in inside and not found
    clip = "clip" in inside and not clips(subject.live, subject.action) and _has(subject, CLIPS)
    return squash or clip


def _has(subject: Subject, targets: Any) -> bool:
    return any(n.target in targets for n in subject.live.graph_module.graph.nodes)


def _same(a: Any, b: Any, span: tuple[float, float]) -> bool:
    return np.allclose(a, b, rtol=0, atol=1e-3 * (span[1] - span[0]))


def _shown(values: Any) -> tuple[float, ...]:
    return tuple(round(float(v), 6) for v in values)


def _check_bounds(subject: Subject, action: ActionContract) -> None:
    """Golden rows, among them some of three standard deviations, stay within the bounds, after the caller's steps.

    With a state, the steps of the golden sequence: what a filter holds in a single row is made up.
    """
    position = list(subject.live.out_keys).index(subject.action)
    sequence = subject.golden.sequence
    found = [row[position] for row in subject.golden.outputs]
    if sequence is not None:
        found = [step[subject.action] for step in sequence.outputs]
    for bound, sign in (("low", 1), ("high", -1)):
        values = getattr(action, bound)
        if values is None:
            continue
        limit = torch.tensor([-sign * np.inf if v is None else v for v in values], dtype=torch.float64)
        for command in (_commanded(row.double().reshape(-1), action) for row in found):
            if bool((sign * (command - limit) < -1e-5).any()):
                raise BundleError(
                    f"the action, {_shown(command)}, leaves its bounds ({bound} {list(values)}) although the "
                    f"contract says that {list(action.inside or ())} happen inside the program: a squash or scale "
                    "missing, or doubled?"
                )


def _commanded(x: torch.Tensor, action: ActionContract) -> torch.Tensor:
    """What the caller makes of the program's action: the steps that are stated and not inside."""
    left = {n: getattr(action, n) for n in ("squash", "scale", "offset", "clip") if n not in (action.inside or ())}
    if left.get("squash") in RANGES:
        x = torch.tanh(x) if left["squash"] == "tanh" else torch.sigmoid(x)
    if left.get("scale") is not None:
        x = x * torch.tensor(left["scale"], dtype=x.dtype)
    if left.get("offset") is not None:
        x = x + torch.tensor(left["offset"], dtype=x.dtype)
    return x if left.get("clip") is None else x.clamp(*left["clip"])
