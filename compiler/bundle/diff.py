"""What differs between two bundles: contract, interface, graph, weights, tools, files. numpy only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrl.compiler.bundle.load import Bundle
from graphrl.compiler.bundle.runtime import read_graph, read_safetensors
from graphrl.errors import BundleError

__all__ = ["Difference", "diff"]


@dataclass(frozen=True)
class Difference:
    """One thing that differs: its place, and how either bundle has it."""

    place: str
    ours: str
    theirs: str


def diff(ours: Bundle, theirs: Bundle) -> list[Difference]:
    """Everything that differs, the contract first; an empty list for bundles that say and compute the same.

    A graph is told by its first node that differs, a weight by its largest difference, an array of numbers by entry.
    ``model.pt2`` is not compared: torch numbers each package anew. Nor are hashes of files where the contracts differ.
    Raises :class:`BundleError` for a damaged graph or weights file.
    """
    try:
        return _differences(ours, theirs)
    except ValueError as error:
        raise BundleError(str(error)) from error


def _differences(ours: Bundle, theirs: Bundle) -> list[Difference]:
    found: list[Difference] = []
    for part in ("contract", "contract_hash", "inputs", "outputs", "targets", "tolerance", "tools"):
        found += _values(part, ours.manifest[part], theirs.manifest[part])
    found += _graphs(ours, theirs)
    found += _weights(ours, theirs)
    same = ours.manifest["contract_hash"] == theirs.manifest["contract_hash"]  # it stands in every file
    files = [{n: h[:12] if same else "present" for n, h in b.manifest["files"].items() if n != "model.pt2"}
             for b in (ours, theirs)]  # fmt: skip
    return [*found, *_values("files", *files)]


def _values(place: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            yield from _values(f"{place}.{key}", a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _values(f"{place}[{i}]", x, y)
    elif a != b:
        yield Difference(place, _shown(a), _shown(b))


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _shown(value: Any) -> str:
    text = repr(value) if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _graphs(ours: Bundle, theirs: Bundle) -> Iterator[Difference]:
    a, b = (read_graph(x.path, x.manifest)["nodes"] for x in (ours, theirs))
    if len(a) != len(b):
        yield Difference("graph: operations", str(len(a) - 1), str(len(b) - 1))
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            yield Difference(f"graph: first at node {i}", _node(x), _node(y))
            return


def _node(node: Any) -> str:
    return f"{node['name']} = {node['op']}{_shown([node['args'], node['kwargs']])}"


def _weights(ours: Bundle, theirs: Bundle) -> Iterator[Difference]:
    a, b = (read_safetensors((x.path / "weights.safetensors").read_bytes())[0] for x in (ours, theirs))
    for name in [*a, *(n for n in b if n not in a)]:
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            yield Difference(
                f"weight {name}", *("absent" if t is None else f"{t.dtype}{list(t.shape)}" for t in (x, y))
            )
        elif not np.array_equal(x, y):
            apart = np.abs(x.astype(np.float64) - y.astype(np.float64))
            where = np.unravel_index(int(apart.argmax()), x.shape)
            at = f"at {[int(i) for i in where]}, {int((x != y).sum())} of {x.size} entries"
            yield Difference(f"weight {name}, most {at}", repr(x[where].item()), repr(y[where].item()))
