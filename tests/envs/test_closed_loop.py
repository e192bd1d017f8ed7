"""A bundle in its environment, beside the policy it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphrl.compiler.bundle import Bundle, Contract, export, load
from graphrl.compiler.bundle.runners import RUNNERS
from graphrl.compiler.bundle.runtime import Policy
from graphrl.envs import GymEnv, closed_loop, contract_from_env
from graphrl.errors import BundleError, EnvError
from graphrl.models import CategoricalActor, GaussianActor, RunningNorm


def write(path: Path, name: str = "Pendulum-v1", episodes: int = 2, **options: Any) -> Bundle:
    torch.manual_seed(0)
    with GymEnv(name, 4, seed=0) as env:
        norm, example = RunningNorm(env.observation_spec["observation"].shape[-1]), env.reset()
        norm.update(example["observation"])
        size = example["observation"].shape[-1]
        actor: Any = CategoricalActor if name == "CartPole-v1" else GaussianActor
        policy = actor(size, 2 if name == "CartPole-v1" else 1, num_cells=(8,), normalizer=norm)
        contract = contract_from_env(env, policy)
    drive = closed_loop(name, episodes, seed=5)
    return export(
        policy, path / "b", example, contract=contract, targets=("numpy",), closed_loop=drive, **options
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1"])
def test_returns_stand_beside_the_policy_s_own(name: str, tmp_path: Path) -> None:
    bundle = write(tmp_path, name)
    loop = bundle.manifest["reports"]["parity"]["closed_loop"]
    assert json.loads((bundle.path / "reports/parity.json").read_text())["closed_loop"] == loop
    assert (loop["runtime"], loop["episodes"]) == ("numpy", 2) and loop["judged_steps"] == loop["steps"]
    assert 0 <= loop["max_relative_error"] <= 1e-5
    assert loop["return"]["numpy"] == pytest.approx(loop["return"]["eager"], rel=1e-4)
    assert "In its environment: return numpy" in (bundle.path / "reports/contract.md").read_text()
    policy = Policy.load(bundle.path)  # the bundle again, by hand

    class Player:
        def reset(self) -> None:
            policy.reset()

        def step(self, observation: Any) -> Any:
            return policy.step({"observation": np.asarray(observation["observation"], np.float64)})

    returns = closed_loop(name, 2, seed=5)(Player())
    assert loop["return"]["numpy"] == {"mean": float(np.mean(returns)), "std": float(np.std(returns))}


class Drifts(Policy):
    """Right on every golden vector, whose episodes are short: wrong from the 50th step of an episode on."""

    steps = 0

    def reset(self, state: Any = None) -> None:
        self.steps = 0
        super().reset(state)

    def step(self, observation: Any) -> Any:
        self.steps += 1
        found = super().step(observation)
        return {k: v + (0.01 if self.steps > 50 else 0.0) for k, v in found.items()}


def broken(folder: Path, manifest: Any) -> tuple[Callable[..., Any], Any]:
    policy = Drifts.load(folder)
    return policy.run_row, policy


def test_a_runtime_that_is_wrong_only_in_the_loop_stops_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUNNERS, "numpy", broken)
    with pytest.raises(
        BundleError, match="check 'parity': in closed loop numpy differs from the float64 reference.*step"
    ):
        write(tmp_path)
    assert not (tmp_path / "b").exists()


def test_what_the_environment_does_not_give_is_named(tmp_path: Path) -> None:
    from graphrl.graph import KeyedGraph

    graph = KeyedGraph((lambda x: x[..., :1], ["joints"], ["action"]))
    with pytest.raises(
        BundleError, match=r"reads \['joints'\], which the environment does not give: \['observation'\]"
    ):
        export(graph, tmp_path / "b", {"joints": torch.zeros(1, 3)}, contract=Contract(), targets=("numpy",),
               closed_loop=closed_loop("Pendulum-v1", 1))  # fmt: skip
    with pytest.raises(EnvError, match="0 episodes"):
        closed_loop("Pendulum-v1", 0)


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1", episodes=1), write(tmp_path / "2", episodes=1)
    assert load(first.path).manifest == second.manifest
