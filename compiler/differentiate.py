"""Differentiable programs: one traced program of results and gradients, cut into a forward and a backward half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, fx

from graphrl.compiler.checks import CHECKED, may_go_on
from graphrl.compiler.guards import LiveState
from graphrl.compiler.lower import lower_with_fallback
from graphrl.compiler.lowering import graph_slots
from graphrl.compiler.passes.guard_nonfinite import guard_writes
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Port, Program
from graphrl.compiler.trace import JointProgram, trace_joint
from graphrl.compiler.undo import random_states, set_random_states
from graphrl.compiler.verify import verify_lowered
from graphrl.errors import CompileError

__all__ = ["Differentiable", "lower_differentiable", "split"]

aten = torch.ops.aten


@dataclass
class Differentiable:
    """A forward program with its backward half bound to autograd."""

    forward: Program
    backward: Program
    backend: str
    refusals: tuple[str, ...]
    parity: float | None
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]


def lower_differentiable(
    graph: TensorDictModuleBase,
    example: TensorDictBase,
    inputs_need_grad: Sequence[bool],
    backend: str,
    strict: bool,
    verify: bool,
    precision: str | None,
    eager: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    dynamic: bool = False,
) -> Differentiable | None:
    """Trace, cut and lower ``graph`` with its gradients; ``None`` when nothing it computes carries gradient.

    ``eager`` runs in the program's place where a check of the traced code would fail.
    """
    joint = trace_joint(graph, example, inputs_need_grad, dynamic=dynamic)
    if joint is None:
        return None
    whole = replace(joint, program=guard_writes(run_passes(joint.program, precision=precision)))
    forward, backward, saved_from = split(whole)
    run_forward, name, refusals = lower_with_fallback(forward, backend, strict)
    run_backward, back_name, more = lower_with_fallback(backward, backend, strict)
    parity = None
    if verify:
        tensors = [example.get(k).contiguous() for k in [p.key for p in forward.inputs]]
        arguments = forward.arguments(tensors)
        parity = verify_lowered(forward, run_forward, name, arguments)
        with torch.no_grad():
            saved = list(forward.graph_module(*[t.clone() for t in arguments]))[len(whole.outputs) :]
        values = _backward_values(whole, saved_from, arguments, saved)
        cotangents = [torch.randn_like(c) for c in _cotangent_likes(whole)]
        parity = max(parity, verify_lowered(backward, run_backward, back_name, [*cotangents, *values]))
    live = LiveState(forward)
    unread = _unread_targets(whole)
    reads = [slot.read for slot in graph_slots(graph).values() if slot.name in unread]
    function = _autograd_function(whole, unread, saved_from, run_forward, run_backward)
    checked = whole.outputs[-1].key == CHECKED
    n_out = len(whole.outputs) - checked
    generators = {n.device for n in forward.noise} if may_go_on(forward.assumptions) else set()

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = inputs[0].shape[0] if dynamic else None
        before = random_states(generators) if checked else []
        draws = [n.draw(rows) for n in forward.noise]
        outputs = function.apply(*inputs, *live(), *draws, *(read() for read in reads))
        if checked and not outputs[n_out]:
            set_random_states(before)
            return eager(inputs)
        return outputs[:n_out]

    return Differentiable(forward, backward, name, (*refusals, *more), parity, run)


def split(joint: JointProgram) -> tuple[Program, Program, list[tuple[str, int]]]:
    """Cut a joint program: forward (outputs, then values the backward half needs) and backward (gradients).

    The third result says where each saved value comes from: ``("argument", i)`` among the forward's placeholders, or
    ``("saved", i)`` among its extra outputs.
    """
    graph = joint.program.graph_module.graph
    places = joint.program.placeholders()
    n_in = len(joint.program.inputs) - len(joint.differentiable)
    cotangents = places[n_in : n_in + len(joint.differentiable)]
    forward_places = [p for p in places if p not in cotangents]
    late: set[fx.Node] = set(cotangents)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and any(n in late for n in node.all_input_nodes):
            late.add(node)
    (output,) = (n for n in graph.nodes if n.op == "output")
    n_out = len(joint.outputs)
    outputs, gradients = output.args[0][:n_out], output.args[0][n_out:]
    needed, computed_again = _needed_by(late)
    crossing = [n for n in graph.nodes if n in needed and n not in late]
    crossing += [g for g in gradients if g not in late and g not in crossing]
    saved_from: list[tuple[str, int]] = []
    saved: list[fx.Node] = []
    for node in crossing:
        if node in forward_places:
            saved_from.append(("argument", forward_places.index(node)))
        else:
            saved_from.append(("saved", len(saved)))
            saved.append(node)
    forward = _extract(graph, forward_places, [*outputs, *saved], lambda n: n not in late)
    backward = _extract(graph, [*cotangents, *crossing], list(gradients), lambda n: n in late or n in computed_again)
    for node in backward.nodes:  # saved values come contiguous, whatever layout a view was traced on
        layouts_kept = not joint.program.dynamic and all(n.meta["val"].is_contiguous() for n in crossing)
        if node.target is aten.view.default and not layouts_kept:
            node.target = aten.reshape.default
    base = joint.program
    saved_ports = tuple(Port.of(("saved", str(i)), n.meta["val"]) for i, n in enumerate(saved))
    crossing_ports = tuple(Port.of(("forward", str(i)), n.meta["val"]) for i, n in enumerate(crossing))
    module = base.graph_module
    return (
        replace(base, graph_module=fx.GraphModule(module, forward), inputs=base.inputs[:n_in],
                outputs=(*joint.outputs, *saved_ports)),
        replace(base, graph_module=fx.GraphModule(module, backward), inputs=(*base.inputs[n_in:], *crossing_ports),
                outputs=base.outputs[n_out:], state=(), noise=(), name=f"{base.name}_backward"),
        saved_from,
    )  # fmt: skip


def _needed_by(late: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The values the backward half reads, and the sizes it computes again: a number cannot be saved as a tensor."""
    needed: set[fx.Node] = set()
    again: set[fx.Node] = set()
    pending = list(late)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in late or node in needed or node in again:
                continue
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
                again.add(node)
                pending.append(node)
            else:
                needed.add(node)
    return needed, again


def _extract(graph: fx.Graph, places: Sequence[fx.Node], outputs: Sequence[fx.Node], keep: Any) -> fx.Graph:
    """A graph of ``places`` to ``outputs``, of the nodes for which ``keep`` holds."""
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for i, place in enumerate(places):
        values[place] = new.placeholder(f"{place.name}_{i}" if place.op != "placeholder" else place.name)
        values[place].meta.update(place.meta)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node not in values and keep(node):
            values[node] = new.node_copy(node, lambda n: values[n])
    new.output(tuple(values[n] for n in outputs))
    new.eliminate_dead_code()
    new.lint()
    return new


def _cotangent_likes(joint: JointProgram) -> list[Tensor]:
    n_in = len(joint.program.inputs) - len(joint.differentiable)
    return [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in joint.program.inputs[n_in:]]


def _backward_values(
    joint: JointProgram, saved_from: list[tuple[str, int]], arguments: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    """The values that cross over, contiguous as the backward half was compiled for."""
    return [(arguments[i] if where == "argument" else saved[i]).contiguous() for where, i in saved_from]


def _unread_targets(joint: JointProgram) -> list[str]:
    """Parameters that get a gradient though no operation reads them, as a custom autograd function may have it."""
    read = {slot.name for slot in joint.program.state}
    return [str(where) for kind, where in joint.targets if kind == "state" and where not in read]


def _autograd_function(
    joint: JointProgram, unread: list[str], saved_from: list[tuple[str, int]], run_forward: Any, run_backward: Any
) -> type[torch.autograd.Function]:
    n_in = len(joint.program.inputs) - len(joint.differentiable)
    n_out = len(joint.outputs)
    n_read = n_in + len(joint.program.state) + len(joint.program.noise)
    n_args = n_read + len(unread)
    state_at = {slot.name: n_in + i for i, slot in enumerate(joint.program.state)}
    state_at |= {name: n_read + i for i, name in enumerate(unread)}
    slots = [int(where) if kind == "input" else state_at[str(where)] for kind, where in joint.targets]
    flat = frozenset(range(n_out)) - set(joint.differentiable)

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Tensor) -> tuple[Tensor, ...]:
            results = tuple(run_forward(list(arguments[:n_read])))
            ctx.save_for_backward(*_backward_values(joint, saved_from, arguments, results[n_out:]))
            # an output that is an input or was saved must be a tensor of its own for autograd
            outputs = tuple(r if all(r is not a for a in arguments) else r.view_as(r) for r in results[:n_out])
            ctx.mark_non_differentiable(*(outputs[i] for i in flat))
            ctx.set_materialize_grads(True)
            return outputs

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
            if torch.is_grad_enabled():  # with create_graph the second derivative would silently be zero
                raise CompileError(
                    "a compiled graph has first derivatives only: for create_graph=True use the graph itself"
                )
            wanted = [cotangents[i].contiguous() for i in joint.differentiable]
            gradients = run_backward([*wanted, *ctx.saved_tensors])
            out: list[Tensor | None] = [None] * n_args
            for slot, gradient in zip(slots, gradients, strict=True):
                out[slot] = gradient
            return tuple(out)

    return Compiled
