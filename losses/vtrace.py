"""V-trace: value estimation from data that an older policy collected."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from graphrl.errors import GraphError, SpecError
from graphrl.kernels import vtrace
from graphrl.keys import DISCARD, Key, normalize_key
from graphrl.losses.policy import action_keys_of, evaluate_action
from graphrl.losses.state_values import rows_of, usable
from graphrl.losses.value_estimator import ValueEstimator

__all__ = ["ImportanceRatio", "VTrace"]

_RATIO, _LOG_PROB = "importance_ratio", "new_log_prob"


class VTrace(ValueEstimator):
    """V-trace as a keyed graph, eq. 1 and section 4.2 of Espeholt et al. 2018, IMPALA (arXiv:1802.01561).

        ratio_t = pi(a_t|s_t) / mu(a_t|s_t);   rho_t = min(rho_thresh, ratio_t);   c_t = lmbda min(c_thresh, ratio_t)
        v_t = V(s_t) + delta_t + gamma c_t (1 - done_t) (v_{t+1} - V(s_{t+1}))
        delta_t = rho_t (r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t))
        advantage_t = rho_t (r_t + gamma v_{t+1} - V(s_t)), V(s'_t) for v_{t+1} where done;   value_target_t = v_t

    Reads, beside what :class:`ValueEstimator` says, what ``actor`` reads, ``action`` and ``action_log_prob`` [*B, T] as
    they were when acting (role ``sample_log_prob``). Keys, shapes, options and errors as there; no gradient reaches
    the actor. ``average_adv`` normalises the advantage, as ``average_gae`` does. ``rho_thresh``, ``c_thresh``:
    positive floats, fixed. Raises :class:`GraphError` for an actor without a distribution.
    """

    def __init__(
        self,
        critic: Any,
        actor: Any,
        *,
        gamma: float | Tensor = 0.99,
        lmbda: float | Tensor = 1.0,
        rho_thresh: float = 1.0,
        c_thresh: float = 1.0,
        average_adv: bool = False,
        differentiable: bool = False,
        shifted: bool = False,
        skip_existing: bool = False,
        mask_key: Key | None = None,
        time_dim: int | None = None,
    ) -> None:
        for name, value in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
            if isinstance(value, Tensor) or not value > 0:
                raise GraphError(f"VTrace: {name}={value}: expected a positive float; float('inf') clips nothing")
        super().__init__(
            critic,
            partial(vtrace, rho_clip=float(rho_thresh), c_clip=float(c_thresh)),
            {"gamma": gamma, "lmbda": lmbda},
            average_advantage=average_adv,
            differentiable=differentiable,
            shifted=shifted,
            skip_existing=skip_existing,
            mask_key=mask_key,
            time_dim=time_dim,
            more_nodes={"ratio": ImportanceRatio(actor, mask_key=mask_key)},
            more_signals={"ratio": _RATIO},
        )
        action, log_prob = action_keys_of(actor)
        self.tensor_keys |= {"action": action, "sample_log_prob": log_prob}

    @property
    def actor(self) -> Any:
        """The policy, as given."""
        return self.get_submodule("nodes.ratio.policy").actor


class ImportanceRatio(TensorDictModuleBase):
    """A node that weighs the policy of now against the one that acted: pi(a|s) / mu(a|s), [*B, 1], no gradient.

    Reads what ``actor`` reads, its action, the log-probability [*B] of when it was taken and, given ``mask_key``, the
    mask. Raises :class:`SpecError` where the log-probabilities differ in shape.
    """

    def __init__(self, actor: Any, *, mask_key: Key | None = None) -> None:
        super().__init__()
        self.policy = evaluate_action(actor, out_keys=(_LOG_PROB, DISCARD))
        self._first = [action_keys_of(actor)[1], *([] if mask_key is None else [normalize_key(mask_key)])]
        self.keys = list(self._first)
        self.in_keys, self.out_keys = [*self.policy.in_keys, *self.keys], [_RATIO]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the ratio into ``tensordict``."""
        old, *masks = (tensordict.get(key) for key in self.keys)
        with torch.no_grad():
            batch = tensordict.select(*self.policy.in_keys)
            for mask in masks:  # a policy refuses NaN, in padding too
                dims = tensordict.batch_dims or old.dim()
                for key in batch.keys(True, True):
                    x = batch.get(key)
                    batch.set(key, usable(x, ~rows_of(mask, x.shape, dims), 0.0))
            new = self.policy(batch).get(_LOG_PROB)
            if new.shape != old.shape:
                raise SpecError(
                    f"{self.keys[0]!r} is {list(old.shape)}, but the policy gives {list(new.shape)}: one "
                    "log-probability a step, summed over the action's dimensions, without a trailing 1"
                )
            tensordict.set(_RATIO, (new - old).exp().unsqueeze(-1))
        return tensordict

    def replace_keys(self, mapping: Mapping[Key, Key]) -> None:
        """Read all but the actor's own inputs under other keys from now on; ``mapping``: from those of first."""
        self.policy = copy(self.policy)
        self.policy.replace_keys(mapping)
        self.keys = [mapping.get(key, key) for key in self._first]
        self.in_keys = [*self.policy.in_keys, *self.keys]
