"""What a policy carries from step to step, as keyed nodes: history, previous action, low-pass filter, phase clock."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl.errors import GraphError
from graphrl.keys import Key, next_key, normalize_key

__all__ = ["LowPassFilter", "ObservationHistory", "PhaseClock", "PreviousAction", "StateModule"]

Numbers = float | Sequence[float]
Facts: TypeAlias = "dict[tuple[str, Key | None], dict[str, Any]]"
Made = TypeVar("Made", bound="StateModule")


class StateModule(TensorDictModuleBase):
    """A node that reads its state under a key and writes the state after the step under ``("next", key)``.

    Where ``is_init`` [*B, 1] is set, the state that was read counts for nothing: the step starts from ``_start``. That
    is the one reset there is, in a collector, in a loss over sequences and on a robot.
    """

    starts_at_input = False
    """Whether the first step's state is made of its input; otherwise it is :meth:`initial_state`."""

    def __init__(self, in_key: Key | None, out_key: Key, state_key: Key | None, is_init_key: Key) -> None:
        super().__init__()
        out = normalize_key(out_key)
        self.state_key = _named(out, "_state") if state_key is None else normalize_key(state_key)
        self.is_init_key = normalize_key(is_init_key)
        self.in_key = self.is_init_key if in_key is None else normalize_key(in_key)
        self.in_keys = [*([] if in_key is None else [self.in_key]), self.state_key, self.is_init_key]
        self.out_keys = [out, next_key(self.state_key)]
        self.steps_through_time = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one row of the state."""
        raise NotImplementedError

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output [*B, ...] and next state [*B, *state_shape] for inputs [*B, F]."""
        raise NotImplementedError

    def _start(self, x: Tensor, state: Tensor) -> Tensor:
        """What stands for ``state`` on an episode's first step."""
        return self.get_buffer("initial").to(state.dtype).expand_as(state)

    def initial_state(self, *batch_size: int) -> Tensor:
        """The state before a first step: [*batch_size, *state_shape]."""
        return self.get_buffer("initial").expand(*batch_size, *self.state_shape).clone()

    def contract_facts(self) -> Facts:
        """What a deployment contract says because of this node: ``(part, key)`` to its fields."""
        initial = _plain(self.initial_state())
        rule = "first input" if self.starts_at_input else "initial value"
        said = {"next_key": next_key(self.state_key), "initial": initial, "reset_rule": rule}
        return {("recurrent", self.state_key): said}

    def over_time(self: Made) -> Made:
        """The same node over sequences, weights shared: x [*B, T, F], is_init [*B, T, 1] -> outputs [*B, T, ...].

        The state entering step 0 is read from ``state[:, 0]`` of [*B, T, *state_shape]; the states written are those
        after each step. Where ``is_init`` is set inside a sequence, a new one starts there.
        """
        other = copy.copy(self)
        other.steps_through_time = True
        return other

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the output and the next state; gradient flows through both."""
        x, state, is_init = (tensordict.get(key) for key in (self.in_key, self.state_key, self.is_init_key))
        self._check(x, state, is_init)
        if not self.steps_through_time:
            out, state = self._reset_and_step(x, state, is_init)
        else:
            outs, states, state = [], [], state.select(x.dim() - 2, 0)
            for t in range(x.shape[-2]):
                out, state = self._reset_and_step(x[..., t, :], state, is_init[..., t, :])
                outs.append(out)
                states.append(state)
            out, state = torch.stack(outs, x.dim() - 2), torch.stack(states, x.dim() - 2)
        tensordict.set(self.out_keys[0], out)
        tensordict.set(self.out_keys[1], state)
        return tensordict

    def _check(self, x: Tensor, state: Tensor, is_init: Tensor) -> None:
        size = getattr(self, "size", None) if len(self.in_keys) == 3 else None
        if size is not None and x.shape[-1:] != (size,):
            raise GraphError(f"{self.in_key!r} is {list(x.shape)}: expected [*B, {size}]")
        if is_init.dtype != torch.bool or is_init.shape[-1:] != (1,):
            raise GraphError(f"{self.is_init_key!r} is {is_init.dtype} {list(is_init.shape)}: expected bool [*B, 1]")
        if state.shape != (*x.shape[:-1], *self.state_shape):
            expected = [*x.shape[:-1], *self.state_shape]
            raise GraphError(
                f"{self.state_key!r} is {list(state.shape)}, expected {expected}: one state for each row of "
                f"{self.in_key!r} {list(x.shape)}, of which a sequence reads the first"
            )

    def _reset_and_step(self, x: Tensor, state: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor]:
        mask = is_init.reshape(*is_init.shape[:-1], *[1] * len(self.state_shape))
        return self._step(x, torch.where(mask, self._start(x, state), state))


class ObservationHistory(StateModule):
    """The last ``length`` observations, this one among them.

        h_t = (x_{t-length+1}, ..., x_t)

    Reads ``in_key`` [*B, size]; writes ``out_key``, [*B, length * size], or [*B, length, size] where ``flatten`` is
    off, and the state [*B, length, size]. order: ``"oldest_first"``, as Isaac Lab and TorchRL's ``CatFrames`` stack, or
    ``"newest_first"``. padding, as in ``CatFrames``: what stands for the time before an episode, ``"same"``, its first
    observation, or ``"constant"``, ``padding_value``. One history stacks whole observations, time by time; robots that
    stack term by term have a history for each term, and concatenate these. Gradient flows to each observation.
    Raises :class:`GraphError` for another ``length``, ``order`` or ``padding``.
    """

    def __init__(
        self,
        size: int,
        length: int,
        *,
        in_key: Key = "observation",
        out_key: Key = "history",
        state_key: Key | None = None,
        is_init_key: Key = "is_init",
        order: str = "oldest_first",
        padding: str = "same",
        padding_value: float = 0.0,
        flatten: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_key, out_key, state_key, is_init_key)
        _check_size(self, size)
        _check_size(self, length)
        if order not in ("oldest_first", "newest_first") or padding not in ("same", "constant"):
            raise GraphError(
                f"ObservationHistory: order={order!r}, padding={padding!r}; expected 'oldest_first' or "
                "'newest_first', 'same' or 'constant'"
            )
        self.size, self.length, self.order, self.padding, self.flatten = size, length, order, padding, flatten
        self.padding_value = padding_value
        self.starts_at_input = padding == "same"
        start = 0.0 if self.starts_at_input else padding_value
        self.register_buffer("initial", _initial(start, 1, device, dtype), persistent=False)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """``(length, size)``."""
        return (self.length, self.size)

    def _start(self, x: Tensor, state: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand_as(state) if self.starts_at_input else super()._start(x, state)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        frame = x.unsqueeze(-2)
        oldest = self.order == "oldest_first"
        window = torch.cat([state[..., 1:, :], frame] if oldest else [frame, state[..., :-1, :]], -2)
        return (window.flatten(-2) if self.flatten else window), window

    def contract_facts(self) -> Facts:
        """Length, order and fill of the history of ``in_key``."""
        fill = "first observation" if self.starts_at_input else f"constant {self.padding_value:g}"
        said = {"history_length": self.length, "history_order": self.order, "history_reset_fill": fill}
        return {**super().contract_facts(), ("observation", self.in_key): said}


class LowPassFilter(StateModule):
    """A first-order low-pass filter.

        y_t = y_{t-1} + a (x_t - y_{t-1});   a = 1 - exp(-2 pi cutoff_hz / rate_hz)

    Reads ``in_key`` [*B, size], writes ``out_key`` and the state, both [*B, size]; the state is y. Give ``alpha`` in
    (0, 1], or ``cutoff_hz`` and ``rate_hz``, control steps a second. initial: y before an episode, a number or one for
    each entry; ``None``: the first input, which then passes unchanged. Gradient flows to x and to y_{t-1}. Raises
    :class:`GraphError` for neither or both ways to say a, and for an a outside (0, 1].
    """

    def __init__(
        self,
        size: int,
        *,
        in_key: Key = "observation",
        out_key: Key = "filtered",
        state_key: Key | None = None,
        is_init_key: Key = "is_init",
        alpha: float | None = None,
        cutoff_hz: float | None = None,
        rate_hz: float | None = None,
        initial: Numbers | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_key, out_key, state_key, is_init_key)
        if (alpha is None) == (cutoff_hz is None or rate_hz is None) or (alpha is not None and cutoff_hz is not None):
            raise GraphError("LowPassFilter: give alpha, or cutoff_hz and rate_hz")
        if alpha is None:
            assert cutoff_hz is not None and rate_hz is not None
            if not (cutoff_hz > 0 and rate_hz > 0):
                raise GraphError(f"LowPassFilter: cutoff_hz={cutoff_hz}, rate_hz={rate_hz}; expected positive numbers")
            alpha = -math.expm1(-2 * math.pi * cutoff_hz / rate_hz)
        if not 0 < alpha <= 1:
            raise GraphError(f"LowPassFilter: alpha is {alpha}; expected a number in (0, 1]")
        _check_size(self, size)
        self.size, self.alpha, self.rate_hz = size, alpha, rate_hz
        self.starts_at_input = initial is None
        value = _initial(0.0 if initial is None else initial, size, device, dtype)
        self.register_buffer("initial", value, persistent=False)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """``(size,)``."""
        return (self.size,)

    def _start(self, x: Tensor, state: Tensor) -> Tensor:
        return x if self.starts_at_input else super()._start(x, state)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = state + self.alpha * (x - state)
        return y, y

    def contract_facts(self) -> Facts:
        """The control rate, where the filter was made for one."""
        return {**super().contract_facts(), ("contract", None): {"rate_hz": self.rate_hz}}


class PhaseClock(StateModule):
    """Sine and cosine of a phase that runs through ``frequency_hz`` cycles a second: the clock of a gait.

        phi_t = 2 pi frequency_hz t / rate_hz;   out = (sin(phi_t + 2 pi o), ..., cos(phi_t + 2 pi o), ...)

    t counts an episode's steps from 0. offsets: o of each leg, in cycles; ``out_key`` is [*B, 2 len(offsets)], sines
    first. The state is (cos phi, sin phi), [*B, 2], turned by a fixed angle a step and pulled back to length 1 by a
    Newton step: unlike a phase in [0, 1) it never jumps, so rounding cannot put two runtimes a whole turn apart. In
    float32 the phase is right to 1e-7 cycles a step. Raises :class:`GraphError` for a frequency above half the rate.
    """

    def __init__(
        self,
        frequency_hz: float,
        rate_hz: float,
        *,
        offsets: Sequence[float] = (0.0,),
        out_key: Key = "phase",
        state_key: Key | None = None,
        is_init_key: Key = "is_init",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(None, out_key, state_key, is_init_key)
        if not 0 < frequency_hz <= rate_hz / 2 < math.inf or not offsets or not all(map(math.isfinite, offsets)):
            raise GraphError(
                f"PhaseClock: frequency_hz={frequency_hz}, rate_hz={rate_hz}, offsets={offsets}; expected a frequency "
                "above 0, up to half the rate, and at least one offset, all of them finite"
            )
        self.frequency_hz, self.rate_hz, self.offsets = frequency_hz, rate_hz, tuple(offsets)
        turn = [2 * math.pi * frequency_hz / rate_hz]
        angles = torch.tensor([2 * math.pi * o for o in offsets], dtype=torch.float64)
        step = torch.tensor(turn, dtype=torch.float64)
        places = {"initial": torch.tensor([1.0, 0.0]), "_legs": torch.stack([angles.cos(), angles.sin()]),
                  "_turn": torch.stack([step.cos(), step.sin()])}  # fmt: skip
        for name, value in places.items():
            value = value.to(device=device, dtype=dtype or torch.get_default_dtype())
            self.register_buffer(name, value, persistent=False)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """``(2,)``: cosine, sine."""
        return (2,)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        c, s = state[..., :1], state[..., 1:]
        cos, sin = self._turned(c, s, "_legs")
        length = 1.5 - 0.5 * (c * c + s * s)  # Newton's step for 1 / sqrt
        return torch.cat([sin, cos], -1), torch.cat(self._turned(c * length, s * length, "_turn"), -1)

    def _turned(self, c: Tensor, s: Tensor, by: str) -> tuple[Tensor, Tensor]:
        cos, sin = self.get_buffer(by).to(c.dtype).unbind(0)
        return c * cos - s * sin, s * cos + c * sin

    def contract_facts(self) -> Facts:
        """The control rate."""
        return {**super().contract_facts(), ("contract", None): {"rate_hz": self.rate_hz}}


class PreviousAction(StateModule):
    """The action of the step before, for the policy to read; ``initial`` on an episode's first step.

        out_t = action_{t-1}, or clamp(action_{t-1}, low, high) where ``clip=(low, high)``

    Two nodes: this one before the network, which writes ``out_key`` [*B, size], and :meth:`feedback` behind it, which
    keeps ``action_key`` for the next step. clip: where the robot and the environment clip the action and training
    observed what was left; bounds are numbers, or one for each entry. initial likewise. Gradient flows through it.

        previous = PreviousAction(12)
        KeyedGraph(previous, actor, previous.feedback())
    """

    def __init__(
        self,
        size: int,
        *,
        action_key: Key = "action",
        out_key: Key = "previous_action",
        state_key: Key | None = None,
        is_init_key: Key = "is_init",
        initial: Numbers = 0.0,
        clip: tuple[Numbers, Numbers] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(None, out_key, state_key, is_init_key)
        _check_size(self, size)
        self.size, self.action_key, self.clip = size, normalize_key(action_key), clip
        self.out_keys = self.out_keys[:1]  # the next state is the feedback's to write
        self._made = {"device": device, "dtype": dtype}
        self.register_buffer("initial", _initial(initial, size, device, dtype), persistent=False)
        self.feedback()  # refuses bounds that are none now, not later

    @property
    def state_shape(self) -> tuple[int, ...]:
        """``(size,)``."""
        return (self.size,)

    def over_time(self) -> PreviousAction:
        """The node itself: every row of a sequence holds the action of the step before."""
        return self

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the previous action."""
        state, is_init = (tensordict.get(key) for key in self.in_keys)
        self._check(is_init, state, is_init)
        return tensordict.set(self.out_keys[0], torch.where(is_init, self._start(is_init, state), state))

    def feedback(self) -> TensorDictModuleBase:
        """The node that keeps the action for the next step; it belongs behind whatever writes the action."""
        return _Feedback(self.action_key, next_key(self.state_key), self.size, self.clip, self._made)

    def contract_facts(self) -> Facts:
        """Which action is fed back, and what stands for it on the first step."""
        kind = "raw" if self.clip is None else "clipped"
        said = {"previous_action": kind, "previous_action_initial": _plain(self.initial_state())}
        return {**super().contract_facts(), ("action", self.action_key): said}


class _Feedback(TensorDictModuleBase):
    def __init__(self, action: Key, following: Key, size: int, clip: Any, made: Mapping[str, Any]) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [action], [following]
        self.size, self.clips = size, clip is not None
        if self.clips:
            bounds = [_values(v, size, **made) for v in clip] if isinstance(clip, (tuple, list)) else []
            if len(bounds) != 2 or not (bounds[0] <= bounds[1]).all():
                raise GraphError(f"PreviousAction: clip is {clip}; expected (low, high), no low above its high")
            for name, value in zip(("low", "high"), bounds, strict=True):
                self.register_buffer(name, value, persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get(self.in_keys[0])
        if action.shape[-1:] != (self.size,):
            raise GraphError(f"{self.in_keys[0]!r} is {list(action.shape)}: expected [*B, {self.size}]")
        if self.clips:
            action = torch.clamp(action, self.get_buffer("low"), self.get_buffer("high"))
        return tensordict.set(self.out_keys[0], action)


def _plain(value: Tensor) -> float | tuple[float, ...]:
    """One number where all entries are the same, else all of them, flat."""
    flat = value.detach().reshape(-1).tolist()
    return float(flat[0]) if len(set(flat)) == 1 else tuple(map(float, flat))


def _check_size(node: StateModule, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise GraphError(f"{type(node).__name__}: {size!r} for a size or length; expected a whole number, 1 or more")


def _initial(given: Numbers, size: int, device: Any, dtype: torch.dtype | None) -> Tensor:
    """Finite :func:`_values`."""
    value = _values(given, size, device, dtype)
    if not value.isfinite().all():
        raise GraphError(f"initial or padding value {given}: expected finite numbers")
    return value


def _values(given: Numbers, size: int, device: Any, dtype: torch.dtype | None) -> Tensor:
    """Numbers, or one for all, as [size] or []."""
    try:
        value = torch.as_tensor(given, device=device, dtype=dtype or torch.get_default_dtype()).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphError(f"{given!r}: expected one number, or {size}") from error
    if value.shape not in ((), (size,)):
        raise GraphError(f"{given} has {value.numel()} entries; expected one number, or {size}")
    return value


def _named(key: Key, ending: str) -> Key:
    return f"{key}{ending}" if isinstance(key, str) else (*key[:-1], f"{key[-1]}{ending}")
