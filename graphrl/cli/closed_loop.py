"""Runs an exported policy's C in closed loop with its environment: gymnasium and numpy, no torch, no graphrl.

python -I closed_loop.py BUNDLE ENV_ID EPISODES SEED OUT.npz

Episode i is reset with SEED + i. The action is clipped to the action space. Writes observations, actions as the C gave
them, and the return of each episode. Fails if torch or graphrl was imported on the way.
"""

import runpy
import sys
from pathlib import Path

import gymnasium
import numpy as np


def load_runner(bundle: str):
    """The bundle's own C runner when it ships one, else the copy that stands in the package beside this file."""
    here = Path(__file__).resolve()
    candidates = [Path(bundle) / "c_policy.py"]
    candidates += [p / "compiler" / "bundle" / "c_policy.py" for p in (here.parents[1], here.parents[2])]
    path = next(p for p in candidates if p.is_file())
    return runpy.run_path(str(path))["CPolicy"]


def main(bundle: str, env_id: str, episodes: int, seed: int, out: str) -> None:
    """Run the episodes and write what was seen and done."""
    policy = load_runner(bundle)(bundle)
    env = gymnasium.make(env_id, disable_env_checker=True)
    assert isinstance(env.action_space, gymnasium.spaces.Box)
    low, high = env.action_space.low, env.action_space.high
    observations, actions, returns = [], [], []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        policy.reset()
        total, ended = 0.0, False
        while not ended:
            seen = np.asarray(observation, dtype=np.float32)
            action = np.array(policy(seen), dtype=np.float32).reshape(env.action_space.shape)
            observations.append(seen)
            actions.append(action)
            observation, reward, terminated, truncated, _ = env.step(np.clip(action, low, high))
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    env.close()
    for name in ("torch", "graphrl"):
        assert name not in sys.modules, f"{name} was imported"
    np.savez(out, observations=np.stack(observations), actions=np.stack(actions), returns=np.array(returns))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
