"""The contract of a policy, as far as its environment, the simulator behind it and the policy itself tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn

from graphrl.compiler.bundle import ActionContract, Contract, Normalizer, ObservationTerm
from graphrl.compiler.bundle.state import acting_graph
from graphrl.compiler.bundle.tail import tail_steps
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.envs.base import EnvBase
from graphrl.envs.mujoco import actuator_fields, has_quaternion, observation_fields
from graphrl.errors import BundleError
from graphrl.keys import Key, next_key, normalize_keys
from graphrl.models import RunningNorm
from graphrl.specs import Bounded, Categorical

__all__ = ["contract_from_env"]

SAME_ENTRIES = frozenset(
    "TimeLimit OrderEnforcing PassiveEnvChecker RecordEpisodeStatistics RecordVideo HumanRendering RenderCollection "
    "ClipReward NormalizeReward TransformReward ClipAction RescaleAction NormalizeObservation".split()
)
"""Wrappers of Gymnasium behind which an observation has the same entries, and a step takes as long."""


def contract_from_env(env: EnvBase, policy: nn.Module, action_key: Key = "action") -> Contract:
    """What an environment and a trained policy tell a robot; what neither knows stays null.

    From the specs: keys, shapes, finite bounds. From the simulator (MuJoCo): names and units of entries, joints, pose,
    gains, rate, decimation; an environment of one's own may have ``entry_names``, {key: names}, the action's among
    them. From wrappers: a stack of frames, a ``NormalizeObservation``. From the policy: the statistics of its
    ``RunningNorm``, and which of squash, scale and clip it performs. Its state is told by its own nodes, at export.
    Behind a wrapper that this does not know, entries
    have no names, and no rate is told.
    """
    raw = getattr(env, "envs", [None])[0]
    inner = None if raw is None else raw.unwrapped
    layers = _layers(raw)
    unknown = [type(layer).__name__ for layer in layers if type(layer).__name__ not in SAME_ENTRIES]
    plain = inner is not None and not unknown
    terms, start = [], 0
    written = normalize_keys(list(policy.out_keys))  # type: ignore[arg-type]
    read = [key for key in normalize_keys(list(policy.in_keys)) if next_key(key) not in written]  # type: ignore[arg-type]
    keys = [key for key in read if key in env.observation_spec.keys(True, True)]
    for key in keys:
        term = _bounded(key, env.observation_spec[key])
        size = math.prod(term.shape or ())
        term = replace(term, **(_entries(inner, key, size) if plain else _stacked(layers)))
        terms.append(replace(term, normalizer=_normalizer(policy, layers, key, start, start + size)))
        start += size
    action, note = _action(env, inner, policy, action_key)
    notes = [f"trained on {getattr(env, 'name', type(env).__name__)}", *note]
    notes += [f"wrapped in {', '.join(unknown)}"] if unknown else []
    model = getattr(inner, "model", None)
    moving = model is not None and hasattr(model, "jnt_type")
    return Contract(
        **_clock(env, inner, layers),
        observations=tuple(terms),
        action=action,
        quaternion_order="wxyz" if moving and has_quaternion(model) else None,
        notes="; ".join(notes),
    )


def _layers(raw: Any) -> list[Any]:
    layers = []
    while raw is not None and raw is not raw.unwrapped:
        layers.append(raw)
        raw = raw.env
    return layers


def _clock(env: EnvBase, inner: Any, layers: Sequence[Any]) -> dict[str, Any]:
    """Control rate and simulator steps a control step, where no wrapper can have changed them."""
    import gymnasium

    kept = (gymnasium.ObservationWrapper, gymnasium.RewardWrapper, gymnasium.ActionWrapper)
    names = [type(layer).__name__ for layer in layers if not isinstance(layer, kept)]
    if any(name not in SAME_ENTRIES and name != "FrameStackObservation" for name in names):
        return {}
    dt = env.dt
    if dt is None and any(c.__module__.endswith("classic_control.cartpole") for c in type(inner).__mro__):
        dt = float(inner.tau)  # the seconds a step of the cart and pole takes, under a name of its own
    if dt is None:
        return {}
    step = getattr(getattr(getattr(inner, "model", None), "opt", None), "timestep", None)
    decimation = None if step is None else round(dt / step)
    fits = decimation is not None and decimation >= 1 and math.isclose(decimation * step, dt, rel_tol=1e-6)
    return {"rate_hz": 1.0 / dt, "decimation": decimation if fits else None}


def _finite(bound: Tensor) -> tuple[float | None, ...] | None:
    numbers = [float(v) if math.isfinite(v) else None for v in bound[0].reshape(-1).tolist()]
    return tuple(numbers) if any(v is not None for v in numbers) else None


def _bounded(key: Key, spec: Any) -> ObservationTerm:
    term = ObservationTerm(key, shape=tuple(spec.shape[1:]))
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return term
    low, high = _finite(spec.low), _finite(spec.high)
    return replace(term, low=low, high=high, bounds_from="stated" if low or high else None)


def _entries(inner: Any, key: Key, size: int) -> dict[str, Any]:
    named = getattr(inner, "entry_names", {}).get(key)
    if named is not None:
        return {"names": tuple(named)}
    return observation_fields(inner, size) if key == "observation" and hasattr(inner, "model") else {}


def _stacked(layers: Sequence[Any]) -> dict[str, Any]:
    for layer in layers:
        if type(layer).__name__ == "FrameStackObservation":
            fill = {"reset": "first observation", "zero": "constant 0"}.get(layer.padding_type)
            return {"history_length": int(layer.stack_size), "history_order": "oldest_first",
                    "history_reset_fill": fill}  # fmt: skip
    return {}


def _normalizer(policy: nn.Module, layers: Sequence[Any], key: Key, start: int, stop: int) -> Normalizer | None:
    """The policy's own statistics of entries ``start`` to ``stop``, or those of a wrapper; null where two are at work.

    A ``RunningNorm`` that is a node of the policy belongs to the key it reads; one in a network to all keys, joined.
    """
    own = [m for m in policy.modules() if isinstance(m, RunningNorm)]
    for node in policy.modules():
        reads = getattr(node, "in_keys", None)
        if isinstance(getattr(node, "module", None), RunningNorm) and reads and normalize_keys(list(reads)) == [key]:
            own, start, stop = [node.module], 0, stop - start  # type: ignore[list-item]
    outer = next((layer for layer in layers if type(layer).__name__ == "NormalizeObservation"), None)
    if len(own) > 1 or (own and outer is not None):
        return None
    if own:
        norm = own[0]
        if len(norm.mean.reshape(-1)) < stop:
            return None
        centre, std = norm.mean.reshape(-1)[start:stop], (norm.var.reshape(-1)[start:stop] + norm.eps).sqrt()
        return Normalizer("inside", tuple(centre.tolist()), tuple(std.tolist()), norm.eps, norm.clip)
    if outer is not None and key == "observation":
        mean, var = np.ravel(outer.obs_rms.mean), np.ravel(outer.obs_rms.var)
        spread = tuple(np.sqrt(var + outer.epsilon).tolist())
        return Normalizer("outside", tuple(mean.tolist()), spread, float(outer.epsilon))
    return Normalizer("none")


def _action(env: EnvBase, inner: Any, policy: nn.Module, key: Key) -> tuple[ActionContract, list[str]]:
    """The action's names, bounds and steps, and what the robot must do with it."""
    spec = env.action_spec
    if isinstance(spec, Categorical):
        choices = ActionContract(key, names=("action_0",), low=(0.0,), high=(float(spec.n - 1),), inside=())
        return choices, [f"the action is one of {spec.n} choices, counted from 0"]
    size = math.prod(spec.shape[1:])
    fields: dict[str, Any] = {"names": tuple(f"action_{i}" for i in range(size))}
    named = getattr(inner, "entry_names", {}).get("action")
    if named is not None:
        fields["names"] = tuple(named)
    if hasattr(getattr(inner, "model", None), "actuator_trnid") and inner.model.nu == size:
        found = actuator_fields(inner)
        fields = {**fields, **found, **({"names": fields["names"]} if named is not None else {})}
    fields.update(_steps(env, policy, key))
    if not isinstance(spec, Bounded):
        return ActionContract(key, **fields), ["the action has no bounds"]
    low, high = _finite(spec.low), _finite(spec.high)
    if "inside" not in fields:
        return ActionContract(key, low=low, high=high, **fields), ["say in action.inside what the policy performs"]
    clipped = "clip" in fields["inside"]
    if not clipped and low and high and len({*low}) == len({*high}) == 1 and None not in (*low, *high):
        fields["clip"] = (low[0], high[0])
    note = [] if clipped else ["clip the action to its bounds before use"]
    return ActionContract(key, low=low, high=high, **fields), note


def _steps(env: EnvBase, policy: nn.Module, key: Key) -> dict[str, Any]:
    """Squash, scale, offset and clip that the traced policy ends in; nothing where an input's shape is not known."""
    try:
        graph, _, starts = acting_graph(policy, key, Contract())  # type: ignore[arg-type]
    except BundleError:  # a state that only the user can tell
        return {}
    row = dict(starts)
    for name in normalize_keys(list(graph.in_keys)):
        if name in env.observation_spec.keys(True, True):
            spec = env.observation_spec[name]
            row[name] = torch.zeros(1, *spec.shape[1:], dtype=spec.dtype)
        elif name not in row:
            return {}
    with set_interaction_type(InteractionType.DETERMINISTIC), torch.no_grad():
        return tail_steps(run_passes(trace(graph, TensorDict(row, batch_size=[1]))), key)
