"""What must hold for a compiled program to run: the cheap checks before every call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from graphrl.compiler.backends import Lowered
from graphrl.compiler.program import Program
from graphrl.graph import KeyedGraph

__all__ = ["LiveState", "Modes", "StateChanged", "bind"]

_MODELESS = {
    *(nn.Linear, nn.Identity, nn.Flatten, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Embedding),
    *(nn.ReLU, nn.Tanh, nn.ELU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.Softmax),
    *(nn.Sequential, nn.ModuleDict, nn.ModuleList, TensorDictModule, KeyedGraph),
}
"""Classes whose own ``forward`` does the same in training and evaluation."""


class Modes:
    """The modes a trace depends on: train/eval flags, TensorDict's interaction type, autocast."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [m for m in modules if type(m) not in _MODELESS]

    def now(self) -> tuple[Any, ...]:
        """The present modes, hashable and comparable."""
        return (
            interaction_type(),
            torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            *[m.training for m in self.modules],
        )


class StateChanged(Exception):
    """A weight has another shape, dtype, device or layout than the program was compiled for."""


class LiveState:
    """Reads a program's state tensors at each call and notices when one became another kind of tensor.

    A tensor at the address it had at the last call needs no further look: the old memory is kept alive here, so new
    memory, of another dtype or shape, has another address.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._reads = [slot.read for slot in program.state]
        self._layouts = [_layout(read()) for read in self._reads]
        self._seen: list[Tensor] = []
        self._addresses: list[int] = []

    def __call__(self) -> list[Tensor]:
        tensors = [read() for read in self._reads]
        addresses = [t.data_ptr() for t in tensors]
        if addresses != self._addresses:
            for slot, tensor, layout in zip(self._program.state, tensors, self._layouts, strict=True):
                if _layout(tensor) != layout:
                    raise StateChanged(f"{slot.name} became {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
            self._addresses, self._seen = addresses, [t.detach() for t in tensors]
        return tensors


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def bind(program: Program, lowered: Lowered) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """A function of the inputs alone: gathers the live state, draws the noise, runs."""
    live = LiveState(program)
    if not program.noise:
        return lambda inputs: lowered([*inputs, *live()])
    if not _noise_stays_inside(program):
        return lambda inputs: lowered([*inputs, *live(), *[n.draw() for n in program.noise]])
    mine = threading.local()

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            redraws = mine.redraws
        except AttributeError:
            redraws = mine.redraws = [(n.redraw, n.empty()) for n in program.noise]
        return lowered([*inputs, *live(), *[redraw(buffer) for redraw, buffer in redraws]])

    return run


def _noise_stays_inside(program: Program) -> bool:
    """Whether no output is, or views, a random draw: only then may its memory be drawn into again."""
    (output,) = (n for n in program.graph_module.graph.nodes if n.op == "output")
    places = program.placeholders()[len(program.inputs) + len(program.state) :]
    reached = set(places)
    for node in program.graph_module.graph.nodes:
        tags = getattr(node.target, "_schema", None)
        views = tags is not None and any(a.alias_info is not None for a in tags.arguments)
        if views and any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    return not any(node in reached for node in output.args[0])
