"""Actors: keyed graphs from an observation to an action and its log-probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution

from graphrl.errors import GraphError
from graphrl.graph import KeyedGraph
from graphrl.keys import Key, normalize_key, normalize_keys
from graphrl.models.distributions import Categorical, IndependentNormal, TanhNormal
from graphrl.models.heads import GaussianHead, Trunk
from graphrl.models.init import orthogonal_init_
from graphrl.models.mlp import MLP

__all__ = ["Actor", "CategoricalActor", "GaussianActor", "TanhGaussianActor"]


def _beside(key: Key, name: str) -> Key:
    """``name`` next to ``key``: ("agents", "action") gives ("agents", name)."""
    return name if isinstance(key, str) else (*key[:-1], name)


class Actor(KeyedGraph):
    """A stochastic policy: network nodes, then a distribution that is sampled.

        theta = network(observation);   action ~ distribution_class(theta)

    ``network``: any nodes a :class:`KeyedGraph` takes, together writing ``dist_keys``, the distribution's arguments
    under their own names (or a mapping of argument to key). Writes what the network writes, then ``action_key`` and
    ``log_prob_key`` (default: the action's name + ``_log_prob``), the log-probability of that action, [*B] in nats.
    The action is drawn unless ``tensordict.nn.set_interaction_type`` says otherwise; gradient flows through it where
    the distribution is reparametrised. ``actor.get_dist(td)`` gives the distribution itself.
    Raises :class:`GraphError` for keys the network does not write.
    """

    def __init__(
        self,
        *network: Any,
        distribution_class: type[Distribution],
        dist_keys: Sequence[Key] | Mapping[str, Key] = ("loc", "scale"),
        distribution_kwargs: Mapping[str, Any] | None = None,
        action_key: Key = "action",
        log_prob_key: Key | None = None,
        default_interaction_type: InteractionType = InteractionType.RANDOM,
    ) -> None:
        action_key = normalize_key(action_key)
        last = action_key if isinstance(action_key, str) else action_key[-1]
        arguments = dist_keys if isinstance(dist_keys, Mapping) else {_name(key): key for key in dist_keys}
        written = [key for node in KeyedGraph(*network).nodes.values() for key in normalize_keys(node.out_keys)]
        for key in arguments.values():
            if normalize_key(key) not in written:
                raise GraphError(
                    f"{distribution_class.__name__} needs {key!r}, but the network writes {written}; "
                    "pass dist_keys={'argument': key, ...} with keys it writes"
                )
        super().__init__(
            *network,
            ProbabilisticTensorDictModule(
                in_keys=dict(arguments),
                out_keys=[action_key],
                distribution_class=distribution_class,
                distribution_kwargs=dict(distribution_kwargs or {}),
                return_log_prob=True,
                log_prob_key=log_prob_key or _beside(action_key, f"{last}_log_prob"),
                default_interaction_type=default_interaction_type,
            ),
        )

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """The action distribution of a batch, which is left as it was."""
        scratch = tensordict.copy()
        *network, sampler = self  # by position: a network node may be a graph with hidden keys of its own
        for node in network:
            node(scratch)
        return sampler.get_dist(scratch)


class GaussianActor(Actor):
    """A diagonal Gaussian policy on a multi-layer perceptron.

        loc = MLP(normalizer(observation));   scale = exp(log_std);   action ~ N(loc, scale^2)

    ``in_keys``: tensors [*B, F_i], joined, sum of F_i = ``observation_dim``. Writes ``loc scale action`` [*B,
    ``action_dim``] and ``action_log_prob`` [*B]; keys stay beside a nested ``action_key``. ``normalizer``: a module
    before the network, such as a :class:`RunningNorm` shared with the critic; it adds no key. ``init_std``: the
    standard deviation at the start, one parameter an action, or an output of the network with
    ``state_dependent_std``. Linear layers start orthogonal, gain sqrt(2), the last 0.01: see ``orthogonal_init_``.
    """

    _distribution: type[Distribution] = IndependentNormal

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        *,
        num_cells: Sequence[int] = (64, 64),
        activation_class: Callable[..., nn.Module] = nn.Tanh,
        normalizer: nn.Module | None = None,
        init_std: float = 1.0,
        state_dependent_std: bool = False,
        in_keys: Key | list[Key] = "observation",
        action_key: Key = "action",
        distribution_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        outputs = 2 * action_dim if state_dependent_std else action_dim
        mlp = MLP(
            observation_dim,
            outputs,
            num_cells=num_cells,
            activation_class=activation_class,
            device=device,
            dtype=dtype,
        )
        head = GaussianHead(
            action_dim, init_std=init_std, state_dependent_std=state_dependent_std, device=device, dtype=dtype
        )
        network = Trunk(normalizer=normalizer, mlp=orthogonal_init_(mlp, last_gain=0.01), head=head)
        keys = [_beside(action_key, "loc"), _beside(action_key, "scale")]
        super().__init__(
            (network, normalize_keys(in_keys), keys),
            distribution_class=self._distribution,
            dist_keys=keys,
            distribution_kwargs=distribution_kwargs,
            action_key=action_key,
        )


class TanhGaussianActor(GaussianActor):
    """A Gaussian policy squashed into the box ``[low, high]`` by tanh.

        loc, scale = MLP(normalizer(observation));   action = (high + low) / 2 + (high - low) / 2 tanh(loc + scale e)

    As :class:`GaussianActor`, with :class:`TanhNormal` as the distribution and a state-dependent scale by default.
    ``low``, ``high``: floats, or tensors [``action_dim``].
    """

    _distribution = TanhNormal

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        *,
        low: float | Tensor = -1.0,
        high: float | Tensor = 1.0,
        state_dependent_std: bool = True,
        **options: Any,
    ) -> None:
        if not torch.as_tensor(high > low).all():
            raise GraphError(f"TanhGaussianActor: low={low} must lie below high={high}")
        super().__init__(
            observation_dim,
            action_dim,
            state_dependent_std=state_dependent_std,
            distribution_kwargs={"low": low, "high": high},
            **options,
        )


class CategoricalActor(Actor):
    """A policy over ``num_actions`` choices on a multi-layer perceptron.

        action ~ Categorical(logits = MLP(normalizer(observation)))

    Writes ``logits`` [*B, ``num_actions``], ``action`` [*B] int64 and ``action_log_prob`` [*B]; arguments and
    initialisation as in :class:`GaussianActor`. Gradient flows to the log-probability, not to the action.
    """

    def __init__(
        self,
        observation_dim: int,
        num_actions: int,
        *,
        num_cells: Sequence[int] = (64, 64),
        activation_class: Callable[..., nn.Module] = nn.Tanh,
        normalizer: nn.Module | None = None,
        in_keys: Key | list[Key] = "observation",
        action_key: Key = "action",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        mlp = MLP(
            observation_dim,
            num_actions,
            num_cells=num_cells,
            activation_class=activation_class,
            device=device,
            dtype=dtype,
        )
        logits = _beside(action_key, "logits")
        network = Trunk(normalizer=normalizer, mlp=orthogonal_init_(mlp, last_gain=0.01))
        super().__init__(
            (network, normalize_keys(in_keys), [logits]),
            distribution_class=Categorical,
            dist_keys=[logits],
            action_key=action_key,
        )


def _name(key: Key) -> str:
    return key if isinstance(key, str) else key[-1]
