"""Find the pass that changes what a program computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl.compiler.backends import get_backend
from graphrl.compiler.check_program import check_program
from graphrl.compiler.passes import pipeline
from graphrl.compiler.program import Program
from graphrl.compiler.trace import as_example, trace, trace_joint
from graphrl.compiler.verify import allowed_error, relative_error, widened_run
from graphrl.errors import CompileError
from graphrl.keys import Key

__all__ = ["Stage", "bisect_passes", "bisect_program"]


@dataclass(frozen=True)
class Stage:
    """The program after one pass: its size, and how far its results are from the traced program's in float64.

    ``error`` belongs to the interpreter, ``lowered`` to the backend (``None`` without one), each as a multiple of what
    rounding allows. ``problem``: what is wrong, empty where nothing is.
    """

    name: str
    nodes: int
    error: float
    lowered: float | None
    problem: str


def bisect_passes(
    graph: TensorDictModuleBase,
    example: TensorDictBase | dict[Key, Tensor],
    backend: str | None = None,
    deploy: bool = False,
    precision: str | None = None,
) -> list[Stage]:
    """Trace ``graph`` with its gradients, run pass after pass, compare each result; ends at the first wrong one.

    example: holds ``graph.in_keys``, as for :func:`trace`. backend: lower the program after each pass as well.
    """
    example = as_example(example)
    joint = None if deploy else trace_joint(graph, example, [example.get(k).is_floating_point() for k in graph.in_keys])
    program = trace(graph, example) if joint is None else joint.program
    generator = torch.Generator().manual_seed(0)
    inputs = [  # the rest are cotangents
        example.get(p.key)
        if p.key in graph.in_keys
        else torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        for p in program.inputs
    ]
    return bisect_program(program, inputs, pipeline.passes(deploy, precision), backend)


def bisect_program(
    program: Program, inputs: Sequence[Tensor], passes: Sequence[Callable[[Program], Program]], backend: str | None
) -> list[Stage]:
    """As :func:`bisect_passes`, for a program, its input values and the passes to try."""
    judge = _Judge(program, inputs)
    stages = [judge.stage("trace", program, backend)]
    for step in passes:
        if stages[-1].problem:
            break
        try:
            program = check_program(step(program), step.__name__)
        except Exception as error:  # a broken pass may raise anything
            first = (str(error).splitlines() or [""])[0]
            stages.append(Stage(step.__name__, program.node_count(), float("inf"), None, first or type(error).__name__))
            break
        stages.append(judge.stage(step.__name__, program, backend))
    return stages


class _Judge:
    """Knows what the traced program returns and writes, in float64, and how far its own dtype is from that."""

    def __init__(self, program: Program, inputs: Sequence[Tensor]) -> None:
        self.inputs = [t.detach() for t in inputs]
        self.draws = {id(draw): draw.draw() for draw in program.noise}
        self.reference = self._results(program, widened_run(program), wide=True)
        self.own = self._results(program, program.graph_module)

    def _results(self, program: Program, run: Callable[..., Any], wide: bool = False) -> dict[str, Tensor]:
        draws = [self.draws[id(draw)] for draw in program.noise]
        state = [slot.read().detach() for slot in program.state]
        arguments = [t.clone() for t in (*self.inputs, *state, *draws)]
        if wide:
            arguments = [t.double() if t.is_floating_point() else t for t in arguments]
        with torch.no_grad():
            outputs = [t.clone() for t in run(*arguments)]
        found = {f"{i}: {port.key!r}": t for i, (port, t) in enumerate(zip(program.outputs, outputs, strict=True))}
        first = len(program.inputs)
        return found | {s.name: arguments[first + i] for i, s in enumerate(program.state) if s.mutated}

    def _distance(self, program: Program, found: dict[str, Tensor]) -> tuple[float, str]:
        """The largest error as a multiple of what is allowed, and the result that has it."""
        if set(found) != set(self.reference):
            return float("inf"), f"results {sorted(set(found) ^ set(self.reference))} came or went"
        worst, where = 0.0, ""
        for name, value in found.items():
            error = relative_error(value, self.reference[name])
            ratio = error / allowed_error(program, self.own[name], self.reference[name]) if error else 0.0
            if value.dtype != self.own[name].dtype:
                ratio = float("inf")
            if not ratio <= worst:
                worst, where = ratio, name
        return worst, where

    def stage(self, name: str, program: Program, backend: str | None) -> Stage:
        error, where = self._distance(program, self._results(program, program.graph_module))
        problem = "" if error <= 1 else f"{where} differs"
        lowered = None
        if backend is not None and not problem:
            candidate = get_backend(backend)
            refusal = candidate.supports(program)
            if refusal is not None:
                raise CompileError(f"{backend} refuses {program.name} after {name}: {refusal.reason}")
            run = candidate.lower(program)
            lowered, where = self._distance(program, self._results(program, lambda *values: run(list(values))))
            problem = "" if lowered <= 1 else f"{where} differs on {backend}"
        return Stage(name, program.node_count(), error, lowered, problem)
