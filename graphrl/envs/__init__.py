"""Environments: one contract (:class:`EnvBase`), Gymnasium behind it, and what works on any of them.

Data follow TorchRL's layout: root ``observation action done terminated truncated``, the outcome under ``next``.
An environment library is imported only when an environment is made.
"""

from graphrl.envs.base import EnvBase
from graphrl.envs.buffers import StepBuffers
from graphrl.envs.check import check_env_specs
from graphrl.envs.closed_loop import closed_loop
from graphrl.envs.contract import contract_from_env
from graphrl.envs.evaluate import EpisodeStats, evaluate
from graphrl.envs.gym import GymEnv
from graphrl.envs.step_mdp import step_mdp

__all__ = [
    "EnvBase",
    "EpisodeStats",
    "GymEnv",
    "StepBuffers",
    "check_env_specs",
    "closed_loop",
    "contract_from_env",
    "evaluate",
    "step_mdp",
]
