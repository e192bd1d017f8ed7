"""What the compiler makes of losses: one kernel for the advantage, one computation of what is shared."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl import KeyedGraph
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace_joint
from graphrl.losses import GAE, LossGraph, PPOLoss
from graphrl.models import Actor, GaussianActor, GaussianHead, IndependentNormal, Trunk, ValueCritic


def rollout(actor, rows=2, steps=6):
    dtype = next(actor.parameters()).dtype
    td = TensorDict(observation=torch.randn(rows, steps, 3, dtype=dtype), batch_size=[rows, steps])
    with torch.no_grad():
        td = actor(td).select("observation", "action", "action_log_prob")
    flags = {name: torch.rand(rows, steps, 1) < 0.2 for name in ("done", "terminated")}
    flags["done"] |= flags["terminated"]
    following, reward = torch.randn(rows, steps, 3, dtype=dtype), torch.randn(rows, steps, 1, dtype=dtype)
    td["next"] = TensorDict(observation=following, reward=reward, **flags, batch_size=[rows, steps])
    return td


def targets(program, *names):
    found = [str(n.target).removeprefix("aten.") for n in program.graph_module.graph.nodes]
    return sum(any(name in target for name in names) for target in found)


def parts(trunk_shared=False):
    """An actor and a critic of three and three products, or of a shared trunk and one head each."""
    torch.manual_seed(0)
    if not trunk_shared:
        return GaussianActor(3, 2, num_cells=[8, 8]), ValueCritic(3, num_cells=[8, 8])
    shared = (nn.Sequential(nn.Linear(3, 8), nn.Tanh()), ["observation"], ["hidden"])
    head = Trunk(mlp=nn.Linear(8, 2), head=GaussianHead(2))
    actor = Actor(shared, (head, ["hidden"], ["loc", "scale"]), distribution_class=IndependentNormal)
    return actor, KeyedGraph(shared, (nn.Linear(8, 1), ["hidden"], ["state_value"]))


SPELLINGS = {
    "LossGraph": lambda estimator, loss: LossGraph({"estimator": estimator, "loss": loss}),
    "KeyedGraph": KeyedGraph,
    "LossGraph of nodes": lambda estimator, loss: LossGraph({"estimator": estimator, **loss.nodes}),
}


@pytest.mark.parametrize(
    ("spelling", "shared", "products"),
    [("LossGraph", True, 5), ("KeyedGraph", False, 9), ("LossGraph of nodes", True, 5)],
)
def test_roots_are_valued_once_for_estimator_and_loss(spelling, shared, products):
    """Separate: three products each for policy, root values, next values; shared: two trunks and three heads.

    With gradients: the estimator's values carry none, the loss's do, and they are one computation all the same.
    """
    actor, critic = parts(shared)
    graph = SPELLINGS[spelling](GAE(critic, average_gae=True), PPOLoss(actor, critic))
    joint = trace_joint(graph, rollout(actor), [False] * len(graph.in_keys)).program
    program = run_passes(joint)
    assert "loss_objective" in graph.out_keys and "advantage" not in graph.out_keys
    assert targets(program, "graphrl.gae") == 1
    assert targets(program, "addmm") == products < targets(joint, "addmm")


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_graph_with_a_loss_returns_the_loss_and_edits_nothing(spelling):
    actor, critic = parts()
    estimator, loss, td = GAE(critic, average_gae=True), PPOLoss(actor, critic), rollout(actor)
    graph, before = spelling(estimator, loss), td.clone()
    fast = grl.compile(graph, backend="eager", strict=True)
    wanted = loss(estimator(td.clone()))
    names = sorted(map(str, wanted.keys()))
    results = []
    for run in (lambda td: wanted, graph, fast):
        graph.zero_grad()
        out = run(td)
        assert out is not td and out.batch_size == torch.Size([]) and names <= sorted(map(str, out.keys()))
        (out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]).backward()
        results.append(
            ({key: out[key].detach() for key in wanted.keys()}, [p.grad.clone() for p in graph.parameters()])
        )
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    assert len(fast.entries()) == 1 and fast.retraces == []
    assert set(td.keys(True, True)) == set(before.keys(True, True)) and (td == before).all()


def test_what_is_computed_from_a_loss_is_returned_with_it():
    actor, critic = parts()
    td = rollout(actor)
    graph = KeyedGraph(
        GAE(critic), PPOLoss(actor, critic), (torch.add, ["loss_objective", "loss_critic"], ["loss_total"])
    )
    out = graph(td)
    assert "loss_total" in graph.out_keys and out["loss_total"] == out["loss_objective"] + out["loss_critic"]
    chosen = KeyedGraph(*graph, out_keys=["loss_total", "advantage"])(td)
    assert set(chosen.keys()) == {"loss_total", "advantage"} and chosen["advantage"].shape == (2, 6, 1)
    assert "advantage" not in td.keys()
    nested = KeyedGraph(graph, (torch.neg, ["loss_total"], ["gain"]))
    assert nested(td)["gain"] == -out["loss_total"]


def test_a_graph_with_a_loss_is_cut_and_renamed():
    actor, critic = parts()
    td = rollout(actor)
    graph = KeyedGraph(GAE(critic), PPOLoss(actor, critic))
    assert torch.equal(graph.select(out_keys=["loss_critic"])(td)["loss_critic"], graph(td)["loss_critic"])
    assert graph.select(out_keys=["advantage"])(td.clone())["advantage"].shape == (2, 6, 1)
    renamed = graph.rename(loss_critic="value_loss")
    assert torch.equal(renamed(td)["value_loss"], graph(td)["loss_critic"]) and "value_loss" not in td.keys()
    fast = grl.compile(renamed, backend="eager", strict=True)
    assert torch.allclose(fast(td)["value_loss"], renamed(td)["value_loss"])


@pytest.mark.parametrize("spelling", list(SPELLINGS.values())[:2], ids=list(SPELLINGS)[:2])
def test_an_update_on_a_graph_of_estimator_and_loss_equals_eager(spelling):
    def make():
        actor, critic = parts(True)
        graph = spelling(GAE(critic), PPOLoss(actor, critic)).double()
        optimizer = torch.optim.Adam(graph.parameters(), 1e-2)

        def step(td):
            out = graph(td)
            optimizer.zero_grad()
            (out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]).backward()
            optimizer.step()
            return {"loss_critic": out["loss_critic"], "loss_objective": out["loss_objective"]}

        return graph, step

    (graph, step), (other, eager) = make(), make()
    td = rollout(parts()[0].double())
    update = grl.compile_update(step, backend="eager")
    for _ in range(5):
        metrics = update(td)
        torch.testing.assert_close(metrics, {key: x.detach() for key, x in eager(td).items()})
    assert len(update.entries()) == 1 and update.retraces == []
    for p, q in zip(graph.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


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
