"""The JSON Schema of a contract, made from its dataclasses; what each field means stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from graphrl.compiler.bundle.contract import Contract, _Typed

__all__ = ["ABOUT", "contract_schema"]

ABOUT: dict[str, dict[str, str]] = {
    "Contract": {
        "": "What a robot must know to run a policy. Every field is there; null means: not known.",
        "rate_hz": "Control steps a second, in Hz.",
        "decimation": "Simulator steps a control step, in training.",
        "observations": "The sensors that the policy reads, in the order of its inputs.",
        "action": "What the policy writes.",
        "recurrent": "Values that the policy carries from one step to the next; every runtime does it itself.",
        "quaternion_order": "Order of the entries of every quaternion among the observations.",
        "command_ranges": "Commands that training drew, by name: lowest and highest, in the observation's unit.",
        "dtype": "What the policy computes in.",
        "notes": "For people.",
    },
    "ObservationTerm": {
        "": "One input of the policy.",
        "key": "Name of the input; the parts of a nested one are joined by '/'.",
        "names": "Name of each entry, in order.",
        "shape": "Shape of one observation, without a batch dim.",
        "unit": "Physical unit, such as 'rad' or 'm/s': one for all entries, or one an entry.",
        "frame": "Frame of reference, such as 'base' or 'world': one for all entries, or one an entry.",
        "scale": "The caller multiplies by this before the call: one number, or one an entry.",
        "clip": "The caller then clips to [low, high].",
        "low": "Lowest value of each entry, as the policy reads it, in its unit; null for an entry without.",
        "high": "Highest value of each entry, as the policy reads it, in its unit; null for an entry without.",
        "bounds_from": "Where low and high come from: 'stated' by sensor or environment, or 'recorded' data.",
        "normalizer": "How the observation is normalised.",
        "history_length": "Observations in the window that the network sees: the policy's own where it is a recurrent "
        "value, else the first dim of shape.",
        "history_order": "Which end of the window is the newest observation.",
        "history_reset_fill": "What fills it at the start of an episode: 'first observation', or 'constant NUMBER'.",
    },
    "Normalizer": {
        "": "y = clamp((x - mean) / std, -clip, clip).",
        "where": "'inside' the program: give raw values; 'outside': by the caller before the call; 'none': nowhere.",
        "mean": "Mean of each entry, in the observation's unit.",
        "std": "Standard deviation of each entry, in the observation's unit, epsilon within: sqrt(variance + epsilon).",
        "epsilon": "What was added to the variance, in the observation's unit squared.",
        "clip": "Largest size of a normalised entry, without unit.",
    },
    "ActionContract": {
        "": "command = clip(squash(x) * scale + offset), where x is what the network's last layer gives.",
        "key": "Name of the output; the parts of a nested one are joined by '/'.",
        "names": "Name of each entry, in order.",
        "unit": "Physical unit of the command: one for all entries, or one an entry.",
        "low": "Lowest command of each entry, in its unit; null for an entry without.",
        "high": "Highest command of each entry, in its unit; null for an entry without.",
        "squash": "Function that bounds the network's number; 'none' where there is none.",
        "scale": "Factor behind the squash: one number, or one an entry.",
        "offset": "Added after the scale, in the command's unit: one number, or one an entry.",
        "clip": "The command is clipped to [low, high] last.",
        "inside": "Those of the four steps that the program performs; the caller does the others.",
        "joint_names": "The joint that each entry drives.",
        "default_pose": "Position of each driven joint at rest, in rad or m.",
        "kp": "Stiffness of each joint's position loop, in N m/rad or N/m.",
        "kd": "Damping of each joint's position loop, in N m s/rad or N s/m.",
        "previous_action": "Where the action before is an observation: the 'raw' output, or the 'clipped' command.",
        "previous_action_initial": "Its value at the start of an episode: one number, or one an entry.",
    },
    "RecurrentState": {
        "": "A value carried from one step to the next.",
        "key": "Input that reads it; the parts of a nested name are joined by '/'.",
        "next_key": "Output that writes it for the next step.",
        "initial": "Its value at the start of an episode: one number, or one an entry.",
        "reset_rule": "What it is on an episode's first step: 'initial value'; 'first step', a flag that is true then "
        "and false after; 'first input', made of the first observation; or other words.",
        "shape": "Its shape, without a batch dim.",
    },
}
"""What each field means, its unit among it; under ``""`` the whole."""

PLAIN: dict[Any, str] = {float: "number", int: "integer", str: "string", type(None): "null"}


def contract_schema() -> dict[str, Any]:
    """Draft 2020-12: types, allowed texts, a description a field; every field required, no other allowed."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Contract of a policy bundle",
        **_object(Contract),
    }


def _object(kind: type[_Typed]) -> dict[str, Any]:
    hints, about = get_type_hints(kind), ABOUT[kind.__name__]
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    properties = {}
    for name in names:
        of = {"type": "string"} if name in ("key", "next_key") else _schema(hints[name])
        properties[name] = {"description": about[name], **of}
    return {
        "description": about[""],
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def _schema(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(option) for option in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple and inner[-1] is Ellipsis:
        return {"type": "array", "items": _schema(inner[0])}
    if origin is tuple:
        parts = [_schema(part) for part in inner]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(inner[1])}
    if issubclass(hint, _Typed):
        return _object(hint)
    return {"type": PLAIN[hint]}
