"""``graphrl diff A B``: what differs between two bundles."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

__all__ = ["run"]


@dataclass(frozen=True)
class Diff:
    """Compare two bundles: contract, interface, graph, weights, tools, files. Exit code 1 where they differ."""

    ours: Annotated[str, tyro.conf.Positional]
    theirs: Annotated[str, tyro.conf.Positional]


def run(arguments: list[str]) -> int:
    """Print a table of differences; returns 1 where there is one."""
    options = tyro.cli(Diff, prog="graphrl diff", args=arguments)
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from graphrl.compiler.bundle.diff import diff
    from graphrl.compiler.bundle.load import load

    found = diff(load(options.ours), load(options.theirs))
    if not found:
        print(f"{options.ours} and {options.theirs} do not differ")
        return 0
    table = Table("what", escape(options.ours), escape(options.theirs), title=f"{len(found)} difference(s)")
    for line in found:
        table.add_row(escape(line.place), escape(line.ours), escape(line.theirs))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 1
