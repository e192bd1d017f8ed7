"""The node that asks a critic for the value of each step's root and of the state that the step led to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl.errors import GraphError, SpecError
from graphrl.keys import Key, normalize_key, normalize_keys
from graphrl.losses.common import next_key, value_key_of
from graphrl.losses.recurrent_values import Memory

__all__ = ["StateValues", "usable"]


def usable(x: Tensor, unused: Tensor, instead: Tensor | float) -> Tensor:
    """``x`` [*rows, *F] with what is not finite in ``unused`` rows [*rows] replaced, so that it spoils no other row."""
    if not x.is_floating_point():
        return x
    unused = unused.reshape(unused.shape + (1,) * (x.dim() - unused.dim()))
    return torch.where(unused & ~x.isfinite(), instead, x)


def rows_of(flag: Tensor, shape: torch.Size, batch_dims: int) -> Tensor:
    """A flag [*B], [*B, 1] or [*B, A, 1] for the rows of a tensor: by agent where it has agents, else of all."""
    flag = flag.bool()
    if flag.dim() <= batch_dims:
        return flag
    agents = flag.shape[:-1]
    if len(shape) > len(agents) and shape[: len(agents)] == agents:
        return flag.squeeze(-1)
    return flag.flatten(batch_dims).all(-1)


def _either(a: Tensor, b: Tensor) -> Tensor:
    """Whether one of two flags holds, [*B] or [*B, A]; what holds for a row holds for each of its agents."""
    dims = max(a.dim(), b.dim())
    a, b = (x.unsqueeze(-1) if x.dim() < dims else x for x in (a, b))
    return a | b


class StateValues(TensorDictModuleBase):
    """A node that values the root and the next state of each step, with one call of the critic for each.

        V(s_t) = critic(s_t);   V(s'_t) = critic(s'_t);   s'_t from the batch's ``next``, never the root of row t + 1

    Reads the critic's ``in_keys``, the same under ``next``, ``terminated`` and, given ``mask_key``, the mask; writes
    the critic's value key, also under ``next``. Two calls, so that a loss that values the same roots shares one of
    them in a compiled program, and batch statistics are those of roots. ``shifted``: one call over T + 1 states, the
    roots and the last next state; only for batches whose next states are the following roots, which is checked.
    A recurrent critic's next value is one step from its state after the root; the batch's states are left alone.
    What is not finite in the next state of a terminated step, or in a masked row, is replaced before the critic sees
    it. No gradient unless ``differentiable``. Raises :class:`SpecError` when root and next differ in shape.
    """

    def __init__(
        self,
        critic: Any,
        *,
        differentiable: bool = False,
        shifted: bool = False,
        time_dim: int | None = None,
        terminated_key: Key = ("next", "terminated"),
        mask_key: Key | None = None,
    ) -> None:
        super().__init__()
        self.critic = critic
        self.differentiable, self.shifted, self.time_dim = differentiable, shifted, time_dim
        self.critic_keys = normalize_keys(critic.in_keys)
        self.value_key = value_key_of(critic)
        self.memory = Memory.of(critic)
        if shifted and self.memory is not None and not self.memory.walks:
            raise GraphError("shifted=True calls a recurrent critic along the rows: give it nodes with over_time()")
        self.followed = [key for key in self.critic_keys if self.memory is None or key not in self.memory.keys]
        self._first = [normalize_key(key) for key in (terminated_key, mask_key) if key is not None]
        self.flags = list(self._first)
        self._read()
        self.out_keys = [self.value_key, next_key(self.value_key)]

    def _read(self) -> None:
        self.in_keys = [*self.critic_keys, *map(next_key, self.followed), *self.flags]

    def replace_keys(self, mapping: Mapping[Key, Key]) -> None:
        """Read the flags under other keys from now on; ``mapping``: from the keys they had first."""
        self.flags = [mapping.get(key, key) for key in self._first]
        self._read()

    def why_needed(self, key: Key) -> str:
        """What a message adds where the batch lacks ``key``."""
        if key not in map(next_key, self.followed):
            return ""
        return (
            f" V(next) needs {key!r}, the state that the step itself led to: at a time limit the next row already "
            "belongs to a new episode, and nothing is put in its place. Let the collector keep it under 'next'"
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write both values into ``tensordict``."""
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            steps = self._steps(tensordict)
            if self.memory is None:
                value, next_value = self._values(steps)
            else:  # it walks along the last batch dim
                last = len(steps.root.batch_size) - 1
                walked = self._values(steps.moved(last))
                value, next_value = (x.movedim(last, steps.time) for x in walked)
        tensordict.set(self.value_key, value)
        tensordict.set(next_key(self.value_key), next_value)
        return tensordict

    def _steps(self, tensordict: TensorDictBase) -> _Steps:
        """What the critic reads, in batches of its own: it may write into them what it likes."""
        terminated, *masks = (tensordict.get(key) for key in self.flags)
        size = tensordict.batch_size or terminated.shape[:-1]  # plain tensors come without
        if not size:
            raise SpecError(
                f"{self.flags[0]!r} is {list(terminated.shape)}, one step without a time dim: expected [*B, T, 1]; "
                "td.unsqueeze(0) adds it"
            )
        dims, time = len(size), -1 if self.time_dim is None else self.time_dim

        def unused(shape: torch.Size, *flags: Tensor) -> Tensor:
            found = [rows_of(flag, shape, dims) for flag in flags] + [~rows_of(mask, shape, dims) for mask in masks]
            return found[0] if len(found) == 1 else _either(*found)

        root, following = TensorDict({}, batch_size=size), TensorDict({}, batch_size=size)
        for key in tensordict.select(*self.critic_keys).keys(True, True):
            x = tensordict.get(key)
            root.set(key, usable(x, unused(x.shape), 0.0) if masks else x)
        for key in tensordict.get("next").select(*self.followed).keys(True, True):
            x, stands_in = tensordict.get(next_key(key)), root.get(key)
            if x.shape != stands_in.shape:
                raise SpecError(
                    f"{key!r} is {list(stands_in.shape)}, but {next_key(key)!r} is {list(x.shape)}: each step needs "
                    "its own next state"
                )
            following.set(key, usable(x, unused(x.shape, terminated), stands_in))
        return _Steps(root, following, unused(size, terminated), time % dims)

    def _values(self, steps: _Steps) -> tuple[Tensor, Tensor]:
        critic, key, root, following = self.critic, self.value_key, steps.root, steps.following
        length = root.batch_size[steps.time]
        if self.shifted and length:
            value = critic(self._chain(steps, length)).get(key)
            return value.narrow(steps.time, 0, length), value.narrow(steps.time, 1, length)
        if self.memory is not None:
            value, states = self.memory.along(critic, key, root)
            return value, self.memory.one_step_on(critic, key, root, following, states)
        return critic(root).get(key), critic(following).get(key)

    def _chain(self, steps: _Steps, length: int) -> TensorDict:
        """The roots and the last next state: [*B, T + 1]. Raises :class:`SpecError` where that would lose a state."""
        root, following, time = steps.root, steps.following, steps.time
        resets = self.memory.resets if self.memory is not None else ()
        follows = steps.unused.narrow(time, 0, length - 1)
        same = torch.ones_like(follows)
        for key in following.keys(True, True):
            equal = root.get(key).narrow(time, 1, length - 1) == following.get(key).narrow(time, 0, length - 1)
            same = same & (equal.flatten(same.dim()).all(-1) if equal.dim() > same.dim() else equal)
        for key in resets:
            same = same & ~root.get(key).narrow(time, 1, length - 1).flatten(same.dim()).any(-1)
        if not (follows | same).all():
            raise SpecError(
                "shifted=True reads V(next) off the following root, but a step that did not terminate leads to another "
                "state than the next row's: the batch holds a truncation, or rows that were put together. Use "
                "shifted=False"
            )
        chain = TensorDict({}, batch_size=[n + (i == time) for i, n in enumerate(root.batch_size)])
        for key in root.keys(True, True):
            last = (following if key in following.keys(True) else root).get(key).narrow(time, length - 1, 1)
            last = torch.zeros_like(last) if key in resets else last
            chain.set(key, torch.cat([root.get(key), last], time))
        return chain


@dataclass(frozen=True)
class _Steps:
    """Roots and next states [*B, T, ...], the rows whose next value nobody may use, and the time axis of the batch."""

    root: TensorDict
    following: TensorDict
    unused: Tensor
    time: int

    def moved(self, to: int) -> _Steps:
        """The same with time at dim ``to``."""
        if to == self.time:
            return self
        unused = self.unused.movedim(self.time, to)

        def moved(td: TensorDict) -> TensorDict:
            entries = {key: td.get(key).movedim(self.time, to) for key in td.keys(True, True)}
            return TensorDict(entries, batch_size=unused.shape)

        return _Steps(moved(self.root), moved(self.following), unused, to)
