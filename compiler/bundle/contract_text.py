"""The contract of a bundle as a page for people: what goes in, what comes out, and how to call it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphrl.compiler.bundle.contract import FIRST_STEP

__all__ = ["closed_loop_text", "contract_text", "entry_names"]


def contract_text(manifest: Mapping[str, Any]) -> str:
    """Markdown written from a finished manifest; a field nobody filled in says "not stated"."""
    contract = manifest["contract"]
    parts = [
        "# Contract of this policy",
        f"Contract hash `{manifest['contract_hash']}`. It stands in every file that carries data.",
        _general(contract),
        "## Observation",
        *_observations(manifest),
        "## Action",
        *_action(manifest),
        "## State",
        _state(manifest),
        "## Accuracy",
        _accuracy(manifest),
        "## Calling it",
        *_calls(manifest),
    ]
    return "\n\n".join(parts) + "\n"


def entry_names(contract: Mapping[str, Any], key: str, size: int) -> list[str]:
    """The name of each entry of an input or output: the contract's, else ``key[i]``."""
    terms = [*(contract["observations"] or ()), *([contract["action"]] if contract["action"] else [])]
    for term in terms:
        if term["key"] == key:
            names = term["names"] or term.get("joint_names")
            if names:
                return list(names)
    return [f"{key}[{i}]" for i in range(size)]


def _general(contract: Mapping[str, Any]) -> str:
    ranges = contract["command_ranges"]
    rows = [
        ("rate", f"{contract['rate_hz']!r} Hz" if contract["rate_hz"] is not None else None),
        ("simulator steps a control step", contract["decimation"]),
        ("dtype", contract["dtype"]),
        ("quaternion order", contract["quaternion_order"]),
        ("command ranges", "; ".join(f"{k}: {a!r} to {b!r}" for k, (a, b) in ranges.items()) if ranges else None),
        ("notes", contract["notes"]),
    ]
    return _table(("", ""), rows)


def _observations(manifest: Mapping[str, Any]) -> list[str]:
    contract = manifest["contract"]
    terms = {t["key"]: t for t in contract["observations"] or ()}
    carried = {s["key"] for s in contract["recurrent"] or ()}
    parts = []
    for port in manifest["inputs"]:
        if port["key"] in carried:
            continue
        term = terms.get(port["key"], {})
        parts.append(f"### `{port['key']}`: {port['dtype']} {_shape(port)}")
        fields = (
            "unit",
            "frame",
            "scale",
            "clip",
            "bounds_from",
            "history_length",
            "history_order",
            "history_reset_fill",
        )
        parts.append(_table(("", ""), [(f.replace("_", " "), _whole(f, term)) for f in fields]))
        size, norm = math.prod(port["shape"]), term.get("normalizer") or {}
        each = [_each(f, term) for f in ("unit", "frame", "scale", "low", "high")]
        columns = [*each, norm.get("mean"), norm.get("std")]
        parts.append(f"Normalised: {_where(norm.get('where'))}" + _epsilon(norm))
        parts.append(f"What to give: {_given(term, norm)}.")
        if term.get("names") or any(columns):
            names = entry_names(contract, port["key"], size)
            parts.append(_entries(("name", "unit", "frame", "scale", "low", "high", "mean", "std"), names, columns))
    return parts or ["None."]


def _each(field: str, term: Mapping[str, Any]) -> Any:
    """A field with a value an entry: it stands in the table of entries."""
    return term.get(field) if isinstance(term.get(field), list) else None


def _whole(field: str, term: Mapping[str, Any]) -> Any:
    """A field with one value for all entries; ``clip`` is a pair."""
    return term.get(field) if field == "clip" or _each(field, term) is None else "each its own, below"


def _given(term: Mapping[str, Any], norm: Mapping[str, Any]) -> str:
    """The caller's steps on an observation, as a formula."""
    value = "sensor" + (" * scale" if term.get("scale") is not None else "")
    value = f"clip({value}, {term['clip'][0]!r}, {term['clip'][1]!r})" if term.get("clip") else value
    if norm.get("where") == "outside":
        value = f"({value} - mean) / std"
        value = f"clip({value}, -{norm['clip']!r}, {norm['clip']!r})" if norm.get("clip") else value
    low_high = " low and high below are of this value, not of the sensor's" if value != "sensor" else ""
    return f"`{value}`" + (f";{low_high}" if low_high and (term.get("low") or term.get("high")) else "")


def _where(where: str | None) -> str:
    told = {"inside": "inside the program: give raw values.", "none": "nowhere: the network reads raw values.",
            "outside": "by the caller, before the call: (x - mean) / std."}  # fmt: skip
    return told.get(where or "", "not stated.")


def _epsilon(norm: Mapping[str, Any]) -> str:
    parts = [f" std contains epsilon {norm['epsilon']!r} (added to the variance)."] if norm.get("epsilon") else []
    parts += [f" The result is clipped to -{norm['clip']!r} and {norm['clip']!r}."] if norm.get("clip") else []
    return "".join(parts)


def _action(manifest: Mapping[str, Any]) -> list[str]:
    contract = manifest["contract"]
    action = contract["action"] or {}
    written = {s["next_key"] for s in contract["recurrent"] or ()}
    parts = []
    for port in manifest["outputs"]:
        if port["key"] in written:
            continue
        parts.append(f"### `{port['key']}`: {port['dtype']} {_shape(port)}")
        if not action or port["key"] != action["key"]:
            continue
        inside = action["inside"]
        rows = [(f, _whole(f, action)) for f in ("unit", "squash", "scale", "offset", "clip")]
        rows += [("done inside the program", None if inside is None else ", ".join(inside) or "none of these steps")]
        rows += [(f.replace("_", " "), action[f]) for f in ("previous_action", "previous_action_initial")]
        parts.append(_table(("", ""), rows))
        parts.append(_command(action))
        fields = ("unit", "scale", "offset", "joint_names", "low", "high", "default_pose", "kp", "kd")
        columns = [_each(f, action) for f in fields]
        if action["names"] or any(columns):
            names = entry_names(contract, port["key"], math.prod(port["shape"]))
            head = [f.replace("_", " ") for f in fields]
            parts.append(_entries(("name", *head), names, columns))
    return parts


def _command(action: Mapping[str, Any]) -> str:
    """The caller's steps on the action, as a formula."""
    stated = [n for n in ("squash", "scale", "offset", "clip") if action[n] not in (None, "none")]
    if action["inside"] is None and stated:
        return "Which of these steps the program performs is not stated."
    left = [n for n in stated if n not in (action["inside"] or ())]
    value = "action"
    value = f"{action['squash']}({value})" if "squash" in left else value
    value += " * scale" if "scale" in left else ""
    value += " + offset" if "offset" in left else ""
    value = f"clip({value}, {action['clip'][0]!r}, {action['clip'][1]!r})" if "clip" in left else value
    return f"The command to the motors: `{value}`."


def _state(manifest: Mapping[str, Any]) -> str:
    recurrent = manifest["contract"]["recurrent"]
    if not recurrent:
        return "None: an action depends on one observation alone."
    ports = {p["key"]: p for p in manifest["inputs"]}
    rows = [(f"`{s['key']}`", f"`{s['next_key']}`", _shape(ports[s["key"]]), repr(s["initial"]),
             _said(s["reset_rule"])) for s in recurrent]  # fmt: skip
    flags = [f"`{s['key']}`" for s in recurrent if s["reset_rule"] == FIRST_STEP]
    told = ""
    if flags:
        told = f" {' and '.join(flags)}: true after a reset, false after a step. Nobody has to give it; whoever puts "
        told += "values of their own into the state of the C clears it."
    return f"Carried by every runtime itself; call its reset at the start of an episode.{told}\n\n" + _table(
        ("read at", "written at", "shape", "initial value", "reset rule"), rows
    )


def _accuracy(manifest: Mapping[str, Any]) -> str:
    parity = manifest["reports"]["parity"]
    names = list(parity["max_relative_error"])
    columns = ("max_relative_error", "max_absolute_error", "sequence_relative_error")
    rows = [(n, *("" if parity[c][n] is None else f"{parity[c][n]:.1e}" for c in columns)) for n in names]
    scale = ", ".join(f"`{k}` {v:.3g}" for k, v in parity["scale"].items())
    moved, weights = parity.get("rounding"), ""
    if moved is not None:
        most = max(moved["relative"], moved["sequence"] or 0.0)
        weights = (
            f" Weights are rounded to {manifest['weights']}, in every runtime and in this reference; rounding them "
            f"moved the action by {most:.1e} of its spread at most ({moved['absolute']:.1e} in its unit). "
            f"Allowed: {moved['allowed']!r} relative."
        )
    steps = f", and on a sequence of {parity['sequence_steps']} steps" if parity["sequence_steps"] else ""
    told = (
        f"Largest errors against float64 on {parity['rows']} golden rows{steps}; relative to the output's usual size "
        f"({scale}). Allowed: {parity['tolerance']!r} relative.{weights}"
    )
    loop = parity.get("closed_loop")
    parts = [told, _table(("runtime", "relative", "absolute", "relative, sequence"), rows)]
    return "\n\n".join(parts + ([f"In its environment: {closed_loop_text(loop)}."] if loop else []))


def closed_loop_text(loop: Mapping[str, Any]) -> str:
    """Returns of a bundle and of the eager policy in the environment, and the largest error of an action, as a line."""
    returns = ", ".join(f"{name} {r['mean']:.2f} +- {r['std']:.2f}" for name, r in loop["return"].items())
    if loop["runtime"] is None:
        return f"return {returns}; no runtime of the bundle works here"
    return (
        f"return {returns} over {loop['episodes']} episodes; largest error of an action "
        f"{loop['max_relative_error']:.1e} of its usual size, on {loop['judged_steps']} of {loop['steps']} steps"
    )


def _calls(manifest: Mapping[str, Any]) -> list[str]:
    parts = []
    carried = {s["key"] for s in manifest["contract"]["recurrent"] or ()}
    written = {s["next_key"] for s in manifest["contract"]["recurrent"] or ()}
    if "numpy" in manifest["targets"]:
        keys = [p["key"] for p in manifest["inputs"] if p["key"] not in carried]
        observation = "{" + ", ".join(f'"{k}": ...' for k in keys) + "}"
        outputs = [p["key"] for p in manifest["outputs"] if p["key"] not in written]
        lines = ["from runtime import Policy", "", 'policy = Policy.load(".")', "policy.reset()"]
        lines += [f"result = policy.step({observation})", *(f'result["{k}"]' for k in outputs)]
        parts.append("Python, numpy only, in this folder:\n\n```python\n" + "\n".join(lines) + "\n```")
    interface = manifest["c"]
    if interface:
        p = interface["prefix"]
        sides = [[m for m in interface[s] if m["place"] == w] for s, w in (("inputs", "obs"), ("outputs", "command"))]
        lines = [f'#include "{p}.h"', "", f"static {p}_state state;", f"{p}_obs obs;", f"{p}_command command;"]
        lines += [f"{p}_init(&state);", *(f"/* fill obs.{m['name']}[{m['size']}] */" for m in sides[0])]
        lines += [f"uint32_t status = {p}_step(&state, &obs, &command); /* 0 is well */"]
        lines += [f"/* read command.{m['name']}[{m['size']}] */" for m in sides[1]]
        parts.append(
            f"C99: compile `c/{p}.c` with any compiler, and `{p}_reset(&state)` starts an episode.\n\n"
            "```c\n" + "\n".join(lines) + "\n```"
        )
    parts.append("Status bits: 1 non-finite input, 2 non-finite output, 4 an observation beyond its low or high.")
    return parts


def _shape(port: Mapping[str, Any]) -> str:
    shape = list(port["shape"])
    return str(shape[1:] if shape[:1] == [1] and len(shape) > 1 else shape)  # of one row, as every runtime takes it


def _said(value: Any) -> str:
    if value is None:
        return "not stated"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(_said(v) for v in row)} |" for row in rows])


def _entries(head: Sequence[str], names: Sequence[str], columns: Sequence[Sequence[Any] | None]) -> str:
    """A row an entry; columns that are null throughout are left out."""
    kept = [(title, values) for title, values in zip(head[1:], columns, strict=True) if values]
    rows = [(i, name, *(values[i] for _, values in kept)) for i, name in enumerate(names)]
    return _table(("", head[0], *(title for title, _ in kept)), rows)
