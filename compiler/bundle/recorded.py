"""Recorded observations: golden rows, a golden sequence, the size of a standard deviation, and the range seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.utils._pytree import tree_leaves

from graphrl.compiler.bundle.contract import Contract, ObservationTerm
from graphrl.compiler.trace import as_example
from graphrl.errors import BundleError, did_you_mean
from graphrl.keys import Key

__all__ = ["RANGE_MARGIN", "Recording", "read_recording", "with_ranges"]

RANGE_MARGIN = 0.5
"""What is added to a recorded range on either side, a part of its width."""


@dataclass(frozen=True)
class Recording:
    """Observations of one episode after another: by key [T, ...], and where an episode starts [T]."""

    values: dict[Key, Tensor]
    resets: tuple[bool, ...]

    def row(self, t: int, keys: Sequence[Key], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Step ``t`` in the order of ``keys``; what was not recorded, a recurrent value, is that of ``like``."""
        made = []
        for key, value in zip(keys, like, strict=True):
            step = self.values[key][t] if key in self.values else value
            if step.numel() != value.numel():
                raise BundleError(f"the recorded {key!r} has {step.numel()} entries a step, the policy {value.numel()}")
            made.append(step.reshape(value.shape).to(value.dtype))
        return tuple(made)

    def spread(self, key: Key) -> Tensor | None:
        """Standard deviation of each entry, or ``None`` where it was not recorded, or only once."""
        value = self.values.get(key)
        if value is None or not value.is_floating_point() or len(value) < 2:
            return None
        return value.double().std(0).clamp_min(1e-6).to(value.dtype)

    def starts(self, episodes: int, steps: int) -> Iterator[tuple[bool, int]]:
        """The first ``steps`` of the first ``episodes``, as (whether an episode starts, step of the recording)."""
        begins = [t for t, start in enumerate(self.resets) if start][:episodes]
        for begin in begins:
            for t in range(begin, min(begin + steps, len(self.resets))):
                if t > begin and self.resets[t]:
                    break
                yield t == begin, t


def read_recording(data: Any, keys: Sequence[Key]) -> Recording:
    """A recording from a TensorDict [T] or [episodes, T], or a mapping of arrays [T, ...], with all of ``keys``.

    ``is_init`` or ``reset``, where it is there, is true where an episode of [T, ...] starts; else there is one episode.
    Raises :class:`BundleError` for a key that lacks, another number of dims, or values that are not finite.
    """
    td: TensorDictBase = as_example(data) if isinstance(data, TensorDictBase) else _timed(data)
    present = list(td.keys(True, True))
    for key in keys:
        if td.get(key, None) is None:
            raise BundleError(f"the recorded data lack {key!r}, which the policy reads; they have {present}."
                              f"{did_you_mean(key, present)}")  # fmt: skip
    if td.batch_dims not in (1, 2) or 0 in td.batch_size:
        raise BundleError(f"the recorded data have batch size {list(td.batch_size)}: expected [T] or [episodes, T], "
                          "a step at least")  # fmt: skip
    flag = next((td.get(name) for name in ("is_init", "reset") if td.get(name, None) is not None), None)
    if td.batch_dims == 2:
        resets = torch.zeros(td.batch_size, dtype=torch.bool)
        resets[:, 0] = True
    else:
        resets = torch.zeros(td.batch_size, dtype=torch.bool) if flag is None else flag.reshape(-1).bool()
        resets[0] = True
    values = {key: td.get(key).detach().cpu().flatten(0, td.batch_dims - 1) for key in keys}
    for key, value in values.items():
        if not torch.isfinite(value).all():
            raise BundleError(f"the recorded {key!r} is not finite everywhere: leave those steps out")
    return Recording(values, tuple(resets.reshape(-1).tolist()))


def _timed(data: Any) -> TensorDictBase:
    if not isinstance(data, Mapping):
        raise BundleError(f"the recorded data are a {type(data).__name__}: expected a TensorDict or arrays by key")
    tensors = _tensors(data)
    lengths = {len(t) if t.dim() else 0 for t in tree_leaves(tensors)}
    if len(lengths) != 1:
        raise BundleError(f"the recorded arrays have {sorted(lengths)} entries; expected one a step, as many in each")
    return TensorDict(tensors, batch_size=[lengths.pop()])


def _tensors(data: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: _tensors(v) if isinstance(v, Mapping) else _tensor(k, v) for k, v in data.items()}


def _tensor(key: Any, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"the recorded {key!r} is no array [T, ...] of numbers ({error}): episodes of several "
                          "lengths go one after another, is_init true where one starts") from error  # fmt: skip


def with_ranges(contract: Contract, recording: Recording) -> Contract:
    """The contract, where it states no bounds of an observation with those recorded, and half their width more.

    What training saw belongs to them: three standard deviations about the mean of a normaliser inside.
    """
    terms = tuple(_with_range(term, recording.values.get(term.key)) for term in contract.observations or ())
    return replace(contract, observations=terms) if contract.observations is not None else contract


def _with_range(term: ObservationTerm, value: Tensor | None) -> ObservationTerm:
    if value is None or not value.is_floating_point() or term.low is not None or term.high is not None:
        return term
    flat = value.double().flatten(1)
    low, high = flat.amin(0), flat.amax(0)
    norm = term.normalizer
    if norm is not None and norm.where == "inside" and norm.mean is not None and norm.std is not None:
        mean, std = (torch.tensor(v, dtype=torch.float64) for v in (norm.mean, norm.std))
        low, high = torch.minimum(low, mean - 3 * std), torch.maximum(high, mean + 3 * std)
    margin = RANGE_MARGIN * (high - low)
    moved = (high > low).tolist()
    bounds = [
        tuple(number if seen else None for number, seen in zip(limit.float().tolist(), moved, strict=True))
        for limit in (low - margin, high + margin)
    ]
    return replace(term, low=bounds[0], high=bounds[1], bounds_from="recorded") if any(moved) else term
