"""``graphrl cache list`` and ``graphrl cache clear``: the compiled programs kept on disk."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from graphrl.errors import GraphRLError

__all__ = ["run"]


@dataclass(frozen=True)
class List:
    """Show what is kept: program, backend, shapes, size, age, and the seconds it took to compile."""


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
        _show()
        return
    count, freed = cache.clear(86400 * options.older_than, options.entry)
    if options.entry and not count:
        raise GraphRLError(f"cache: no entry {options.entry!r} in {cache.programs_dir()}: see graphrl cache list")
    print(f"{cache.programs_dir()}: {count} program(s) deleted, {_bytes(freed)} freed")


def _show() -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from graphrl.compiler import cache

    found = list(cache.entries())
    total = _bytes(sum(entry.size for entry in found))
    title = f"{cache.programs_dir()}: {len(found)} program(s), {total}"
    table = Table("entry", "program", "backend", "shapes", "size", "age", "compile s", title=title)
    for entry in found:
        name, told, size, age = entry.folder.name[:12], entry.record, _bytes(entry.size), _age(entry.age_s)
        if not entry.intact:
            table.add_row(name, "?", "?", "broken: will be compiled again", size, age, "")
            continue
        shapes = f"{', '.join(told['inputs'])} -> {', '.join(told['outputs'])}"
        seconds = f"{told['compile_seconds']:.1f}"
        table.add_row(name, escape(told["name"]), told["backend"], escape(shapes), size, age, seconds)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


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
