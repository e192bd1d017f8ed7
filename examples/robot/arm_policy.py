"""Writes a bundle for the arm: a feedback law, so that nothing has to be trained.

python examples/robot/arm_policy.py arm_bundle
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import graphrl as grl
from graphrl.compiler.bundle import ActionContract, Bundle, Contract, Normalizer, ObservationTerm

JOINTS = ("elbow", "shoulder", "waist", "wrist")
"""The policy's order; the robot's joints and motors have two others."""


class Feedback(nn.Module):
    """action = clip(kp (target - position) - kd velocity, -1, 1): [B, 4], shares of the full torque."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kp", torch.tensor([4.0, 5.0, 3.0, 2.0]))
        self.register_buffer("kd", torch.tensor([0.25, 0.45, 0.2, 0.1]))

    def forward(self, position: Tensor, velocity: Tensor, target: Tensor) -> Tensor:
        return (self.kp * (target - position) - self.kd * velocity).clamp(-1, 1)


def arm_policy() -> grl.KeyedGraph:
    """The law as a keyed graph."""
    return grl.KeyedGraph((Feedback(), ["joint_position", "joint_velocity", "target"], ["action"]))


def arm_contract() -> Contract:
    """What arm and policy agree on: names above all."""
    units = {"joint_position": "rad", "joint_velocity": "rad/s", "target": "rad"}
    return Contract(
        rate_hz=50.0,
        decimation=10,
        observations=tuple(
            ObservationTerm(key=key, names=JOINTS, unit=unit, normalizer=Normalizer("none"))
            for key, unit in units.items()
        ),
        action=ActionContract(
            names=JOINTS, unit="share of the motor's full torque", low=(-1.0,) * 4, high=(1.0,) * 4, inside=("clip",)
        ),
    )


def write_bundle(path: str | Path) -> Bundle:
    """Export the law; a folder that is there stays."""
    generator = torch.Generator().manual_seed(0)
    keys = ("joint_position", "joint_velocity", "target")
    example = TensorDict({key: torch.randn(8, 4, generator=generator) for key in keys}, batch_size=[8])
    return grl.export(arm_policy(), path, example, targets=("c99", "numpy"), contract=arm_contract())


if __name__ == "__main__":
    print(write_bundle(sys.argv[1] if len(sys.argv) > 1 else "arm_bundle"))
