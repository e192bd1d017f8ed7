"""Compute at compile time what no input can change."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Fixed, Program, StateSlot

__all__ = ["fold_constants", "freeze_state"]


def freeze_state(program: Program) -> Program:
    """Make every state tensor that the program does not write a constant with today's value: for deployment only."""
    frozen = tuple(
        slot if slot.mutated else replace(slot, read=Fixed(slot.read().detach().clone()), kind="constant")
        for slot in program.state
    )
    return replace(program, state=frozen)


def fold_constants(program: Program) -> Program:
    """Replace an operation whose arguments are all constants by its value.

    before   s = sqrt(var + 1e-8);  z = (x - mean) / s       var, mean: constants
    after    z = (x - mean) / s                              s: a constant

    Weights are constants only after :func:`freeze_state`; for a live program this folds literals alone. Draws and
    writes are never folded, nor is an output: the caller must get a tensor of its own at each call.
    """
    graph = program.copy_graph()
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs = output.all_input_nodes
    places = [n for n in graph.nodes if n.op == "placeholder"]
    first = len(program.inputs)
    known: dict[fx.Node, Tensor] = {
        node: slot.read()
        for slot, node in zip(program.state, places[first : first + len(program.state)], strict=True)
        if slot.kind == "constant" and not slot.mutated
    }
    folded: dict[fx.Node, Tensor] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in outputs and _foldable(node, known):
            value = _evaluate(node, known)
            if isinstance(value, Tensor):
                known[node] = folded[node] = value.contiguous()
    needed = [n for n in folded if any(user not in folded for user in n.users)]
    if not needed:
        return program
    slots = list(program.state)
    anchor = places[first + len(slots) - 1] if first + len(slots) else None
    for node in needed:
        slot = StateSlot.of(_fresh_name(node.name, slots), Fixed(folded[node]), "constant")
        with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
            anchor = graph.placeholder(f"folded_{node.name}")
        anchor.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)
        node.replace_all_uses_with(anchor)
        slots.append(slot)
    graph.eliminate_dead_code()
    return program.with_graph(graph, state=tuple(slots))


def _foldable(node: fx.Node, known: dict[fx.Node, Tensor]) -> bool:
    if node.is_impure() or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    # an operation without tensors (full, arange) is cheap and better left for the backend to generate
    return bool(node.all_input_nodes) and all(n in known for n in node.all_input_nodes)


def _evaluate(node: fx.Node, known: dict[fx.Node, Tensor]) -> object:
    args = fx.map_arg(node.args, lambda n: known[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: known[n])
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _fresh_name(name: str, slots: list[StateSlot]) -> str:
    taken = {slot.name for slot in slots}
    while name in taken:
        name += "_"
    return name
