"""Turn random draws into inputs of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Noise, Program

__all__ = ["lift_random"]

aten = torch.ops.aten


def lift_random(program: Program) -> Program:
    """Make every normal and uniform draw an input that is drawn by torch's own generator just before the call.

    before   e = randn([B, A]);  action = loc + scale * e
    after    action = loc + scale * noise_0              noise_0: [B, A], drawn in the order of the eager code

    So a compiled program makes eager's draws, one for one, under the same seed, and what a backend compiles is a
    pure function. Draws whose distribution is not fixed beforehand (bernoulli, multinomial) stay in the graph.
    """
    graph = program.copy_graph()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    anchor = places[-1] if places else None
    noise = list(program.noise)
    for node in list(graph.nodes):
        drawn = _standard(node)
        if drawn is None:
            continue
        kind, finish = drawn
        value: Tensor = node.meta["val"]
        with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
            anchor = graph.placeholder(f"noise_{len(noise)}")
        anchor.meta["val"] = value
        noise.append(Noise(tuple(value.shape), value.dtype, value.device, kind))
        with graph.inserting_before(node):
            node.replace_all_uses_with(finish(graph, anchor, node))
        graph.erase_node(node)
    if len(noise) == len(program.noise):
        return program
    return program.with_graph(graph, noise=tuple(noise))


def _standard(node: fx.Node) -> tuple[str, Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]] | None:
    """``(kind, finish)`` for a draw that is a function of standard normal or uniform noise, else ``None``."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.randn, aten.randn_like):
        return "normal", lambda graph, noise, _: noise
    if packet in (aten.rand, aten.rand_like):
        return "uniform", lambda graph, noise, _: noise
    if packet in (aten.normal_functional,) or node.target is aten.normal.float_float:
        return "normal", _affine_normal
    if packet is aten.normal:
        return "normal", _tensor_normal
    if packet is aten.uniform and len(node.args) <= 3:
        return "uniform", _affine_uniform
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
