"""Collectors: batches of steps from an environment and a policy, with exact frame counts.

A batch has size ``[num_envs, T]`` (time last) and TorchRL's layout; see ``graphrl.envs`` for the rows themselves.
"""

from graphrl.collectors.sync import SyncCollector

__all__ = ["SyncCollector"]
