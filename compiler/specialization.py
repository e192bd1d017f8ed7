"""What a program was compiled for: whether it fits a call, and what changed when it does not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict.nn import EnsembleModule, TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from graphrl.graph import KeyedGraph
from graphrl.keys import Key, encode_key

__all__ = ["Specialization", "result_of"]


@dataclass(frozen=True)
class Specialization:
    """Shapes, dtypes, devices, modes, gradient flags and batch size of the calls a program serves.

    ``sizes``: the smallest and the largest batch size of a program for many, otherwise ``None``; ``signature`` and
    ``batch_size`` then lack the first dim.
    ``needs_grad``: which inputs and parameters carry gradient; ``None`` where nothing does.
    """

    signature: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    modes: tuple[Any, ...]
    needs_grad: tuple[bool, ...] | None
    batch_size: torch.Size
    sizes: tuple[int, int] | None = None

    @property
    def rows(self) -> int | None:
        """The first batch dim, where there is one."""
        return self.batch_size[0] if self.batch_size and self.sizes is None else None

    @property
    def may_open(self) -> bool:
        """Whether another program could serve this batch size among others."""
        return self.rows is not None and self.rows > 1 and bool(self.signature)

    def opened(self, smallest: int = 2, largest: int = sys.maxsize) -> Specialization:
        """The same for any batch size in a range. For one that is open already, or has ``rows``."""
        if self.sizes is not None:
            return replace(self, sizes=(smallest, largest))
        signature = tuple((shape[1:], dtype, device) for shape, dtype, device in self.signature)
        return replace(self, signature=signature, batch_size=self.batch_size[1:], sizes=(smallest, largest))

    def fits(self, inputs: Sequence[Tensor], batch_size: torch.Size | None) -> bool:
        """Whether tensors and a batch size (``None``: any) are those of this; modes and gradients are not looked at."""
        if self.sizes is not None:
            return self._fits_open(inputs, batch_size, *self.sizes)
        if batch_size is not None and batch_size != self.batch_size:
            return False
        for t, (shape, dtype, device) in zip(inputs, self.signature, strict=True):
            if t.shape != shape or t.dtype is not dtype or t.device != device:
                return False
        return True

    def _fits_open(self, inputs: Sequence[Tensor], batch_size: torch.Size | None, smallest: int, largest: int) -> bool:
        first = inputs[0].shape
        if not first or not smallest <= (rows := first[0]) <= largest:
            return False
        if batch_size is not None and (not batch_size or batch_size[0] != rows or batch_size[1:] != self.batch_size):
            return False
        for t, (rest, dtype, device) in zip(inputs, self.signature, strict=True):
            shape = t.shape
            if not shape or shape[0] != rows or shape[1:] != rest or t.dtype is not dtype or t.device != device:
                return False
        return True

    def changes_from(self, old: Specialization, keys: Sequence[Key]) -> list[str]:
        """What differs from ``old``, in words: which key, from what to what."""
        found = []
        many = old.sizes is not None
        if self.rows is not None and (many or old.rows is not None) and old.opened() == self.opened():
            return [f"batch size {'-'.join(map(str, old.sizes)) if old.sizes else old.rows} -> {self.rows}"]
        for key, (was, dtype, device), (shape, new_dtype, new_device) in zip(
            keys, old.signature, self.signature, strict=True
        ):
            name = encode_key(key)
            if (shape[1:] if many else shape) != was:
                found.append(f"shape of {name} {['*'] * many + list(was)} -> {list(shape)}")
            if new_dtype != dtype:
                found.append(f"dtype of {name} {_short(dtype)} -> {_short(new_dtype)}")
            if new_device != device:
                found.append(f"device of {name} {device} -> {new_device}")
        if not found and (self.batch_size[1:] if many else self.batch_size) != old.batch_size:
            found.append(f"batch size {['*'] * many + list(old.batch_size)} -> {list(self.batch_size)}")
        return found + _mode_changes(old.modes, self.modes) + _gradient_changes(old.needs_grad, self.needs_grad)


def _mode_changes(old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
    names = ("interaction type", "autocast on the CPU", "autocast on CUDA", "argument checks of distributions")
    found = [f"{name} {_short(a)} -> {_short(b)}" for name, a, b in zip(names, old, new, strict=False) if a != b]
    flips = [(a, b) for a, b in zip(old[len(names) :], new[len(names) :], strict=True) if a != b]
    if flips:
        word = {True: "train", False: "eval"}
        found.append(f"{len(flips)} module(s) {word[flips[0][0]]} -> {word[flips[0][1]]}")
    return found


def _gradient_changes(old: tuple[bool, ...] | None, new: tuple[bool, ...] | None) -> list[str]:
    if old == new:
        return []
    if old is None or new is None:
        return [f"gradients {'off -> on' if old is None else 'on -> off'}"]
    return ["what requires gradient"]


def _short(value: Any) -> str:
    return "off" if value is False else str(value).removeprefix("torch.")


def result_of(graph: TensorDictModuleBase) -> str:
    """What a call returns: the ``same`` batch, a ``new`` one of no batch size, an ``empty`` one like it, or ``another``
    that eager makes by itself."""
    if getattr(graph, "returns_new", False):
        return "new"
    if isinstance(graph, KeyedGraph):
        return "same"
    inplace = getattr(graph, "inplace", True)
    if isinstance(graph, TensorDictModule) and not isinstance(graph, TensorDictSequential):
        return {True: "same", "empty": "empty"}.get(inplace, "new")
    inner = [m for m in graph.modules() if isinstance(m, TensorDictModuleBase)]
    ensembles = any(isinstance(m, EnsembleModule) for m in inner)
    parts = any(not isinstance(m, TensorDictSequential) and getattr(m, "inplace", True) is not True for m in inner)
    return "another" if ensembles or parts or inplace not in (True, None) else "same"
