"""The check of normalisers: what the program does to each input, against what the contract says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphrl.compiler.bundle.contract import Normalizer, ObservationTerm
from graphrl.compiler.bundle.front import Stage, stages
from graphrl.compiler.bundle.subject import Subject, fingerprint, frozen
from graphrl.errors import BundleError, ContractError

__all__ = ["check_normalizer"]

CLOSE = 1e-4
"""Largest error of a gain, as a part of it, and of a shift in standard deviations."""


def check_normalizer(subject: Subject) -> None:
    """Each observation has a normaliser or an explicit "none", where and what the contract says; none still learns."""
    if fingerprint(subject.policy) != subject.state:
        raise BundleError("a weight or buffer of the policy changed while it was run: a normaliser still learning?")
    terms = subject.terms()
    seen = {i: stages(subject.live, i) for i in terms}
    for i, term in terms.items():
        norm, name = term.normalizer, term.key
        if norm is None:
            raise ContractError(f"nothing is said of how {name!r} is normalised: give its ObservationTerm a "
                                "Normalizer, Normalizer('none') where there is none")  # fmt: skip
        if norm.where != "inside":
            _check_absent(term, seen[i])
        elif norm.mean is None or norm.std is None:
            raise ContractError(f"the normaliser of {name!r} is inside, but its mean and std are not stated")
        else:
            _check_numbers(term, seen[i], {t.key: seen[k] for k, t in terms.items() if k != i}, terms)
        _check_shift(subject, i, term)


def _check_absent(term: ObservationTerm, seen: list[Stage]) -> None:
    """No weights shift and scale an input that is normalised elsewhere, or not at all."""
    for stage in (s for s in seen if s.weights):
        told, gain, shift = stage.entries(seen[0].source.numel())
        if told.any() and np.mean(~np.isclose(gain[told], 1) & ~np.isclose(shift[told], 0)) > 0.5:
            where = term.normalizer.where if term.normalizer is not None else None
            at = int(np.flatnonzero(told & ~np.isclose(gain, 1))[0])
            raise ContractError(
                f"the contract says that {term.key!r} is normalised {where!r}, and the program normalises it by its "
                f"{sorted(set(stage.weights))} ({_entry(term, at)}: {_formula(gain[at], shift[at])}): twice on the "
                "robot? If that is the policy's normaliser, it is Normalizer('inside', mean, std)"
            )


def _check_numbers(term: ObservationTerm, seen: list[Stage], others: dict[Any, list[Stage]], terms: Any) -> None:
    """Every entry goes through the stated mean, std and clip, and through no second normaliser."""
    norm, size = term.normalizer, seen[0].source.numel()
    assert norm is not None and norm.mean is not None and norm.std is not None
    missing = ~_matched(seen, norm, size)
    if missing.any():
        at = int(np.flatnonzero(missing)[0])
        gain, shift = _numbers_of(seen, at, size)
        stated = f"the contract says (x - {norm.mean[at]:.6g}) / {norm.std[at]:.6g}"
        if gain == 1 and shift == 0:
            raise ContractError(f"the normaliser of {term.key!r} is stated as inside, but the program does not "
                                f"normalise it: {_entry(term, at)} meets the others as it is, and {stated}. "
                                f"A normaliser left out?{_whose(norm, others, size)}")  # fmt: skip
        raise ContractError(f"the normaliser of {term.key!r} has other numbers in the program than in the contract: "
                            f"{_entry(term, at)} is {_formula(gain, shift)} in the program, and {stated}. "
                            f"{_hint(norm, at, gain, terms, shift, size) or 'Of another training?'}"
                            f"{_whose(norm, others, size)}")  # fmt: skip
    told, gains, shifts = seen[-1].entries(size)
    scale = gains * np.array(norm.std)
    rest = shifts + gains * np.array(norm.mean)
    if told.any() and np.mean(_off(scale[told], 1) & _off(rest[told], 0)) > 0.5:
        at = int(np.flatnonzero(told)[0])
        raise ContractError(f"the program normalises {term.key!r} again after the stated normaliser: {_entry(term, at)}"
                            f" is {_formula(gains[at], shifts[at])} in the end: twice?")  # fmt: skip
    if norm.clip is not None and not any(s.clip and np.allclose(s.clip, (-norm.clip, norm.clip)) for s in seen):
        clips = sorted({s.clip for s in seen if s.clip})
        raise ContractError(f"the contract clips the normalised {term.key!r} to +-{norm.clip:g}, and the program "
                            f"{f'to {clips}' if clips else 'does not'}: state Normalizer.clip as it is")  # fmt: skip


def _off(found: Any, wanted: Any) -> Any:
    return ~np.isclose(found, wanted, rtol=CLOSE, atol=CLOSE)


def _matched(seen: list[Stage], norm: Normalizer, size: int) -> Any:
    """Which entries are (x - mean) / std somewhere on their way."""
    matched = np.zeros(size, bool)
    mean, std = np.array(norm.mean, np.float64), np.array(norm.std, np.float64)
    if mean.size != size or std.size != size:
        return matched
    for stage in seen:
        told, gain, shift = stage.entries(size)
        near = np.abs(gain * std - 1) <= CLOSE
        matched |= told & near & (np.abs(shift + mean / std) <= CLOSE * (1 + np.abs(mean / std)))
    return matched


def _numbers_of(seen: list[Stage], at: int, size: int) -> tuple[float, float]:
    """Gain and shift of an entry at the last stage where it has both, else at the last where it is."""
    found = [(gain[at], shift[at]) for told, gain, shift in (s.entries(size) for s in seen) if told[at]]
    return next((f for f in reversed(found) if f[0] != 1 and f[1] != 0), found[-1])


def _hint(norm: Normalizer, at: int, gain: float, terms: Any, shift: float, size: int) -> str:
    assert norm.std is not None
    std = abs(1 / gain) if gain else 0.0
    for what, number in (("the variance; state its root (with epsilon in it)", std**2),
                         ("1 / std; state std", 1 / std if std else 0.0)):  # fmt: skip
        if np.isclose(norm.std[at], number, rtol=1e-3):
            return f"The stated std is {what}."
    for other in terms.values():
        theirs = other.normalizer
        if theirs is None or theirs is norm or not theirs.std or not theirs.mean or len(theirs.std) != size:
            continue
        if np.isclose(theirs.std[at], std, rtol=1e-3) and np.isclose(theirs.mean[at] * -gain, shift, rtol=1e-3):
            return f"The program's are the numbers that the contract states for {other.key!r}."
    return ""


def _whose(norm: Normalizer, others: dict[Any, list[Stage]], size: int) -> str:
    """The other input that the stated numbers belong to, if there is one."""
    for key, seen in others.items():
        if seen[0].source.numel() == size and _matched(seen, norm, size).all():
            return f" The stated numbers are what the program does to {key!r}: swapped?"
    return ""


def _entry(term: ObservationTerm, at: int) -> str:
    return f"entry {at} ({term.names[at]!r})" if term.names and at < len(term.names) else f"entry {at}"


def _formula(gain: float, shift: float) -> str:
    return f"(x - {-shift / gain:.6g}) / {1 / gain:.6g}" if gain else f"always {shift:.6g}"


def _check_shift(subject: Subject, i: int, term: ObservationTerm) -> None:
    """One standard deviation more must change the action in an example row: a saturated network sees nothing."""
    norm, position = term.normalizer, list(subject.live.out_keys).index(subject.action)
    kinds = subject.golden.kinds  # extreme and random rows may leave the range that the sensors have
    rows = [at for at, kind in enumerate(kinds) if kind in ("example", "recorded")] or [0]
    seen = None if subject.recorded is None else subject.recorded.spread(term.key)
    bases = [subject.golden.inputs[at][i] for at in rows]
    spread = torch.ones(()) if seen is None else seen.reshape(bases[0].shape)
    if norm is not None and norm.where == "inside" and norm.mean is not None and norm.std is not None:
        bases = [torch.tensor(norm.mean).reshape(bases[0].shape)] * len(bases)
        spread = torch.tensor(norm.std).reshape(bases[0].shape)
    # every other entry the other way: a layer norm does not see what all of them do alike
    apart = (1 - 2 * (torch.arange(bases[0].numel()) % 2)).reshape(bases[0].shape)

    def moves(at: int, base: Tensor) -> bool:
        still, *moved = (subject.command(subject.row({i: base + sign * spread}, at)) for sign in (0, 1, -1, apart))
        return max(float((still - x).abs().max()) for x in moved) > 1e-6 * subject.golden.scales[position]

    if subject.live.outputs[position].dtype.is_floating_point:  # a choice may well stay the same
        if not any(map(moves, rows, bases)):
            raise BundleError(f"the action does not change when {term.key!r} moves by one standard deviation: "
                              "normaliser missing or wrong, or the network saturated or blind to it"
                              f"{frozen(subject)}")  # fmt: skip
