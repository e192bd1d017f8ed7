"""Teams: what all agents share beside what each has of its own."""

import pytest
import torch
from rollouts import rollout
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.errors import SpecError
from graphrl.losses import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from graphrl.losses.broadcast import expand_to_agents
from graphrl.models import GaussianActor, ValueCritic

B, T, A = 3, 8, 2
GROUP = ("agents", "state_value")
ALL = [GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator]


def team(reward=False, done=False):
    """A rollout of two agents; reward and flags of the team, unless they are the agents' own."""
    td = rollout(B, T, ends=0.3)
    for place in (td, td["next"]):
        place["agents"] = TensorDict(observation=torch.randn(B, T, A, 3), batch_size=[B, T, A])
    if reward:
        td["next", "agents", "reward"] = torch.randn(B, T, A, 1)
    if done:
        terminated = torch.rand(B, T, A, 1) < 0.3
        td["next", "agents", "terminated"] = terminated
        td["next", "agents", "done"] = terminated | (torch.rand(B, T, A, 1) < 0.3)
    return td


def own(td, agent, reward=False, done=False):
    """What one agent sees, as a single agent's batch."""
    one = td.select("next").clone()
    one["observation"] = td["agents", "observation"][..., agent, :]
    one["next", "observation"] = td["next", "agents", "observation"][..., agent, :]
    if reward:
        one["next", "reward"] = td["next", "agents", "reward"][..., agent, :]
    if done:
        for key in ("done", "terminated"):
            one["next", key] = td["next", "agents", key][..., agent, :]
    return one


def of_agents():
    critic = ValueCritic(3, num_cells=[8], in_keys=[("agents", "observation")], value_key=GROUP)
    alone = ValueCritic(3, num_cells=[8])
    alone.load_state_dict(critic.state_dict())
    return critic, alone


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("reward", "done"), [(False, False), (True, False), (True, True)])
def test_each_agent_gets_what_it_would_get_alone(kind, reward, done):
    (critic, alone), td = of_agents(), team(reward, done)
    estimator = kind(critic)
    names = {"reward": ("agents", "reward")} if reward else {}
    names |= {"done": ("agents", "done"), "terminated": ("agents", "terminated")} if done else {}
    estimator.set_keys(advantage=("agents", "advantage"), value_target=("agents", "value_target"), **names)
    out = estimator(td.clone())
    assert out["agents", "advantage"].shape == (B, T, A, 1)
    for agent in range(A):
        wanted = kind(alone)(own(td, agent, reward, done))
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(out["agents", key][..., agent, :], wanted[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_a_team_value_is_measured_against_each_agents_reward(kind):
    td, critic = team(reward=True), ValueCritic(3, num_cells=[8])
    estimator = kind(critic)
    estimator.set_keys(reward=("agents", "reward"))
    out = estimator(td.clone())
    assert out["advantage"].shape == (B, T, A, 1) and out["state_value"].shape == (B, T, 1)
    for agent in range(A):
        one = td.clone()
        one["next", "reward"] = td["next", "agents", "reward"][..., agent, :]
        torch.testing.assert_close(out["advantage"][..., agent, :], kind(critic)(one)["advantage"])


def test_policies_of_agents_have_ratios_of_their_own():
    (critic, alone), td = of_agents(), team()
    actor = GaussianActor(3, 2, in_keys=[("agents", "observation")], action_key=("agents", "action"))
    single = GaussianActor(3, 2)
    single.load_state_dict(actor.state_dict())
    with torch.no_grad():
        actor(td)
    td["agents", "action_log_prob"] += torch.randn(B, T, A)
    out = VTrace(critic, actor)(td.clone())
    for agent in range(A):
        one = own(td, agent)
        one["action"], one["action_log_prob"] = (
            td["agents", "action"][..., agent, :],
            td["agents", "action_log_prob"][..., agent],
        )
        wanted = VTrace(alone, single)(one)["advantage"]
        torch.testing.assert_close(out["advantage"][..., agent, :], wanted, rtol=1e-5, atol=1e-5)


def test_discounts_of_a_team_and_a_mask_hold_for_each_agent():
    (critic, alone), td = of_agents(), team()
    gamma, mask = torch.rand(T, 1), torch.arange(T).expand(B, T) < 6
    td["mask"] = mask
    out = GAE(critic, gamma=gamma, mask_key="mask")(td.clone())
    for agent in range(A):
        one = own(td, agent)
        one["mask"] = mask
        wanted = GAE(alone, gamma=gamma, mask_key="mask")(one)["advantage"]
        torch.testing.assert_close(out["advantage"][..., agent, :], wanted, rtol=1e-5, atol=1e-5)


def test_an_agent_that_ends_alone_hides_its_own_missing_observation():
    (critic, _), td = of_agents(), team(reward=True, done=True)
    td["next", "agents", "observation"][td["next", "agents", "terminated"].squeeze(-1)] = float("nan")
    estimator = GAE(critic, differentiable=True)
    estimator.set_keys(**{key: ("agents", key) for key in ("reward", "done", "terminated")})
    out = estimator(td)
    out["advantage"].sum().backward()
    assert out["advantage"].isfinite().all() and all(p.grad.isfinite().all() for p in critic.parameters())


def test_compiled_is_eager():
    (critic, _), td = of_agents(), team()
    fast = grl.compile(GAE(critic), backend="eager", strict=True)
    torch.testing.assert_close(fast(td.clone())["advantage"], GAE(critic)(td.clone())["advantage"].detach())


def test_an_axis_that_could_be_time_or_agents_is_refused_and_can_be_told():
    critic, td = ValueCritic(3, num_cells=[8]), rollout(B, T)
    wanted = GAE(critic)(td.clone())["advantage"]
    td.batch_size = [B]
    with pytest.raises(SpecError, match=r"reward is \[3, 8, 1\] in a batch \[3\]: its axis of 8 may be time or agents"):
        GAE(critic)(td)
    td.batch_size = [B, T]
    torch.testing.assert_close(GAE(critic)(td)["advantage"], wanted)


def test_agents_in_a_batch_that_stops_before_time_do_not_make_time_out_of_rows():
    (critic, _), td = of_agents(), team()
    td.batch_size = td["next"].batch_size = [B]
    with pytest.raises(SpecError, match=r"reward is \[3, 8, 1\] in a batch \[3\].*Give the batch its time dim"):
        GAE(critic)(td)


@pytest.mark.parametrize(
    "shapes",
    [
        {"reward": (3, 8, 1), "state_value": (3, 2, 1)},
        {"reward": (3, 8), "state_value": (3, 8, 1)},
        {"reward": (3, 8, 1), "state_value": (3, 8, 2, 4)},
        {"reward": (3, 1), "state_value": (3, 8, 2, 1)},
        {"reward": (8, 1), "state_value": (3, 8, 2, 1)},
    ],
)
def test_nothing_else_is_broadcast(shapes):
    with pytest.raises(SpecError) as error:
        expand_to_agents({name: torch.zeros(shape) for name, shape in shapes.items()})
    assert all(f"{name} {list(shape)}" in str(error.value) for name, shape in shapes.items())


def test_a_time_dim_the_batch_lacks_is_refused():
    with pytest.raises(SpecError, match=r"time_dim=2 is no dim of a batch \[3, 8\]"):
        TD1Estimator(ValueCritic(3), time_dim=2)(rollout())


def test_a_shared_head_for_all_agents_is_one_call():
    head = nn.Linear(3, 1)
    critic = grl.KeyedGraph((head, [("agents", "observation")], [GROUP]))
    out = GAE(critic)(team())
    assert out[GROUP].shape == (B, T, A, 1)
