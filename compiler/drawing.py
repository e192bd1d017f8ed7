"""Drawings of keyed graphs: boxes in layers, arrows that carry a key and its shape; as Mermaid text or as SVG."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from graphrl.compiler.program import Port
from graphrl.compiler.trace import common_leading
from graphrl.compiler.undo import Undo, kept_random_state
from graphrl.graph import KeyedGraph, KeyVersion
from graphrl.keys import encode_key, normalize_key
from graphrl.node_messages import describe

__all__ = ["Arrow", "Drawing", "draw"]

_CHAR, _LINE, _PAD, _GAP_X, _GAP_Y = 7.3, 16, 12, 45, 22
"""Pixels: a character of 12 px monospace, a line of it, inside a box, between layers, between boxes of a layer."""


@dataclass(frozen=True)
class Arrow:
    """From one box to another, by index, with what flows."""

    source: int
    target: int
    label: str


@dataclass(frozen=True)
class Drawing:
    """``boxes``: name and whether it is a module (else a key at the border)."""

    boxes: tuple[tuple[str, bool], ...]
    arrows: tuple[Arrow, ...]

    def to_mermaid(self) -> str:
        """The drawing as Mermaid text."""
        shapes = [f'    b{i}["{name}"]' if module else f'    b{i}(["{name}"])'
                  for i, (name, module) in enumerate(self.boxes)]  # fmt: skip
        lines = [f'    b{a.source} -- "{a.label}" --> b{a.target}' for a in self.arrows]
        return "\n".join(["flowchart LR", *shapes, *lines])

    def to_svg(self) -> str:
        """The drawing as one SVG element: a column for each step from the inputs, few crossings, no scripts."""
        depth = _depths(self)
        boxes, arrows = _with_waypoints(self, depth)
        layers = _ordered([[b for b in range(len(depth)) if depth[b] == d] for d in range(max(depth) + 1)], arrows)
        widths = [len(name) * _CHAR + 2 * _PAD if name else 0.0 for name, _ in boxes]
        height = max(map(len, layers)) * (2 * _LINE + _GAP_Y)
        place: dict[int, tuple[float, float, float]] = {}  # x, centre y, width
        x = float(_PAD)
        for i, layer in enumerate(layers):
            x += max((len(a.label) for a in arrows if depth[a.target] == i), default=0) * _CHAR + _GAP_X if i else 0
            column = max(widths[box] for box in layer)
            for j, box in enumerate(layer):
                place[box] = (x + (column - widths[box]) / 2, height / len(layer) * (j + 0.5), widths[box])
            x += column
        size = f'width="{x + _PAD:.0f}" height="{height:.0f}" viewBox="0 0 {x + _PAD:.0f} {height:.0f}"'
        curves, labels = zip(*(_curve(a, place, arrows) for a in arrows), strict=True) if arrows else ((), ())
        drawn = [_box(*place[i], name, module) for i, (name, module) in enumerate(boxes) if name]
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">'
        return "\n".join([head, _ARROWHEAD, *curves, *labels, *drawn, "</svg>"])


def draw(graph: KeyedGraph, inputs: Sequence[Port] = ()) -> Drawing:
    """Draw ``graph``. With the ports of a program compiled from it, each arrow carries the shape as well.

    Shapes are found by running the graph once on zeros; everything it changes is put back.
    """
    shapes = _shapes(graph, inputs) if inputs else {}
    boxes: list[tuple[str, bool]] = []
    arrows: list[Arrow] = []
    source: dict[KeyVersion, int] = {}

    def arrow(version: KeyVersion, target: int) -> Arrow:
        return Arrow(source[version], target, f"{encode_key(version.key)} {shapes.get(version, '')}".strip())

    for node, (reads, writes) in zip(graph.flat_nodes(), graph.versions(), strict=True):
        for version in reads:
            if version not in source:
                source[version] = len(boxes)
                boxes.append((encode_key(version.key), False))
        arrows += [arrow(version, len(boxes)) for version in reads]
        source.update(dict.fromkeys(writes, len(boxes)))
        boxes.append((describe(node), True))
    last = {version.key: version for version in source}
    for key in map(normalize_key, graph.out_keys):
        arrows.append(arrow(last[key], len(boxes)))
        boxes.append((encode_key(key), False))
    return Drawing(tuple(boxes), tuple(arrows))


def _shapes(graph: KeyedGraph, inputs: Sequence[Port]) -> dict[KeyVersion, str]:
    """What each version of each key holds, ``f32[4, 17]``, as far as the nodes run on zeros."""
    tensors = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in inputs]
    td = TensorDict({}, batch_size=common_leading(tensors))
    for port, tensor in zip(inputs, tensors, strict=True):
        td.set(port.key, tensor)
    shapes: dict[KeyVersion, str] = {}
    undo = Undo()
    with contextlib.suppress(Exception), torch.no_grad(), kept_random_state(), undo:  # zeros may not suit a node
        for node, (reads, writes) in zip(graph.flat_nodes(), graph.versions(), strict=True):
            for version in reads:
                shapes.setdefault(version, _shape(td, version))
            node(td)
            shapes.update({version: _shape(td, version) for version in writes})
    undo.restore()
    return shapes


def _shape(td: TensorDict, version: KeyVersion) -> str:
    value = td.get(version.key, None)
    return str(Port.of("", value)).partition(": ")[2] if isinstance(value, Tensor) else ""


# ---- layout


def _depths(drawing: Drawing) -> list[int]:
    """The layer of each box: its longest way from an input. Keys that leave the graph stand in the last one."""
    depth = [0] * len(drawing.boxes)
    for arrow in sorted(drawing.arrows, key=lambda a: a.target):  # boxes are numbered in the order they run
        depth[arrow.target] = max(depth[arrow.target], depth[arrow.source] + 1)
    sources, targets = {a.source for a in drawing.arrows}, {a.target for a in drawing.arrows}
    for box in targets - sources:
        depth[box] = max(depth)
    for box in sources - targets:
        depth[box] = min(depth[a.target] for a in drawing.arrows if a.source == box) - 1
    return depth


def _with_waypoints(drawing: Drawing, depth: list[int]) -> tuple[list[tuple[str, bool]], list[Arrow]]:
    """Boxes and arrows, long arrows led through a nameless box in each layer they pass: they go round the others."""
    boxes, arrows = list(drawing.boxes), []
    for arrow in drawing.arrows:
        source = arrow.source
        for layer in range(depth[source] + 1, depth[arrow.target]):
            arrows.append(Arrow(source, len(boxes), ""))
            source = len(boxes)
            boxes.append(("", False))
            depth.append(layer)
        arrows.append(Arrow(source, arrow.target, arrow.label))
    return boxes, arrows


def _ordered(layers: list[list[int]], arrows: Sequence[Arrow]) -> list[list[int]]:
    """Each layer sorted by the mean place of its neighbours, there and back a few times: few arrows cross."""
    place = {box: j / len(layer) for layer in layers for j, box in enumerate(layer)}
    for sweep in range(6):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            near = {b: [place[a.source] for a in arrows if a.target == b] for b in layer} if sweep % 2 == 0 else {
                b: [place[a.target] for a in arrows if a.source == b] for b in layer
            }  # fmt: skip
            layer.sort(key=lambda b: sum(near[b]) / len(near[b]) if near[b] else place[b])
            place.update({box: (j + 0.5) / len(layer) for j, box in enumerate(layer)})
    return layers


_ARROWHEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#667"/></marker></defs>'
)


def _curve(arrow: Arrow, place: dict[int, tuple[float, float, float]], arrows: Sequence[Arrow]) -> tuple[str, str]:
    """One arrow as a smooth curve, and its label near its end, apart from those of its neighbours."""
    (x0, y0, width), (x1, y1, _) = place[arrow.source], place[arrow.target]
    x0 += width
    entering = sorted((a for a in arrows if a.target == arrow.target), key=lambda a: place[a.source][1])
    y1 += (entering.index(arrow) - (len(entering) - 1) / 2) * _LINE
    bend = min(80.0, (x1 - x0) / 2)
    path = f"M{x0:.0f} {y0:.0f} C{x0 + bend:.0f} {y0:.0f} {x1 - bend:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    end = ' marker-end="url(#head)"' if arrow.label else ""
    label = (
        f'<text x="{x1 - 12:.0f}" y="{y1 - 4:.0f}" text-anchor="end" fill="#345" stroke="#fafbfd" stroke-width="4" '
        f'paint-order="stroke">{html.escape(arrow.label)}</text>'
    )
    return f'<path d="{path}" fill="none" stroke="#667"{end}/>', label


def _box(x: float, y: float, width: float, name: str, module: bool) -> str:
    radius, fill = (4, "#dce9f7") if module else (14, "#f3eee0")
    return (
        f'<rect x="{x:.0f}" y="{y - 16:.0f}" width="{width:.0f}" height="32" rx="{radius}" '
        f'fill="{fill}" stroke="#667"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + 4:.0f}" text-anchor="middle">{html.escape(name)}</text>'
    )
