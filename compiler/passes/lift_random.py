"""Turn random draws into inputs of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Noise, Program
from graphrl.compiler.shapes import rows_per_batch, sizes
from graphrl.errors import TraceError

__all__ = ["lift_random"]

aten = torch.ops.aten


def lift_random(program: Program) -> Program:
    """Make every random draw an input that is drawn by torch's own generator just before the call.

    before   e = randn([B, A]);  action = loc + scale * e
    after    action = loc + scale * noise_0              noise_0: [B, A], drawn in the order of the eager code

    So a compiled program makes eager's draws, one for one, under the same seed, and what a backend compiles is a
    pure function. A draw from probabilities becomes a function of a fixed one, as inside torch: ``uniform < p``, and
    ``argmax(p / exponential)`` for one multinomial sample. Several multinomial samples stay in the graph.
    """
    graph = program.copy_graph()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    anchor = places[-1] if places else None
    noise = list(program.noise)
    for node in list(graph.nodes):
        drawn = _drawn(node) if node.op == "call_function" else None
        if drawn is None:
            continue
        value: Tensor = drawn.like.meta["val"]
        strides = None if value.is_contiguous() else tuple(value.stride())
        with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
            anchor = graph.placeholder(f"noise_{len(noise)}")
        anchor.meta["val"] = value.contiguous()
        rows = _rows(program, places, value) if program.dynamic else None
        noise.append(Noise(sizes(value), value.dtype, value.device, drawn.kind, drawn.options, strides, rows))
        with graph.inserting_before(node):
            node.replace_all_uses_with(drawn.finish(graph, anchor, node))
        graph.erase_node(node)
    if len(noise) == len(program.noise):
        return program
    return program.with_graph(graph, noise=tuple(noise))


def _rows(program: Program, places: list[fx.Node], value: Tensor) -> tuple[int, ...]:
    """How often the batch size goes into each dim of a draw."""
    batch = places[0].meta["val"].shape[0]
    rows = [rows_per_batch(n, batch) for n in value.shape]
    if None in rows or not value.is_contiguous():
        raise TraceError(f"a random draw of shape {list(value.shape)} does not follow from the batch size s")
    return tuple(n for n in rows if n is not None)


class _Draw(NamedTuple):
    """A fixed draw shaped as the value of ``like``, and what turns it into the result of the node."""

    like: fx.Node
    kind: str
    options: tuple[Any, ...] = ()
    finish: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node] = lambda graph, noise, node: noise


def _drawn(node: fx.Node) -> _Draw | None:
    """The fixed draw behind a node, or ``None`` when it draws nothing, or nothing fixed."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.randn, aten.randn_like):
        return _Draw(node, "normal")
    if packet in (aten.rand, aten.rand_like):
        return _Draw(node, "uniform")
    if packet is aten.normal_functional or node.target is aten.normal.float_float:
        return _Draw(node, "normal", (), _affine_normal)
    if packet is aten.normal:
        return _Draw(node, "normal", (), _tensor_normal)
    if packet is aten.uniform:
        return _Draw(node, "uniform", (), _affine_uniform)
    if packet in (aten.randint, aten.randint_like):
        sized = node.args if packet is aten.randint else (*node.args[1:], None)
        low, high = (0, sized[0]) if len(sized) == 2 else sized[:2]
        return _Draw(node, "random", (low, high))
    if node.target is aten.randperm.default:
        return _Draw(node, "randperm")
    if node.target is aten.bernoulli.default and node.meta["val"].dtype in (torch.float32, torch.float64):
        return _Draw(node.args[0], "uniform", (), _below_probability)
    if node.target is aten.multinomial.default and node.args[1] == 1:
        return _Draw(node.args[0], "exponential", (1.0,), _largest_quotient)
    if packet in (aten.bernoulli, aten.exponential, aten.geometric, aten.log_normal, aten.cauchy):
        if not any(isinstance(a, fx.Node) for a in node.args[1:]):
            return _Draw(node, packet.__name__, tuple(node.args[1:]))
    return None


def _made(graph: fx.Graph, target: Any, *args: Any, like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = like.meta["val"]
    return node


def _affine_normal(graph: fx.Graph, noise: fx.Node, node: fx.Node) -> fx.Node:
    mean, std = (*node.args[1:3], *(0.0, 1.0)[len(node.args[1:3]) :]) if node.target is not aten.normal.float_float \
        else node.args[:2]  # fmt: skip
    scaled = noise if std == 1 else _made(graph, aten.mul.Tensor, noise, std, like=node)
    return scaled if mean == 0 else _made(graph, aten.add.Tensor, scaled, mean, like=node)


def _tensor_normal(graph: fx.Graph, noise: fx.Node, node: fx.Node) -> fx.Node:
    mean, std = node.args[0], node.args[1] if len(node.args) > 1 else 1.0
    scaled = _made(graph, aten.mul.Tensor, noise, std, like=node)
    return _made(graph, aten.add.Tensor, scaled, mean, like=node)


def _affine_uniform(graph: fx.Graph, noise: fx.Node, node: fx.Node) -> fx.Node:
    low, high = (*node.args[1:3], *(0.0, 1.0)[len(node.args[1:3]) :])
    scaled = _made(graph, aten.mul.Tensor, noise, high - low, like=node)
    return _made(graph, aten.add.Tensor, scaled, low, like=node)


def _below_probability(graph: fx.Graph, noise: fx.Node, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    below = graph.call_function(aten.lt.Tensor, (noise, node.args[0]))
    below.meta["val"] = torch.empty_like(value, dtype=torch.bool)
    result = _made(graph, aten._to_copy.default, below, like=node)
    result.kwargs = {"dtype": value.dtype}
    return result


def _largest_quotient(graph: fx.Graph, noise: fx.Node, node: fx.Node) -> fx.Node:
    quotient = _made(graph, aten.div.Tensor, node.args[0], noise, like=node.args[0])
    return _made(graph, aten.argmax.default, quotient, -1, True, like=node)
