"""What must hold for a compiled program to run: the cheap checks before every call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from graphrl.compiler.backends import Lowered
from graphrl.compiler.checks import CHECKED, may_go_on
from graphrl.compiler.program import Program
from graphrl.compiler.undo import random_states, set_random_states
from graphrl.graph import KeyedGraph

try:  # which transform of torch.func is at work; private, checked with torch 2.13
    from torch._C._functorch import maybe_current_level
except ImportError:

    def maybe_current_level() -> int | None:
        """Without the entry, transforms are not seen: torch itself then refuses compiled code under them."""
        return None


__all__ = ["Bound", "LiveState", "Modes", "StateChanged", "operations_watched", "raise_index_error"]

_MODELESS = {
    *(nn.Linear, nn.Identity, nn.Flatten, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Embedding),
    *(nn.ReLU, nn.Tanh, nn.ELU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.Softmax),
    *(nn.Sequential, nn.ModuleDict, nn.ModuleList, TensorDictModule, KeyedGraph),
}
"""Classes whose own ``forward`` does the same in training and evaluation."""


def operations_watched() -> bool:
    """Whether someone traces, or transforms (``torch.func``), each operation: compiled code would hide them."""
    return is_in_torch_dispatch_mode() or maybe_current_level() is not None


def raise_index_error(error: RuntimeError, what: str) -> None:
    """Raise eager's kind of error where ``error`` is generated code's own report of an index out of range."""
    if "index out of bounds" in str(error):
        raise IndexError(f"an index in {what} is out of range; run it eagerly to see which") from error


class Modes:
    """The modes a trace depends on: train/eval flags, TensorDict's interaction type, autocast, argument checks."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [m for m in modules if type(m) not in _MODELESS]
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]

    def same_modules(self) -> bool:
        """Whether every module still has the children it had: a layer put in place of another needs a new trace."""
        for children, before in self._children:
            if [*children.values()] != before:
                return False
        return True

    def now(self) -> tuple[Any, ...]:
        """The present modes, hashable and comparable."""
        return (
            interaction_type(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            Distribution._validate_args,
            *[m.training for m in self.modules],
        )


class StateChanged(Exception):
    """A weight has another shape, dtype, device or layout than the program was compiled for."""


class LiveState:
    """Reads a program's state tensors at each call and notices when one became another kind of tensor.

    A tensor at the address it had at the last call needs no further look: the old memory is kept alive here, so new
    memory, of another dtype or shape, has another address. A transposed view of the same memory shows by its layout.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._reads = [slot.read for slot in program.state]
        self._layouts = [_layout(read()) for read in self._reads]
        self._seen: list[Tensor] = []
        self._places: tuple[list[int], list[bool]] = ([], [])

    def __call__(self) -> list[Tensor]:
        tensors = [read() for read in self._reads]
        places = (list(map(_data_ptr, tensors)), list(map(_is_contiguous, tensors)))
        if places != self._places:
            for slot, tensor, layout in zip(self._program.state, tensors, self._layouts, strict=True):
                if _layout(tensor) != layout:
                    raise StateChanged(f"{slot.name} became {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
            self._places, self._seen = places, [t.detach() for t in tensors]
        return tensors


_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr
_is_contiguous: Callable[[Tensor], bool] = Tensor.is_contiguous


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Bound:
    """A lowered program as a function of the inputs alone: gathers the live state, draws the noise, runs.

    Where a check of the traced code would fail, ``otherwise`` runs instead, and raises the code's own error.
    """

    def __init__(
        self, program: Program, lowered: Lowered, otherwise: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    ) -> None:
        self._otherwise = otherwise
        self._checked = program.outputs[-1:] != () and program.outputs[-1].key == CHECKED
        self._live = LiveState(program)
        self._lowered = lowered
        self._noise = program.noise
        self._generators = {n.device for n in program.noise} if may_go_on(program.assumptions) else set()
        self._dynamic = program.dynamic
        self._reuses_noise = _noise_stays_inside(program)
        self._mine = threading.local()
        self._write_into = getattr(lowered, "call_into", None)
        self._row_draws: tuple[int, list[Tensor]] | None = None
        self._row_flags: Tensor | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run on plain tensors in ``in_keys`` order."""
        outputs = self.attempt(inputs)
        return self._otherwise(inputs) if outputs is None else outputs

    def attempt(self, inputs: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """The results, or ``None`` where a check fails: no state is written then, and the draws can be made again."""
        if not self._checked:
            return self._lowered([*inputs, *self._live(), *self._draws(inputs)])
        before = random_states(self._generators)
        *outputs, passed = self._lowered([*inputs, *self._live(), *self._draws(inputs)])
        if passed:
            return outputs
        set_random_states(before)
        return None

    def into(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run and leave the results in ``outputs``."""
        if self._write_into is not None and all(t.is_contiguous() for t in outputs):
            flag = [torch.empty((), dtype=torch.bool)] if self._checked else []
            before = random_states(self._generators) if flag else []
            self._write_into([*inputs, *self._live(), *self._draws(inputs)], [*outputs, *flag])
            if not flag or flag[0]:
                return
            set_random_states(before)
        for target, value in zip(outputs, self(inputs), strict=True):
            target.copy_(value)

    def rows(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[int], None] | None:
        """A function of a row number, see :meth:`CompiledGraph.bind_rows`; ``None`` where the backend has none."""
        bind_rows = getattr(self._lowered, "bind_rows", None)
        if bind_rows is None or not self._reuses_noise:
            return None
        if self._row_draws is None or self._row_draws[0] != len(inputs):
            draws = [torch.empty(len(inputs), *n.shape, dtype=n.dtype, device=n.device) for n in self._noise]
            self._row_draws = (len(inputs), draws)
        draws = [n.redraw(rows) for n, rows in zip(self._noise, self._row_draws[1], strict=True)]
        if not self._checked:
            return bind_rows(inputs, self._live(), draws, outputs)
        if self._row_flags is None or len(self._row_flags) != len(inputs):
            self._row_flags = torch.empty(len(inputs), dtype=torch.bool)
            self._flagged: tuple[Any, list[Any]] = (None, [])
        if self._flagged[0] is not outputs:
            self._flagged = (outputs, [(*row, flag) for row, flag in zip(outputs, self._row_flags, strict=True)])
        step, passed = bind_rows(inputs, self._live(), draws, self._flagged[1]), self._row_flags.numpy()
        if step is None:
            return None

        def checked(t: int) -> None:
            step(t)
            if not passed[t]:
                for target, value in zip(outputs[t], self._otherwise(inputs[t]), strict=True):
                    target.copy_(value)

        return checked

    def _draws(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._noise:
            return ()
        rows = inputs[0].shape[0] if self._dynamic else None
        if not self._reuses_noise:
            return [n.draw(rows) for n in self._noise]
        known, buffers = getattr(self._mine, "buffers", (-1, []))
        if known != rows:  # first call in this thread, or of this batch size
            buffers = [n.empty(rows) for n in self._noise]
            self._mine.buffers = rows, buffers
        return [n.redraw(buffer) for n, buffer in zip(self._noise, buffers, strict=True)]


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
