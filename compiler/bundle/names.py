"""C names for keys."""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphrl.errors import BundleError
from graphrl.keys import Key, encode_key

__all__ = ["c_name", "c_names", "check_prefix"]

_RESERVED = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if inline int long register "
    "restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
    "_Bool _Complex _Imaginary bool true false complex imaginary I NULL NAN INFINITY HUGE_VAL HUGE_VALF HUGE_VALL EOF "
    "errno assert offsetof linux unix steps "  # macros, and the step counter of the state struct
    # C++ reads the header too
    "alignas alignof and and_eq asm bitand bitor catch class compl concept const_cast consteval constexpr constinit "
    "co_await co_return co_yield decltype delete dynamic_cast explicit export friend mutable namespace new noexcept "
    "not not_eq nullptr operator or or_eq private protected public reinterpret_cast requires static_assert "
    "static_cast template this thread_local throw try typeid typename using virtual wchar_t xor xor_eq".split()
)
_FILES = ("selftest", "bench")
"""Files of a bundle's C that no prefix may call its own."""


def c_name(key: Key) -> str:
    """A C member name: ``a/b -> a__b``, other characters become ``_uHEX_``, a reserved word gets ``_`` behind."""
    name = "".join(
        "__" if c == "/" else c if c == "_" or (c.isascii() and c.isalnum()) else f"_u{ord(c):X}_"
        for c in encode_key(key)
    )
    name = f"k_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in _RESERVED else name


def c_names(keys: Sequence[Key]) -> list[str]:
    """One name a key; the manifest lists both, so the way back is a look-up. Raises where two keys would share one."""
    names: dict[str, Key] = {}
    for key in keys:
        name = c_name(key)
        if name in names:
            raise BundleError(f"keys {names[name]!r} and {key!r} would both be called {name} in C: rename one of them")
        names[name] = key
    return list(names)


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that cannot start C identifiers and file names."""
    if prefix in _FILES:
        raise BundleError(f"prefix {prefix!r} is the name of another file of the bundle: choose another")
    if not isinstance(prefix, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", prefix) or prefix in _RESERVED:
        raise BundleError(
            f"prefix {prefix!r} cannot start C names: expected a letter, then at most 63 letters, digits and _"
        )
