"""Recurrent nodes: the state is a key like any other, read at a step and written for the next one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphrl.keys import Key
from graphrl.models.state import StateModule

__all__ = ["GRUModule", "LSTMModule"]


class _RecurrentModule(StateModule):
    """What GRU and LSTM nodes share."""

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
        super().__init__(in_key, out_key, state_key, is_init_key)
        self.cell = self._cell(input_size, hidden_size, device=device, dtype=dtype)  # type: ignore[call-arg]
        self.hidden_size = hidden_size

    def initial_state(self, *batch_size: int) -> Tensor:
        """The state before a first step, zeros: [*batch_size, *state_shape]."""
        return self.cell.weight_hh.new_zeros(*batch_size, *self.state_shape)

    def _start(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


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
