"""``graphrl verify BUNDLE``: hashes, self-test and golden vectors, in every runtime found here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

__all__ = ["run"]


@dataclass(frozen=True)
class Verify:
    """Check a bundle: every file by its hash, the C by its self-test, each runtime by the golden vectors."""

    bundle: Annotated[str, tyro.conf.Positional]


def run(arguments: list[str]) -> None:
    """Print what was checked; a failure is an error."""
    options = tyro.cli(Verify, prog="graphrl verify", args=arguments)
    from graphrl.compiler.bundle import verify

    print(verify(options.bundle))
