"""The body: a Gymnasium environment as named sensors and named actuators, with what real sensors add."""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np


class Model:
    """Sensors and actuators by name, in the robot's own order.

    An environment with ``entry_names`` ({key: names}) has sensors ``key/name``; another has ``key[i]``. Actuators are
    named by ``entry_names["action"]``, else ``action_i``. Actions are clipped to their bounds, as in training.
    delay: every observation is that of so many steps ago. noise: standard deviation added to every sensor.
    Raises ``ValueError`` for a negative one, and for an environment without motors.
    """

    def __init__(self, env_id: str, seed: int = 0, delay: int = 0, noise: float = 0.0) -> None:
        self.env = gymnasium.make(env_id, disable_env_checker=True)
        space = self.env.observation_space
        if not isinstance(self.env.action_space, gymnasium.spaces.Box):
            raise ValueError(f"{env_id} has actions {self.env.action_space}; a robot here has motors: a Box")
        if delay < 0 or noise < 0:
            raise ValueError(f"sensor delay {delay} and noise {noise}: expected 0 or more")
        self._keys = list(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else None
        names = getattr(self.env.unwrapped, "entry_names", {})
        self.sensors: list[str] = []
        for key, box in space.spaces.items() if self._keys else [("observation", space)]:
            self.sensors += [f"{key}/{n}" for n in names[key]] if key in names else [
                f"{key}[{i}]" for i in range(int(np.prod(box.shape)))
            ]  # fmt: skip
        self._box = self.env.action_space
        self.actuators = list(names.get("action", [f"action_{i}" for i in range(self._box.shape[0])]))
        dt = getattr(self.env.unwrapped, "dt", None)
        self.rate_hz = None if dt is None else 1.0 / float(dt)
        self.returns = [0.0]
        """The return of each episode so far; the last entry is that of the one running, or about to start."""
        self.starts = True
        """Whether the observation begins an episode."""
        self._seed, self._noise = seed, noise
        self._rng = np.random.default_rng(seed)
        self._past: deque[np.ndarray] = deque(maxlen=delay + 1)

    def observe(self) -> np.ndarray:
        """What the sensors say now; begins the next episode where one has ended (episode i is reset with seed + i)."""
        if self.starts:
            self._now, _ = self.env.reset(seed=self._seed + len(self.returns) - 1)
            self._past.clear()
        parts = [self._now[key] for key in self._keys] if self._keys else [self._now]
        values = np.concatenate([np.asarray(part, np.float32).reshape(-1) for part in parts])
        self._past.append(values)
        seen = self._past[0]
        return seen if not self._noise else seen + self._rng.normal(0, self._noise, seen.shape).astype(np.float32)

    def act(self, action: np.ndarray) -> None:
        """Apply an action for one control step."""
        self.starts = False
        action = np.clip(action, self._box.low, self._box.high)
        self._now, reward, terminated, truncated, _ = self.env.step(action)
        self.returns[-1] += float(reward)
        if terminated or truncated:
            self.starts = True
            self.returns.append(0.0)

    @property
    def finished(self) -> list[float]:
        """The returns of the episodes that have ended."""
        return self.returns[:-1]
