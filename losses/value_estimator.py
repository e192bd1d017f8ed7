"""What every value estimator is: a critic's values, then one kernel over each trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from graphrl.errors import GraphError
from graphrl.keys import Key, normalize_key
from graphrl.losses.broadcast import expand_to_agents, find_time
from graphrl.losses.common import LossTerm, SettableKeys, next_key, value_key_of
from graphrl.losses.functional import normalize_advantage
from graphrl.losses.state_values import StateValues

__all__ = ["ValueEstimator"]

Signals = dict[str, Tensor]


class ValueEstimator(SettableKeys):
    """What every estimator is: a node that values states, and one that turns values and rewards into an advantage.

    Reads what ``critic`` reads, the same under ``next`` (what a recurrent critic carries excepted), and
    ``("next", "reward"|"done"|"terminated")``: [*B, T, 1]. Writes the critic's ``state_value``, its ``("next", ...)``,
    ``advantage`` and ``value_target``: [*B, T, 1]; with agents, [*B, T, A, 1] beside what the team shares,
    see :func:`expand_to_agents`. Keys are set by role, without ``next``: ``set_keys(reward=("agents", "reward"))``.

    ``differentiable``: gradient reaches the critic through both values, the rewards, and discounts given as parameters.
    ``shifted``: one critic call over T + 1 states, see :class:`StateValues`. ``skip_existing``: the values are in the
    batch and no critic is called; a static choice, since the keys that a graph reads decide its program.
    ``mask_key``: bool [*B, T] or [*B, T, 1], false at padding; those rows get 0 and change nothing elsewhere, but for
    the statistics of a batch normalisation. ``time_dim``: of the batch, the last unless given. Discounts are floats or
    tensors and live. Raises :class:`SpecError` when shapes do not fit, :class:`GraphError` for what is no discount.
    """

    def __init__(
        self,
        critic: Any,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        discounts: Mapping[str, float | Tensor],
        *,
        differentiable: bool,
        shifted: bool,
        skip_existing: bool,
        mask_key: Key | None,
        time_dim: int | None,
        average_advantage: bool = False,
        average_rewards: bool = False,
        more_nodes: Mapping[str, Any] | None = None,
        more_signals: Mapping[str, Key] | None = None,
    ) -> None:
        for name, value in discounts.items():
            if not isinstance(value, Tensor) and not 0 <= value <= 1:
                raise GraphError(f"{type(self).__name__}: {name}={value} is not a discount: expected 0 <= {name} <= 1")
        value_key = value_key_of(critic)
        nodes: dict[str, Any] = {}
        if not skip_existing:
            nodes["value"] = StateValues(
                critic, differentiable=differentiable, shifted=shifted, time_dim=time_dim, mask_key=mask_key
            )
        signals = {
            "reward": next_key("reward"),
            "state_value": value_key,
            "next_state_value": next_key(value_key),
            "done": next_key("done"),
            "terminated": next_key("terminated"),
            **(more_signals or {}),
            **({"mask": normalize_key(mask_key)} if mask_key is not None else {}),
        }
        nodes |= more_nodes or {}
        nodes["estimate"] = _Estimate(
            kernel,
            signals,
            {k: v if isinstance(v, Tensor) else float(v) for k, v in discounts.items()},
            time_dim=time_dim,
            differentiable=differentiable,
            average_advantage=average_advantage,
            average_rewards=average_rewards,
        )
        written = [*(nodes["value"].out_keys if "value" in nodes else []), "advantage", "value_target"]
        super().__init__(*nodes.values(), out_keys=written)
        self._name_nodes(nodes)
        roles = ("advantage", "value_target", "reward", "done", "terminated")
        self.tensor_keys = {**{role: role for role in roles}, "value": value_key}
        if mask_key is not None:
            self.tensor_keys["mask"] = normalize_key(mask_key)

    def why_needed(self, key: Key) -> str:
        """What a message adds where the batch lacks ``key``."""
        node = self.nodes["value"] if "value" in self.nodes else None
        return node.why_needed(key) if isinstance(node, StateValues) else ""

    def _place(self, role: str, key: Key) -> Key:
        return next_key(key) if role in ("reward", "done", "terminated") else key

    @property
    def critic(self) -> Any:
        """The critic, as given; ``None`` with ``skip_existing``."""
        return self.nodes["value"].critic if "value" in self.nodes else None

    @property
    def gamma(self) -> Tensor:
        """The discount, live: ``estimator.gamma.fill_(0.995)`` takes effect at the next call."""
        return self.term("estimate").option("gamma")

    @property
    def lmbda(self) -> Tensor:
        """The trace decay, live. Raises ``AttributeError`` for an estimator without one."""
        return self.term("estimate").option("lmbda")


class _Estimate(LossTerm):
    """A kernel over trajectories as a node; it knows the batch's dims, which tell time from agents."""

    def __init__(
        self,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        signals: Mapping[str, Key],
        discounts: Mapping[str, float | Tensor],
        **fixed: Any,
    ) -> None:
        super().__init__(_estimate, list(signals.values()), ["advantage", "value_target"], **discounts)
        self._fixed |= {**fixed, "kernel": kernel, "names": tuple(signals)}

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self._fixed["kernel"].__name__.lstrip("_"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write both into ``tensordict``."""
        names = self._fixed["names"]
        nested = {name for name, key in zip(names, self.in_keys, strict=True) if _is_nested(key)}
        outputs = self.compute(
            [tensordict.get(key) for key in self.in_keys], batch_dims=tensordict.batch_dims, grouped=nested
        )
        for key, value in zip(self.out_keys, outputs, strict=True):
            tensordict.set(key, value)
        return tensordict


def _is_nested(key: Key) -> bool:
    """Whether a key stands under a group, ``next`` aside."""
    return not isinstance(key, str) and len(key) > 1 + (key[0] == "next")


def _estimate(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *others: Tensor,
    kernel: Callable[..., tuple[Tensor, Tensor]],
    names: tuple[str, ...],
    batch_dims: int,
    grouped: Set[str],
    time_dim: int | None,
    differentiable: bool,
    average_advantage: bool,
    average_rewards: bool,
    **discounts: Tensor,
) -> tuple[Tensor, Tensor]:
    given = (reward, state_value, next_state_value, done, terminated, *others)
    signals = dict(zip(names, given, strict=True))
    mask = signals.pop("mask", None)
    if mask is not None:
        lowest = min(x.dim() for x in signals.values())
        signals["mask"] = mask.unsqueeze(-1) if mask.dim() < lowest else mask
    lowest = min(x.dim() for x in signals.values())
    together = expand_to_agents(signals)
    time = find_time(time_dim, batch_dims, signals, grouped=grouped)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        mask = together.pop("mask").bool() if mask is not None else None
        if average_rewards:
            together["reward"] = normalize_advantage(together["reward"], mask)
        if mask is not None:
            together = _without(together, mask, time)
        shape = together["reward"].shape
        for name, x in discounts.items():  # what is given for the steps of a team holds for each of its agents
            if len(shape) - 1 > (batch_dims or lowest - 1) and x.dim() > 1 and x.shape != shape:
                discounts[name] = x.unsqueeze(-2)
        advantage, target = kernel(*together.values(), time_dim=time, **discounts)
        return normalize_advantage(advantage, mask) if average_advantage else advantage, target


def _without(signals: Signals, mask: Tensor, time: int) -> Signals:
    """Signals in which rows out of the mask are ends of their own, worth nothing, and no trace enters them."""
    result = {name: torch.where(mask, x, 0.0) if x.is_floating_point() else x for name, x in signals.items()}
    result["done"] = signals["done"].bool() | ~(mask & mask.roll(-1, time))  # the last row has none to follow
    result["terminated"] = signals["terminated"].bool() | ~mask
    return result
