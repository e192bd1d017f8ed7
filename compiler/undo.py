"""Run code for its trace or its result, then put every tensor and random generator back as it was."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["Undo"]


class Undo(TorchDispatchMode):
    """While active, remembers each tensor's bytes before its first in-place change; ``restore()`` writes them back.

    Tensors made inside (lazily created optimiser moments, say) go back to the value they were born with, so a step
    run under ``Undo`` leaves the optimiser as if it had been initialised and never stepped. ``grads_of`` names the
    tensors whose ``.grad`` is put back too. CPU and CUDA generators are restored on exit.
    """

    def __init__(self, grads_of: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._grads = [(t, t.grad) for t in grads_of]

    def __enter__(self) -> Undo:
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.set_rng_state(self._cpu_rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state_all(self._cuda_rng)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        self._remember(tensor)
        return func(*args, **kwargs)

    def _remember(self, tensor: Tensor) -> None:
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
            for tensor, grad in self._grads:
                tensor.grad = grad
