import re
import warnings
from pathlib import Path

import pytest
import torch
from rollouts import identity, rollout, steps, with_policy
from tensordict.nn import TensorDictModule
from torch import nn

from graphrl.errors import GraphError, KeyMissingError, SpecError
from graphrl.graph import KeyedGraph
from graphrl.losses import GAE, VTrace
from graphrl.models import GaussianActor, ValueCritic


def gae_reference(reward, value, next_value, done, terminated, gamma, lmbda):
    """The recursion, one step at a time, in float64: [N, T] each."""
    advantage = torch.zeros_like(reward, dtype=torch.float64)
    for n in range(reward.shape[0]):
        carry = 0.0
        for t in reversed(range(reward.shape[1])):
            bootstrap = 0.0 if terminated[n, t] else gamma * next_value[n, t].item()
            delta = reward[n, t].item() + bootstrap - value[n, t].item()
            carry = delta + (0.0 if done[n, t] else gamma * lmbda * carry)
            advantage[n, t] = carry
    return advantage


def test_next_state_is_never_the_shifted_root():
    td = steps([1, 2, 10, 11], [2, 3, 11, 12], [0, 0, 0, 0], done=[0, 1, 0, 0])
    assert GAE(identity(), gamma=1.0, lmbda=0.0)(td)["advantage"].flatten().tolist() == [1, 1, 1, 1]


def test_time_limit_cuts_the_trace_and_still_bootstraps():
    td = steps([0.5, 0.5], [2, 3], [1, 1], done=[1, 0])
    assert GAE(identity(), gamma=0.9, lmbda=0.9)(td)["advantage"].flatten().tolist() == pytest.approx([2.3, 3.2])


def test_a_value_before_the_last_step_keeps_its_bootstrap():
    td = steps([0.0, 0.95], [0.95, 7.0], [0, 1], done=[0, 1], terminated=[0, 1])
    target = GAE(identity(), gamma=0.9, lmbda=0.0)(td)["value_target"].flatten().tolist()
    assert target == pytest.approx([0.855, 1.0])


def test_a_time_limit_bootstraps_from_the_state_it_was_cut_at_not_from_the_root():
    td = steps([5], [0], [1], done=[1])
    assert GAE(identity(), gamma=0.9)(td)["advantage"].item() == pytest.approx(-4.0)


def test_the_value_at_the_end_of_the_window_counts_once():
    """V is 10 at the last next state and 0 elsewhere."""
    td = steps([0, 0], [0, 10], [1, 1])
    assert GAE(identity(), gamma=0.5, lmbda=1.0)(td)["advantage"].flatten().tolist() == [4.0, 6.0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_a_terminal_last_step_is_worth_its_reward(gamma):
    td = steps([2, 2, 2], [2, 2, 2], [1, 1, 1], done=[0, 0, 1], terminated=[0, 0, 1])
    assert GAE(identity(), gamma=gamma)(td)["advantage"][-1].item() == -1.0


def test_v_trace_does_not_look_past_a_truncation():
    """The values after step 1 are those of the next episode."""
    td = steps([1, 1, 100, 100], [1, 1, 100, 100], [0, 0, 0, 0], done=[0, 1, 0, 0])
    actor = GaussianActor(1, 1, dtype=torch.float64)
    with torch.no_grad():
        actor(td)
    out = VTrace(identity(), actor, gamma=1.0)(td)
    assert out["advantage"].flatten().tolist() == pytest.approx([0, 0, 0, 0])


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_missing_last_observation_leaks_nowhere(differentiable):
    gamma = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
    critic = TensorDictModule(nn.Linear(1, 1, bias=False).double(), in_keys=["observation"], out_keys=["state_value"])
    critic.module.weight.data.fill_(1.0)
    td = steps([0.5, 0.5], [0.5, float("nan")], [1, 1], done=[0, 1], terminated=[0, 1])
    GAE(critic, gamma=gamma, lmbda=0.9, differentiable=differentiable)(td)
    assert td["advantage"].flatten().tolist() == pytest.approx([1.355, 0.5])
    assert td["advantage"].requires_grad == differentiable
    if differentiable:
        td["advantage"].sum().backward()
        assert critic.module.weight.grad.isfinite().all() and gamma.grad.isfinite() and gamma.grad != 0


def test_equals_the_recursion_in_float64():
    critic, td = ValueCritic(3), rollout()
    GAE(critic, gamma=0.97, lmbda=0.9)(td)
    torch.testing.assert_close(td["state_value"], critic(td["observation"]))
    torch.testing.assert_close(td["next", "state_value"], critic(td["next", "observation"]))
    signals = [td[k].squeeze(-1) for k in (("next", "reward"), "state_value", ("next", "state_value"))]
    flags = [td["next", k].squeeze(-1) for k in ("done", "terminated")]
    expected = gae_reference(*signals, *flags, 0.97, 0.9).unsqueeze(-1)
    torch.testing.assert_close(td["advantage"].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(td["value_target"], td["advantage"] + td["state_value"])


def test_lambda_one_is_return_minus_value_and_lambda_zero_the_td_error():
    td = rollout()
    td["next", "done"].zero_(), td["next", "terminated"].zero_()
    td["next", "observation"][:, :-1] = td["observation"][:, 1:]
    critic = ValueCritic(3)
    monte_carlo = GAE(critic, gamma=0.9, lmbda=1.0)(td.clone())
    total = monte_carlo["next", "state_value"][:, -1]
    for t in reversed(range(8)):
        total = td["next", "reward"][:, t] + 0.9 * total
    torch.testing.assert_close(monte_carlo["advantage"][:, 0], total - monte_carlo["state_value"][:, 0])
    error = GAE(critic, gamma=0.9, lmbda=0.0)(td.clone())
    expected = td["next", "reward"] + 0.9 * error["next", "state_value"] - error["state_value"]
    torch.testing.assert_close(error["advantage"], expected)


def test_the_critic_is_called_for_roots_and_for_next_states_and_gets_no_gradient():
    critic, td = identity(), steps([1, 2], [2, 3], [0, 0])
    GAE(critic)(td)
    assert critic.module.calls == 2
    td = GAE(ValueCritic(3))(rollout())
    assert not any(td[k].requires_grad for k in ("advantage", "value_target", "state_value"))


def test_time_may_be_another_dim():
    critic, td = ValueCritic(3), rollout()
    expected = GAE(critic)(td.clone())["advantage"]
    turned = GAE(critic, time_dim=0)(td.transpose(0, 1).contiguous())["advantage"]
    torch.testing.assert_close(turned.transpose(0, 1), expected)


def test_takes_plain_tensors_by_keyword():
    gae, td = GAE(ValueCritic(3)), rollout()
    following = {f"next_{k}": td["next", k] for k in ("observation", "reward", "done", "terminated")}
    plain = dict(zip(gae.out_keys, gae(observation=td["observation"], **following), strict=True))
    assert torch.equal(plain["advantage"], gae(td)["advantage"])


def test_average_gae_normalises():
    advantage = GAE(ValueCritic(3), average_gae=True)(rollout())["advantage"]
    assert advantage.mean().item() == pytest.approx(0, abs=1e-6) and advantage.std().item() == pytest.approx(
        1, rel=1e-4
    )


def test_state_dict_is_whole_from_the_start():
    gae = GAE(ValueCritic(3), gamma=0.5)
    before = set(gae.state_dict())
    gae(rollout())
    fresh = GAE(ValueCritic(3))
    fresh.load_state_dict(gae.state_dict(), strict=True)
    assert set(gae.state_dict()) == before and fresh.gamma.item() == 0.5


def test_keys_can_be_set_by_role():
    gae, td = GAE(ValueCritic(3), differentiable=True), rollout()
    expected = gae(td.clone())["advantage"]
    gae.set_keys(advantage="adv", reward=("agents", "reward"), terminated="dead")
    td["next", "agents", "reward"] = td["next"].pop("reward")
    td["next", "dead"] = td["next"].pop("terminated")
    assert ("next", "agents", "reward") in gae.in_keys and "adv" in gae.out_keys and "advantage" not in gae.out_keys
    assert torch.equal(gae(td)["adv"], expected)
    with pytest.raises(GraphError, match="Did you mean 'advantage'"):
        gae.set_keys(advantag="adv")
    with pytest.raises(GraphError, match="build the critic with value_key"):
        gae.set_keys(value="v")


def test_what_does_not_fit_is_refused():
    td = rollout()
    td["next", "reward"] = td["next", "reward"].squeeze(-1)
    with pytest.raises(SpecError, match=r"reward \[3, 8\], state_value \[3, 8, 1\]"):
        GAE(ValueCritic(3))(td)
    td = rollout()
    del td["next", "terminated"]
    with pytest.raises(KeyMissingError, match="terminated"):
        GAE(ValueCritic(3))(td)
    with pytest.raises(GraphError, match="gamma=1.5"):
        GAE(ValueCritic(3), gamma=1.5)
    with pytest.raises(GraphError, match="expected one of them to be called 'state_value'"):
        GAE(TensorDictModule(lambda x: (x, x), in_keys=["observation"], out_keys=["a", "b"]))


def test_the_page_s_examples_run():
    page = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["team"]["agents", "advantage"].shape == (4, 32, 3, 1)
    assert names["loss"]["loss_critic"].isfinite() and "advantage" in names["td"].keys()


def test_trace_equals_eager(trace):
    gae, td = GAE(ValueCritic(3)), rollout()
    keys = [*gae.in_keys]

    def run(*tensors):
        return gae(*tensors)

    inputs = [td[k] for k in keys]
    torch.testing.assert_close(trace(run, *inputs)(*inputs), run(*inputs))


@pytest.mark.peers
@pytest.mark.parametrize("average", [False, True])
def test_equals_torchrl(average):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimators = pytest.importorskip("torchrl.objectives.value")
        critic, td = ValueCritic(3), rollout(4, 20)
        theirs = estimators.GAE(gamma=0.97, lmbda=0.9, value_network=critic, average_gae=average)(td.clone())
    ours = GAE(critic, gamma=0.97, lmbda=0.9, average_gae=average)(td.clone())
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)


def test_two_roles_may_share_a_key_swap_and_part_again():
    td, critic, actor = with_policy(rollout(), GaussianActor(3, 2)), ValueCritic(3), GaussianActor(3, 2)
    for estimator in (GAE(critic), VTrace(critic, actor)):
        wanted = estimator(td.clone())["advantage"]
        estimator.set_keys(terminated="done")
        assert not torch.equal(estimator(td.clone())["advantage"], wanted)
        estimator.set_keys(terminated="terminated")
        assert torch.equal(estimator(td.clone())["advantage"], wanted)
        estimator.set_keys(terminated="done", done="terminated")
        swapped = td.clone()
        swapped["next", "done"], swapped["next", "terminated"] = td["next", "terminated"], td["next", "done"]
        assert torch.equal(estimator(swapped)["advantage"], wanted)


def test_a_key_set_after_a_graph_was_built_on_it_is_said_to_be():
    estimator = GAE(ValueCritic(3))
    graph = KeyedGraph(estimator)
    estimator.set_keys(reward="prize")
    td = rollout()
    td["next"].rename_key_("reward", "prize")
    with pytest.raises(KeyMissingError, match="before they are joined"):
        graph(td)
    assert KeyedGraph(estimator)(td)["advantage"].shape == (3, 8, 1)


def test_a_single_step_without_time_is_refused():
    for estimator in (GAE(identity()), GAE(identity(), skip_existing=True)):
        td = steps([1], [1], [1])[0]
        td["state_value"], td["next", "state_value"] = td["observation"], td["next", "observation"]
        with pytest.raises(SpecError, match="without a time dim"):
            estimator(td)
