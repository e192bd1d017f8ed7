"""The contract of a deployed policy: what a robot must agree on with training, each field filled or plainly null."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from graphrl.errors import ContractError, did_you_mean
from graphrl.keys import Key, encode_key

__all__ = ["ActionContract", "Contract", "Normalizer", "ObservationTerm", "RecurrentState"]

Numbers = tuple[float, ...]
FIRST_STEP = "first step"
"""The rule of a state that is true on an episode's first step and false afterwards: what training calls ``is_init``."""


class _Typed:
    """A dataclass that refuses values of another type than its fields say."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not _fits(value, hints[field.name]):
                raise ContractError(
                    f"{type(self).__name__}: {field.name} is {_shown(value)}; expected {_named(hints[field.name])}"
                )


@dataclass(frozen=True)
class Normalizer(_Typed):
    """How an observation is normalised. ``where``: ``"inside"`` the program, ``"outside"`` by the caller, ``"none"``

    y = (x - mean) / std; ``epsilon``: what was added to the variance, already part of ``std``.
    """

    where: str = "none"
    mean: Numbers | None = None
    std: Numbers | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class ObservationTerm(_Typed):
    """One input: its key, the order and names of its entries, and what was done to it before training saw it.

    A history that the policy keeps itself is told here too; the input is then one observation.
    """

    key: Key
    names: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None
    unit: str | None = None
    frame: str | None = None
    scale: Numbers | float | None = None
    clip: tuple[float, float] | None = None
    low: Numbers | None = None
    high: Numbers | None = None
    normalizer: Normalizer | None = None
    history_length: int | None = None
    history_order: str | None = None
    history_reset_fill: str | None = None


@dataclass(frozen=True)
class ActionContract(_Typed):
    """The output: names in order, bounds, and the steps between the network's number and the motor's command.

    ``inside``: those of ``"squash" "scale" "offset" "clip"`` that the program performs; the caller does the others.
    """

    key: Key = "action"
    names: tuple[str, ...] | None = None
    unit: str | None = None
    low: Numbers | None = None
    high: Numbers | None = None
    squash: str | None = None
    scale: Numbers | float | None = None
    offset: Numbers | float | None = None
    clip: tuple[float, float] | None = None
    inside: tuple[str, ...] | None = None
    joint_names: tuple[str, ...] | None = None
    default_pose: Numbers | None = None
    kp: Numbers | None = None
    kd: Numbers | None = None
    previous_action: str | None = None  # "raw" or "clipped", when it is an observation
    previous_action_initial: Numbers | float | None = None


@dataclass(frozen=True)
class RecurrentState(_Typed):
    """A value carried from one step to the next: read at ``key``, written at ``next_key``; ``initial`` on reset.

    initial: a number, or one for each entry. reset_rule: what the state is on an episode's first step, in words where
    that is not ``initial``.
    """

    key: Key
    next_key: Key
    initial: float | Numbers = 0.0
    reset_rule: str | None = None


@dataclass(frozen=True)
class Contract(_Typed):
    """What a robot must know to run a policy. Fields left ``None`` are written as null: known to be unknown.

    rate_hz: control steps a second. decimation: simulator steps a control step. observations: the declared sensors, in
    order; with them, an input that is not declared stops the export. quaternion_order: ``"wxyz"`` or ``"xyzw"``.
    command_ranges: name to (low, high). Raises :class:`ContractError` for values that contradict each other.
    """

    rate_hz: float | None = None
    decimation: int | None = None
    observations: tuple[ObservationTerm, ...] | None = None
    action: ActionContract | None = None
    recurrent: tuple[RecurrentState, ...] | None = None
    quaternion_order: str | None = None
    command_ranges: Mapping[str, tuple[float, float]] | None = None
    dtype: str = "float32"
    notes: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_hz is not None and not self.rate_hz > 0:
            raise ContractError(f"rate_hz is {self.rate_hz}: expected a positive number of control steps a second")
        if self.quaternion_order not in (None, "wxyz", "xyzw"):
            raise ContractError(f"quaternion_order is {self.quaternion_order!r}: expected 'wxyz', 'xyzw' or None")
        if self.dtype != "float32":
            raise ContractError(f"dtype is {self.dtype!r}: a bundle computes in float32")
        for term in self.observations or ():
            _check_names(encode_key(term.key), term.names)
            if term.normalizer is not None and term.normalizer.where not in ("inside", "outside", "none"):
                raise ContractError(
                    f"normalizer of {term.key!r} is {term.normalizer.where!r}: expected 'inside', 'outside' or 'none'"
                )
        if self.action is not None:
            _check_names(encode_key(self.action.key), self.action.names)

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

    def sha256(self) -> str:
        """The contract hash that stands in every file of a bundle."""
        return hash_contract(self.as_dict())


def hash_contract(data: Mapping[str, Any]) -> str:
    """Hash of a contract's plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_against(contract: Contract, inputs: Mapping[Key, int], action_key: Key, action_size: int) -> None:
    """Raise :class:`ContractError` where ``contract`` contradicts the program (inputs: key to size)."""
    recurrent = [s.key for s in contract.recurrent or ()]
    if contract.observations is not None:
        declared = [t.key for t in contract.observations]
        for key in inputs:
            if key not in declared and key not in recurrent:
                raise ContractError(
                    f"the policy reads {key!r}, which is not among the contract's observations {declared}: a "
                    f"privileged input left in? Declare it, or leave it out.{did_you_mean(key, declared)}"
                )
        for key in declared:
            if key not in inputs:
                raise ContractError(
                    f"the contract has observation {key!r}, but the policy reads {list(inputs)}."
                    + did_you_mean(key, inputs)
                )
        for term in contract.observations:
            for name in ("names", "low", "high"):
                _check_length(f"observation {term.key!r}: {name}", getattr(term, name), inputs[term.key])
            if term.normalizer is not None:
                _check_length(f"observation {term.key!r}: normalizer.mean", term.normalizer.mean, inputs[term.key])
                _check_length(f"observation {term.key!r}: normalizer.std", term.normalizer.std, inputs[term.key])
    for state in contract.recurrent or ():
        if not isinstance(state.initial, (int, float)) and state.key in inputs:
            _check_length(f"recurrent state {state.key!r}: initial", state.initial, inputs[state.key])
    if contract.action is not None:
        if contract.action.key != action_key:
            raise ContractError(f"the contract's action is {contract.action.key!r}, the bundle's {action_key!r}")
        for name in ("names", "low", "high", "joint_names", "default_pose", "kp", "kd"):
            _check_length(f"action: {name}", getattr(contract.action, name), action_size)


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
    wanted = (int, float) if hint is float else hint
    return isinstance(value, wanted) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """The type of a value; for a sequence also those of its entries."""
    name = f"a {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        name += f" of {', '.join(sorted({type(v).__name__ for v in value})) or 'nothing'} ({len(value)})"
    return name


def _named(hint: Any) -> str:
    """An annotation as a user would import it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_named, inner))
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if i is Ellipsis else _named(i) for i in inner)}]"
    if hint is type(None):
        return "None"
    return f"graphrl.compiler.bundle.{hint.__name__}" if issubclass(hint, _Typed) else str(hint.__name__)


def _check_names(what: str, names: Sequence[str] | None) -> None:
    for name in names or ():
        if list(names or ()).count(name) > 1:
            raise ContractError(f"{what}: the name {name!r} stands twice; names must tell entries apart")


def _check_length(what: str, values: Sequence[Any] | None, size: int) -> None:
    if values is not None and len(values) != size:
        raise ContractError(f"{what} has {len(values)} entries, the policy has {size}")
