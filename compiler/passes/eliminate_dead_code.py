"""Remove what nobody reads."""

from __future__ import annotations

from graphrl.compiler.program import Program

__all__ = ["drop_unread_draws", "eliminate_dead_code"]


def eliminate_dead_code(program: Program) -> Program:
    """Remove operations whose results reach no output and no state write, with the state only they read.

    before   a = x @ w;  b = x @ v;  return a        state: w, v
    after    a = x @ w;              return a        state: w

    Inputs stay, read or not: they are the program's signature. So do draws: eager makes them, and those that follow
    depend on it.
    """
    graph = program.copy_graph()
    graph.eliminate_dead_code()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    first = len(program.inputs)
    state_nodes = places[first : first + len(program.state)]
    state = tuple(slot for slot, node in zip(program.state, state_nodes, strict=True) if node.users)
    for node in state_nodes:
        if not node.users:
            graph.erase_node(node)
    return program.with_graph(graph, state=state)


def drop_unread_draws(program: Program) -> Program:
    """Remove random draws that nobody reads: for deployment only, where no eager run shares the generator."""
    graph = program.copy_graph()
    places = [n for n in graph.nodes if n.op == "placeholder"][len(program.inputs) + len(program.state) :]
    noise = tuple(draw for draw, node in zip(program.noise, places, strict=True) if node.users)
    for node in places:
        if not node.users:
            graph.erase_node(node)
    return program.with_graph(graph, noise=noise)
