"""Team signals and per-agent ones brought to one shape, and the axis that is time."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor

from graphrl.errors import SpecError

__all__ = ["expand_to_agents", "find_time"]


def expand_to_agents(signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Expand what the agents of a team share to each of them: [*B, T, 1] to [*B, T, A, 1], where another signal has A.

        reward, done [*B, T, 1] with state_value [*B, T, A, 1]: every agent gets the team's reward and ends with it
        reward [*B, T, A, 1] with state_value [*B, T, 1]: every agent is measured against the team's value

    The agent axis stands before the trailing 1, and it is all that is ever added; equal shapes pass as they are.
    Raises :class:`SpecError`, naming the shapes, for anything else: equal ranks with other sizes, two axes apart, no
    trailing 1.
    """
    widest = max(signals, key=lambda name: signals[name].dim())
    shape = signals[widest].shape
    found = ", ".join(f"{name} {list(x.shape)}" for name, x in signals.items())
    expanded = {}
    for name, x in signals.items():
        if x.shape == shape:
            expanded[name] = x
        elif len(shape) > 2 and shape[-1] == 1 and x.shape == (*shape[:-2], 1):
            expanded[name] = x.unsqueeze(-2).expand(shape)
        else:
            raise SpecError(
                f"{found}: {name} {list(x.shape)} and {widest} {list(shape)} must have one shape, or differ by the "
                "agent axis alone, [*B, T, 1] beside [*B, T, A, 1]: nothing else is broadcast; reshape one where it "
                "is made"
            )
    return expanded


def find_time(time_dim: int | None, batch_dims: int, signals: Mapping[str, Tensor], *, grouped: Set[str]) -> int:
    """The time axis of signals [*batch, 1] or [*batch, A, 1], counted from the front.

    ``time_dim``: of the batch, the last unless given. ``batch_dims``: how many dims the batch has; 0 (plain tensors)
    takes the lowest rank among the signals to be [*batch, 1]. ``grouped``: the signals under a group key, agents'.
    Raises :class:`SpecError` where all signals have an axis more than the batch, and none of those that have just one
    stands under a group key, which would make it that of agents: it could as well be time, of a batch that stops
    before it.
    """
    lowest = min(signals, key=lambda name: signals[name].dim())
    shape = list(signals[lowest].shape)
    dims = batch_dims or len(shape) - 1
    if not dims:
        raise SpecError(
            f"{lowest} is {shape}, one step without a time dim: expected [*B, T, 1]; td.unsqueeze(0) adds it"
        )
    if not dims < len(shape) <= dims + 2:
        raise SpecError(f"{lowest} is {shape} in a batch of {dims} dim(s): expected its dims and a trailing 1")
    alike = {name for name, x in signals.items() if x.dim() == len(shape)}
    if len(shape) == dims + 2 and not alike & grouped and time_dim is None:
        raise SpecError(
            f"{lowest} is {shape} in a batch {shape[:dims]}: its axis of {shape[dims]} may be time or agents. Give the "
            f"batch its time dim, td.batch_size = {shape[: dims + 1]}; or keep agents under a group key, ('agents', "
            "'reward'); or say time_dim=-1 where the batch's last dim is time already"
        )
    axis = -1 if time_dim is None else time_dim
    if not -dims <= axis < dims:
        raise SpecError(f"time_dim={time_dim} is no dim of a batch {shape[:dims]}")
    return axis % dims
