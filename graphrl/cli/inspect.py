"""``graphrl inspect BUNDLE``: what a bundle holds and says."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

__all__ = ["run"]


@dataclass(frozen=True)
class Inspect:
    """Print a bundle's contract, interface, targets, parity, and files with their sizes and hashes."""

    bundle: Annotated[str, tyro.conf.Positional]


def run(arguments: list[str]) -> None:
    """Print the tables. Raises :class:`BundleError` for a bundle whose files are not the manifest's."""
    options = tyro.cli(Inspect, prog="graphrl inspect", args=arguments)
    from rich.console import Console

    from graphrl.compiler.bundle.contract_text import closed_loop_text
    from graphrl.compiler.bundle.load import load

    bundle = load(options.bundle)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in (_contract(bundle), _interface(bundle), _parity(bundle)):
        console.print(table)
    loop = bundle.manifest["reports"]["parity"]["closed_loop"]
    if loop is not None:
        console.print(f"in its environment: {closed_loop_text(loop)}", highlight=False)
    for table in (_checks(bundle), _files(bundle)):
        console.print(table)


def _contract(bundle: Any) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("field", "value", title=f"contract {bundle.manifest['contract_hash'][:12]}")
    for name, value in _stated("", bundle.contract):
        table.add_row(escape(name), escape(json.dumps(value)))
    return table


def _stated(place: str, value: Any) -> Any:
    """Fields that are filled in; a list of plain values is one field."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _stated(f"{place}.{key}" if place else key, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from _stated(f"{place}[{i}]", inner)
    elif value is not None:
        yield place, value


def _interface(bundle: Any) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "key", "dtype", "shape", title="interface")
    for side, ports in (("in", bundle.manifest["inputs"]), ("out", bundle.manifest["outputs"])):
        for port in ports:
            table.add_row(side, escape(port["key"]), port["dtype"], escape(str(port["shape"])))
    return table


def _parity(bundle: Any) -> Any:
    from rich.table import Table

    parity = bundle.manifest["reports"]["parity"]
    steps = parity["sequence_steps"]
    rows = f"{parity['rows']} rows" + (f", {steps} steps" if steps else "")
    title = f"parity with float64: {rows}, {parity['tolerance']} allowed"
    columns = {"relative": "max_relative_error", "absolute": "max_absolute_error"}
    columns |= {"relative, sequence": "sequence_relative_error"} if steps else {}
    table = Table("runtime", *columns, title=title)
    for name in ("eager", *bundle.manifest["targets"]):
        figures = [parity[column].get(name) for column in columns.values()]
        table.add_row(name, *("" if f is None else f"{f:.1e}" for f in figures))
    return table


def _checks(bundle: Any) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "result", title="checks when it was exported")
    for name, result in bundle.manifest.get("checks", {}).items():
        table.add_row(name, escape(result))
    return table


def _files(bundle: Any) -> Any:
    from rich.table import Table

    tools = ", ".join(f"{name} {version}" for name, version in bundle.manifest["tools"].items())
    table = Table("file", "bytes", "SHA-256", title=f"files, written by {tools}")
    for name, digest in bundle.manifest["files"].items():
        table.add_row(name, f"{(bundle.path / name).stat().st_size:,}", digest[:16])
    return table
