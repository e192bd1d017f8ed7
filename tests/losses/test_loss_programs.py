"""What the compiler makes of losses: one kernel for the advantage, one computation of what is shared."""

import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.losses import GAE, LossGraph, PPOLoss
from graphrl.models import GaussianActor, GaussianHead, IndependentNormal, ValueCritic


def rollout(actor, rows=2, steps=6):
    td = TensorDict(observation=torch.randn(rows, steps, 3), batch_size=[rows, steps])
    with torch.no_grad():
        td = actor(td).select("observation", "action", "action_log_prob")
    flags = {name: torch.rand(rows, steps, 1) < 0.2 for name in ("done", "terminated")}
    flags["done"] |= flags["terminated"]
    td["next"] = TensorDict(observation=torch.randn(rows, steps, 3), reward=torch.randn(rows, steps, 1), **flags,
                            batch_size=[rows, steps])  # fmt: skip
    return td


def targets(program, *names):
    found = [str(n.target).removeprefix("aten.") for n in program.graph_module.graph.nodes]
    return sum(any(name in target for name in names) for target in found)


def test_advantage_and_loss_in_one_graph_hold_one_gae():
    actor, critic = GaussianActor(3, 2, num_cells=[8]), ValueCritic(3, num_cells=[8])
    graph = LossGraph({"estimator": GAE(critic), **PPOLoss(actor, critic).nodes})
    program = run_passes(grl.trace(graph, rollout(actor)))
    assert "loss_objective" in program.out_keys
    assert targets(program, "graphrl.gae") == 1


def test_a_trunk_is_computed_once_for_actor_critic_and_loss():
    """Four readers: the distribution's parameters, the value, the loss of each; the trunk's product stands once."""
    trunk = nn.Linear(3, 7)
    shared = (nn.Sequential(trunk, nn.Tanh()), ["observation"], ["hidden"])
    head, value = nn.Linear(7, 4), nn.Linear(7, 1)

    def policy_term(observation, action):
        loc, scale = head(trunk(observation).tanh()).chunk(2, -1)
        return -IndependentNormal(loc, scale.exp()).log_prob(action)

    def value_term(observation):
        return value(trunk(observation).tanh()).square()

    graph = KeyedGraph(
        shared,
        (nn.Sequential(head, GaussianHead(2, state_dependent_std=True)), ["hidden"], ["loc", "scale"]),
        (value, ["hidden"], ["state_value"]),
        (policy_term, ["observation", "action"], ["loss_objective"]),
        (value_term, ["observation"], ["loss_critic"]),
        out_keys=["loc", "state_value", "loss_objective", "loss_critic"],
    )
    td = TensorDict(observation=torch.randn(5, 3), action=torch.randn(5, 2), batch_size=[5])
    traced = grl.trace(graph, td)
    program = run_passes(traced)
    assert targets(traced, "tanh") == 3 and targets(traced, "addmm") == 7
    assert targets(program, "tanh") == 1
    assert targets(program, "addmm") == 3, "trunk, policy head and value head, each for two readers"
    for a, b in zip(program.run(*td.values()), traced.run(*td.values()), strict=True):
        assert torch.equal(a, b)
