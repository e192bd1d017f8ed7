from dataclasses import replace

import pytest

from graphrl.training import EnvConfig, PPOConfig


@pytest.fixture
def tiny(tmp_path):
    """A configuration whose batches take milliseconds; keyword arguments replace fields."""
    config = PPOConfig(
        env=EnvConfig("Pendulum-v1", num_envs=2),
        total_frames=128,
        frames_per_batch=64,
        minibatch=32,
        epochs=2,
        num_cells=(8,),
        policy_backend="eager",
        update_backend="eager",
        eval_episodes=0,
        tensorboard=False,
        curve=False,
        out=str(tmp_path / "run"),
    )
    return lambda **changes: replace(config, **changes)
