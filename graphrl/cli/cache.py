"""``graphrl cache list`` and ``graphrl cache clear``: the compiled programs kept on disk."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from graphrl.errors import GraphRLError

__all__ = ["run"]

NEWEST = 20


@dataclass(frozen=True)
class List:
    """Show what is kept, the newest first: program, backend, inputs, size, age, and the seconds it took to compile."""

    all: bool = False
    """Every entry, not just the newest twenty."""


@dataclass(frozen=True)
class Clear:
    """Delete compiled programs. Running ones keep what they have loaded; the next compile writes them again."""

    entry: Annotated[str, tyro.conf.Positional] = ""
    """An entry's name in the list, or its beginning; without it all of them."""
    older_than: float = 0.0
    """Only entries at least this many days old."""


def run(arguments: list[str]) -> None:
    """Show or delete. Raises :class:`GraphRLError` for an entry that is not there."""
    commands: Any = Annotated[List, tyro.conf.subcommand("list")] | Annotated[Clear, tyro.conf.subcommand("clear")]
    options = tyro.cli(commands, prog="graphrl cache", args=arguments)
    from graphrl.compiler import cache

    if isinstance(options, List):
        _show(None if options.all else NEWEST)
        return
    if options.older_than < 0:
        raise GraphRLError(f"cache: --older-than {options.older_than:g}: expected a number of days, 0 or more")
    count, freed = cache.clear(86400 * options.older_than, options.entry)
    if options.entry and not count:
        raise GraphRLError(f"cache: no entry {options.entry!r} in {cache.programs_dir()}: see graphrl cache list")
    print(f"{cache.programs_dir()}: {count} program(s) deleted, {_bytes(freed)} freed")


def _show(most: int | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from graphrl.compiler import cache

    found = list(cache.entries())
    total = _bytes(sum(entry.size for entry in found))
    title = f"{cache.programs_dir()}: {len(found)} program(s), {total}"
    table = Table("entry", "program", "backend", "inputs", "size", "age", "compile s", title=title)
    for entry in found[:most]:
        name, told, size, age = entry.folder.name[:12], entry.record, _bytes(entry.size), _age(entry.age_s)
        if not entry.intact:
            table.add_row(name, "?", "?", "broken: will be compiled again", size, age, "")
            continue
        inputs = textwrap.shorten(", ".join(told["inputs"]), 60, placeholder=" ...")
        seconds = f"{told['compile_seconds']:.1f}"
        table.add_row(name, escape(told["name"]), told["backend"], escape(inputs), size, age, seconds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if most is not None and len(found) > most:
        console.print(f"and {len(found) - most} older: graphrl cache list --all")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
