"""How a critic is asked for root and next values."""

import pytest
import torch
from rollouts import chained, identity, rollout, steps
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import graphrl as grl
from graphrl.errors import GraphError, SpecError
from graphrl.losses import GAE, TD0Estimator, TDLambdaEstimator
from graphrl.models import GRUModule, ValueCritic

NAN = float("nan")


def linear(normed=False):
    torch.manual_seed(0)
    head = nn.Linear(1, 1, dtype=torch.float64)
    net = nn.Sequential(_Rows(nn.BatchNorm1d(1, dtype=torch.float64)), head) if normed else head
    return TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])


class _Rows(nn.Module):
    """A batch normalisation over all leading dims."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.flatten(0, -2)).view(x.shape)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("normed", [False, True], ids=["linear", "batch norm"])
@pytest.mark.parametrize("broken", [NAN, float("inf")])
def test_a_missing_last_observation_leaks_into_no_other_step_and_no_gradient(broken, normed, shifted):
    critic = linear(normed)
    gamma = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
    td = steps(
        [0.5, 0.5, 2.0, 1.0], [0.5, broken, 1.0, broken], [1, 1, 1, 1], done=[0, 1, 0, 1], terminated=[0, 1, 0, 1]
    )
    out = TDLambdaEstimator(critic, gamma=gamma, lmbda=0.9, differentiable=True, shifted=shifted)(td.clone())
    (out["advantage"].sum() + out["next", "state_value"].sum()).backward()
    for x in (out["advantage"], out["value_target"], out["next", "state_value"], gamma.grad):
        assert x.isfinite().all()
    assert all(p.grad.isfinite().all() for p in critic.parameters()) and gamma.grad != 0
    assert all(buffer.isfinite().all() for buffer in critic.buffers())


def test_a_missing_last_observation_leaks_into_no_gradient_of_a_program():
    critic = linear()
    td = steps([0.5, 0.5], [0.5, NAN], [1, 1], done=[0, 1], terminated=[0, 1])
    fast = grl.compile(GAE(critic, gamma=0.9, lmbda=0.9, differentiable=True), backend="eager", strict=True)
    advantage = fast(td)["advantage"]
    advantage.sum().backward()
    assert advantage.isfinite().all() and all(p.grad.isfinite().all() for p in critic.parameters())


def test_a_missing_observation_at_a_time_limit_is_not_hidden():
    td = steps([0.5, 0.5], [0.5, NAN], [1, 1], done=[0, 1])
    assert not TD0Estimator(identity())(td)["advantage"][1].isfinite().any()


def test_the_value_of_a_finite_terminal_state_is_its_own():
    td = steps([1, 2], [2, 7], [0, 0], done=[0, 1], terminated=[0, 1])
    assert GAE(identity())(td)["next", "state_value"].flatten().tolist() == [2, 7]


def test_batch_statistics_are_those_of_the_roots_first_then_of_the_next_states():
    norm = nn.BatchNorm1d(3, momentum=0.5)
    critic = grl.KeyedGraph((nn.Sequential(_Rows(norm), nn.Linear(3, 1)), ["observation"], ["state_value"]))
    td = rollout()
    td["observation"].fill_(2.0), td["next", "observation"].fill_(4.0)
    GAE(critic)(td)
    assert norm.running_mean.tolist() == [0.5 * 1.0 + 2.0] * 3


def test_shifted_calls_the_critic_once():
    critic = identity()
    out = GAE(critic, gamma=1.0, lmbda=0.0, shifted=True)(steps([1, 2, 3], [2, 3, 4], [0, 0, 0]))
    assert critic.module.calls == 1 and out["advantage"].flatten().tolist() == [1, 1, 1]


def test_shifted_refuses_a_truncation_inside_the_batch_in_eager_and_compiled():
    """Reading V(next) off the following root would give 8 at step 1, the value of the state after the reset."""
    td = steps([1, 2, 10, 11], [2, 3, 11, 12], [0, 0, 0, 0], done=[0, 1, 0, 0])
    chain = steps([1, 2, 3, 11], [2, 3, 11, 12], [0, 0, 0, 0])
    estimator = GAE(identity(), gamma=1.0, lmbda=0.0, shifted=True)
    fast = grl.compile(estimator, backend="eager", strict=True)
    for call in (estimator, fast, fast):
        assert call(chain.clone())["advantage"].flatten().tolist() == [1, 1, 8, 1]
        with pytest.raises(SpecError, match="shifted=True reads V\\(next\\) off the following root"):
            call(td.clone())
    assert GAE(identity(), gamma=1.0, lmbda=0.0)(td)["advantage"].flatten().tolist() == [1, 1, 1, 1]


def test_shifted_takes_a_truncation_that_was_not_followed_by_a_reset():
    td = steps([1, 2, 3], [2, 3, 4], [0, 0, 0], done=[0, 1, 0])
    assert GAE(identity(), gamma=1.0, lmbda=1.0, shifted=True)(td)["advantage"].flatten().tolist() == [2, 1, 1]


@pytest.mark.parametrize("time_dim", [0, 1, None])
def test_shifted_follows_the_time_dim(time_dim):
    critic, td = ValueCritic(3, num_cells=[8]), chained()
    wanted = GAE(critic)(td.clone())["advantage"]
    given = td.transpose(0, 1) if time_dim == 0 else td
    out = GAE(critic, time_dim=time_dim, shifted=True)(given.clone())["advantage"]
    torch.testing.assert_close(out.transpose(0, 1) if time_dim == 0 else out, wanted)


@pytest.mark.parametrize("size", [[0, 4], [3, 0], [3, 1]])
@pytest.mark.parametrize("shifted", [False, True])
def test_no_rows_no_steps_and_one_step(size, shifted):
    out = GAE(ValueCritic(3), average_gae=True, shifted=shifted)(rollout(*size))
    assert out["advantage"].shape == (*size, 1)


def test_what_the_critic_reads_may_be_nested_or_whole_numbers():
    critic = TensorDictModule(
        lambda agents, count: agents.get("x") + count, in_keys=["robot", "count"], out_keys=["state_value"]
    )
    td = rollout()
    for place, shift in ((td, 0.0), (td["next"], 1.0)):
        place["robot"] = TensorDict(x=torch.randn(3, 8, 1) + shift, batch_size=[3, 8])
        place["count"] = torch.randint(5, (3, 8, 1))
    out = GAE(critic)(td)
    assert torch.equal(out["next", "state_value"], td["next", "robot", "x"] + td["next", "count"])


def test_a_root_without_a_next_state_of_its_shape_is_refused():
    td = rollout()
    td["next", "observation"] = td["next", "observation"][..., :2]
    with pytest.raises(SpecError, match=r"'observation' is \[3, 8, 3\], but .*\[3, 8, 2\]"):
        GAE(ValueCritic(3))(td)


def test_a_recurrent_critic_that_steps_cannot_be_shifted():
    critic = grl.KeyedGraph(GRUModule(3, 4), (nn.Linear(4, 1), ["features"], ["state_value"]))
    with pytest.raises(GraphError, match="over_time"):
        GAE(critic, shifted=True)
