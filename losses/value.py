"""Value estimators as keyed graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl.errors import GraphError, SpecError
from graphrl.kernels import gae
from graphrl.keys import Key, normalize_key, normalize_keys
from graphrl.losses.common import LossTerm, SettableKeys, require_same_shape, value_key_of
from graphrl.losses.functional import normalize_advantage

__all__ = ["GAE", "StateValues"]


def _next(key: Key) -> Key:
    return normalize_key(("next", key))


class GAE(SettableKeys):
    """Generalised advantage estimation as a keyed graph, eqs. 11 to 16 of Schulman et al. 2016 (arXiv:1506.02438).

        delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)
        A_t = delta_t + gamma lmbda (1 - done_t) A_{t+1};   value_target_t = A_t + V(s_t)

    Reads what ``critic`` reads, the same under ``next``, and ``("next", "reward"|"done"|"terminated")``: [*B, T, 1].
    Writes the critic's ``state_value``, its ``("next", ...)``, ``advantage`` and ``value_target``: [*B, T, 1]. s'_t is
    the true next observation, never the root shifted by a step: the critic sees both in one call, stacked in front.
    ``time_dim``: of the batch, the last unless given. ``gamma``, ``lmbda``: floats or tensors, buffers of the graph.
    ``average_gae`` normalises the advantage. Keys are settable: ``set_keys(reward=("agents", "reward"))``.

    No gradient flows, unless ``differentiable``: then it reaches the critic (through both values), the rewards, and
    ``gamma`` and ``lmbda`` given as parameters. Raises :class:`SpecError` when shapes differ: nothing is broadcast.
    """

    def __init__(
        self,
        critic: Any,
        *,
        gamma: float | Tensor = 0.99,
        lmbda: float | Tensor = 0.95,
        average_gae: bool = False,
        differentiable: bool = False,
        time_dim: int = -1,
    ) -> None:
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not isinstance(value, Tensor) and not 0 <= value <= 1:
                raise GraphError(f"GAE: {name}={value} is not a discount: expected 0 <= {name} <= 1")
        value_key = value_key_of(critic)
        signals = [_next("reward"), value_key, _next(value_key), _next("done"), _next("terminated")]
        nodes: list[Any] = [
            StateValues(critic, differentiable=differentiable),
            LossTerm(
                _estimate,
                signals,
                ["advantage", "value_target"],
                gamma=gamma if isinstance(gamma, Tensor) else float(gamma),
                lmbda=lmbda if isinstance(lmbda, Tensor) else float(lmbda),
                time_dim=time_dim - 1 if time_dim < 0 else time_dim,
                differentiable=differentiable,
            ),
        ]
        names = ["value", "estimate"]
        if average_gae:
            nodes.append(LossTerm(normalize_advantage, ["advantage"], ["advantage"]))
            names.append("normalize")
        super().__init__(*nodes)
        self._name_nodes(names)
        self.tensor_keys = {
            "advantage": "advantage",
            "value_target": "value_target",
            "value": value_key,
            "reward": "reward",
            "done": "done",
            "terminated": "terminated",
        }

    def set_keys(self, **keys: Key) -> None:
        """Change the keys of roles, in place; ``reward``, ``done``, ``terminated`` are given without ``next``."""
        if "value" in keys and normalize_key(keys["value"]) != self.tensor_keys["value"]:
            raise GraphError(
                f"set_keys: the critic writes its value as {self.tensor_keys['value']!r}; to change it, build the "
                f"critic with value_key={keys['value']!r}"
            )
        super().set_keys(**keys)

    def _place(self, role: str, key: Key) -> Key:
        return _next(key) if role in ("reward", "done", "terminated") else key

    @property
    def critic(self) -> Any:
        """The critic, as given."""
        return self.nodes["value"].critic

    @property
    def gamma(self) -> Tensor:
        """The discount, live: ``gae.gamma.fill_(0.995)`` takes effect at the next call."""
        return self.term("estimate").option("gamma")

    @property
    def lmbda(self) -> Tensor:
        """The trace decay, live."""
        return self.term("estimate").option("lmbda")


class StateValues(TensorDictModuleBase):
    """A node that values the root and the next state of each step with one call of the critic.

        V(s_t), V(s'_t) = critic(stack([s, s'], 0))

    Reads the critic's ``in_keys`` and the same under ``next``; writes its value key, also under ``next``: [*B, T, 1].
    No gradient unless ``differentiable``; then a terminated step's next state, whose value nobody may use, is replaced
    by the root so that a NaN in it reaches no gradient. Raises :class:`SpecError` when root and next differ in shape.
    """

    def __init__(self, critic: Any, *, differentiable: bool = False) -> None:
        super().__init__()
        self.critic = critic
        self.differentiable = differentiable
        self.critic_keys = normalize_keys(critic.in_keys)
        self.value_key = value_key_of(critic)
        self.in_keys = [*self.critic_keys, *map(_next, self.critic_keys)]
        if differentiable:
            self.in_keys.append(_next("terminated"))
        self.out_keys = [self.value_key, _next(self.value_key)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write both values into ``tensordict``."""
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            both = TensorDict({}, batch_size=[2, *tensordict.batch_size])
            for key in self.critic_keys:
                root, following = tensordict.get(key), tensordict.get(_next(key))
                if root.shape != following.shape:
                    raise SpecError(
                        f"{key!r} is {list(root.shape)}, but {_next(key)!r} is {list(following.shape)}: "
                        "each step needs its own next state"
                    )
                if self.differentiable:
                    following = _where_over(tensordict.get(self.in_keys[-1]), root, following)
                both.set(key, torch.stack([root, following]))
            value, next_value = self.critic(both).get(self.value_key).unbind(0)
        tensordict.set(self.value_key, value)
        tensordict.set(_next(self.value_key), next_value)
        return tensordict

    def replace_keys(self, mapping: Mapping[Key, Key]) -> None:
        """Read the terminated flag under another key from now on."""
        if self.differentiable:
            self.in_keys[-1] = mapping.get(self.in_keys[-1], self.in_keys[-1])


def _where_over(terminated: Tensor, root: Tensor, following: Tensor) -> Tensor:
    """``root`` at terminated steps [*B, T, 1], else ``following`` [*B, T, *F]."""
    flag = terminated.bool().squeeze(-1)
    return torch.where(flag.reshape(flag.shape + (1,) * (root.ndim - flag.ndim)), root, following)


def _estimate(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: Tensor,
    lmbda: Tensor,
    time_dim: int,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    require_same_shape(
        reward=reward, state_value=state_value, next_state_value=next_state_value, done=done, terminated=terminated
    )
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        return gae(reward, state_value, next_state_value, done, terminated, gamma, lmbda, time_dim=time_dim)
