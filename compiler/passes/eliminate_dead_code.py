"""Remove what nobody reads."""

from __future__ import annotations

from graphrl.compiler.program import Program

__all__ = ["eliminate_dead_code"]


def eliminate_dead_code(program: Program) -> Program:
    """Remove operations whose results reach no output and no state write, with the state and draws only they read.

    before   a = x @ w;  b = x @ v;  return a        state: w, v
    after    a = x @ w;              return a        state: w

    Inputs stay, read or not: they are the program's signature.
    """
    graph = program.copy_graph()
    graph.eliminate_dead_code()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    n_in, n_state = len(program.inputs), len(program.state)
    state_nodes, noise_nodes = places[n_in : n_in + n_state], places[n_in + n_state :]
    state = tuple(slot for slot, node in zip(program.state, state_nodes, strict=True) if node.users)
    noise = tuple(draw for draw, node in zip(program.noise, noise_nodes, strict=True) if node.users)
    for node in (*state_nodes, *noise_nodes):
        if not node.users:
            graph.erase_node(node)
    return program.with_graph(graph, state=state, noise=noise)
