"""What messages say of a node: its name, what it read, why it needs a key."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from graphrl.errors import GraphError, KeyMissingError, did_you_mean
from graphrl.keys import Key, normalize_keys
from graphrl.opaque_nodes import is_opaque

if TYPE_CHECKING:
    from graphrl.graph import KeyedGraph

__all__ = ["describe", "missing_key", "node_error"]


def describe(node: nn.Module) -> str:
    """A node in a word: the class of its module, the name of its function."""
    inner = getattr(node, "module", None)
    if isinstance(node, TensorDictModule) and inner is not None:
        if isinstance(inner, nn.Module):
            return f"{'opaque ' if is_opaque(node) else ''}{type(inner).__name__}"
        return getattr(inner, "__name__", None) or type(inner).__name__
    return type(node).__name__


def _shapes(tensordict: TensorDictBase, keys: Iterable[Key]) -> str:
    def show(key: Key) -> str:
        value = tensordict.get(key, None)
        if not isinstance(value, torch.Tensor):
            return f"{key!r}: {type(value).__name__}"
        return f"{key!r} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"

    return ", ".join(show(key) for key in keys)


def missing_key(graph: KeyedGraph, key: Key, tensordict: TensorDictBase) -> KeyMissingError:
    """The error for a key that a node reads and the batch lacks: which node, what is there, and the nearest name."""
    present = list(tensordict.keys(True, True))
    readers = ((name, node) for name, node in graph.nodes.items() if key in normalize_keys(node.in_keys))
    index, node = next(readers, (None, graph))
    if index is None:
        return KeyMissingError(
            f"the graph was built on a node that read {key!r}, and none does now: change the keys of nodes before they "
            "are joined, or build the graph anew"
        )
    near = did_you_mean(key, present)
    fix = ""
    if near and isinstance(key, str):
        found = near.removeprefix(" Did you mean ").removesuffix("?")
        fix = f" graph.rename({key}={found})"
    why = getattr(node, "why_needed", lambda key: "")(key)
    return KeyMissingError(
        f"node {index} ({describe(node)}) reads {key!r}, but the batch {list(tensordict.batch_size)} "
        f"has {_shapes(tensordict, present) or 'no keys'}.{near}{fix}{why}"
    )


def node_error(
    graph: KeyedGraph, name: str, node: nn.Module, tensordict: TensorDictBase, error: Exception
) -> GraphError:
    """The error for a node that failed: which node, what it read with shapes and dtypes, and what it said."""
    where = f"node {name} ({describe(node)}) of a graph with in_keys {graph.in_keys}"
    reads = _shapes(tensordict, normalize_keys(node.in_keys))
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    takes = ""
    inner = getattr(node, "module", None)
    if isinstance(inner, nn.Linear):
        takes = f"; the layer takes [..., {inner.in_features}] {str(inner.weight.dtype).removeprefix('torch.')}"
    elif isinstance(error, TypeError) and callable(inner):
        with contextlib.suppress(TypeError, ValueError):
            takes = f"; its signature is {inspect.signature(inner)}"
    return GraphError(f"{where} failed on {reads}{takes}: {first_line}")
