"""Recurrent nodes: the state is a key like any other, read at a step and written for the next one."""

from __future__ import annotations

import copy

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from graphrl.errors import GraphError
from graphrl.keys import Key, normalize_key

__all__ = ["GRUModule", "LSTMModule"]


class _RecurrentModule(TensorDictModuleBase):
    """What GRU and LSTM nodes share: keys, resets, and the walk over time."""

    _cell: type[nn.RNNCellBase]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        in_key: Key = "observation",
        out_key: Key = "features",
        state_key: Key = "recurrent_state",
        is_init_key: Key = "is_init",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.cell = self._cell(input_size, hidden_size, device=device, dtype=dtype)  # type: ignore[call-arg]
        self.hidden_size = hidden_size
        key = normalize_key(state_key)
        self.is_init_key = normalize_key(is_init_key)
        self.in_keys = [normalize_key(in_key), key, self.is_init_key]
        self.out_keys = [normalize_key(out_key), ("next", *([key] if isinstance(key, str) else key))]
        self.steps_through_time = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one row of the recurrent state."""
        raise NotImplementedError

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output [*B, H] and next state [*B, *state_shape] for inputs [*B, F]."""
        raise NotImplementedError

    def initial_state(self, *batch_size: int) -> Tensor:
        """The state before a first step, zeros: [*batch_size, *state_shape]."""
        return self.cell.weight_hh.new_zeros(*batch_size, *self.state_shape)

    def over_time(self) -> _RecurrentModule:
        """The same node over sequences, weights shared: x [*B, T, F], is_init [*B, T, 1] -> features [*B, T, H].

        The state entering step 0 is read from ``recurrent_state[:, 0]``, [*B, T, *state_shape]; the states written are
        those after each step. Where ``is_init`` is set inside a sequence, a new one starts there.
        """
        other = copy.copy(self)
        other.steps_through_time = True
        return other

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the features and the next state; gradient flows through both."""
        x, state, is_init = (tensordict.get(key) for key in self.in_keys)
        if is_init.dtype != torch.bool or is_init.shape[-1:] != (1,):
            raise GraphError(f"{self.in_keys[2]!r} is {is_init.dtype} {list(is_init.shape)}: expected bool [*B, 1]")
        if state.shape != (*x.shape[:-1], *self.state_shape):
            expected = [*x.shape[:-1], *self.state_shape]
            raise GraphError(
                f"{self.in_keys[1]!r} is {list(state.shape)}, expected {expected}: one state for each row of "
                f"{self.in_keys[0]!r} {list(x.shape)}, of which a sequence reads the first"
            )
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

    def _reset_and_step(self, x: Tensor, state: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor]:
        mask = is_init.reshape(*is_init.shape[:-1], *[1] * len(self.state_shape))
        return self._step(x, torch.where(mask, torch.zeros_like(state), state))


class GRUModule(_RecurrentModule):
    """A gated recurrent unit as a keyed node.

        r, z = sigmoid(W x + U h + b);   n = tanh(W x + b + r (U h + b'));   h' = (1 - z) n + z h

    Cho et al. 2014 (arXiv:1406.1078). Reads ``in_key`` [*B, input_size], ``recurrent_state`` [*B, hidden_size] and
    ``is_init`` [*B, 1] bool, where the state is taken as zero; writes ``features`` [*B, hidden_size] and
    ``("next", "recurrent_state")``. ``over_time()`` gives the node for sequences. Raises :class:`GraphError` for an
    ``is_init`` that is no flag.
    """

    _cell = nn.GRUCell

    @property
    def state_shape(self) -> tuple[int, ...]:
        """``(hidden_size,)``."""
        return (self.hidden_size,)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x.reshape(-1, x.shape[-1]), state.reshape(-1, self.hidden_size)).reshape(state.shape)
        return h, h


class LSTMModule(_RecurrentModule):
    """A long short-term memory as a keyed node; its state stacks hidden and cell values, [*B, 2, hidden_size].

        i, f, g, o = W x + U h + b;   c' = sigmoid(f) c + sigmoid(i) tanh(g);   h' = sigmoid(o) tanh(c')

    Hochreiter and Schmidhuber 1997. Keys, resets and errors as for :class:`GRUModule`.
    """

    _cell = nn.LSTMCell

    @property
    def state_shape(self) -> tuple[int, ...]:
        """``(2, hidden_size)``: hidden values, cell values."""
        return (2, self.hidden_size)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        flat = state.reshape(-1, *self.state_shape)
        h, c = self.cell(x.reshape(-1, x.shape[-1]), (flat[:, 0], flat[:, 1]))
        return h.reshape(*state.shape[:-2], self.hidden_size), torch.stack([h, c], 1).reshape(state.shape)
