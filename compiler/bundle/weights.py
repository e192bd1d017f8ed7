"""Weights rounded before anything is written, so that every runtime of a bundle computes with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.backends.c99.nodes import op_name
from graphrl.compiler.backends.c99.ops import VIEWS
from graphrl.compiler.backends.c99.weights import FORMATS, encode
from graphrl.compiler.bundle.golden import Golden
from graphrl.compiler.bundle.parity import Parity
from graphrl.compiler.program import Fixed, Program
from graphrl.errors import BundleError, did_you_mean
from graphrl.keys import Key

__all__ = ["LIMITS", "check_format", "check_rounding", "round_weights", "what_moved"]

LIMITS = {"float16": 1e-2, "int8": 5e-2}
"""How far rounded weights may move the action, as a part of its own spread over the golden rows."""

_MOVES = VIEWS | {"cat.default", "clone.default"}
"""Operations that move numbers and leave them what they are."""


def check_format(form: str) -> None:
    """Refuse a format of weights that does not exist."""
    if form not in FORMATS:
        raise BundleError(f"weights={form!r}: there are {FORMATS}.{did_you_mean(form, FORMATS)}")


def check_rounding(form: str, moved: Parity) -> None:
    """Refuse weights whose rounding moved an output too far."""
    if not moved.worst <= LIMITS[form]:
        raise BundleError(
            f"weights rounded to {form} move the action by {moved.worst:.1e} of its spread ({moved.where}); "
            f"{LIMITS[form]:.0e} is allowed: keep weights='float32'"
        )


def what_moved(exact: Golden, rounded: Golden, position: int, key: Key) -> Parity:
    """How far rounding moves the output at ``position``: on golden rows that are not extreme, and on the sequence.

    relative: a part of the spread, the root mean square of what entries differ by from their own mean, so that a pose
    which is added at the end hides no error. Of choices, the part of the rows where another is made.
    """
    wanted, found = (
        torch.stack([o[position].double().reshape(-1) for o, kind in zip(g.outputs, g.kinds, strict=True)
                     if kind != "extreme"]) for g in (exact, rounded)
    )  # fmt: skip
    if wanted.shape != found.shape:
        return Parity(float("inf"), float("inf"), None, "a row whose output is no longer finite")
    if not exact.outputs[0][position].is_floating_point():
        other = (wanted != found).any(1).double()
        return Parity(float(other.mean()), float(other.max()), None, f"{int(other.sum())} of {len(other)} choices")
    spread = max(float(wanted.var(0, correction=0).mean().sqrt()), 1e-9)
    by = (wanted - found).abs().amax(1)
    relative, absolute, where = float(by.max()) / spread, float(by.max()), f"golden row {int(by.argmax())}"
    if exact.sequence is None or rounded.sequence is None:
        return Parity(relative, absolute, None, where)
    pairs = zip(exact.sequence.outputs, rounded.sequence.outputs, strict=True)
    along = max(float((a[key].double() - b[key].double()).abs().max()) for a, b in pairs)
    return Parity(relative, max(absolute, along), along / spread, where)


def round_weights(program: Program, form: str) -> Program:
    """``program`` with the weights of its products rounded to what ``form`` holds; biases and statistics stay.

    A weight is what a matrix product or convolution multiplies its input by, when it lies in the state, perhaps turned,
    cut or put together; a column of an int8 product is one of its outputs. Raises :class:`BundleError` for a weight too
    large for ``form``.
    """
    slots = [slot for slot in program.state if slot.dtype == torch.float32]
    pool = torch.cat([slot.read().detach().cpu().reshape(-1) for slot in slots] or [torch.empty(0)])
    starts = dict(zip((s.name for s in slots), _starts([s.read().numel() for s in slots]), strict=True))
    places = program.placeholders()[len(program.inputs) :]
    # where each number of a value lies in the pool, for values that only move weights about
    lies: dict[fx.Node, Any] = {
        node: torch.arange(starts[slot.name], starts[slot.name] + slot.read().numel()).reshape(slot.shape)
        for node, slot in zip(places, program.state, strict=False)
        if slot.name in starts
    }
    for node in program.graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if (
            op_name(node) in (*_MOVES, "getitem")
            and node.all_input_nodes
            and all(n in lies for n in node.all_input_nodes)
        ):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lies.__getitem__)
            lies[node] = node.target(*args, **kwargs)
        elif (at := _columns(node, lies)) is not None:
            pool[at] = _rounded(pool[at], form, node)
    kept = {s.name: pool[starts[s.name] :][: s.read().numel()].reshape(s.shape).clone() for s in slots}
    state = tuple(replace(s, read=Fixed(kept[s.name])) if s.name in kept else s for s in program.state)
    return replace(program, state=state)


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _columns(node: fx.Node, lies: dict[fx.Node, Any]) -> Tensor | None:
    """Where the weights of a product lie, as [.., K, N]: N outputs, each the sum of K of them. ``None`` for others."""
    name = op_name(node).split(".")[0]
    position = {"mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2, "convolution": 1}.get(name)
    weight = node.args[position] if position is not None else None
    if not isinstance(weight, fx.Node) or weight not in lies:
        return None
    at: Tensor = lies[weight]
    return at.flatten(1).t() if name == "convolution" else at


def _rounded(weights: Tensor, form: str, node: fx.Node) -> Tensor:
    found = encode(weights, form).decode()
    if not torch.isfinite(found).all():
        raise BundleError(f"a weight of {float(weights.abs().max()):.3g} at {node.name!r} is too large for {form}: "
                          "keep weights='float32'")  # fmt: skip
    return found
