"""What the compiler did, in words: drawn graph, passes, who runs what, refusals, retraces, assumptions, cost."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from graphrl.compiler.cache import outcome
from graphrl.compiler.compiled import CompiledGraph
from graphrl.compiler.cost import estimate_cost
from graphrl.compiler.drawing import Drawing, draw
from graphrl.compiler.entry import Entry
from graphrl.compiler.files import replace_file
from graphrl.compiler.program import Program
from graphrl.compiler.update import CompiledUpdate
from graphrl.graph import KeyedGraph

__all__ = ["Explanation", "explain"]


class Explanation:
    """Printable account of a compiled object: ``str()`` gives plain text, ``write_html`` a page.

    ``drawing``: the keyed graph, ``None`` for what is no graph.
    """

    def __init__(self, title: str, drawing: Drawing | None, entries: list[Entry], retraces: list[str]) -> None:
        self.title, self.drawing, self.entries, self.retraces = title, drawing, entries, retraces

    def write_html(self, path: str | Path) -> Path:
        """Write one self-contained page: no script, nothing fetched. A page that is there is replaced in one step."""
        from graphrl.compiler.explain_html import page

        target = Path(path)
        replace_file(target, page(self).encode())
        return target

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=110, highlight=False)
        console.print(self)
        return out.getvalue()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        yield f"[bold]{self.title}[/bold]: {len(self.entries)} program(s), {len(self.retraces)} retrace(s)"
        if self.drawing:
            yield Text(self.drawing.to_mermaid())
        for i, entry in enumerate(self.entries):
            yield ""
            yield f"program {i} on {entry.backend}"
            for name, what in facts(entry):
                yield f"  {name:10} {escape(what)}"
            if _backward_count(entry):
                yield "  passes over forward and backward together:"
            table = Table("pass", "ms", "operations", box=None, pad_edge=False)
            for record in entry.program.history:
                counts = f"{record.nodes_before} -> {record.nodes_after}"
                table.add_row(record.name, f"{1e3 * record.seconds:.1f}", counts)
            yield table
        for reason in self.retraces:
            yield escape(f"retrace: {reason}")


def explain(compiled: CompiledGraph | CompiledUpdate | Program) -> Explanation:
    """Tell what was compiled: the drawn graph, each program's passes, backend, parity, refusals, retraces and cost.

    ``print(grl.explain(fast))``, or ``grl.explain(fast).write_html("fast.html")`` for a page with the program after
    each pass. Takes a compiled graph, a compiled update, or a program. Raises :class:`TypeError` for anything else.
    """
    if isinstance(compiled, Program):
        entry = Entry(compiled, "not lowered", (), 0.0, "traced", None, compiled.run, False)
        return Explanation(compiled.name, None, [entry], [])
    if isinstance(compiled, CompiledUpdate):
        name = getattr(compiled.step, "__name__", type(compiled.step).__name__)
        return Explanation(f"update {name}", None, compiled.entries(), compiled.retraces)
    if isinstance(compiled, CompiledGraph):
        graph = compiled.graph
        entries = compiled.entries()
        drawn = draw(graph, entries[0].program.inputs if entries else ()) if isinstance(graph, KeyedGraph) else None
        return Explanation(type(graph).__name__, drawn, entries, compiled.retraces)
    raise TypeError(f"explain takes what compile, compile_update or trace returned, not a {type(compiled).__name__}")


def facts(entry: Entry) -> list[tuple[str, str]]:
    """What there is to say about one program, a name and a text for each."""
    cost = estimate_cost(entry.program)
    found = [
        ("compiled", f"in {entry.seconds:.1f} s: {entry.reason}"),
        ("work", f"{_operations(entry)}, {_short(cost.flops)}FLOP, {_short(cost.bytes)}B read or written"),
        ("parity", "not checked" if entry.parity is None else f"error {entry.parity:.1e} against float64"),
        *([("gradients", "differentiable, first order")] if entry.differentiable else []),
    ]
    notes = entry.program.graph_module.meta
    found += [("threads", notes["how"])] if "how" in notes else []
    found += [("part", text) for text in notes.get("parts", ())]
    if kept := outcome(entry.program):
        found.append(("disk cache", kept))
    found += [("refused by", refusal) for refusal in entry.refusals]
    return found + [("assumes", assumption) for assumption in entry.program.assumptions]


def _operations(entry: Entry) -> str:
    forward, backward = entry.program.node_count(), _backward_count(entry)
    return f"forward {forward} operations, backward {backward}" if backward else f"{forward} operations"


def _backward_count(entry: Entry) -> int:
    """Operations of the other half: the passes counted both halves, and cutting them apart copies none."""
    history = entry.program.history
    return history[-1].nodes_after - entry.program.node_count() if entry.differentiable and history else 0


def _short(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} T"
