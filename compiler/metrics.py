"""What a training step returns, as a program's plain outputs and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, fx

from graphrl.compiler.program import Port
from graphrl.errors import TraceError
from graphrl.keys import Key, normalize_key

__all__ = ["MetricShape", "Metrics"]

Metrics = Any
"""A dictionary or TensorDict of tensors, or ``None``."""


class MetricShape:
    """Remembers what a step returns, to rebuild it from a program's plain outputs."""

    def flatten(self, metrics: Metrics) -> tuple[Tensor, ...]:
        """The metrics' tensors, in order. Raises :class:`TraceError` for anything that is no tensor."""
        self.keys: list[Key]
        self.kind: type
        if metrics is None:
            self.keys, self.kind = [], type(None)
            return ()
        if isinstance(metrics, TensorDictBase):
            self.keys, self.kind = [normalize_key(k) for k in metrics.keys(True, True)], TensorDict
            values = [metrics.get(k) for k in self.keys]
        elif isinstance(metrics, dict):
            self.keys, self.kind = list(metrics), dict
            values = list(metrics.values())
        else:
            raise TraceError(f"the step returns a {type(metrics).__name__}: expected a dict or TensorDict of tensors")
        for key, value in zip(self.keys, values, strict=True):
            if not isinstance(value, Tensor):
                raise TraceError(f"metric {key!r} is a {type(value).__name__}: return the tensor itself, not .item()")
        return tuple(v.detach() for v in values)

    def ports(self, traced: fx.GraphModule, more: Iterable[Key]) -> tuple[Port, ...]:
        """The ports of a trace's outputs: the metrics, then those called ``more``."""
        (output,) = (n for n in traced.graph.nodes if n.op == "output")
        return tuple(Port.of(k, n.meta["val"]) for k, n in zip([*self.keys, *more], output.args[0], strict=True))

    def rebuild(self, outputs: Iterable[Tensor]) -> Metrics:
        """What the step would have returned, from the tensors of :meth:`flatten`."""
        if self.kind is type(None):
            return None
        values = dict(zip(self.keys, outputs, strict=True))
        return values if self.kind is dict else TensorDict(values, batch_size=[])
