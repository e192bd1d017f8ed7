"""From Gymnasium spaces to specs, and between an environment's values and the rows of a buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch

from graphrl.errors import SpecError
from graphrl.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, Spec, Unbounded

__all__ = ["ObservationLeaf", "action_converter", "action_to_spec", "observation_leaves", "observation_to_spec"]

RESERVED = ("action", "reward", "done", "terminated", "truncated", "next", "collector")
# torch computes with these; wider or unsigned ones are stored in the next signed type
DTYPES = {
    "float16": torch.float16, "float32": torch.float32, "float64": torch.float32, "bool": torch.bool,
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class ObservationLeaf:
    """One tensor of an observation: its key, its spec for a single environment, and how to read it."""

    key: Any
    spec: Spec
    read: Callable[[Any], Any] | None  # None: the raw observation itself


def leaf_to_spec(space: Any, what: str) -> Spec:
    """The spec of a leaf space for one environment (no batch dim).

    Box with a finite bound: Bounded; without: Unbounded; float64 becomes float32. Discrete: Categorical index.
    MultiDiscrete: MultiCategorical; MultiBinary: Binary. Raises :class:`SpecError` naming any other space.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        dtype = DTYPES.get(space.dtype.name)
        if dtype is None:
            raise SpecError(f"{what} is a Box of {space.dtype}, which has no torch dtype")
        if bool((space.low == -inf).all() and (space.high == inf).all()):
            return Unbounded(space.shape, dtype=dtype)
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        return Bounded(low, high, space.shape, dtype=dtype)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiCategorical(space.nvec.tolist())
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape[-1], space.shape)
    raise SpecError(
        f"{what} is {space}, which graphrl does not read: it takes Box, Discrete, MultiDiscrete (one dim), MultiBinary"
        " and, for observations, Dict and Tuple of them. Wrap the environment to convert it"
    )


def _walk(space: Any, path: tuple[str, ...], read: Callable[[Any], Any] | None) -> list[ObservationLeaf]:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        leaves = []
        for name, inner in named:
            leaves += _walk(inner, (*path, str(name)), _then(read, name))
        return leaves
    path = path or ("observation",)
    spec = leaf_to_spec(space, f"observation {'.'.join(path)!r}")
    start = getattr(space, "start", 0)
    if np.any(np.asarray(start) != 0):
        read = _minus(read, start)
    return [ObservationLeaf(path[0] if len(path) == 1 else path, spec, read)]


def _then(read: Callable[[Any], Any] | None, name: Any) -> Callable[[Any], Any]:
    return (lambda raw: raw[name]) if read is None else (lambda raw: read(raw)[name])


def _minus(read: Callable[[Any], Any] | None, start: Any) -> Callable[[Any], Any]:
    return (lambda raw: raw - start) if read is None else (lambda raw: read(raw) - start)


def observation_leaves(space: Any) -> list[ObservationLeaf]:
    """The tensors of an observation space in a fixed order.

    A plain space is called ``observation``; a Dict gives its names, nested ones as tuples; a Tuple gives
    ``"0"``, ``"1"``, ... (under ``observation`` at the top). Raises :class:`SpecError` for a reserved name.
    """
    from gymnasium import spaces

    leaves = _walk(space, ("observation",) if isinstance(space, spaces.Tuple) else (), None)
    for leaf in leaves:
        head = leaf.key[0] if isinstance(leaf.key, tuple) else leaf.key
        if head in RESERVED:
            raise SpecError(f"the observation Dict has the name {head!r}, which graphrl writes itself: rename it")
    return leaves


def observation_to_spec(leaves: list[ObservationLeaf], num_envs: int) -> Composite:
    """The Composite of an observation, batch size ``[num_envs]``."""
    fields = {leaf.key: leaf.spec.expand(num_envs, *leaf.spec.shape) for leaf in leaves}
    return Composite(fields, [num_envs])


def action_to_spec(space: Any, num_envs: int) -> Spec:
    """The spec of ``action``: ``[num_envs, *space.shape]``. Raises :class:`SpecError` for Dict and Tuple spaces."""
    spec = leaf_to_spec(space, "the action")
    return spec.expand(num_envs, *spec.shape)


def action_converter(space: Any) -> Callable[[Any], Any]:
    """From a row of the action buffer (numpy) to what ``env.step`` takes; always fresh memory.

    Box: NaN is refused and values are clipped to the bounds (an unsquashed Gaussian exceeds them; the stored
    action stays unclipped). Index spaces: the range is checked and ``start`` added. Fresh memory matters:
    environments keep their last action. Raises :class:`SpecError`.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return _float_box(space) if np.issubdtype(space.dtype, np.floating) else _integer_box(space)
    if isinstance(space, spaces.Discrete):
        return _discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return _indices(space.nvec, space.start, space.dtype)
    return _indices(np.full(space.shape, 2), np.zeros(space.shape, dtype=space.dtype), space.dtype)


def _float_box(space: Any) -> Callable[[Any], Any]:
    low, high, dtype, shape = space.low.reshape(-1), space.high.reshape(-1), space.dtype, space.shape
    maximum, minimum, plain = np.maximum, np.minimum, len(space.shape) == 1 and space.dtype == np.float32
    bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())

    def convert(row: Any) -> Any:
        clipped = minimum(maximum(row if plain else row.reshape(-1).astype(dtype), low), high)  # NaN stays NaN
        # Bounded values cannot overflow, so one dot product (0.3 us against 1.2) finds NaN.
        if not clipped.dot(clipped) < inf if bounded else np.isnan(clipped).any():
            raise SpecError(f"the action holds NaN: {row}. The policy produced it: check its inputs and weights")
        return clipped if plain else clipped.reshape(shape)

    return convert


def _integer_box(space: Any) -> Callable[[Any], Any]:
    low, high, dtype = space.low, space.high, space.dtype
    return lambda row: np.clip(row, low, high).astype(dtype)


def _discrete(n: int, start: int) -> Callable[[Any], Any]:
    def convert(row: Any) -> int:
        index = int(row)
        if not 0 <= index < n:
            raise SpecError(f"the action is {index}, outside 0 .. {n - 1}")
        return index + start

    return convert


def _indices(limit: Any, start: Any, dtype: Any) -> Callable[[Any], Any]:
    def convert(row: Any) -> Any:
        if (row < 0).any() or (row >= limit).any():
            raise SpecError(f"the action is {row.tolist()}, outside 0 .. {limit.tolist()} - 1")
        return (row + start).astype(dtype)

    return convert
