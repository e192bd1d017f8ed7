"""Policy bundles: everything a robot needs to run a traced policy, and the proof that it runs the same policy.

``export`` needs torch; ``load``, ``verify`` and ``CPolicy`` need numpy and a C compiler only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphrl.compiler.bundle.c_policy import CPolicy
from graphrl.compiler.bundle.contract import ActionContract, Contract, Normalizer, ObservationTerm, RecurrentState
from graphrl.compiler.bundle.load import Bundle, load
from graphrl.compiler.bundle.verify import Verification, verify

if TYPE_CHECKING:
    from graphrl.compiler.bundle.write import export

__all__ = [
    "ActionContract",
    "Bundle",
    "CPolicy",
    "Contract",
    "Normalizer",
    "ObservationTerm",
    "RecurrentState",
    "Verification",
    "export",
    "load",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "export":
        from graphrl.compiler.bundle.write import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
