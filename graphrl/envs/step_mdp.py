"""The step from one row to the next: what lies under ``next`` becomes the root."""

from __future__ import annotations

from tensordict import TensorDictBase

from graphrl.errors import KeyMissingError

__all__ = ["step_mdp"]


def step_mdp(
    tensordict: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
) -> TensorDictBase:
    """The root of the next step: the entries under ``next``, moved up.

    tensordict: any batch size, with a ``next`` entry; it is not changed, tensors are shared.
    keep_other: keep root entries that ``next`` does not replace (a hidden state, a goal). exclude_reward,
    exclude_done, exclude_action: leave those out (``done`` stands for done, terminated and truncated).
    The options and their defaults are TorchRL's. Raises :class:`KeyMissingError` without ``next``.
    """
    following = tensordict.get("next", None)
    if following is None:
        raise KeyMissingError(
            f"step_mdp reads 'next', but the batch has {list(tensordict.keys())}: call env.step first"
        )
    out = tensordict.exclude("next") if keep_other else tensordict.empty()
    out = out.update(following.copy())
    dropped = ["reward"] if exclude_reward else []
    dropped += ["done", "terminated", "truncated"] if exclude_done else []
    dropped += ["action"] if exclude_action else []
    return out.exclude(*dropped)
