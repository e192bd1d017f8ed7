"""The errors graphrl raises on purpose. Each message says what was found, what was expected, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BundleError",
    "CheckpointError",
    "CompileError",
    "ContractError",
    "EnvError",
    "GraphError",
    "GraphRLError",
    "KeyMissingError",
    "MissingExtraError",
    "NonFiniteError",
    "ParityError",
    "SpecError",
    "TraceError",
    "did_you_mean",
    "require_extra",
]


class GraphRLError(Exception):
    """Base of every error graphrl raises on purpose."""


class GraphError(GraphRLError, ValueError):
    """A keyed graph that cannot be built or called as asked."""


class KeyMissingError(GraphError, KeyError):
    """A node reads a key that neither the batch nor an earlier node provides."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class SpecError(GraphRLError, ValueError):
    """A tensor whose shape, dtype, device or range is not what its spec or signature says."""


class TraceError(GraphRLError, RuntimeError):
    """A graph or update function that cannot be lowered to one program."""


class CompileError(GraphRLError, RuntimeError):
    """A program that a backend refuses or fails to lower."""


class ParityError(CompileError):
    """A compiled program whose results differ from the eager float reference."""


class NonFiniteError(GraphRLError, FloatingPointError):
    """A NaN or an infinity where training cannot go on."""


class EnvError(GraphRLError, RuntimeError):
    """An environment that cannot be made, or that breaks its contract."""


class CheckpointError(GraphRLError, RuntimeError):
    """A checkpoint that is missing, damaged or belongs to another run."""


class BundleError(GraphRLError, RuntimeError):
    """A policy bundle that cannot be written, or does not verify."""


class ContractError(BundleError):
    """A bundle whose contract is incomplete or contradicts the policy."""


class MissingExtraError(GraphRLError, ImportError):
    """An optional package is not installed."""


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or an empty string."""
    names = {str(k): k for k in known}
    near = difflib.get_close_matches(str(word), list(names), n=1, cutoff=0.5)
    return f" Did you mean {names[near[0]]!r}?" if near else ""


def require_extra(package: str, extra: str) -> None:
    """Raise a one-line :class:`MissingExtraError` with the pip command unless ``package`` can be imported."""
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"{package} is not installed: run  pip install 'graphrl[{extra}]'")
