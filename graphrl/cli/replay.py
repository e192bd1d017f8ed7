"""``graphrl replay BUNDLE LOG``: a recorded log through the numpy runtime, to the first step that differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

__all__ = ["run"]


@dataclass(frozen=True)
class Options:
    """Feed a log's observations to a bundle and compare the actions it recorded. Exit code 1 where they part."""

    bundle: Annotated[str, tyro.conf.Positional]
    log: Annotated[str, tyro.conf.Positional]
    """``.npz`` with an array [steps, ...] a key, or ``.csv`` with a column an entry: ``key[i]`` or ``key[name]``."""
    tolerance: float | None = None
    """Allowed error, a part of the output's usual size; default the bundle's own."""


def run(arguments: list[str]) -> int:
    """Print where log and bundle part, and return 1; or how many steps agree."""
    options = tyro.cli(Options, prog="graphrl replay", args=arguments)
    from graphrl.compiler.bundle.load import load
    from graphrl.compiler.bundle.replay import replay

    found = replay(load(options.bundle), options.log, options.tolerance)
    told = f"{found.steps} steps agree, within {found.largest_error:.1e} of the output's usual size"
    if found.divergence is not None:
        told = f"{found.divergence}\n" + (f"before it, {told}" if found.steps else "no step before it agrees")
    print(told)
    return 0 if found.divergence is None else 1
