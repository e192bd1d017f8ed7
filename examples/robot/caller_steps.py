"""What a contract leaves to the caller: the steps before and after the policy, as numbers and as C++ statements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Step = tuple[Any, ...]
"""The name of an operation of ``numpy``, or ``sigmoid``; then a number an entry, where it has a second operand."""

CPP = {
    "multiply": "{x} * {v}", "divide": "{x} / {v}", "add": "{x} + {v}", "subtract": "{x} - {v}",
    "maximum": "std::max({x}, {v})", "minimum": "std::min({x}, {v})",
    "tanh": "std::tanh({x})", "sigmoid": "1.0F / (1.0F + std::exp(-{x}))",
}  # fmt: skip


def observation_steps(term: Mapping[str, Any] | None, size: int) -> list[Step]:
    """From a sensor's value to what the policy is given: scale, clip, and a normaliser that is outside."""
    if term is None:
        return []
    steps = [*_each("multiply", term["scale"], size), *_clip(term["clip"], size)]
    norm = term["normalizer"]
    if norm is not None and norm["where"] == "outside":
        if norm["mean"] is None or norm["std"] is None:
            raise ValueError(f"{term['key']!r} is normalised outside the policy, and the contract lacks mean and std")
        steps += [("subtract", norm["mean"]), ("divide", norm["std"])]
        steps += _clip(norm["clip"] and [-norm["clip"], norm["clip"]], size)
    return steps


def action_steps(action: Mapping[str, Any] | None, size: int) -> list[Step]:
    """From the policy's action to the command: squash, scale, offset, clip where not inside; the bounds last."""
    if action is None:
        return []
    stated = [name for name in ("squash", "scale", "offset", "clip") if action[name] not in (None, "none")]
    if action["inside"] is None and stated:
        raise ValueError(
            f"the contract states the action's {stated}, and not which of them the policy performs (inside)"
        )
    left = [name for name in stated if name not in action["inside"]]
    steps: list[Step] = [(action["squash"],)] if "squash" in left else []
    steps += _each("multiply", action["scale"] if "scale" in left else None, size)
    steps += _each("add", action["offset"] if "offset" in left else None, size)
    steps += _clip(action["clip"] if "clip" in left else None, size)
    for name, bound, far in (("maximum", action["low"], -math.inf), ("minimum", action["high"], math.inf)):
        steps += [(name, [far if v is None else v for v in bound])] if bound else []
    return steps


def cpp_lines(steps: Sequence[Step], place: str, size: int) -> str:
    """The steps of ``size`` entries of an array, a statement each."""
    lines = []
    for name, *values in steps:
        for i in range(size):
            if not values or math.isfinite(values[0][i]):
                x = f"{place}[{i}]"
                v = f"static_cast<float>({values[0][i]!r})" if values else ""
                lines.append(f"    {x} = {CPP[name].format(x=x, v=v)};")
    return "\n".join(lines)


def _each(name: str, values: Any, size: int) -> list[Step]:
    if values is None:
        return []
    return [(name, list(values) if isinstance(values, list) else [values] * size)]


def _clip(bounds: Any, size: int) -> list[Step]:
    return [("maximum", [bounds[0]] * size), ("minimum", [bounds[1]] * size)] if bounds else []
