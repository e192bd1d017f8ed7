"""The three forms of a policy, as one: plain tensors in, plain tensors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.errors import KeyMissingError, SpecError, did_you_mean
from graphrl.keys import next_key
from graphrl.models.state import StateModule
from graphrl.specs import Unbounded

__all__ = ["KeyedPolicy", "keyed_policy", "state_specs"]

Key = Any
Call = Callable[..., tuple[Tensor, ...]]


class KeyedPolicy:
    """``call(*inputs) -> outputs`` with the keys of both; where there are, ``call_into`` and ``bind_rows``.

    ``out_keys`` is None until the first call where only a call can tell (a plain function of a TensorDict).
    """

    def __init__(
        self, in_keys: list[Key], out_keys: list[Key] | None, call: Call, call_into: Any = None, bind_rows: Any = None
    ) -> None:
        self.in_keys = in_keys
        self.out_keys = out_keys
        self.call = call
        self.call_into = call_into
        self.bind_rows = bind_rows

    def check(self, known: Sequence[Key]) -> None:
        """Raise unless every input is in ``known`` and the policy writes ``action``."""
        for key in self.in_keys:
            if key not in known:
                raise KeyMissingError(
                    f"the policy reads {key!r}, but the environment gives {list(known)}.{did_you_mean(key, known)}"
                    " A recurrent state comes from primers={key: spec}"
                )
        if self.out_keys is not None:
            self.check_outputs(known)

    def check_outputs(self, known: Sequence[Key]) -> None:
        """Raise unless the policy writes ``action`` and leaves the environment's own keys alone."""
        out_keys = self.out_keys or []
        if "action" not in out_keys:
            hint = did_you_mean("action", out_keys)
            raise KeyMissingError(f"the environment reads 'action', but the policy writes {out_keys}.{hint}")
        taken = [key for key in out_keys if key in known]
        if taken:
            raise SpecError(f"the policy overwrites {taken} of the environment: give that output another key")


def _plain(keys: Sequence[Key]) -> list[Key]:
    return [key[0] if isinstance(key, tuple) and len(key) == 1 else key for key in keys]


def keyed_policy(policy: Any, env_keys: Sequence[Key], num_envs: int) -> KeyedPolicy:
    """Adapt a compiled graph (``call``), a TensorDict module or a function of a TensorDict.

    env_keys: what a plain function finds in its TensorDict ``[num_envs]``; of what it returns, the other keys are
    its outputs. Raises :class:`SpecError` for anything else.
    """
    keyed = hasattr(policy, "in_keys") and hasattr(policy, "out_keys")
    if keyed and callable(getattr(policy, "call", None)):
        faster = (getattr(policy, name, None) for name in ("call_into", "bind_rows"))
        return KeyedPolicy(_plain(policy.in_keys), _plain(policy.out_keys), policy.call, *faster)
    if not callable(policy):
        raise SpecError(f"the policy is a {type(policy).__name__}; expected a compiled graph, a module or a function")
    if keyed:
        return _module_policy(policy, num_envs)
    return _function_policy(policy, list(env_keys), num_envs)


def _module_policy(policy: Any, num_envs: int) -> KeyedPolicy:
    in_keys = _plain(policy.in_keys)
    out_keys = [key for key in _plain(policy.out_keys) if not str(key).startswith("_")]  # "_" marks a dropped output

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = policy(TensorDict(dict(zip(in_keys, inputs, strict=True)), batch_size=[num_envs]))
        return tuple(out[key] for key in out_keys)

    return KeyedPolicy(in_keys, out_keys, call)


def _function_policy(policy: Any, in_keys: list[Key], num_envs: int) -> KeyedPolicy:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(in_keys, inputs, strict=True))
        out = policy(TensorDict(given, batch_size=[num_envs]))
        if not hasattr(out, "keys"):
            raise SpecError(f"the policy returned a {type(out).__name__}; expected the TensorDict with 'action'")
        if adapted.out_keys is None:
            adapted.out_keys = [key for key in out.keys(True, True) if key not in given]
        return tuple(out[key] for key in adapted.out_keys)

    adapted = KeyedPolicy(in_keys, None, call)
    return adapted


def state_specs(policy: Any, num_envs: int) -> dict[Key, Unbounded]:
    """What the nodes of a policy carry from step to step: ``{key: Spec}``, ``[num_envs, *state_shape]``.

    Raises :class:`KeyMissingError` where the policy reads a state and shows no next value of it.
    """
    nodes = [m for m in policy.modules() if isinstance(m, StateModule)] if isinstance(policy, nn.Module) else []
    specs: dict[Key, Unbounded] = {}
    for node in (m for m in nodes if m.state_key in _plain(getattr(policy, "in_keys", ()))):
        following = next_key(node.state_key)
        if following not in _plain(policy.out_keys):
            raise KeyMissingError(
                f"{type(node).__name__} reads {node.state_key!r}, and the policy does not write {following!r}, its "
                "value for the next step: add it to out_keys, or the node that writes it (PreviousAction.feedback())"
            )
        row = node.initial_state(1)
        specs[node.state_key] = Unbounded((num_envs, *node.state_shape), dtype=row.dtype)
    return specs
