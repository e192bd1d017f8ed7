"""A policy with a history and its previous action, collected, trained and deployed: one state throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphrl as grl
from graphrl.collectors import SyncCollector
from graphrl.compiler.bundle.replay import replay
from graphrl.envs import GymEnv
from graphrl.errors import KeyMissingError
from graphrl.losses import GAE, PPOLoss
from graphrl.models import MLP, GaussianActor, ObservationHistory, PreviousAction, ValueCritic

LIMIT, STEPS = 12, 30


def actor(history: ObservationHistory, head: Any = None) -> grl.KeyedGraph:
    previous = PreviousAction(1, initial=0.5, clip=(-2.0, 2.0))
    head = head or GaussianActor(10, 1, in_keys=["history", "previous_action"], num_cells=(16,))
    return grl.KeyedGraph(history, previous, head, previous.feedback())


def env() -> GymEnv:
    return GymEnv("Pendulum-v1", num_envs=2, seed=3, max_episode_steps=LIMIT)


@pytest.mark.parametrize("backend", [None, "native"])
def test_state_is_carried_starts_anew_with_the_episode_and_is_the_same_in_a_loss(backend: str | None) -> None:
    torch.manual_seed(0)
    history = ObservationHistory(3, 3)
    policy = actor(history)
    critic = grl.KeyedGraph(history, ValueCritic(9, in_keys="history", num_cells=(16,)))
    acting = policy if backend is None else grl.compile(policy, backend=backend)
    collector = SyncCollector(env(), acting, frames_per_batch=2 * STEPS, total_frames=4 * STEPS)
    for batch in collector:
        x, first = batch["observation"], batch["is_init"][..., 0]
        for row in range(2):
            for t in range(4, STEPS):
                begin = max((k for k in range(t + 1) if first[row, k]), default=None)
                frames = [x[row, k if begin is None else max(k, begin)] for k in range(t - 2, t + 1)]
                assert torch.equal(batch["history"][row, t], torch.cat(frames))
                wanted = torch.tensor([0.5]) if t == begin else batch["action"][row, t - 1].clamp(-2, 2)
                assert torch.equal(batch["previous_action"][row, t], wanted)
        assert first.sum() >= 4
        estimator = GAE(critic, gamma=0.9, lmbda=0.95)
        with torch.no_grad():
            estimator(batch)
        value = critic(batch.clone())["state_value"]
        inside = ~first[:, 1:]  # a next value is the value of the next row, where the episode goes on
        target = batch["next", "reward"] + 0.9 * torch.cat([value[:, 1:], value[:, -1:]], 1)
        one_step = GAE(critic, gamma=0.9, lmbda=0.0)(batch.clone())["advantage"]
        torch.testing.assert_close(one_step[:, :-1][inside], (target - value)[:, :-1][inside], rtol=1e-4, atol=1e-4)

    if backend is None:
        return
    fast = grl.compile(estimator, backend="eager", strict=True)(batch.clone())
    torch.testing.assert_close(fast["advantage"], batch["advantage"])
    loss = PPOLoss(policy, critic, entropy_bonus=False)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)

    def step(rows):
        terms = loss(rows)
        optimizer.zero_grad()
        (terms["loss_objective"] + terms["loss_critic"]).backward()
        optimizer.step()
        return {"kl": terms["kl_approx"], "critic": terms["loss_critic"]}

    rows = batch.reshape(-1)
    update = grl.compile_update(step, backend="eager")
    first_update, *_, last = [update(rows) for _ in range(10)]
    assert abs(float(first_update["kl"])) < 1e-6  # the log-probability of the rows is that of their collection
    assert float(last["critic"]) < float(first_update["critic"])


def test_a_memory_begins_where_the_policy_begins_to_act() -> None:
    policy = actor(ObservationHistory(3, 3))
    batches = SyncCollector(env(), policy, frames_per_batch=10, total_frames=20, init_random_frames=14)
    batch = torch.cat([*batches], 1)  # five rows at random, and two more
    assert batch["is_init"][:, :8].all() and not batch["is_init"][:, 8:].any()
    x = batch["observation"]
    assert torch.equal(batch["history"][:, 7], x[:, 7].repeat(1, 3))
    assert torch.equal(batch["history"][:, 9], x[:, 7:].flatten(1)) and (batch["previous_action"][:, 7] == 0.5).all()


def test_a_collected_log_replays_through_the_bundle(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = MLP(10, 1, num_cells=[16])
    head = (lambda *x: 3 * net(torch.cat(x, -1)), ["history", "previous_action"], ["action"])
    policy = actor(ObservationHistory(3, 3), head)
    batch = SyncCollector(env(), policy, frames_per_batch=2 * STEPS).rollout()
    bundle = grl.export(policy, tmp_path / "b", batch.select("observation"), targets=("c99", "numpy"))
    row = batch[0]
    log = {"observation": row["observation"], "action": row["action"], "reset": row["is_init"]}
    np.savez(tmp_path / "log.npz", **{key: value.detach().numpy() for key, value in log.items()})
    found = replay(bundle, tmp_path / "log.npz")
    assert (found.steps, found.divergence) == (STEPS, None) and int(log["reset"].sum()) == 3
    log["reset"] = torch.arange(STEPS) == 0
    np.savez(tmp_path / "log.npz", **{key: value.detach().numpy() for key, value in log.items()})
    parted = replay(bundle, tmp_path / "log.npz").divergence
    assert parted is not None and parted.step == LIMIT  # where the second episode began


def test_a_previous_action_that_nobody_keeps_is_an_error() -> None:
    graph = grl.KeyedGraph(
        PreviousAction(1), (lambda p, x: p + x[..., :1], ["previous_action", "observation"], ["action"])
    )
    with pytest.raises(KeyMissingError, match=r"'previous_action_state'.*PreviousAction.feedback\(\)"):
        SyncCollector(env(), graph, frames_per_batch=2)
