"""Keys: a string, or a tuple of strings for a nested entry, as TensorDict has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from graphrl.errors import GraphError

__all__ = ["DISCARD", "Key", "decode_key", "encode_key", "next_key", "normalize_key", "normalize_keys"]

Key: TypeAlias = "str | tuple[str, ...]"

DISCARD = "_"
"""An output named ``"_"`` is computed and thrown away."""


def normalize_key(key: object) -> Key:
    """Return ``key`` in its one canonical form: ``"a"``, or ``("a", "b")`` for a nested entry.

    Raises :class:`GraphError` for anything that is not a non-empty string or a (nested) tuple of them.
    """
    if isinstance(key, str) and key:
        return key
    if isinstance(key, tuple) and key:
        flat: list[str] = []
        for part in key:
            inner = normalize_key(part)
            flat.extend((inner,) if isinstance(inner, str) else inner)
        return flat[0] if len(flat) == 1 else tuple(flat)
    raise GraphError(
        f"{key!r} ({type(key).__name__}) is not a key: expected a non-empty string, "
        "or a tuple of strings for a nested entry, such as ('next', 'observation')"
    )


def normalize_keys(keys: object) -> list[Key]:
    """Canonical list of keys from one string, or from a list of keys. A tuple is one nested key, as in TensorDict."""
    if isinstance(keys, (str, tuple)):
        return [normalize_key(keys)]
    if not isinstance(keys, Iterable):
        raise GraphError(f"{keys!r} ({type(keys).__name__}) is not a list of keys: expected e.g. ['observation']")
    return [normalize_key(k) for k in keys]


def next_key(key: Key) -> Key:
    """Where the value of ``key`` after the step stands: ``("next", "observation")``."""
    return ("next", *((key,) if isinstance(key, str) else key))


def encode_key(key: Key) -> str:
    """Flat, reversible name of a key: parts joined by ``/``, with ``~`` and ``/`` escaped as in RFC 6901.

    ``"a.b" -> "a.b"``, ``("a", "b") -> "a/b"``, ``"a/b" -> "a~1b"``: different keys never share a name.
    """
    parts: Sequence[str] = (key,) if isinstance(key, str) else key
    return "/".join(p.replace("~", "~0").replace("/", "~1") for p in parts)


def decode_key(name: str) -> Key:
    """Inverse of :func:`encode_key`."""
    return normalize_key(tuple(p.replace("~1", "/").replace("~0", "~") for p in name.split("/")))
