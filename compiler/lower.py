"""Choose the backend that runs a program, or the backends that run its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from graphrl.compiler.backends import Backend, Lowered, get_backend
from graphrl.compiler.parts import SplitProgram, cut, unsupported_nodes
from graphrl.compiler.program import Program
from graphrl.errors import CompileError

__all__ = ["FALLBACKS", "lower_with_fallback"]

FALLBACKS = ("inductor", "eager")
"""Who runs what the wanted backend refuses, in this order."""


def lower_with_fallback(program: Program, backend: str, strict: bool) -> tuple[Lowered, str, tuple[str, ...]]:
    """Lower with ``backend``; what it refuses, all of the program or some parts, with the next best that takes it.

    Returns the lowered program, who runs it ("native", or "native (2 parts), inductor (1 part)") and the refusals.
    With ``strict`` a refusal is a :class:`CompileError`.
    """
    wanted = get_backend(backend)
    refusal = wanted.supports(program)
    if refusal is None:
        return wanted.lower(program), backend, ()
    if strict:
        raise CompileError(f"{backend} refuses {program.name}: {refusal.reason}. strict=False falls back to another")
    if backend not in FALLBACKS[1:] and (split := _lower_parts(program, wanted)) is not None:
        return split
    lowered, name, refusals = _lower_whole(program, [b for b in FALLBACKS if b != backend])
    return lowered, name, (f"{backend}: {refusal.reason}", *refusals)


def _lower_parts(program: Program, wanted: Backend) -> tuple[Lowered, str, tuple[str, ...]] | None:
    """The parts that ``wanted`` takes lowered by it, the rest by the fallbacks; ``None`` where there are none."""
    refused = unsupported_nodes(wanted, program)
    parts = cut(program, refused) if refused else []
    rest = [b for b in FALLBACKS if b != wanted.name]
    runs, names, lines = [], [], []
    refusals = [f"{wanted.name}: {line}" for line in _summary(list(refused.values()))]
    for i, part in enumerate(parts):
        run, name, more = _lower_whole(part.program, [wanted.name, *rest] if part.wanted else rest)
        runs.append(run)
        names.append(name)
        refusals += more
        how = part.program.graph_module.meta.get("how")
        lines.append(f"part {i} on {name}{f', {how}' if how else ''}: {_contents(part.program)}")
    if wanted.name not in names:
        return None
    program.graph_module.meta["parts"] = lines
    counts = Counter(names).items()
    described = ", ".join(f"{name} ({n} part{'s' if n > 1 else ''})" for name, n in counts)
    return SplitProgram(program, parts, runs), described, tuple(refusals)


def _lower_whole(program: Program, order: Sequence[str]) -> tuple[Lowered, str, tuple[str, ...]]:
    refusals: list[str] = []
    for name in order:
        candidate = get_backend(name)
        refusal = candidate.supports(program)
        if refusal is None:
            return candidate.lower(program), name, tuple(refusals)
        refusals.append(f"{name}: {refusal.reason}")
    raise CompileError(f"no backend takes {program.name}: {'; '.join(refusals)}")


def _summary(reasons: Sequence[str]) -> list[str]:
    """One line for each kind of reason: the first, with the number of nodes that it also holds for."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = reason.split(", at node")[0]
        first.setdefault(kind, reason)
        counts[kind] += 1
    return [f"{text} (and {counts[k] - 1} more)" if counts[k] > 1 else text for k, text in first.items()]


def _contents(program: Program) -> str:
    """The operations of a program, counted: ``3 addmm, 2 tanh``."""
    nodes = (n for n in program.graph_module.graph.nodes if n.op == "call_function")
    counts = Counter(n.target.__name__.split(".")[0] for n in nodes)  # type: ignore[union-attr]
    return ", ".join(f"{n} {name}" for name, n in counts.most_common())
