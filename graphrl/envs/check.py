"""A check that an environment does what its specs say."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from graphrl.envs.base import EnvBase
from graphrl.errors import EnvError, SpecError

__all__ = ["check_env_specs"]


def check_env_specs(env: EnvBase, steps: int = 5) -> None:
    """Take ``steps`` real random steps and compare every row with the specs and with ``fake_tensordict``.

    Checked: keys, shapes and dtypes; observations, rewards and flags in their specs; ``done = terminated |
    truncated``; root flags false after a reset; episodes that end go on from a reset. The environment is reset.
    Raises :class:`EnvError` that names the row and the key.
    """
    fake = env.fake_tensordict()
    root = env.reset()
    _check_part(env, root, "reset", step=0)
    for t in range(steps):
        row, root = env.step_and_maybe_reset(env.rand_action(root))
        _check_structure(fake, row, t)
        _check_part(env, row, "root", t)
        _check_part(env, row["next"], "next", t)
        following = row["next"]
        if not torch.equal(following["done"], following["terminated"] | following["truncated"]):
            raise EnvError(f"step {t}: 'done' is not terminated | truncated")
        if bool(root["done"].any()):
            raise EnvError(f"step {t}: the root after an ended episode still says done")


def _check_part(env: EnvBase, part: TensorDictBase, where: str, step: int) -> None:
    try:
        env.observation_spec.assert_is_in(part, where)
        env.done_spec.assert_is_in(part, where)
        if where == "next":
            env.reward_spec.assert_is_in(part["reward"], "reward")
    except SpecError as error:
        raise EnvError(f"step {step}: {error}") from error


def _check_structure(fake: TensorDictBase, row: TensorDictBase, step: int) -> None:
    expected, found = set(fake.keys(True, True)), set(row.keys(True, True))
    if expected != found:
        missing, further = sorted(map(str, expected - found)), sorted(map(str, found - expected))
        raise EnvError(f"step {step}: keys missing from real data {missing}, keys without a spec {further}")
    for key in expected:
        want, have = fake[key], row[key]
        if want.shape != have.shape or want.dtype != have.dtype:
            raise EnvError(
                f"step {step}: {key!r} is {have.dtype} of shape {list(have.shape)},"
                f" its spec says {want.dtype} of shape {list(want.shape)}"
            )
