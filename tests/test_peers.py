"""Compiled graphs among TorchRL's parts."""

import copy
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential, set_interaction_type
from torch import nn
from torch.distributions import Distribution

import graphrl as grl
from graphrl import KeyedGraph

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
collectors = pytest.importorskip("torchrl.collectors", exc_type=ImportError)
modules = pytest.importorskip("torchrl.modules", exc_type=ImportError)
envs = pytest.importorskip("torchrl.envs", exc_type=ImportError)


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """A fixed seed, and argument checks off, as importing torchrl leaves them: its TanhNormal fails with them on."""
    torch.manual_seed(0)
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    yield
    Distribution.set_default_validate_args(checked)


def torchrl_actor(observations, actions, spec=None):
    network = nn.Sequential(
        nn.Linear(observations, 16), nn.Tanh(), nn.Linear(16, 2 * actions), modules.NormalParamExtractor()
    )
    return modules.ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=modules.TanhNormal,
        return_log_prob=True,
    )


@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_a_probabilistic_actor_compiles_and_equals_eager(kind):
    actor = torchrl_actor(3, 2)
    fast = grl.compile(actor, backend="eager", strict=True)
    td = TensorDict(observation=torch.randn(5, 3), batch_size=[5])
    with set_interaction_type(kind), torch.no_grad():
        torch.manual_seed(1)
        expected = actor(td.clone())
        torch.manual_seed(1)
        found = fast(td.clone())
    assert set(found.keys()) == set(expected.keys())
    for key in expected.keys():
        torch.testing.assert_close(found[key], expected[key])
    assert list(fast.state_dict()) == list(actor.state_dict())


def test_a_compiled_graph_sits_in_a_torchrl_sequence():
    graph = KeyedGraph((nn.Linear(3, 4), ["observation"], ["hidden"]), (torch.tanh, ["hidden"], ["hidden"]))
    fast = grl.compile(graph, backend="eager")
    value = modules.ValueOperator(nn.Linear(4, 1), in_keys=["hidden"])
    td = TensorDict(observation=torch.randn(5, 3), batch_size=[5])
    found = TensorDictSequential(fast, value)(td.clone())
    torch.testing.assert_close(found["state_value"], value(graph(td.clone()))["state_value"])
    found["state_value"].sum().backward()
    assert graph[0].module.weight.grad is not None


def test_torchrl_s_loss_as_an_update():
    objectives = pytest.importorskip("torchrl.objectives", exc_type=ImportError)
    n = 32
    td = TensorDict(
        {"observation": torch.randn(n, 3), "action": torch.rand(n, 2) - 0.5, "action_log_prob": torch.randn(n) - 2}
        | {"advantage": torch.randn(n, 1), "value_target": torch.randn(n, 1)},
        batch_size=[n],
    )

    def make():
        torch.manual_seed(0)
        critic = modules.ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        loss = objectives.ClipPPOLoss(torchrl_actor(3, 2), critic, entropy_bonus=False)
        optimizer = torch.optim.Adam(loss.parameters(), 1e-2)

        def step(batch):
            terms = loss(batch)
            optimizer.zero_grad()
            total = terms["loss_objective"] + terms["loss_critic"]
            total.backward()
            optimizer.step()
            return {"loss": total}

        return loss, step

    (loss, step), (other, eager) = make(), make()
    update = grl.compile_update(step, td, backend="eager")
    for _ in range(5):
        found, expected = update(td), eager(td)
    torch.testing.assert_close(found["loss"], expected["loss"].detach())
    for a, b in zip(loss.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_compiled_policy_collects_in_torchrl_and_sees_new_weights():
    env = envs.GymEnv("Pendulum-v1")
    actor = KeyedGraph((nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), ["observation"], ["action"]))
    fast = grl.compile(actor, backend="eager")
    collector_class = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
    collector = collector_class(env, fast, frames_per_batch=20, total_frames=40)
    try:
        batches = iter(collector)
        first = next(batches).clone()
        with torch.no_grad():
            torch.testing.assert_close(first["action"], actor(copy.copy(first.select("observation")))["action"])
            [p.zero_() for p in actor.parameters()]
        assert (next(batches)["action"] == 0).all()
    finally:
        collector.shutdown()
