"""Fold an input normaliser into the linear layer behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx

from graphrl.compiler.program import Fixed, Program, StateSlot

__all__ = ["fold_normalizer"]

aten = torch.ops.aten

FAR = 64.0
"""Folding multiplies the rounding of an entry by its |mean / std|."""


class _Match(NamedTuple):
    linear: fx.Node  # addmm(b, z, Wt) or mm(z, Wt)
    source: fx.Node  # x
    weight: Tensor  # Wt: [I, O]
    bias: Tensor | None
    mean: Tensor
    std: Tensor


def fold_normalizer(program: Program) -> Program:
    """Fold ``(x - mean) / std`` into the linear layer that is its only reader.

    before   z = (x - mean) / std;  h = z @ W.T + b            x, z: [B, I]   W: [O, I]   h: [B, O]
    after    h = x @ (W / std).T + (b - W @ (mean / std))

    Equal in real arithmetic; float32 differs by rounding. Left alone when ``z`` has a second reader, is clipped or is
    an output: it must then be computed anyway; and where a mean is more than :data:`FAR` standard deviations from 0:
    x - mean is exact near the mean, and x @ (W / std).T would take the difference of two large numbers.
    Needs frozen weights, so it runs for deployment only.
    """
    graph = program.copy_graph()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    first = len(program.inputs)
    constant: dict[fx.Node, Tensor] = {
        node: slot.read()
        for slot, node in zip(program.state, places[first : first + len(program.state)], strict=True)
        if slot.kind == "constant"
    }
    matches = [m for node in graph.nodes if (m := _match(node, constant)) is not None]
    if not matches:
        return program
    slots, anchor = list(program.state), places[first + len(program.state) - 1]
    for match in matches:
        weight64, std64, mean64 = match.weight.double(), match.std.double(), match.mean.double()
        weight = weight64 / std64.reshape(-1, 1)
        bias = (0.0 if match.bias is None else match.bias.double()) - (mean64 / std64).reshape(1, -1) @ weight64
        new = []
        for suffix, tensor in (("weight", weight), ("bias", bias.reshape(-1))):
            value = tensor.to(match.weight.dtype).contiguous()
            slots.append(StateSlot.of(f"normalized_{match.linear.name}_{suffix}", Fixed(value), "constant"))
            with graph.inserting_after(anchor):
                anchor = graph.placeholder(f"folded_{match.linear.name}_{suffix}")
            anchor.meta["val"] = match.linear.meta["val"].new_empty(value.shape)
            new.append(anchor)
        with graph.inserting_before(match.linear):
            folded = graph.call_function(aten.addmm.default, (new[1], match.source, new[0]))
        folded.meta["val"] = match.linear.meta["val"]
        match.linear.replace_all_uses_with(folded)
    graph.eliminate_dead_code()
    return program.with_graph(graph, state=tuple(slots))


def _match(node: fx.Node, constant: dict[fx.Node, Tensor]) -> _Match | None:
    if node.target is aten.addmm.default and not node.kwargs:
        bias_node, z, weight_node = node.args
    elif node.target is aten.mm.default:
        bias_node, (z, weight_node) = None, node.args
    else:
        return None
    if weight_node not in constant or (bias_node is not None and bias_node not in constant):
        return None
    scaled = _scaled(z, constant)
    if scaled is None:
        return None
    centred, std = scaled
    source, mean = _centred(centred, constant)
    size = constant[weight_node].shape[0]
    if mean.numel() not in (1, size) or std.numel() not in (1, size) or source.meta["val"].shape != z.meta["val"].shape:
        return None
    if not (mean / std).abs().max() <= FAR:
        return None
    bias = None if bias_node is None else constant[bias_node]
    return _Match(node, source, constant[weight_node], bias, mean.expand(size), std.expand(size))


def _scaled(z: fx.Node, constant: dict[fx.Node, Tensor]) -> tuple[fx.Node, Tensor] | None:
    """``(y, std)`` for ``z = y / std`` or ``z = y * (1 / std)`` that only one operation reads."""
    if len(z.users) != 1 or len(z.args) != 2 or z.args[1] not in constant:
        return None
    value = constant[z.args[1]].reshape(-1)
    if z.target is aten.div.Tensor:
        return z.args[0], value
    if z.target is aten.mul.Tensor:
        return z.args[0], 1.0 / value
    return None


def _centred(y: fx.Node, constant: dict[fx.Node, Tensor]) -> tuple[fx.Node, Tensor]:
    """``(x, mean)`` for ``y = x - mean``; otherwise ``(y, 0)``."""
    if y.target is aten.sub.Tensor and len(y.users) == 1 and y.args[1] in constant and not y.kwargs:
        return y.args[0], constant[y.args[1]].reshape(-1)
    return y, torch.zeros(1)
