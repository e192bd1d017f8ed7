"""Shapes with an open batch size: the symbol for it, the example's sizes behind it, and what a trace assumed of it.

torch's private symbolic-shape calls live in this file alone. Checked with torch 2.13; where one is missing, each batch
size keeps a program of its own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from graphrl.errors import TraceError

__all__ = ["batch_range", "on_fakes", "open_batch", "quiet_fakes", "rows_per_batch", "same_sizes", "sizes"]


def sizes(tensor: Tensor) -> tuple[int, ...]:
    """The shape in numbers; for a symbolic dim the example's."""
    shape: Any = tensor.shape
    return tuple(n if type(n) is int else int(n.node.hint) for n in shape)


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes, or strides, are equal at every batch size. Assumes nothing: unsure is ``False``."""
    if all(type(n) is int for n in (*a, *b)):
        return tuple(a) == tuple(b)
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    return statically_known_true(sym_eq(tuple(a), tuple(b)))


def open_batch(tensors: Sequence[Tensor]) -> tuple[FakeTensorMode, list[Tensor]]:
    """Fake tensors like the given ones, with one symbol for their first dim, the batch size: any number from 2."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        dims = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (tensor.dim() - 1)]  # equal sizes get one symbol
        return mode.from_tensor(tensor.detach(), symbolic_context=StatelessSymbolicContext(dims))

    return mode, [fake(t) for t in tensors]


@contextlib.contextmanager
def on_fakes(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run on fake tensors of ``mode``, with torch's Python kernels where its C++ ones ask for a size as a number."""
    if mode is None:
        yield
        return
    with mode, enable_python_dispatcher():
        yield


def rows_per_batch(dim: Any, batch: Any) -> int | None:
    """``n`` where ``dim`` is ``n`` times the batch size, 0 where it is a fixed number, ``None`` for anything else."""
    if type(dim) is int:
        return 0
    whole, rest = divmod(int(dim.node.hint), int(batch.node.hint))
    return whole if rest == 0 and same_sizes([dim], [whole * batch]) else None


def batch_range(mode: FakeTensorMode) -> tuple[int, int]:
    """The batch sizes, smallest and largest, that all that was traced or compiled under ``mode`` holds for.

    Raises :class:`TraceError` where something else was assumed, as ``if x.shape[0] % 2`` does, or one size.
    """
    env: Any = mode.shape_env
    for guard in env.guards:
        if env._maybe_evaluate_static(guard.expr, compute_hint=False) is None:
            raise TraceError(f"the code asks of the batch size, the s in it, whether {guard.expr}")
    ranges = list(env.var_to_range.values())
    smallest = max((int(r.lower) for r in ranges), default=2)
    largest = min((int(r.upper) for r in ranges if r.upper < sys.maxsize), default=sys.maxsize)
    if smallest == largest:
        raise TraceError(f"the code makes batch size {smallest} a fixed number, as int(x.shape[0]) and len(x) do")
    return smallest, largest


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Without torch's log lines about fake tensors: what cannot be traced with an open batch size has another way."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
