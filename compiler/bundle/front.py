"""The start of a program: what happens to each entry of an input before entries meet."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from graphrl.compiler.bundle.tail import CLIPS, constants
from graphrl.compiler.program import Program

__all__ = ["Stage", "stages"]

HUGE = 1e30
"""What a clip is asked with."""


@dataclass(frozen=True)
class Stage:
    """A value on an input's way: y = gain * x[source] + shift, each number of it; source is -1 where no entry of x is.

    weights: the weights and buffers that took part. clip: the limits of the last clip on the way.
    """

    source: Tensor
    gain: Tensor
    shift: Tensor
    weights: tuple[str, ...] = ()
    clip: tuple[float, float] | None = None

    def entries(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whether an entry is here with one gain and shift, and these: [size] each."""
        source, gain, shift = (t.reshape(-1).numpy() for t in (self.source, self.gain, self.shift))
        here, at = np.flatnonzero(source >= 0), np.zeros(size, np.int64)
        at[source[here]] = here
        told = np.isin(np.arange(size), source[here])
        same = np.isclose(gain, gain[at[source]]) & np.isclose(shift, shift[at[source]])
        told[source[here][~same[here]]] = False
        return told, gain[at], shift[at]


def stages(program: Program, i: int) -> list[Stage]:
    """Each value from input ``i`` on whose numbers are one entry of it, scaled and shifted; the input itself first.

    Found by evaluating each operation on numbers that tell whether it only moves them about, or scales and shifts each
    by itself; so in whatever operations a normaliser is written, folded forms and batch normalisation among them.
    Clips are passed, and ``torch.where`` that chooses between an entry and something else.
    """
    nodes = list(program.graph_module.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    names = {n: s.name for n, s in zip(places[len(program.inputs) :], program.state, strict=False)}
    fixed = {n: v.double() if v.is_floating_point() else v for n, v in constants(program).items()}
    shape = places[i].meta["val"].shape
    source = torch.arange(shape.numel()).reshape(shape)
    found: dict[fx.Node, Any] = {places[i]: Stage(source, torch.ones(shape).double(), torch.zeros(shape).double())}
    for node in nodes:
        if node.op != "call_function" or not any(n in found for n in node.all_input_nodes):
            continue
        if node.target is operator.getitem:
            parts = found[node.args[0]]
            stage = parts[node.args[1]] if isinstance(parts, list) else None
        else:
            try:
                stage = _through(node, found, fixed)
            except RuntimeError:  # an operation that does not take float64 mixes entries, all that only move do
                stage = None
            stage = stage and _with_weights(node, stage, fixed, names)
        if stage is not None:
            found[node] = stage
    return [part for stage in found.values() for part in (stage if isinstance(stage, list) else [stage])]


def _through(node: fx.Node, found: Mapping[fx.Node, Any], fixed: Mapping[fx.Node, Tensor]) -> Any:
    """The stage behind an operation, a list of them where it gives several values, or None where entries meet."""
    varying = [n for n in node.all_input_nodes if n not in fixed]
    before = next(found[n] for n in varying if n in found)
    if isinstance(before, list):
        return None
    if node.target in CLIPS:
        low, high = (_evaluate(node, {**fixed, **{n: _full(n, v) for n in varying}}) for v in (-HUGE, HUGE))
        return replace(before, clip=(float(low.min()), float(high.max()))) if len(varying) == 1 else None
    if node.target is torch.ops.aten.where.self:
        return _chosen(node, found)
    moved = _moved(node, found, fixed, before)
    if moved is not None or len(varying) != 1:
        return moved
    scaled = _scaled(node, varying[0], fixed)
    if scaled is None or scaled[0].numel() != before.gain.numel():
        return None
    gain, shift = scaled
    source, own_gain, own_shift = (t.reshape(gain.shape) for t in (before.source, before.gain, before.shift))
    source = torch.where(gain == 0, -1, source)  # what is times nothing is no entry of x
    stage = replace(before, source=source, gain=own_gain * gain, shift=own_shift * gain + shift)
    return [stage] if isinstance(node.meta["val"], (tuple, list)) else stage


def _moved(node: fx.Node, found: Mapping[fx.Node, Any], fixed: Mapping[fx.Node, Tensor], like: Stage) -> Any:
    """The stage, or stages, where an operation only moves numbers: it carries labels about, and other numbers alike."""
    carriers = [n for n in node.all_input_nodes if n.meta["val"].is_floating_point()]
    sizes = [n.meta["val"].numel() for n in carriers]
    total, generator = sum(sizes), torch.Generator().manual_seed(0)
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    outs = []
    for numbers in (torch.arange(total, dtype=torch.float64), values):
        parts = zip(carriers, numbers.split(sizes), strict=True)
        outs.append(_evaluate(node, {**fixed, **{n: t.reshape(n.meta["val"].shape) for n, t in parts}}))
    several = isinstance(outs[0], (tuple, list))
    columns = []
    for n in carriers:
        stage = found.get(n)
        size = n.meta["val"].numel()
        none = (torch.full((size,), -1), torch.zeros(size).double(), torch.zeros(size).double())
        flat = (stage.source, stage.gain, stage.shift) if isinstance(stage, Stage) else none
        columns.append([t.reshape(-1) for t in flat])
    source, gain, shift = (torch.cat(list(c)) for c in zip(*columns, strict=True))
    made = []
    for labels, moved in zip(*(o if several else [o] for o in outs), strict=True):
        at = labels.double().round().long().clamp(0, total - 1)
        if not labels.is_floating_point() or not torch.allclose(moved.double(), values[at], rtol=1e-6, atol=1e-6):
            return None
        made.append(replace(like, source=source[at], gain=gain[at], shift=shift[at]))
    return made if several else made[0]


def _scaled(node: fx.Node, varying: fx.Node, fixed: Mapping[fx.Node, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Gain and shift of an operation that treats each number by itself, y = gain * x + shift; None for another one."""
    shape = varying.meta["val"].shape
    generator = torch.Generator().manual_seed(1)
    spread = 50 * torch.randn(shape, generator=generator, dtype=torch.float64)
    outs = []
    for x in (torch.zeros(shape).double(), torch.ones(shape).double(), torch.full(shape, -3.0).double(), spread):
        out = _evaluate(node, {**fixed, varying: x})
        out = out[0] if isinstance(out, (tuple, list)) else out
        if not out.is_floating_point() or out.numel() != x.numel():
            return None
        outs.append(out.double())
    shift, gain = outs[0], outs[1] - outs[0]
    for x, out in ((torch.full_like(shift, -3.0), outs[2]), (spread.reshape(shift.shape), outs[3])):
        if not torch.allclose(gain * x + shift, out, rtol=1e-5, atol=1e-6):
            return None
    return gain, shift


def _chosen(node: fx.Node, found: Mapping[fx.Node, Any]) -> Stage | None:
    """``where``: entries of the input, wherever one of the two has them and the other has none."""
    sides = [found.get(n) for n in node.args[1:]]  # type: ignore[arg-type, union-attr]
    shape = node.meta["val"].shape
    ours = [s for s in sides if isinstance(s, Stage) and s.source.shape == shape]
    if not ours or len(ours) != sum(s is not None for s in sides):
        return None
    first = ours[0]
    for other in ours[1:]:
        taken = first.source < 0
        parts = [torch.where(taken, b, a) for a, b in
                 ((first.source, other.source), (first.gain, other.gain), (first.shift, other.shift))]  # fmt: skip
        first = replace(first, source=parts[0], gain=parts[1], shift=parts[2])
    return first


def _with_weights(node: fx.Node, stage: Any, fixed: Mapping[fx.Node, Tensor], names: Mapping[fx.Node, str]) -> Any:
    """The stage, or each of them, with the names of the weights that the operation reads, directly or not."""
    front, read = [n for n in node.all_input_nodes if n in fixed], []
    while front:
        n = front.pop()
        read += [names[n]] if n in names else []
        front += n.all_input_nodes
    if isinstance(stage, list):
        return [replace(s, weights=(*s.weights, *read)) for s in stage]
    return replace(stage, weights=(*stage.weights, *read))


def _full(node: fx.Node, value: float) -> Tensor:
    return torch.full(node.meta["val"].shape, value, dtype=torch.float64)


def _evaluate(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> Any:
    """An operation on these values; those that it reads besides are zero."""

    def value(n: fx.Node) -> Tensor:
        return values[n] if n in values else torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    target: Any = node.target
    return target(*args, **kwargs)
