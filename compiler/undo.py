"""Run code for its trace or its result, then put every tensor and random generator back as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["COMPILING", "Undo", "kept_random_state", "random_states", "set_random_states"]

COMPILING = threading.RLock()
"""Held while anything is compiled: tracing sets switches that all threads share, and ``make_fx`` patches torch."""

_UNDECLARED_WRITES = {
    getattr(torch.ops.aten, f"{name}batch_norm"): ("running_mean", "running_var")
    for name in ("native_", "cudnn_", "miopen_")
}
"""Operations that write arguments their schema calls read-only, and which ones."""


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the CPU and CUDA generators back at the end, as if nothing had been drawn."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def random_states(devices: Iterable[torch.device]) -> list[tuple[torch.device, Tensor]]:
    """The present states of the devices' generators, for :func:`set_random_states`."""
    return [(d, torch.cuda.get_rng_state(d) if d.type == "cuda" else torch.get_rng_state()) for d in devices]


def set_random_states(states: Iterable[tuple[torch.device, Tensor]]) -> None:
    """Go back: what was drawn since is drawn again."""
    for device, state in states:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


class Undo(TorchDispatchMode):
    """While active, remembers each tensor's bytes before its first in-place change; ``restore()`` writes them back.

    Tensors made inside (lazily created optimiser moments, say) go back to the value they were born with, so a step
    run under ``Undo`` leaves the optimiser as if it had been initialised and never stepped. ``grads_of`` names the
    tensors that start without a ``.grad`` and get theirs back. CPU and CUDA generators are restored on exit.
    """

    def __init__(self, grads_of: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._grads = [(t, t.grad) for t in grads_of if t.is_leaf]  # functional parameters may be results
        self._memory = [(t, t.detach()) for t, _ in self._grads]

    def __enter__(self) -> Undo:
        self._random = contextlib.ExitStack()
        self._random.enter_context(kept_random_state())
        for tensor, _ in self._grads:
            tensor.grad = None
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._random.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        hidden = _UNDECLARED_WRITES.get(func._overloadpacket, ())
        if schema.is_mutable or hidden:
            for i, argument in enumerate(schema.arguments):
                if argument.name not in hidden and (argument.alias_info is None or not argument.alias_info.is_write):
                    continue
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        self._remember(tensor)
        return func(*args, **kwargs)

    def _remember(self, tensor: Tensor) -> None:
        if tensor.is_meta or isinstance(tensor, FakeTensor):  # nothing is there to put back
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._before:
            with _disable_current_modes():  # a tracer below must not record this
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._before[storage._cdata] = (whole, whole.clone())

    def changed(self) -> list[Tensor]:
        """Flat byte views of every storage that was written so far."""
        return [whole for whole, _ in self._before.values()]

    def restore(self) -> None:
        """Write every remembered value back."""
        with torch.no_grad():
            for whole, before in self._before.values():
                whole.copy_(before)
            for tensor, data in self.replaced():
                tensor.data = data
            for tensor, grad in self._grads:
                tensor.grad = grad

    def replaced(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors of ``grads_of`` whose ``.data`` was replaced rather than written into, and what it was."""
        return [(t, data) for t, data in self._memory if t.data_ptr() != data.data_ptr()]
