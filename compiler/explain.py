"""What the compiler did, in words: passes, node counts, who runs what, refusals, retraces."""

from __future__ import annotations

import io
from typing import Any

from graphrl.compiler.backends.inductor import chosen_threads
from graphrl.compiler.compiled import CompiledGraph, Entry
from graphrl.compiler.cost import estimate_cost
from graphrl.compiler.program import Program
from graphrl.compiler.update import CompiledUpdate
from graphrl.graph import KeyedGraph

__all__ = ["Explanation", "explain"]


class Explanation:
    """Printable account of a compiled object; ``str()`` gives it as plain text."""

    def __init__(self, title: str, mermaid: str | None, entries: list[Entry], retraces: list[str]) -> None:
        self.title, self.mermaid, self.entries, self.retraces = title, mermaid, entries, retraces

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=110, highlight=False)
        console.print(self)
        return out.getvalue()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.table import Table

        yield f"[bold]{self.title}[/bold]: {len(self.entries)} program(s), {len(self.retraces)} retrace(s)"
        if self.mermaid:
            yield self.mermaid
        for i, entry in enumerate(self.entries):
            yield ""
            yield _entry_line(i, entry)
            for refusal in entry.refusals:
                yield f"  refused by {refusal}"
            if _backward_count(entry):
                yield "  passes over forward and backward together:"
            table = Table("pass", "ms", "operations", box=None, pad_edge=False)
            for record in entry.program.history:
                counts = f"{record.nodes_before} -> {record.nodes_after}"
                table.add_row(record.name, f"{1e3 * record.seconds:.1f}", counts)
            yield table
        for reason in self.retraces:
            yield f"retrace: {reason}"


def explain(compiled: CompiledGraph | CompiledUpdate | Program) -> Explanation:
    """Tell what was compiled: the drawn graph, each program's passes, backend, parity, refusals, retraces and cost.

    ``print(grl.explain(fast))``. Takes a compiled graph, a compiled update, or a program.
    """
    if isinstance(compiled, Program):
        entry = Entry(compiled, "not lowered", (), 0.0, "traced", None, compiled.run, False)
        return Explanation(compiled.name, None, [entry], [])
    if isinstance(compiled, CompiledUpdate):
        name = getattr(compiled.step, "__name__", type(compiled.step).__name__)
        return Explanation(f"update {name}", None, compiled.entries(), compiled.retraces)
    if isinstance(compiled, CompiledGraph):
        graph = compiled.graph
        drawn = graph.to_mermaid() if isinstance(graph, KeyedGraph) else None
        return Explanation(type(graph).__name__, drawn, compiled.entries(), compiled.retraces)
    raise TypeError(f"explain takes what compile, compile_update or trace returned, not a {type(compiled).__name__}")


def _entry_line(i: int, entry: Entry) -> str:
    cost = estimate_cost(entry.program)
    parity = "not checked" if entry.parity is None else f"error {entry.parity:.1e} against float64"
    threads = "threads by batch size" if entry.program.dynamic else f"{chosen_threads(entry.program)} thread(s)"
    threads = f", {threads}" if entry.backend == "inductor" else ""
    return (
        f"program {i} on {entry.backend}{threads}: {_operations(entry)}, "
        f"{_short(cost.flops)}FLOP, {_short(cost.bytes)}B, "
        f"compiled in {entry.seconds:.1f} s, {parity}{', differentiable' if entry.differentiable else ''}\n"
        f"  {entry.reason}"
    )


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
