"""What the kernels that are linear recurrences over time share: the native call, gradient, batching and shape rules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from graphrl.kernels._eager import inside_transform, plain_eager
from graphrl.kernels._lib import lib as _native
from graphrl.kernels._triton import triton_version

__all__ = ["Recurrence", "ends", "extents", "following", "ordinary", "threads_for", "to_front"]

_ops = torch.library.Library("graphrl", "FRAGMENT")  # keeps the registrations alive
# Below this many elements per thread, waking one costs more than it saves.
_PER_THREAD = 65_536


def extents(shape: torch.Size, time_dim: int) -> tuple[int, int, int, int]:
    """outer, steps, inner and the number of threads that this much work is worth. Of a shape that is not empty."""
    steps = shape[time_dim]
    inner = shape[-1] if time_dim == -2 else prod(shape[time_dim % len(shape) + 1 :])
    size = shape.numel()
    outer = size // (steps * inner)
    return outer, steps, inner, threads_for(size)


def threads_for(size: int) -> int:
    """How many threads this many elements are worth."""
    return 1 if size < 2 * _PER_THREAD else min(size // _PER_THREAD, torch.get_num_threads())


def ends(over: Tensor, time_dim: int) -> Tensor:
    """Where a step reads no later one: ``over``, or the last. ``time_dim`` counts from the end."""
    steps = over.shape[time_dim]
    last = torch.arange(steps, device=over.device).eq(steps - 1).view(steps, *(1,) * (-1 - time_dim))
    return last | over


def following(x: Tensor, over: Tensor, time_dim: int) -> Tensor:
    """``x_{t+1}`` where step t is neither ``over`` nor the last, else zero."""
    return x.roll(-1, time_dim).masked_fill(ends(over, time_dim), 0.0)


@dataclass(frozen=True)
class Recurrence:
    """A family of kernels and its two operators, registered by ``register()``.

        name(*data, *constants, *flags, *coefficients, time_dim, *options) -> outputs
        name_backward(*grads, *read, output, *constants, *flags, *coefficients, time_dim, *options, wants_coefficients)
            -> gradients of data, then of coefficients

    data: float tensors of one shape. constants: likewise, but without a gradient. flags: bool. coefficients: in the
    accumulation dtype, each 0-d or of the full shape. read: the data that the coefficients' gradients need beside the
    first output; the kernels do not look at either without ``wants_coefficients``, and placeholders are passed.
    differentiable: ``name_backward`` in differentiable operations, one gradient per element, for create_graph=True.

    The C functions ``grl_<name>[_backward]_<f32|f64>`` take pointers to the tensors in that order, the coefficients as
    numbers, the options, pointers to the results and ``extents``. They are given all coefficients per element (and the
    numbers mean nothing) or none (and the pointers are null). ``<name>/triton.py`` has ``forward_kernel`` and
    ``backward_kernel`` that take the same, but one coefficient may be per element and another not: see ``launch``.
    """

    name: str
    data: tuple[str, ...]
    coefficients: tuple[str, ...]
    outputs: tuple[str, ...]
    read: tuple[str, ...]
    differentiable: Callable[..., Sequence[Tensor]]
    constants: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("done", "terminated")
    optional_flags: bool = False
    options: tuple[str, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """The operator on checked arguments, in eager mode, traced or under ``torch.func``."""
        if plain_eager() and ordinary(args):
            return self.forward_cpu(*args)
        if inside_transform():  # refuses the autograd wrapper that torch.library generates
            return self._transformable.apply(*args)
        return getattr(torch.ops.graphrl, self.name)(*args)

    def register(self) -> Recurrence:
        """Define both operators in torch, and return this."""
        flag = "Tensor?" if self.optional_flags else "Tensor"
        tail = [f"{flag} {x}" for x in self.flags] + [f"Tensor {x}" for x in self.coefficients] + ["int time_dim"]
        tail += [f"float {x}" for x in self.options]
        constants = [f"Tensor {x}" for x in self.constants]
        first = [f"Tensor {x}" for x in self.data]
        grads = [f"Tensor grad_{x}" for x in self.outputs] + [f"Tensor {x}" for x in self.read]
        grads.append(f"Tensor {self.outputs[0]}")
        self._define(self.name, [*first, *constants, *tail], len(self.outputs), self.forward_cpu, self.forward_triton)
        backward = [*grads, *constants, *tail, "bool wants_coefficients"]
        results = len(self.data) + len(self.coefficients)
        self._define(f"{self.name}_backward", backward, results, self.backward_cpu, self.backward_triton)
        name = f"graphrl::{self.name}"
        torch.library.register_fake(name, self._fake, lib=_ops)
        torch.library.register_fake(f"{name}_backward", self._backward_fake, lib=_ops)
        torch.library.register_autograd(name, self._backward, setup_context=self._setup_context, lib=_ops)
        torch.library.register_vmap(name, self._vmap, lib=_ops)
        torch.library.register_vmap(f"{name}_backward", self._backward_vmap, lib=_ops)
        return self

    @staticmethod
    def _define(name: str, arguments: list[str], results: int, cpu: Any, cuda: Any) -> None:
        returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        _ops.define(f"{name}({', '.join(arguments)}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        _ops.impl(name, cpu, "CPU")
        _ops.impl(name, cuda, "CUDA")

    # --- CPU ---

    def _split(self, args: Sequence[Any], *sizes: int) -> list[Any]:
        """``args`` in runs of ``sizes``, then of constants, flags, coefficients, and the rest."""
        runs, at = [], 0
        for n in (*sizes, len(self.constants), len(self.flags), len(self.coefficients)):
            runs.append(list(args[at : at + n]))
            at += n
        return [*runs, *args[at : at + 1], list(args[at + 1 :])]

    def _call(
        self,
        suffix: str,
        floats: Sequence[Tensor],
        flags: Any,
        coefficients: Any,
        options: Any,
        out: Any,
        time_dim: int,
    ) -> None:
        if not out[0].numel():
            return
        shape, dtype = out[0].shape, out[0].dtype
        full, numbers = [None] * len(coefficients), [0.0] * len(coefficients)
        if any(x.dim() for x in coefficients):
            full = [x.expand(shape).contiguous() for x in coefficients]
        else:
            numbers = [x.item() for x in coefficients]
        flags = [x if x is None else x.contiguous() for x in flags]
        tensors = [x if x is None else x.data_ptr() for x in (*floats, *flags, *full)]
        results = [x if x is None else x.data_ptr() for x in out]
        function = getattr(_native, f"grl_{self.name}{suffix}_{'f64' if dtype == torch.float64 else 'f32'}")
        function(*tensors, *numbers, *options, *results, *extents(shape, time_dim))

    def forward_cpu(self, *args: Any) -> Any:
        """The operator by the C function."""
        data, constants, flags, coefficients, time_dim, options = self._split(args, len(self.data))
        exact, dtype = coefficients[0].dtype, data[0].dtype
        floats = [x.to(exact).contiguous() for x in (*data, *constants)]
        out = [torch.empty_like(floats[0]) for _ in self.outputs]
        self._call("", floats, flags, coefficients, options, out, time_dim)
        return out[0].to(dtype) if len(out) == 1 else tuple(x.to(dtype) for x in out)

    def backward_cpu(self, *args: Any) -> Any:
        """The gradient by the C function."""
        sizes = len(self.outputs), len(self.read) + 1
        grads, read, constants, flags, coefficients, time_dim, (*options, wants) = self._split(args, *sizes)
        exact = coefficients[0].dtype
        floats = [x.to(exact).contiguous() for x in grads]
        floats += [x.to(exact).contiguous() if wants else x for x in read]
        floats += [x.to(exact).contiguous() for x in constants]
        results = len(self.data) + (len(coefficients) if wants else 0)
        out = [torch.empty_like(floats[0]) for _ in range(results)]
        unwanted = [None] * (len(self.data) + len(coefficients) - results)
        self._call("_backward", floats, flags, coefficients, options, [*out, *unwanted], time_dim)
        return self._finish(out, grads[0].dtype, coefficients)

    def _finish(
        self, grads: Sequence[Tensor], dtype: torch.dtype, coefficients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of the data in their dtype; those of coefficients, if there, in theirs, summed when 0-d."""
        n = len(self.data)
        data = [x.to(dtype) for x in grads[:n]]
        if len(grads) == n:
            return (*data, *(x.new_empty(0) for x in coefficients))
        return (*data, *(g.sum() if x.dim() == 0 else g for g, x in zip(grads[n:], coefficients, strict=True)))

    # --- CUDA ---

    @cached_property
    def _scan(self) -> Any:
        return importlib.import_module("graphrl.kernels._triton_scan")

    def _launch(
        self, kernel: Any, tensors: Sequence[Any], coefficients: Any, options: Any, out: Any, time_dim: int
    ) -> None:
        if not out[0].numel():
            return
        dense = [x if x is None else x.contiguous() for x in (*tensors, *coefficients)]
        dense = [x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in dense]
        per_step = {x.upper(): c.dim() > 0 for x, c in zip(self.coefficients, coefficients, strict=True)}
        with torch.cuda.device_of(out[0]):
            self._scan.launch(kernel, (*dense, *out), options, time_dim, coefficients[0].dtype, **per_step)

    def forward_triton(self, *args: Any) -> Any:
        """The operator by the Triton kernel."""
        data, constants, flags, coefficients, time_dim, options = self._split(args, len(self.data))
        out = [torch.empty_like(data[0], memory_format=torch.contiguous_format) for _ in self.outputs]
        self._launch(
            triton_version(self.name).forward_kernel, (*data, *constants, *flags), coefficients, options, out, time_dim
        )
        return out[0] if len(out) == 1 else tuple(out)

    def backward_triton(self, *args: Any) -> tuple[Tensor, ...]:
        """The gradient by the Triton kernel."""
        sizes = len(self.outputs), len(self.read) + 1
        grads, read, constants, flags, coefficients, time_dim, (*options, wants) = self._split(args, *sizes)
        first, exact = grads[0], coefficients[0].dtype
        out = [torch.empty_like(first, memory_format=torch.contiguous_format) for _ in self.data]
        extra = [torch.empty_like(out[0], dtype=exact) if wants else None for _ in coefficients]
        tensors = (*grads, *read, *constants, *flags)
        self._launch(
            triton_version(self.name).backward_kernel, tensors, coefficients, options, [*out, *extra], time_dim
        )
        return self._finish([*out, *(x for x in extra if x is not None)], first.dtype, coefficients)

    # --- shape rules ---

    def _fake(self, first: Tensor, *_: Any) -> Any:
        out = tuple(first.new_empty(first.shape) for _ in self.outputs)
        return out[0] if len(out) == 1 else out

    def _backward_fake(self, first: Tensor, *args: Any) -> tuple[Tensor, ...]:
        coefficients = self._split((first, *args), len(self.outputs), len(self.read) + 1)[4]
        data = [first.new_empty(first.shape) for _ in self.data]
        if not args[-1]:
            return (*data, *(x.new_empty(0) for x in coefficients))
        return (*data, *(x.new_empty(() if x.dim() == 0 else first.shape) for x in coefficients))

    # --- autograd ---

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        data, constants, flags, coefficients, ctx.time_dim, ctx.options = self._split(inputs, len(self.data))
        start = len(data) + len(constants) + len(flags)
        ctx.needs = list(ctx.needs_input_grad[start : start + len(coefficients)])
        named = dict(zip(self.data, data, strict=True))
        read = [named[x] for x in self.read] + [output if len(self.outputs) == 1 else output[0]]
        ctx.save_for_backward(*constants, *flags, *coefficients, *(read if any(ctx.needs) else ()))

    def _backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wants = any(ctx.needs)
        constants, flags, coefficients, *_ = self._split(ctx.saved_tensors)
        others = [*constants, *flags, *coefficients]
        read = ctx.saved_tensors[len(others) :] if wants else grads[:1] * (len(self.read) + 1)
        args = (*grads, *read, *others, ctx.time_dim, *ctx.options, wants)
        # Gradient mode is on in a backward pass only under create_graph=True.
        if torch.is_grad_enabled():
            out = self._finish(self.differentiable(*args), grads[0].dtype, coefficients)
        else:
            out = getattr(torch.ops.graphrl, f"{self.name}_backward")(*args)
        n, hidden = len(self.data), len(constants) + len(flags)
        last = [g if needed else None for g, needed in zip(out[n:], ctx.needs, strict=True)]
        return (*out[:n], *[None] * hidden, *last, None, *[None] * len(self.options))

    # --- vmap: leading dimensions are free, so a batched call is the same call with one more ---

    def _vmap(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        count = len(self.data) + len(self.constants) + len(self.flags)
        rank, size = args[0].dim() - (in_dims[0] is not None), info.batch_size
        full = [to_front(x, d, size, rank) for x, d in zip(args[:count], in_dims, strict=False)]
        end = count + len(self.coefficients)
        for x, d in zip(args[count:end], in_dims[count:end], strict=True):
            alone = d is None and x.dim() == 0
            full.append(x if alone else to_front(x, d, size, rank).expand(full[0].shape))
        return self(*full, *args[end:]), 0 if len(self.outputs) == 1 else (0,) * len(self.outputs)

    def _backward_vmap(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        count = len(args) - 2 - len(self.options)
        tensors, rest, n = args[:count], args[count:], len(self.data)
        rank = args[0].dim() - (in_dims[0] is not None)
        full = [to_front(x, d, info.batch_size, rank) for x, d in zip(tensors, in_dims, strict=False)]
        first = count - len(self.coefficients)
        full[first:] = [x.expand(full[0].shape) for x in full[first:]]
        out = list(getattr(torch.ops.graphrl, f"{self.name}_backward")(*full, *rest))
        if not args[-1]:
            return tuple(out), (*[0] * n, *[None] * len(self.coefficients))
        for i, (x, d) in enumerate(zip(tensors[first:], in_dims[first:count], strict=True), n):
            if x.dim() == (d is not None):
                out[i] = out[i].flatten(1).sum(1)
        return tuple(out), (0,) * len(out)

    @cached_property
    def _transformable(self) -> Any:
        """The operator for ``torch.func``: grad, vmap and their compositions."""

        class Transformable(torch.autograd.Function):
            forward = staticmethod(lambda *args: getattr(torch.ops.graphrl, self.name)(*args))
            setup_context = staticmethod(self._setup_context)
            backward = staticmethod(self._backward)
            vmap = staticmethod(self._vmap)

        return Transformable


def ordinary(args: Sequence[Any]) -> bool:
    """True when the tensors among these lie on the CPU, may be read as they are, and ask for no gradient now."""
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    return not wanted and _native.ordinary(*args)


def to_front(x: Any, dim: int | None, size: int, rank: int) -> Any:
    """``x`` with its mapped dimension first, or expanded to have one; 0-d coefficients grow to ``rank`` dimensions."""
    if x is None:
        return None
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    x = x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:])
    return x.expand(size, *x.shape[1:])
