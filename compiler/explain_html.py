"""An explanation as one self-contained page: drawing, passes with what each changed, program text, cost, machine."""

from __future__ import annotations

import difflib
import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from graphrl.compiler.benchmark import machine
from graphrl.compiler.entry import Entry
from graphrl.compiler.explain import Explanation, facts
from graphrl.compiler.program import Program

__all__ = ["page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #223; max-width: 1300px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: .3em; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15em 1.2em .15em 0; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid #bbc; } td.number { text-align: right; }
.drawing, pre { overflow-x: auto; background: #fafbfd; border: 1px solid #dde; border-radius: 4px; padding: .6em; }
pre { font: 12.5px/1.45 ui-monospace, monospace; } pre span { display: block; min-height: 1.45em; }
.gone { background: #fde3e1; } .new { background: #def3dd; } .skip { color: #889; }
.drawing svg { max-width: 100%; height: auto; }
summary { cursor: pointer; } summary code { font-weight: 600; } .bar { background: #7aa7d9; height: .8em; }
"""


def page(explanation: Explanation) -> str:
    """The page's HTML. It has no script and fetches nothing."""
    count = len(explanation.entries)
    body = [f"<h1>{_e(explanation.title)}</h1>"]
    body.append(f"<p>{count} program{'s' if count != 1 else ''}, {len(explanation.retraces)} retrace(s)</p>")
    if explanation.drawing is not None:
        body.append(
            "<h2>Graph</h2><p>Boxes run in this order, left to right. An arrow carries a key and its shape.</p>"
        )
        body.append(f'<div class="drawing">{explanation.drawing.to_svg()}</div>')
    if explanation.retraces:
        body.append(f"<h2>Retraces</h2><ul>{''.join(f'<li>{_e(r)}</li>' for r in explanation.retraces)}</ul>")
    for i, entry in enumerate(explanation.entries):
        body += _entry(i, entry)
    body.append(f"<h2>Machine</h2>{_table((), machine().items())}")
    title = f"<title>graphrl: {_e(explanation.title)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _entry(i: int, entry: Entry) -> Iterator[str]:
    program = entry.program
    yield f"<h2>Program {i} on {_e(entry.backend)}</h2>"
    yield _table((), facts(entry))
    if program.history:
        yield "<h3>Passes</h3>"
        rows = [(r.name, f"{1e3 * r.seconds:.1f}", r.nodes_before, r.nodes_after) for r in program.history]
        yield _table(("pass", "ms", "operations before", "after"), rows)
        yield "<h3>What each pass changed</h3>"
        yield from _changes(program)
    yield "<h3>Operations</h3>"
    yield _operations(program)
    yield f"<h3>Program text</h3><details><summary>runnable Python</summary><pre>{_e(program.code)}</pre></details>"


def _changes(program: Program) -> Iterator[str]:
    """The traced program, then the difference each pass made."""
    texts = [record.before.code for record in program.history if record.before is not None]
    if len(texts) != len(program.history):
        return
    yield f"<details><summary>the program as it was traced</summary><pre>{_e(texts[0])}</pre></details>"
    for i, record in enumerate(program.history):
        last = i == len(program.history) - 1
        if last and record.nodes_after != program.node_count():  # cut into a forward and a backward half afterwards
            continue
        after = program.code if last else texts[i + 1]
        lines = list(_difference(texts[i].splitlines()[1:], after.splitlines()[1:]))
        changed = sum('class="new"' in line or 'class="gone"' in line for line in lines)
        name = f"<code>{_e(record.name)}</code>"
        if not changed:
            yield f"<p>{name}: nothing to do</p>"
            continue
        shown = " open" if changed <= 40 else ""
        yield f"<details{shown}><summary>{name}: {changed} lines</summary><pre>{''.join(lines)}</pre></details>"


def _difference(before: Sequence[str], after: Sequence[str], context: int = 2) -> Iterator[str]:
    """Lines gone and new, with ``context`` lines around them."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for j, group in enumerate(matcher.get_grouped_opcodes(context)):
        if j:
            yield '<span class="skip">...</span>'
        for kind, a0, a1, b0, b1 in group:
            if kind == "equal":
                yield from (f"<span>  {_e(line)}</span>" for line in before[a0:a1])
                continue
            yield from (f'<span class="gone">- {_e(line)}</span>' for line in before[a0:a1])
            yield from (f'<span class="new">+ {_e(line)}</span>' for line in after[b0:b1])


def _operations(program: Program) -> str:
    """How often each operation stands in the program."""
    nodes = (n for n in program.graph_module.graph.nodes if n.op == "call_function")
    counts = Counter(str(n.target) for n in nodes).most_common()
    most = max((n for _, n in counts), default=1)
    rows = "".join(
        f'<tr><td>{_e(name)}</td><td class="number">{n}</td>'
        f'<td style="width:300px"><div class="bar" style="width:{100 * n / most:.0f}%"></div></td></tr>'
        for name, n in counts
    )
    return f"<table>{rows}</table>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]] | Iterable[tuple[str, object]]) -> str:
    top = f"<tr>{''.join(f'<th>{_e(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _e(text: object) -> str:
    return html.escape(str(text))
