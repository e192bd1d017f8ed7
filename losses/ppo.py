"""Proximal policy optimisation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphrl.errors import GraphError
from graphrl.losses.common import LossGraph, LossTerm, value_key_of
from graphrl.losses.functional import (
    approximate_kl,
    clipped_surrogate,
    effective_sample_size,
    entropy_bonus,
    explained_variance,
    normalize_advantage,
    value_error,
)
from graphrl.losses.policy import action_keys_of, evaluate_action

__all__ = ["PPOLoss"]


class PPOLoss(LossGraph):
    """Clipped PPO, eqs. 7 and 9 of Schulman et al. 2017 (arXiv:1707.06347), as a keyed graph.

        loss_objective = -mean(min(r A, clip(r, 1 - clip_epsilon, 1 + clip_epsilon) A)),   r = pi(a|s) / pi_old(a|s)
        loss_critic = critic_coeff mean(l(V(s), R));   loss_entropy = -entropy_coeff mean(H(pi(.|s)))

    Minimise ``loss_objective + loss_critic + loss_entropy``: the coefficients are inside. Reads what ``actor`` and
    ``critic`` read, ``action``, ``action_log_prob`` [*B] as it was when acting, ``advantage`` and ``value_target``
    [*B, 1], and with ``clip_value`` the old ``state_value`` [*B, 1]. Returns, beside the losses, ``kl_approx
    clip_fraction ESS entropy explained_variance``, without gradient; all are []. ``loss_objective`` and
    ``loss_entropy`` move only the actor, ``loss_critic`` only the critic. The critic is clipped by ``clip_value``
    (``True``: by ``clip_epsilon``). Argument names and defaults are those of TorchRL's ``ClipPPOLoss``.
    Numbers are live buffers: ``loss.clip_epsilon.fill_(0.1)``. Keys: ``loss.set_keys(advantage="adv")``.
    Raises :class:`GraphError` for a malformed actor or critic, :class:`SpecError` for shapes that do not pair up.
    """

    def __init__(
        self,
        actor: Any,
        critic: Any,
        *,
        clip_epsilon: float = 0.2,
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "smooth_l1",
        normalize_advantage: bool = False,
        clip_value: float | bool | None = None,
    ) -> None:
        if not 0 < clip_epsilon < 1:
            raise GraphError(f"PPOLoss: clip_epsilon={clip_epsilon} must lie between 0 and 1")
        if loss_critic_type not in ("l2", "smooth_l1"):
            raise GraphError(f"PPOLoss: loss_critic_type={loss_critic_type!r}: expected 'l2' or 'smooth_l1'")
        action, log_prob = action_keys_of(actor)
        value = value_key_of(critic)
        nodes: dict[str, Any] = {}
        if clip_value:  # remembers the batch's value before the critic overwrites it
            nodes["old_value"] = LossTerm(_old_value, [value], ["old_state_value"])
        nodes["actor"] = evaluate_action(actor, action_key=action)
        nodes["critic"] = critic
        nodes |= _policy_terms(log_prob, float(clip_epsilon), normalize_advantage)
        if entropy_bonus:
            nodes["entropy_bonus"] = _entropy_term(float(entropy_coeff))
        clip = float(clip_epsilon if clip_value is True else clip_value) if clip_value else None
        nodes |= _value_terms(value, float(critic_coeff), loss_critic_type, clip)
        super().__init__(
            nodes,
            out_keys=[key for key in _OUT_KEYS if entropy_bonus or "entropy" not in key],
            tensor_keys={
                "action": action,
                "sample_log_prob": log_prob,
                "advantage": "advantage",
                "value_target": "value_target",
                "value": value,
            },
        )

    @property
    def actor(self) -> Any:
        """The policy, as given."""
        return self.nodes["actor"].actor

    @property
    def critic(self) -> Any:
        """The critic, as given."""
        return self.nodes["critic"]

    @property
    def clip_epsilon(self) -> Tensor:
        """The half width of the ratio's interval, live: []."""
        return self.term("surrogate").option("clip_epsilon")

    @property
    def entropy_coeff(self) -> Tensor:
        """The weight of the entropy bonus, live: []."""
        return self.term("entropy_bonus").option("entropy_coeff")

    @property
    def critic_coeff(self) -> Tensor:
        """The weight of the critic's loss, live: []."""
        return self.term("value_error").option("critic_coeff")


_OUT_KEYS = (
    "loss_objective",
    "loss_critic",
    "loss_entropy",
    "kl_approx",
    "clip_fraction",
    "ESS",
    "entropy",
    "explained_variance",
)


def _old_value(state_value: Tensor) -> Tensor:
    return state_value.detach()


def _policy_terms(log_prob: Any, clip_epsilon: float, normalize: bool) -> dict[str, Any]:
    ratio = ["new_log_prob", log_prob]
    terms: dict[str, Any] = {}
    advantage = "advantage"
    if normalize:
        advantage = "normalized_advantage"
        terms["normalize_advantage"] = LossTerm(normalize_advantage, ["advantage"], [advantage])
    terms["surrogate"] = LossTerm(
        clipped_surrogate, [*ratio, advantage], ["loss_objective", "clip_fraction"], clip_epsilon=clip_epsilon
    )
    terms["kl"] = LossTerm(approximate_kl, ratio, ["kl_approx"])
    terms["sample_size"] = LossTerm(effective_sample_size, ratio, ["ESS"])
    return terms


def _entropy_term(entropy_coeff: float) -> LossTerm:
    return LossTerm(entropy_bonus, ["new_entropy"], ["loss_entropy", "entropy"], entropy_coeff=entropy_coeff)


def _value_terms(value: Any, critic_coeff: float, kind: str, clip_value: float | None) -> dict[str, Any]:
    old = [] if clip_value is None else ["old_state_value"]
    clip = {} if clip_value is None else {"clip_value": clip_value}
    error = LossTerm(
        value_error,
        [value, "value_target", *old],
        ["loss_critic"],
        critic_coeff=critic_coeff,
        loss_critic_type=kind,
        **clip,
    )
    explained = LossTerm(explained_variance, [value, "value_target"], ["explained_variance"])
    return {"value_error": error, "explained_variance": explained}
