"""The policies have moved to ``graphrl.bench.robot_policies``."""

from graphrl.bench.robot_policies import *  # noqa: F403
