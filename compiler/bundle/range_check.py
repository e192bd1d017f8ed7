"""The check of the example's range: rows as the policy sees them lie within the bounds that the contract states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graphrl.compiler.bundle.contract import ObservationTerm
from graphrl.compiler.bundle.subject import Skipped, Subject
from graphrl.errors import ContractError

__all__ = ["check_range"]

SHARE = 0.03
"""Part of the rows that may lie beyond the bounds: sensors have outliers."""


def check_range(subject: Subject) -> None:
    """Hardly a row of the example, or of recorded data, lies beyond the bounds that the contract states."""
    terms = [t for t in subject.terms().values() if (t.low or t.high) and t.bounds_from != "recorded"]
    if not terms and any(t.bounds_from == "recorded" for t in subject.terms().values()):
        raise Skipped("all bounds were taken from what was recorded")
    if not terms:
        raise Skipped("the contract states no bounds of an observation")
    for term in terms:
        told = [("example", subject.example.get(term.key))] if subject.example is not None else []
        if subject.recorded is not None and term.key in subject.recorded.values:
            told.append(("recorded data", subject.recorded.values[term.key]))
        for what, values in told:
            _check_rows(term, what, values.double().reshape(-1, len(term.low or term.high or ())))


def _check_rows(term: ObservationTerm, what: str, rows: Tensor) -> None:
    low, high = (_limits(v, rows, away) for v, away in ((term.low, -math.inf), (term.high, math.inf)))
    beyond = torch.maximum(low - rows, rows - high)
    slack = 1e-6 * (1 + rows.abs())
    share = float((beyond > slack).any(1).double().mean())
    if share <= SHARE:
        return
    at = int(beyond.amax(0).argmax())
    worst = float(rows[beyond[:, at].argmax(), at])
    name = f"entry {at} ({term.names[at]!r})" if term.names else f"entry {at}"
    bounds = f"{'-' if term.low is None else term.low[at]} to {'-' if term.high is None else term.high[at]}"
    raise ContractError(f"{term.key!r}: {share:.0%} of {len(rows)} rows of the {what} lie beyond the contract's low "
                        f"and high, {name} as far as {worst:.6g} where {bounds} is stated. "
                        f"{_cause(rows, low, high)}")  # fmt: skip


def _limits(stated: Sequence[float | None] | None, rows: Tensor, away: float) -> Tensor:
    if stated is None:
        return torch.full_like(rows[0], away)
    return torch.tensor([away if v is None else v for v in stated], dtype=rows.dtype)


def _cause(rows: Tensor, low: Tensor, high: Tensor) -> str:
    for factor, text in ((math.pi / 180, "degrees where radians"), (180 / math.pi, "radians where degrees"),
                         (1e-3, "thousandths where whole units")):  # fmt: skip
        if ((rows * factor >= low) & (rows * factor <= high)).all(1).double().mean() > 1 - SHARE:
            return f"Times {factor:.4g} they lie within: {text} are meant?"
    return "Another unit, an observation normalised before it comes here, or bounds of another sensor?"
