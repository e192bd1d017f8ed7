"""Evaluating a policy on stored actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution

from graphrl.errors import GraphError, SpecError
from graphrl.keys import DISCARD, Key, normalize_key, normalize_keys

__all__ = ["EvaluateAction", "action_keys_of", "evaluate_action"]


class EvaluateAction(TensorDictModuleBase):
    """A node that asks a policy how likely it is to take the actions of a batch. See :func:`evaluate_action`."""

    def __init__(self, actor: Any, action_key: Key, out_keys: tuple[Key, Key]) -> None:
        super().__init__()
        self.actor = actor
        self._first = normalize_key(action_key)
        self.in_keys = [*normalize_keys(actor.in_keys), self._first]
        self.out_keys = list(out_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the log-probability and the entropy into ``tensordict``."""
        dist = self.actor.get_dist(tensordict.copy())
        if hasattr(dist, "dists"):
            raise GraphError(
                "the actor's distribution is composite: write a node that sums the log-probabilities of its heads, "
                "or call clipped_surrogate with a list of them"
            )
        action = tensordict.get(self.in_keys[-1]).detach()
        expected = dist.batch_shape + dist.event_shape
        if action.shape != expected:
            raise SpecError(
                f"{self.in_keys[-1]!r} has shape {list(action.shape)}, but the policy acts in {list(expected)}: "
                "a loss must not broadcast one action over others"
            )
        tensordict.set(self.out_keys[0], dist.log_prob(action))
        if self.out_keys[1] != DISCARD:
            tensordict.set(self.out_keys[1], _entropy(dist))
        return tensordict

    def replace_keys(self, mapping: Mapping[Key, Key]) -> None:
        """Read the action under another key from now on; ``mapping``: from the key it had first."""
        self.in_keys = [*self.in_keys[:-1], mapping.get(self._first, self._first)]


def evaluate_action(
    actor: Any, *, action_key: Key | None = None, out_keys: tuple[Key, Key] = ("new_log_prob", "new_entropy")
) -> EvaluateAction:
    """A node from the actor's inputs and a stored action to log pi(a|s) and the entropy of pi(.|s).

        log_prob = log pi(a | s);   entropy = H(pi(. | s)), or -log pi(a' | s) with one a' ~ pi where it has no formula

    ``actor``: anything with ``in_keys`` and ``get_dist``: an :class:`Actor`, a ``ProbabilisticTensorDictSequential``.
    Writes ``out_keys``: [*B] each, in nats; gradient flows to the actor's parameters, not to the action.
    Raises :class:`GraphError` for an actor without a distribution.
    """
    if not hasattr(actor, "get_dist") or not hasattr(actor, "in_keys"):
        raise GraphError(
            f"{type(actor).__name__} is no stochastic policy: expected one with in_keys and get_dist, such as "
            "graphrl.models.Actor or tensordict's ProbabilisticTensorDictSequential"
        )
    return EvaluateAction(actor, action_key or action_keys_of(actor)[0], out_keys)


def action_keys_of(actor: Any) -> tuple[Key, Key]:
    """The keys a policy writes its action and that action's log-probability under."""
    samplers = [module for module in actor.modules() if isinstance(module, ProbabilisticTensorDictModule)]
    if not samplers:
        return "action", "action_log_prob"
    action = normalize_key(samplers[-1].out_keys[0])
    log_prob = samplers[-1].log_prob_key if samplers[-1].return_log_prob else None
    if log_prob is None:
        log_prob = f"{action}_log_prob" if isinstance(action, str) else (*action[:-1], f"{action[-1]}_log_prob")
    return action, normalize_key(log_prob)


def _entropy(dist: Distribution) -> Tensor:
    try:
        return dist.entropy()
    except NotImplementedError:
        return -dist.log_prob(dist.rsample() if dist.has_rsample else dist.sample())
