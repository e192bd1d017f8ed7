"""Specs: what a tensor of an environment may hold (shape, dtype, device, range), under TorchRL's names.

A spec draws random values, gives zeros, checks and projects. It needs no environment library: see
``graphrl.envs.spaces`` for the conversion from Gymnasium spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from graphrl.errors import SpecError, did_you_mean

__all__ = ["Binary", "Bounded", "Categorical", "Composite", "MultiCategorical", "OneHot", "Spec", "Unbounded"]

Key = str | tuple[str, ...]
Shape = int | Sequence[int]
Device = torch.device | str | int | None


def _size(shape: Shape) -> torch.Size:
    return torch.Size([shape]) if isinstance(shape, int) else torch.Size(shape)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


class Spec:
    """One tensor: its trailing shape, dtype, device and domain. Values may have further leading dims.

    ``shape`` includes the batch dims of the environment (``[num_envs, ...]``); a value of shape
    ``[*extra, *shape]`` conforms.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: Device = None) -> None:
        self.shape = _size(shape)
        self.dtype = dtype
        self.device = torch.device("cpu" if device is None else device)

    def rand(self, batch: Shape = ()) -> Tensor:
        """A random value of shape ``[*batch, *shape]`` from torch's global generator."""
        raise NotImplementedError

    def zero(self, batch: Shape = ()) -> Tensor:
        """Zeros of shape ``[*batch, *shape]``; they need not lie in the domain."""
        return torch.zeros((*_size(batch), *self.shape), dtype=self.dtype, device=self.device)

    def is_in(self, value: Any) -> bool:
        """Whether ``value`` has the shape, dtype and device of the spec and lies in its domain."""
        return self.problem(value) is None

    def assert_is_in(self, value: Any, name: object = "value") -> None:
        """Raise a :class:`SpecError` that says what is wrong with ``value`` unless it conforms."""
        problem = self.problem(value)
        if problem is not None:
            raise SpecError(f"{name!r} {problem}")

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value`` as the end of a sentence that names it, or None when it conforms."""
        if not isinstance(value, Tensor):
            return f"is a {type(value).__name__}, expected a {self.dtype} tensor of shape {list(self.shape)}"
        lead = value.ndim - len(self.shape)
        if lead < 0 or value.shape[lead:] != self.shape:
            return f"has shape {list(value.shape)}, expected {list(self.shape)}"
        if value.dtype != self.dtype:
            return f"is {value.dtype}, expected {self.dtype}: convert it with .to({self.dtype})"
        if not _same_device(value.device, self.device):
            return f"is on {value.device}, expected {self.device}"
        return self._domain_problem(value)

    def _domain_problem(self, value: Tensor) -> str | None:
        return None

    def project(self, value: Tensor) -> Tensor:
        """The nearest value of the domain (the value itself where it conforms)."""
        return value

    def encode(self, value: Any) -> Tensor:
        """A Python number, list or array as a checked tensor of this spec."""
        tensor = torch.as_tensor(value, device=self.device).to(self.dtype)
        self.assert_is_in(tensor)
        return tensor

    def to(self, dest: torch.device | str | int | torch.dtype) -> Spec:
        """A copy with another device or dtype."""
        dtype, device = self._target(dest)
        return self._copy(self.shape, dtype, device)

    def expand(self, *shape: int | Sequence[int]) -> Spec:
        """A copy whose shape is ``shape``: new leading dims, trailing dims unchanged."""
        return self._copy(self._expanded(shape), self.dtype, self.device)

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Spec:
        raise NotImplementedError

    def _target(self, dest: torch.device | str | int | torch.dtype) -> tuple[torch.dtype, torch.device]:
        return (dest, self.device) if isinstance(dest, torch.dtype) else (self.dtype, torch.device(dest))

    def _expanded(self, shape: tuple[int | Sequence[int], ...]) -> torch.Size:
        first = shape[0] if len(shape) == 1 else shape
        new = _size(first)  # type: ignore[arg-type]
        if len(new) < len(self.shape) or new[len(new) - len(self.shape) :] != self.shape:
            raise SpecError(f"cannot expand a spec of shape {list(self.shape)} to {list(new)}: add leading dims only")
        return new

    def _identity(self) -> tuple[Any, ...]:
        return (type(self), self.shape, self.dtype, self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]

    def _details(self) -> str:
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._details()}shape={list(self.shape)}, dtype={self.dtype})"


class Unbounded(Spec):
    """Any value of a dtype. Random floats are standard normal; random integers lie in [-128, 127] or [0, 255]."""

    def __init__(self, shape: Shape = 1, *, dtype: torch.dtype = torch.float32, device: Device = None) -> None:
        super().__init__(shape, dtype, device)

    def rand(self, batch: Shape = ()) -> Tensor:
        size = (*_size(batch), *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(size, dtype=self.dtype, device=self.device)
        low = -128 if self.dtype.is_signed and self.dtype != torch.bool else 0
        return torch.randint(low, 2 if self.dtype == torch.bool else low + 256, size, device=self.device).to(self.dtype)

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Unbounded:
        return Unbounded(shape, dtype=dtype, device=device)


class Bounded(Spec):
    """``low <= value <= high`` elementwise, both ends included; an end may be infinite.

    low, high: numbers or tensors that broadcast to ``shape`` (default: their own broadcast shape).
    Random values are uniform between finite ends, exponential from one finite end, normal with none.
    """

    def __init__(
        self,
        low: float | Tensor,
        high: float | Tensor,
        shape: Shape | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
    ) -> None:
        low, high = torch.as_tensor(low), torch.as_tensor(high)
        own = torch.broadcast_shapes(low.shape, high.shape)
        super().__init__((own or (1,)) if shape is None else shape, dtype, device)
        try:
            self.low, self.high = (x.to(self.device, dtype).expand(self.shape) for x in (low, high))
        except RuntimeError as error:
            raise SpecError(f"bounds of shape {list(own)} do not broadcast to shape {list(self.shape)}") from error
        if self.device.type != "meta" and not bool((self.low <= self.high).all()):
            raise SpecError(f"a lower bound exceeds its upper bound: low {self.low}, high {self.high}")

    def rand(self, batch: Shape = ()) -> Tensor:
        size = (*_size(batch), *self.shape)
        if not self.dtype.is_floating_point:
            # float64 holds every integer up to 2**53; the clamp keeps wider ranges inside their bounds
            low, span = self.low.double(), self.high.double() - self.low.double() + 1
            drawn = low + torch.floor(torch.rand(size, dtype=torch.float64, device=self.device) * span)
            return self.project(drawn.to(self.dtype))
        below, above = self.low.isfinite(), self.high.isfinite()
        if bool((below & above).all()):  # one draw in the usual case
            uniform = torch.rand(size, dtype=self.dtype, device=self.device)
            return self.project(torch.lerp(self.low, self.high, uniform))
        low, high = self.low.nan_to_num(0, 0, 0), self.high.nan_to_num(0, 0, 0)
        uniform = torch.rand(size, dtype=self.dtype, device=self.device)
        tail = torch.empty(size, dtype=self.dtype, device=self.device).exponential_()
        drawn = torch.where(below, low + tail, torch.where(above, high - tail, torch.randn_like(uniform)))
        return self.project(torch.where(below & above, torch.lerp(low, high, uniform), drawn))

    def _domain_problem(self, value: Tensor) -> str | None:
        bad = ~((value >= self.low) & (value <= self.high))  # true for NaN
        if not bool(bad.any()):
            return None
        index = tuple(bad.nonzero()[0].tolist())
        tail = index[len(index) - len(self.shape) :]
        return f"holds {value[index].item()} at {list(index)}, outside [{self.low[tail]:g}, {self.high[tail]:g}]"

    def project(self, value: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(value, self.low), self.high)

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Bounded:
        return Bounded(self.low, self.high, shape, dtype=dtype, device=device)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.low.tolist(), self.high.tolist())

    def _details(self) -> str:
        return f"low={self.low.min():g}, high={self.high.max():g}, " if self.low.numel() else ""


class Categorical(Spec):
    """An index in ``0 .. n-1``. With ``n=2, dtype=torch.bool`` it describes a flag such as ``done``."""

    def __init__(self, n: int, shape: Shape = (), *, dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        super().__init__(shape, dtype, device)
        self.n = int(n)

    def rand(self, batch: Shape = ()) -> Tensor:
        return torch.randint(self.n, (*_size(batch), *self.shape), device=self.device).to(self.dtype)

    def _domain_problem(self, value: Tensor) -> str | None:
        if self.dtype == torch.bool:
            return None
        bad = (value < 0) | (value >= self.n)
        return f"holds {value[bad][0].item()}, outside 0 .. {self.n - 1}" if bool(bad.any()) else None

    def project(self, value: Tensor) -> Tensor:
        return value if self.dtype == torch.bool else value.clamp(0, self.n - 1)

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Categorical:
        return Categorical(self.n, shape, dtype=dtype, device=device)

    def to_one_hot_spec(self) -> OneHot:
        """The same choice as a one-hot vector of shape ``[*shape, n]``."""
        return OneHot(self.n, (*self.shape, self.n), device=self.device)

    def to_one_hot(self, value: Tensor) -> Tensor:
        """An index ``[*extra, *shape]`` as a boolean one-hot vector ``[*extra, *shape, n]``."""
        self.assert_is_in(value)
        return torch.nn.functional.one_hot(value.long(), self.n).bool()

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.n)

    def _details(self) -> str:
        return f"n={self.n}, "


class MultiCategorical(Spec):
    """Several indices, the last dim choosing independently: ``value[..., i]`` in ``0 .. nvec[i]-1``."""

    def __init__(
        self,
        nvec: Sequence[int],
        shape: Shape | None = None,
        *,
        dtype: torch.dtype = torch.int64,
        device: Device = None,
    ) -> None:
        self.nvec = tuple(int(n) for n in nvec)
        super().__init__(len(self.nvec) if shape is None else shape, dtype, device)
        if not self.shape or self.shape[-1] != len(self.nvec):
            raise SpecError(f"shape {list(self.shape)} must end in the number of choices, {len(self.nvec)}")

    def _limits(self) -> Tensor:
        return torch.tensor(self.nvec, device=self.device)

    def rand(self, batch: Shape = ()) -> Tensor:
        size = (*_size(batch), *self.shape)
        drawn = torch.rand(size, dtype=torch.float64, device=self.device) * self._limits()
        return self.project(drawn.floor().to(self.dtype))

    def _domain_problem(self, value: Tensor) -> str | None:
        bad = (value < 0) | (value >= self._limits())
        return f"holds {value[bad][0].item()}, outside its limits 0 .. {self.nvec} - 1" if bool(bad.any()) else None

    def project(self, value: Tensor) -> Tensor:
        return torch.minimum(value.clamp(min=0), (self._limits() - 1).to(value.dtype))

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> MultiCategorical:
        return MultiCategorical(self.nvec, shape, dtype=dtype, device=device)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.nvec)

    def _details(self) -> str:
        return f"nvec={list(self.nvec)}, "


class OneHot(Spec):
    """A vector of ``n`` entries, exactly one of them 1."""

    def __init__(
        self, n: int, shape: Shape | None = None, *, dtype: torch.dtype = torch.bool, device: Device = None
    ) -> None:
        super().__init__(n if shape is None else shape, dtype, device)
        self.n = int(n)
        if not self.shape or self.shape[-1] != self.n:
            raise SpecError(f"shape {list(self.shape)} of a one-hot vector must end in n = {self.n}")

    def rand(self, batch: Shape = ()) -> Tensor:
        index = torch.randint(self.n, (*_size(batch), *self.shape[:-1]), device=self.device)
        return torch.nn.functional.one_hot(index, self.n).to(self.dtype)

    def _domain_problem(self, value: Tensor) -> str | None:
        ones = (value == 1).sum(-1) == 1
        good = ones & ((value == 0).sum(-1) == self.n - 1)
        return None if bool(good.all()) else "is not one-hot along its last dim"

    def project(self, value: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(value.to(torch.float32).argmax(-1), self.n).to(self.dtype)

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> OneHot:
        return OneHot(self.n, shape, dtype=dtype, device=device)

    def to_categorical_spec(self) -> Categorical:
        """The same choice as an index of shape ``shape[:-1]``."""
        return Categorical(self.n, self.shape[:-1], device=self.device)

    def to_categorical(self, value: Tensor) -> Tensor:
        """A one-hot vector ``[*extra, *shape]`` as an int64 index ``[*extra, *shape[:-1]]``."""
        self.assert_is_in(value)
        return value.to(torch.uint8).argmax(-1)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.n)

    def _details(self) -> str:
        return f"n={self.n}, "


class Binary(Spec):
    """``n`` independent entries, each 0 or 1."""

    def __init__(
        self, n: int, shape: Shape | None = None, *, dtype: torch.dtype = torch.int8, device: Device = None
    ) -> None:
        super().__init__(n if shape is None else shape, dtype, device)
        self.n = int(n)

    def rand(self, batch: Shape = ()) -> Tensor:
        return torch.randint(2, (*_size(batch), *self.shape), device=self.device).to(self.dtype)

    def _domain_problem(self, value: Tensor) -> str | None:
        return None if bool(((value == 0) | (value == 1)).all()) else "holds an entry that is neither 0 nor 1"

    def project(self, value: Tensor) -> Tensor:
        return value if value.dtype == torch.bool else (value > 0.5).to(self.dtype)

    def _copy(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Binary:
        return Binary(self.n, shape, dtype=dtype, device=device)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.n)

    def _details(self) -> str:
        return f"n={self.n}, "


class Composite(Spec):
    """Named specs, nested at will, that share the leading ``batch_size``: the spec of a TensorDict.

    fields: ``{key: Spec or mapping}``; a tuple key nests. Every leaf shape must start with ``batch_size``
    (``shape=`` is accepted as its other name). Raises :class:`SpecError` where one does not.
    """

    def __init__(
        self,
        fields: Mapping[Any, Any] | None = None,
        batch_size: Shape | None = None,
        *,
        shape: Shape | None = None,
        device: Device = None,
        **named: Spec,
    ) -> None:
        size = batch_size if batch_size is not None else shape
        super().__init__(() if size is None else size, torch.float32, device)
        self._fields: dict[str, Spec] = {}
        for key, spec in {**(fields or {}), **named}.items():
            self[key] = spec

    @property
    def batch_size(self) -> torch.Size:
        """The leading dims that all fields share (also ``shape``)."""
        return self.shape

    def __setitem__(self, key: Key, spec: Spec | Mapping[Any, Any]) -> None:
        if isinstance(key, tuple) and len(key) > 1:
            head = self._fields.setdefault(key[0], Composite(batch_size=self.shape, device=self.device))
            if not isinstance(head, Composite):
                raise SpecError(f"{key!r} cannot nest under {key[0]!r}, which is a {type(head).__name__} leaf")
            head[key[1:]] = spec
            return
        name = key[0] if isinstance(key, tuple) else key
        spec = spec if isinstance(spec, Spec) else Composite(spec, self.shape, device=self.device)
        if spec.shape[: len(self.shape)] != self.shape:
            raise SpecError(f"{name!r} has shape {list(spec.shape)}, expected to start with {list(self.shape)}")
        self._fields[name] = spec

    def __getitem__(self, key: Key) -> Any:
        path = key if isinstance(key, tuple) else (key,)
        spec: Spec = self
        for name in path:
            if not isinstance(spec, Composite) or name not in spec._fields:
                known = list(self.keys(True, True))
                raise SpecError(f"no spec for {key!r}; there are {known}.{did_you_mean(key, known)}")
            spec = spec._fields[name]
        return spec

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[Key]:
        """The keys, as in a TensorDict: nested ones are tuples."""
        for name, spec in self._fields.items():
            nested = isinstance(spec, Composite)
            if not (nested and leaves_only):
                yield name
            if nested and include_nested:
                for inner in spec.keys(True, leaves_only):  # type: ignore[attr-defined]
                    yield (name, *((inner,) if isinstance(inner, str) else inner))

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[tuple[Key, Spec]]:
        """``(key, spec)`` pairs in the order of :meth:`keys`."""
        return ((key, self[key]) for key in self.keys(include_nested, leaves_only))

    def __contains__(self, key: object) -> bool:
        return key in set(self.keys(True))

    def __iter__(self) -> Iterator[Key]:
        return self.keys()

    def __len__(self) -> int:
        return len(self._fields)

    def _batch(self, method: str, batch: Shape) -> TensorDict:
        lead = _size(batch)
        fields = {name: getattr(spec, method)(lead) for name, spec in self._fields.items()}
        return TensorDict(fields, batch_size=(*lead, *self.shape))

    def rand(self, batch: Shape = ()) -> TensorDict:  # type: ignore[override]
        """A TensorDict of random values, batch size ``[*batch, *batch_size]``."""
        return self._batch("rand", batch)

    def zero(self, batch: Shape = ()) -> TensorDict:  # type: ignore[override]
        """A TensorDict of zeros: the fake batch that a model can be checked against."""
        return self._batch("zero", batch)

    def problem(self, value: Any) -> str | None:
        """What is wrong with a TensorDict; further keys in it are no fault."""
        if not isinstance(value, TensorDictBase | Mapping):
            return f"is a {type(value).__name__}, expected a TensorDict with keys {list(self.keys(True, True))}"
        present = list(value.keys())
        for name, spec in self._fields.items():
            if name not in present:
                return f"lacks {name!r}, it has {present}.{did_you_mean(name, present)}"
            problem = spec.problem(value[name])
            if problem is not None:
                return f"at {name!r}: {problem}"
        return None

    def project(self, value: Any) -> Any:
        """A TensorDict with every field projected; further keys are kept."""
        out = value.copy()
        for name, spec in self._fields.items():
            out[name] = spec.project(value[name])
        return out

    def encode(self, value: Any) -> Any:
        """A mapping of Python values as a checked TensorDict."""
        fields = {name: spec.encode(value[name]) for name, spec in self._fields.items()}
        return TensorDict(fields, batch_size=self.shape)

    def to(self, dest: torch.device | str | int | torch.dtype) -> Composite:
        """A copy on another device, or with every field cast to a dtype."""
        device = self._target(dest)[1]
        return Composite({name: spec.to(dest) for name, spec in self._fields.items()}, self.shape, device=device)

    def expand(self, *shape: int | Sequence[int]) -> Composite:
        new = self._expanded(shape)
        lead = new[: len(new) - len(self.shape)]
        fields = {name: spec.expand(*lead, *spec.shape) for name, spec in self._fields.items()}
        return Composite(fields, new, device=self.device)

    def _identity(self) -> tuple[Any, ...]:
        return (type(self), self.shape, sorted(self._fields), [self._fields[k] for k in sorted(self._fields)])

    def __repr__(self) -> str:
        body = "".join(f"    {name}: {spec!r}".replace("\n", "\n    ") + ",\n" for name, spec in self._fields.items())
        return f"Composite(\n{body}    batch_size={list(self.shape)})"
