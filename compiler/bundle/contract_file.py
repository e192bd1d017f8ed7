"""Contracts as plain data: read from a file, laid over another, and made into a :class:`Contract`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from graphrl.compiler.bundle.contract import Contract, _shown, _Typed
from graphrl.errors import ContractError, did_you_mean
from graphrl.keys import decode_key

__all__ = ["contract_from_dict", "merge_contract", "read_contract_file"]

KEYS = ("key", "next_key")
LISTED = ("observations", "recurrent")
"""Fields whose parts are told apart by their key."""


def read_contract_file(file: str | Path) -> dict[str, Any]:
    """Fields of a contract from a ``.json`` or ``.toml`` file. Raises :class:`ContractError` where it is neither."""
    path = Path(file)
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else _toml(path, text)
    except (OSError, ValueError) as error:
        raise ContractError(f"contract file {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ContractError(f"contract file {path} holds a {type(data).__name__}; expected fields by name")
    return data


def _toml(path: Path, text: str) -> Any:
    if path.suffix != ".toml":
        raise ContractError(f"contract file {path}: expected a name that ends in .json or .toml")
    if sys.version_info < (3, 11):
        raise ContractError(f"{path}: this Python reads no TOML (3.11 does): write the fields as JSON")
    import tomllib

    return tomllib.loads(text)


def merge_contract(contract: Contract, data: Mapping[str, Any]) -> Contract:
    """``contract`` with the fields of ``data`` in their places; a null empties a field.

    Fields of ``action``, and of the observations and recurrent values whose ``key`` is there, replace one by one; a new
    key is appended. Raises :class:`ContractError` for an unknown field, or a value that a contract refuses.
    """
    _check_fields(Contract, data, "")
    base = contract.as_dict()
    for name, value in data.items():
        if name in LISTED and isinstance(value, (list, tuple)):
            base[name] = _merge_parts(name, base[name] or [], value)
        else:
            base[name] = _merge(base[name], value)
    return contract_from_dict(base)


def _merge(base: Any, value: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(value, Mapping):
        return value
    return {**base, **{name: _merge(base.get(name), inner) for name, inner in value.items()}}


def _merge_parts(name: str, base: list[Any], parts: Any) -> list[Any]:
    made = {part["key"]: part for part in base}
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("key"), str):
            raise ContractError(f"contract: an entry of {name} has no key; expected one of {list(made)}, or a new one")
        made[part["key"]] = _merge(made.get(part["key"], {}), part)
    return list(made.values())


def contract_from_dict(data: Mapping[str, Any]) -> Contract:
    """A contract from plain data, keys as ``a/b``; fields left out are null. Raises :class:`ContractError`."""
    return _build(Contract, data, "")  # type: ignore[no-any-return]


def _build(kind: type[_Typed], data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        raise ContractError(f"contract: {place or 'it'} is {_shown(data)}; expected fields by name")
    _check_fields(kind, data, place)
    hints = get_type_hints(kind)
    given = {}
    for name, value in data.items():
        inside = f"{place}.{name}" if place else name
        if name not in KEYS:
            given[name] = _made(hints[name], value, inside)
        elif isinstance(value, str):
            given[name] = decode_key(value)
        else:
            raise ContractError(f"contract: {inside} is {_shown(value)}; expected a text, parts joined by '/'")
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]  # type: ignore[arg-type]
    if needed:
        raise ContractError(f"contract: {place} lacks {needed}")
    return kind(**given)


def _made(hint: Any, value: Any, place: str) -> Any:
    """Plain data as a field of type ``hint`` holds it: lists are tuples, mappings the dataclass that is meant."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        typed = [option for option in inner if _holds_typed(option)]
        return _made(typed[0], value, place) if typed and value is not None else _plain(value)
    if isinstance(hint, type) and issubclass(hint, _Typed):
        return _build(hint, value, place)
    if origin is tuple and _holds_typed(hint) and isinstance(value, (list, tuple)):
        return tuple(_build(inner[0], part, f"{place}[{i}]") for i, part in enumerate(value))
    return _plain(value)


def _holds_typed(hint: Any) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, _Typed) for kind in (hint, *get_args(hint)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _check_fields(kind: type[_Typed], data: Mapping[str, Any], place: str) -> None:
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ContractError(f"contract: {place or kind.__name__} has no field {name!r}; there are {known}.{hint}")
