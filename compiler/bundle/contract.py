"""The contract of a deployed policy: what a robot must agree on with training, each field filled or plainly null."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from graphrl.compiler.bundle.runtime import hash_json
from graphrl.errors import ContractError, did_you_mean
from graphrl.keys import Key, encode_key

__all__ = ["ActionContract", "Contract", "Normalizer", "ObservationTerm", "RecurrentState"]

Numbers = tuple[float, ...]
Bounds = tuple[float | None, ...]
"""A limit an entry; ``None`` where an entry has none."""
Labels = tuple[str | None, ...] | str
"""One for all entries, or one an entry."""
FIRST_STEP = "first step"
"""The rule of a state that is true on an episode's first step and false afterwards: what training calls ``is_init``."""


class _Typed:
    """A dataclass that refuses values of another type than its fields say, and numbers that are not finite."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not _fits(value, hints[field.name]):
                words = "Literal" in str(hints[field.name]) and isinstance(value, (tuple, list))
                raise ContractError(
                    f"{type(self).__name__}: {field.name} is {tuple(value) if words else _shown(value)}; "
                    f"expected {_named(hints[field.name])}." + _nearest(value, hints[field.name])
                )
            if any(not math.isfinite(number) for number in _numbers(value)):
                raise ContractError(
                    f"{type(self).__name__}: {field.name} is {value}; expected finite numbers, None where there is none"
                )


@dataclass(frozen=True)
class Normalizer(_Typed):
    """How an observation is normalised. ``where``: ``"inside"`` the program, ``"outside"`` by the caller, ``"none"``

    y = clamp((x - mean) / std, -clip, clip); ``epsilon``: what was added to the variance, already part of ``std``.
    """

    where: Literal["inside", "outside", "none"] = "none"
    mean: Numbers | None = None
    std: Numbers | None = None
    epsilon: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least("Normalizer: std", self.std, 0, above=True)
        _check_least("Normalizer: epsilon", self.epsilon, 0)
        _check_least("Normalizer: clip", self.clip, 0, above=True)


@dataclass(frozen=True)
class ObservationTerm(_Typed):
    """One input: its key, the order and names of its entries, and what was done to it before training saw it.

    ``scale``, then ``clip``: by the caller, before the call. ``low``, ``high``: an entry beyond them sets status bit 4;
    ``bounds_from`` tells where they come from: ``"stated"`` by sensor or environment, or ``"recorded"`` data. A window
    of ``history_length`` observations is the policy's own state, or, where it has none, the first dim of ``shape``.
    ``history_reset_fill``: what fills it at first, ``"first observation"`` or ``"constant 0"``, any number.
    """

    key: Key
    names: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None
    unit: Labels | None = None
    frame: Labels | None = None
    scale: Numbers | float | None = None
    clip: tuple[float, float] | None = None
    low: Bounds | None = None
    high: Bounds | None = None
    bounds_from: Literal["stated", "recorded"] | None = None
    normalizer: Normalizer | None = None
    history_length: int | None = None
    history_order: Literal["oldest_first", "newest_first"] | None = None
    history_reset_fill: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"observation {self.key!r}"
        _check_names(encode_key(self.key), self.names)
        _check_pair(f"{what}: low and high", self.low, self.high)
        _check_clip(f"{what}: clip", self.clip)
        _check_least(f"{what}: shape", self.shape, 0)
        _check_least(f"{what}: history_length", self.history_length, 1)
        fill = self.history_reset_fill
        if (
            fill is not None
            and fill != "first observation"
            and not re.fullmatch(r"constant -?\d+(\.\d+)?(e[+-]?\d+)?", fill)
        ):
            raise ContractError(f"{what}: history_reset_fill is {fill!r}; expected 'first observation' or 'constant 0'")


@dataclass(frozen=True)
class ActionContract(_Typed):
    """The output: names in order, bounds, and the steps between the network's number and the motor's command.

    command = clip(squash(x) * scale + offset). ``inside``: those of ``"squash" "scale" "offset" "clip"`` that the
    program performs, with the numbers stated; the caller does the others. ``squash="none"``: there is none.
    ``low``, ``high``: what the command can be after all of them, not the joint's mechanical limits. ``default_pose``:
    the joints at rest, added to nothing: an action relative to it has it as ``offset`` too.
    """

    key: Key = "action"
    names: tuple[str, ...] | None = None
    unit: Labels | None = None
    low: Bounds | None = None
    high: Bounds | None = None
    squash: Literal["tanh", "sigmoid", "none"] | None = None
    scale: Numbers | float | None = None
    offset: Numbers | float | None = None
    clip: tuple[float, float] | None = None
    inside: tuple[Literal["squash", "scale", "offset", "clip"], ...] | None = None
    joint_names: tuple[str, ...] | None = None
    default_pose: Numbers | None = None
    kp: Numbers | None = None
    kd: Numbers | None = None
    previous_action: Literal["raw", "clipped"] | None = None
    previous_action_initial: Numbers | float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names(encode_key(self.key), self.names)
        _check_names(f"{encode_key(self.key)}: joint_names", self.joint_names)
        _check_pair("action: low and high", self.low, self.high)
        _check_clip("action: clip", self.clip)
        _check_least("action: kp", self.kp, 0)
        _check_least("action: kd", self.kd, 0)


@dataclass(frozen=True)
class RecurrentState(_Typed):
    """A value carried from one step to the next: read at ``key``, written at ``next_key``; ``initial`` on reset.

    shape: without a batch dim. initial: a number, or one for each entry. reset_rule: what the state is on an episode's
    first step, in words where that is not ``initial``.
    """

    key: Key
    next_key: Key
    initial: float | Numbers = 0.0
    reset_rule: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Contract(_Typed):
    """What a robot must know to run a policy. Fields left ``None`` are written as null: known to be unknown.

    rate_hz: control steps a second. decimation: simulator steps a control step. observations: the declared sensors, in
    order; with them, an input that is not declared stops the export. quaternion_order: ``"wxyz"`` or ``"xyzw"``.
    command_ranges: name to (low, high). Raises :class:`ContractError` for values that contradict each other.
    ``docs/contract.schema.json`` describes every field.
    """

    rate_hz: float | None = None
    decimation: int | None = None
    observations: tuple[ObservationTerm, ...] | None = None
    action: ActionContract | None = None
    recurrent: tuple[RecurrentState, ...] | None = None
    quaternion_order: Literal["wxyz", "xyzw"] | None = None
    command_ranges: Mapping[str, tuple[float, float]] | None = None
    dtype: Literal["float32"] = "float32"
    notes: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least("rate_hz", self.rate_hz, 0, above=True)
        _check_least("decimation", self.decimation, 1)
        for what, stated in (("observations", self.observations), ("recurrent", self.recurrent)):
            _check_names(what, [encode_key(part.key) for part in stated or ()])
        for name, limits in (self.command_ranges or {}).items():
            _check_clip(f"command_ranges: {name!r}", limits)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, every field present."""
        data = asdict(self)
        for term in data["observations"] or ():
            term["key"] = encode_key(term["key"])
        if data["action"]:
            data["action"]["key"] = encode_key(data["action"]["key"])
        for state in data["recurrent"] or ():
            state["key"], state["next_key"] = encode_key(state["key"]), encode_key(state["next_key"])
        return json.loads(json.dumps(data))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contract:
        """The inverse of :meth:`as_dict`; fields may be left out. Raises :class:`ContractError` for an unknown one."""
        from graphrl.compiler.bundle.contract_file import contract_from_dict

        return contract_from_dict(data)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of :meth:`as_dict`, which is the contract in a bundle's manifest."""
        from graphrl.compiler.bundle.contract_schema import contract_schema

        return contract_schema()

    def sha256(self) -> str:
        """The contract hash that stands in every file of a bundle."""
        return hash_json(self.as_dict())


def with_shapes(contract: Contract, shapes: Mapping[Key, tuple[int, ...]]) -> Contract:
    """The contract with the program's shapes, by key, where it states none; bounds without a source are stated ones."""
    terms = contract.observations and tuple(
        replace(
            t,
            shape=shapes.get(t.key) if t.shape is None else t.shape,
            bounds_from="stated" if t.bounds_from is None and (t.low or t.high) else t.bounds_from,
        )
        for t in contract.observations
    )
    states = contract.recurrent and tuple(
        replace(s, shape=shapes.get(s.key) if s.shape is None else s.shape) for s in contract.recurrent
    )
    return replace(contract, observations=terms, recurrent=states)


def check_against(contract: Contract, inputs: Mapping[Key, int], action_key: Key, action_size: int) -> None:
    """Raise :class:`ContractError` where ``contract`` contradicts the program (inputs: key to size)."""
    recurrent = [s.key for s in contract.recurrent or ()]
    if contract.observations is not None:
        declared = [t.key for t in contract.observations]
        spare = [key for key in declared if key not in inputs]
        for key in inputs:
            if key not in declared and key not in recurrent:
                raise ContractError(
                    f"the policy reads {key!r}, which is not among the contract's observations {declared}: a "
                    f"privileged input left in? Declare it, or leave it out.{did_you_mean(key, spare)}"
                )
        for key in declared:
            if key not in inputs:
                raise ContractError(
                    f"the contract has observation {key!r}, but the policy reads {list(inputs)}."
                    + did_you_mean(key, [k for k in inputs if k not in declared])
                )
        for term in contract.observations:
            _check_sizes(term, inputs[term.key])
    for state in contract.recurrent or ():
        if not isinstance(state.initial, (int, float)) and state.key in inputs:
            _check_length(f"recurrent state {state.key!r}: initial", state.initial, inputs[state.key])
    if contract.action is not None:
        if contract.action.key != action_key:
            raise ContractError(f"the contract's action is {contract.action.key!r}, the bundle's {action_key!r}")
        for name in ("names", "unit", "low", "high", "scale", "offset", "joint_names", "default_pose", "kp", "kd",
                     "previous_action_initial"):  # fmt: skip
            _check_length(f"action: {name}", getattr(contract.action, name), action_size)


def _check_sizes(term: ObservationTerm, size: int) -> None:
    what = f"observation {term.key!r}"
    for name in ("names", "unit", "frame", "scale", "low", "high"):
        _check_length(f"{what}: {name}", getattr(term, name), size)
    if term.normalizer is not None:
        for name in ("mean", "std"):
            _check_length(f"{what}: normalizer.{name}", getattr(term.normalizer, name), size)
    if term.shape is not None and math.prod(term.shape) != size:
        raise ContractError(f"{what}: shape {list(term.shape)} has {math.prod(term.shape)} entries, the policy {size}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; a list passes for a tuple, an integer for a float."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if origin is Literal:
        return isinstance(value, str) and value in inner
    wanted = (int, float) if hint is float else hint
    return isinstance(value, wanted) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """The type of a value; for a sequence also those of its entries; a text itself."""
    name = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        name += f" of {', '.join(sorted({type(v).__name__ for v in value})) or 'nothing'} ({len(value)})"
    return name


def _named(hint: Any) -> str:
    """An annotation as a user would import it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_named, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if i is Ellipsis else _named(i) for i in inner)}]"
    if hint is type(None):
        return "None"
    return f"graphrl.compiler.bundle.{hint.__name__}" if issubclass(hint, _Typed) else str(hint.__name__)


def _nearest(value: Any, hint: Any) -> str:
    """A hint where a word was given, and the field takes one of a few others."""
    inner = get_args(hint)
    if get_origin(hint) is not Literal:
        return next(filter(None, (_nearest(value, option) for option in inner)), "")
    for word in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(word, str) and word not in inner:
            squash = f" {word!r} is a squash: inside=('squash',), squash={word!r}." if "squash" in inner else ""
            return did_you_mean(word, inner) or (squash if word in ("tanh", "sigmoid") else "")
    return ""


def _check_names(what: str, names: Sequence[str] | None) -> None:
    for name in names or ():
        if list(names or ()).count(name) > 1:
            raise ContractError(f"{what}: the name {name!r} stands twice; names must tell entries apart")


def _numbers(value: Any) -> list[float]:
    """Every float in a value, in whatever it is nested."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [number for part in value for number in _numbers(part)]
    return [value] if isinstance(value, float) else []


def _check_least(what: str, value: Any, least: float, above: bool = False) -> None:
    for number in value if isinstance(value, (tuple, list)) else (value,):
        if number is not None and (number < least or (above and number == least)):
            raise ContractError(f"{what} is {value}; expected {'more than' if above else 'at least'} {least}")


def _check_pair(what: str, low: Sequence[float | None] | None, high: Sequence[float | None] | None) -> None:
    if low is None or high is None:
        return
    if len(low) != len(high):
        raise ContractError(f"{what} have {len(low)} and {len(high)} entries")
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if a is not None and b is not None and a > b:
            raise ContractError(f"{what}: entry {i} is {a} to {b}; expected low <= high")


def _check_clip(what: str, limits: Sequence[float] | None) -> None:
    if limits is not None and not limits[0] < limits[1]:
        raise ContractError(f"{what} is {tuple(limits)}; expected (low, high) with low < high")


def _check_length(what: str, values: Any, size: int) -> None:
    if isinstance(values, (tuple, list)) and len(values) != size:
        raise ContractError(f"{what} has {len(values)} entries, the policy has {size}")
