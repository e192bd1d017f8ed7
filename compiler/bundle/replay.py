"""Running a recorded log through a bundle's numpy runtime, to the first step where it says something else."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphrl.compiler.bundle.contract_text import entry_names
from graphrl.compiler.bundle.load import Bundle
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError, did_you_mean

__all__ = ["Divergence", "Replay", "replay"]


@dataclass(frozen=True)
class Divergence:
    """The first entry of an output that differs: its step, its key, its name, and both values.

    error: a part of the output's usual size. notes: what was unusual about that step's observation, and what such a
    difference usually means.
    """

    step: int
    key: str
    name: str
    recorded: float
    computed: float
    error: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"step {self.step}: {self.key!r}, {self.name}: recorded {self.recorded!r}, the bundle gives "
            f"{self.computed!r}, {self.error:.1e} of its usual size apart"
        )
        return "\n".join([text, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True)
class Replay:
    """How many steps agree, their largest relative error, and where the log and the bundle part."""

    steps: int
    largest_error: float
    divergence: Divergence | None


def replay(bundle: Bundle, log: str | Path, tolerance: float | None = None) -> Replay:
    """Feed a log's observations to the bundle, step by step, and compare the outputs it recorded.

    log: ``.npz`` with an array ``[steps, ...]`` a key, or ``.csv`` with a column an entry, ``key[i]``, ``key[name]`` by
    the contract's names, or ``key`` for a single one. It must hold every observation and an output; a recurrent value
    is compared under the key it is written at. ``reset``, when there, is true where an episode starts (a log without it
    is one episode). Everything else in the log is ignored. tolerance: default the bundle's.

    A difference comes with what it usually means: an action clipped or a step late, another order, a missing reset.
    Raises :class:`BundleError` for a log that lacks something, naming it.
    """
    manifest = bundle.manifest
    try:
        policy = Policy.load(bundle.path)
    except ValueError as error:
        raise BundleError(str(error)) from error
    tolerance = manifest["tolerance"] if tolerance is None else tolerance
    if not tolerance >= 0:
        raise BundleError(f"tolerance is {tolerance}: expected 0 or more")
    data = _read(Path(log), manifest, policy)
    recorded = {p["key"]: data[p["key"]] for p in manifest["outputs"] if p["key"] in data}
    written = {s["next_key"]: s["key"] for s in manifest["contract"]["recurrent"] or ()}
    largest, before = 0.0, dict[str, np.ndarray]()
    for step, start in enumerate(data["reset"]):
        if start:
            policy.reset()
        observation = {key: data[key][step] for key in policy.observations}
        try:
            result = policy.step(observation)
        except ValueError as error:
            raise BundleError(f"{log}, step {step}: {error}") from error
        result.update({following: policy.state[key] for following, key in written.items()})
        for key, values in recorded.items():
            by, entry = _compare(values[step], result[key], manifest["reports"]["parity"]["scale"][key])
            if not by <= tolerance:
                a, b = (np.asarray(v).reshape(-1)[entry].item() for v in (values[step], result[key]))
                names = entry_names(manifest["contract"], key, result[key].size)
                near = tolerance * max(manifest["reports"]["parity"]["scale"][key], abs(b))
                notes = [*_unusual(manifest, observation), *_likely(values[step], result[key], before.get(key), near)]
                notes += _clipped(manifest["contract"], key, a, b, entry)
                if policy.state and not data["reset"][1:].any():
                    notes.append(f"the log marks no `reset` after its first step, and {list(policy.state)} carry over")
                return Replay(step, largest, Divergence(step, key, names[entry], a, b, by, tuple(notes)))
            largest = max(largest, by)
        before = {key: result[key] for key in recorded}
    return Replay(len(data["reset"]), largest, None)


def _compare(recorded: Any, computed: np.ndarray, scale: float) -> tuple[float, int]:
    """Largest error relative to the output's size, and its entry; the same NaN or infinity agrees."""
    a, b = np.asarray(recorded, np.float64).reshape(-1), computed.astype(np.float64).reshape(-1)
    if not a.size:
        return 0.0, 0
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    apart = np.where(np.isnan(apart), np.inf, apart)
    finite = np.abs(b[np.isfinite(b)])
    entry = int(apart.argmax())
    return float(apart[entry] / max(scale, float(finite.max(initial=0.0)))), entry


def _likely(recorded: Any, computed: np.ndarray, before: np.ndarray | None, near: float) -> list[str]:
    """Whether what was recorded is the output after all, a step late or in another order."""
    a, b = np.asarray(recorded, np.float64).reshape(-1), computed.astype(np.float64).reshape(-1)
    if before is not None and np.allclose(a, before.reshape(-1), rtol=0, atol=near):
        return ["what was recorded is the output of the step before: written down a step late?"]
    order = np.argsort(b, kind="stable")[np.argsort(np.argsort(a, kind="stable"))]
    if a.size > 1 and np.allclose(a, b[order], rtol=0, atol=near):
        return [f"the recorded entries are those of the bundle in the order {order.tolist()}: other joint order?"]
    return []


def _clipped(contract: Mapping[str, Any], key: str, recorded: float, computed: float, entry: int) -> list[str]:
    """Whether a recorded action stands at its bound, and the policy asked for more."""
    action = contract["action"] or {"key": None}
    for bound, beyond in (("low", computed < recorded), ("high", computed > recorded)):
        if (
            action["key"] == key
            and action[bound]
            and beyond
            and np.float32(action[bound][entry]) == np.float32(recorded)
        ):
            return [f"recorded exactly at its {bound}: record the action as the policy gave it, before clipping"]
    return []


def _unusual(manifest: Mapping[str, Any], observation: Mapping[str, np.ndarray]) -> list[str]:
    """Entries of an observation that are not finite, or beyond the contract's low or high."""
    contract, notes = manifest["contract"], []
    terms = {t["key"]: t for t in contract["observations"] or ()}
    for key, value in observation.items():
        flat, term = np.asarray(value).reshape(-1), terms.get(key, {})
        low, high = ([far if v is None else v for v in term.get(bound) or [None] * flat.size]
                     for bound, far in (("low", -np.inf), ("high", np.inf)))  # fmt: skip
        for i, name in enumerate(entry_names(contract, key, flat.size)):
            if not low[i] <= flat[i] <= high[i]:
                notes.append(f"{key!r}, {name} is {flat[i].item()!r}, expected {low[i]!r} to {high[i]!r}")
            elif not np.isfinite(flat[i]):
                notes.append(f"{key!r}, {name} is {flat[i].item()!r}")
    return notes


def _read(log: Path, manifest: Mapping[str, Any], policy: Policy) -> dict[str, np.ndarray]:
    """Every array of a log by key, and ``reset``; all of the same length."""
    ports = {p["key"]: p for p in (*manifest["outputs"], *manifest["inputs"])}
    try:
        data = _read_csv(log, manifest, ports) if log.suffix == ".csv" else _read_npz(log)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, csv.Error) as error:
        raise BundleError(f"{log} cannot be read: {error}") from error
    present = list(data)
    for key in policy.observations:
        if key not in data:
            raise BundleError(f"{log} has no {key!r}, which the policy reads; it has {present}."
                              f"{did_you_mean(key, present)}")  # fmt: skip
    outputs = [p["key"] for p in manifest["outputs"]]
    if not any(key in data for key in outputs):
        raise BundleError(f"{log} has no output to compare: expected one of {outputs}, it has {present}")
    lengths = {key: len(data[key]) for key in data if key in ports or key == "reset"}
    if len(set(lengths.values())) != 1:
        raise BundleError(f"{log}: every array needs one entry a step, but the lengths are {lengths}")
    if not next(iter(lengths.values())):
        raise BundleError(f"{log} holds no step")
    for key in lengths:
        if data[key].dtype.kind not in "fiub":
            raise BundleError(f"{log}: {key!r} is {data[key].dtype}, expected real numbers")
        wanted = int(np.prod(ports[key]["shape"])) if key in ports else 1
        if data[key][:1].size != wanted and len(data[key]):
            raise BundleError(f"{log}: {key!r} has {data[key][0].size} entries a step, expected {wanted}")
    steps = next(iter(lengths.values()))
    for key in lengths:
        if key in ports:
            data[key] = data[key].reshape(steps, *ports[key]["shape"])
    if not np.isin(data.get("reset", 0), (0, 1)).all():
        raise BundleError(f"{log}: 'reset' has {data['reset'].reshape(-1)[:5].tolist()}, ...: expected 0 or 1 a step")
    data["reset"] = np.asarray(data.get("reset", [True] + [False] * (steps - 1)), bool).reshape(-1)[:steps]
    return data


def _read_npz(log: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(log):
        raise ValueError("expected an .npz archive of arrays, or a file that ends in .csv")
    with np.load(log, allow_pickle=False) as file:
        return {name: np.atleast_1d(file[name]) for name in file.files}


def _number(text: str) -> float:
    return float({"true": "1", "false": "0"}.get(text.strip().lower(), text))


def _read_csv(log: Path, manifest: Mapping[str, Any], ports: Mapping[str, Any]) -> dict[str, np.ndarray]:
    with log.open(newline="", encoding="utf-8-sig") as stream:
        head, *rows = [row for row in csv.reader(stream) if row] or [[]]
    if len(head) == 1 and any(c in head[0] for c in ";\t"):
        raise ValueError("its columns are not divided by commas")
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise ValueError(f"row {number} has {len(row)} columns, the head {len(head)}")
    place = {name.strip(): i for i, name in enumerate(head)}
    data = {}
    for key in (*ports, "reset"):
        size = int(np.prod(ports[key]["shape"])) if key in ports else 1
        names = entry_names(manifest["contract"], key, size) if size else []
        columns = []
        for i in range(size):
            forms = [f"{key}[{i}]", f"{key}[{names[i]}]", *([key] if size == 1 else [])]
            columns += [place[f] for f in forms if f in place][:1]
        if columns and len(columns) < size:
            lacks = [n for i, n in enumerate(names) if not {f"{key}[{i}]", f"{key}[{n}]"} & place.keys()]
            others = [c for c in place if c.startswith(f"{key}[") and place[c] not in columns]
            raise ValueError(f"{len(columns)} of the {size} columns of {key!r} are there; missing {lacks}"
                             + (f", not known {others}" if others else ""))  # fmt: skip
        if columns:
            values = np.array([[_number(row[c]) for c in columns] for row in rows]).reshape(len(rows), size)
            kind = ports[key]["dtype"] if key in ports else "float32"  # of reset: checked to be 0 or 1
            data[key] = values if kind.startswith("float") else values.astype(kind)
            if (data[key] != values).any() and not kind.startswith("float"):
                raise ValueError(f"{key!r} has a value that a {kind} cannot hold")
    return data
