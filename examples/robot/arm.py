"""An arm of four named joints as a Gymnasium environment, ``arm:Arm-v0``: reach a pose given joint by joint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.spaces import Box, Dict

STEPS, DECIMATION = 100, 10


class ArmEnv(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """Observation: joint_position, joint_velocity, target, in rad and rad/s; action: each motor's share of its torque.

    reward = -|target - joint_position|^2 - 0.001 |action|^2, 50 control steps a second, 100 an episode.
    ``entry_names``: the joints, in the order of the model; of the action, the motors, in theirs.
    """

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("arm.xml")))
        self.data = mujoco.MjData(self.model)
        self.dt = DECIMATION * self.model.opt.timestep
        joints = [self.model.joint(i).name for i in range(self.model.njnt)]
        self.entry_names = {key: joints for key in ("joint_position", "joint_velocity", "target")}
        self.entry_names["action"] = [self.model.actuator(i).name for i in range(self.model.nu)]
        self.observation_space = Dict({key: Box(-np.inf, np.inf, (len(joints),), np.float32)
                                       for key in ("joint_position", "joint_velocity", "target")})  # fmt: skip
        self.action_space = Box(-1, 1, (self.model.nu,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Upright and at rest, with a new target."""
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        low, high = 0.4 * self.model.jnt_range.T
        self.target = self.np_random.uniform(low, high)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """One control step."""
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, DECIMATION)
        self.steps += 1
        miss = float(np.sum((self.target - self.data.qpos) ** 2))
        reward = -miss - 1e-3 * float(np.sum(np.square(action)))
        return self._observation(), reward, False, self.steps >= STEPS, {}

    def _observation(self) -> dict[str, np.ndarray]:
        values = {"joint_position": self.data.qpos, "joint_velocity": self.data.qvel, "target": self.target}
        return {key: value.astype(np.float32) for key, value in values.items()}


if "Arm-v0" not in gymnasium.registry:
    gymnasium.register("Arm-v0", entry_point=ArmEnv)
