"""Kinds of steps: which compile, and which are refused with the reason."""

import copy
import functools

import pytest
import torch
from regression import Regression, batch, distance
from tensordict import TensorDict
from torch import nn, optim

import graphrl as grl
from graphrl.errors import KeyMissingError, ParityError, SpecError, TraceError

# ---- kinds of steps


def test_two_optimisers_and_a_soft_target():
    def make():
        torch.manual_seed(0)
        critic, actor = nn.Linear(4, 1).double(), nn.Linear(4, 4).double()
        target = copy.deepcopy(critic)
        critic_optimizer, actor_optimizer = optim.Adam(critic.parameters(), 0.01), optim.SGD(actor.parameters(), 0.01)

        def step(td):
            with torch.no_grad():
                goal = td["y"] + 0.9 * target(actor(td["x"]))
            loss_critic = (critic(td["x"]) - goal).square().mean()
            critic_optimizer.zero_grad(), loss_critic.backward(), critic_optimizer.step()
            loss_actor = -critic(actor(td["x"])).mean()
            actor_optimizer.zero_grad(), loss_actor.backward(), actor_optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, 0.05)
            return TensorDict(loss_critic=loss_critic.detach(), loss_actor=loss_actor.detach())

        return [*critic.parameters(), *actor.parameters(), *target.parameters()], step

    (found, step), (expected, eager) = make(), make()
    update = grl.compile_update(step, backend="eager")
    for i in range(50):
        metrics, wanted = update(batch(seed=i)), eager(batch(seed=i))
    assert isinstance(metrics, TensorDict)
    torch.testing.assert_close(metrics["loss_actor"], wanted["loss_actor"], rtol=1e-9, atol=1e-10)
    assert distance(found, expected) < 1e-10


def test_batch_norm_statistics_move_once_a_call():
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = optim.SGD(net.parameters(), 0.01)
    other = copy.deepcopy(net)
    other_optimizer = optim.SGD(other.parameters(), 0.01)

    def step(td, net=net, optimizer=optimizer):
        optimizer.zero_grad()
        loss = (net(td["x"]) - td["y"]).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, batch(), backend="eager")
    assert net[0].num_batches_tracked == 0 and (net[0].running_mean == 0).all()
    for i in range(3):
        update(batch(seed=i)), step(batch(seed=i), other, other_optimizer)
    assert net[0].num_batches_tracked == 3
    for name, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-10, atol=1e-12)


def test_a_step_may_write_the_batch_and_return_a_weight():
    owner = Regression()

    def step(td):
        td["x"].mul_(2)
        owner.step(td)
        return {"weight": owner.net[0].weight, "x": td["x"].sum()}

    td = batch()
    x = td["x"].clone()
    update = grl.compile_update(step, td, backend="eager")
    assert torch.equal(td["x"], x), "compiling leaves the batch alone"
    metrics = update(td)
    assert torch.equal(td["x"], 2 * x) and torch.equal(metrics["weight"], owner.net[0].weight)


def test_a_step_without_metrics_or_parameters():
    total = torch.zeros((), dtype=torch.float64)

    def count(td):
        total.add_(td["x"].sum())

    update = grl.compile_update(count, backend="eager")
    td = batch()
    assert update(td) is None and update(td) is None
    torch.testing.assert_close(total, 2 * td["x"].sum())


class Agent:
    def __init__(self):
        self.inner = Regression()
        self.inner.net.append(nn.Dropout(0.5))

    def learn(self, td, scale):
        return self.inner.step(TensorDict(x=scale * td["x"], y=td["y"], batch_size=td.batch_size))


@pytest.mark.parametrize("form", ["closure", "method", "partial", "callable object", "module"])
def test_a_step_may_have_any_form(form):
    agent = Agent()

    class Callable:
        def __init__(self):
            self.agent = agent

        def __call__(self, td):
            return self.agent.learn(td, 1.0)

    class Module(nn.Module):
        def forward(self, td):
            return agent.learn(td, 1.0)

    steps = {
        "closure": lambda td: agent.learn(td, 1.0),
        "method": functools.partial(Agent.learn, agent, scale=1.0),
        "partial": functools.partial(agent.learn, scale=1.0),
        "callable object": Callable(),
        "module": Module(),
    }
    update = grl.compile_update(steps[form], backend="eager")
    td = batch()
    update(td)
    agent.inner.net.eval()
    update(td)
    assert update.retraces == ["a hyperparameter, a mode or a weight was replaced"], "the network's mode is seen"
    kinds = {slot.kind for slot in update.entries()[0].program.state}
    assert kinds == {"parameter", "optimizer"}, "every tensor is known by its owner"


def test_a_compiled_policy_inside_a_step_is_traced_through():
    graph = grl.KeyedGraph((nn.Linear(4, 1).double(), ["x"], ["prediction"]))
    fast = grl.compile(graph, backend="eager")
    with torch.no_grad():
        fast(batch())
    optimizer = optim.SGD(graph.parameters(), 0.1)

    def step(td):
        optimizer.zero_grad()
        loss = (fast(td.copy())["prediction"] - td["y"]).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, backend="eager")
    losses = [update(batch(seed=0))["loss"].item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_checkpoint_and_resume_continue_bit_for_bit():
    first, second = Regression(), Regression()
    update = grl.compile_update(first.step, batch(), backend="eager")
    for i in range(5):
        update(batch(seed=i))
    second.net.load_state_dict(copy.deepcopy(first.net.state_dict()))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    resumed = grl.compile_update(second.step, batch(), backend="eager")
    for i in range(5, 10):
        update(batch(seed=i)), resumed(batch(seed=i))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))


def test_eager_steps_may_follow_compiled_ones():
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, batch(), backend="eager")
    for i in range(10):
        (update if i % 2 else compiled.step)(batch(seed=i))
        eager.step(batch(seed=i))
    assert distance(compiled.net.parameters(), eager.net.parameters()) < 1e-10


# ---- refusals


def test_a_branch_on_a_value_is_refused_at_its_line():
    owner = Regression()

    def step(td):
        metrics = owner.step(td)
        if metrics["loss"] > 1:  # the line an error must name
            metrics["high"] = metrics["loss"]
        return metrics

    line = step.__code__.co_firstlineno + 2
    before = [p.detach().clone() for p in owner.net.parameters()]
    with pytest.raises(TraceError, match=rf"test_update_steps\.py:{line}"):
        grl.compile_update(step, batch(), backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(before, owner.net.parameters(), strict=True))
    assert owner.optimizer.param_groups[0]["lr"] == 0.01


def test_a_step_that_depends_on_python_state_is_found_out():
    calls = []

    def step(td):
        calls.append(1)
        return {"count": td["x"].sum() * 0 + len(calls)}

    with pytest.raises(ParityError, match="'count'.*Does the step depend on Python state"):
        grl.compile_update(step, batch(), backend="eager")


@pytest.mark.parametrize(
    ("result", "message"),
    [({"loss": 1.0}, "metric 'loss' is a float"), (3.0, "the step returns a float"), ([1], "the step returns a list")],
)
def test_what_is_no_metric_is_refused(result, message):
    with pytest.raises(TraceError, match=message):
        grl.compile_update(lambda td: result, batch(), backend="eager")


def test_optimisers_that_cannot_be_traced_are_named():
    with pytest.raises(TraceError, match=r"SGD with momentum and dampening.*one eager step"):
        grl.compile_update(Regression(lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5)).step, batch())
    with pytest.raises(TraceError, match=r"Adam\(fused=True\)"):
        grl.compile_update(Regression(lambda p: optim.Adam(p, 0.1, fused=True)).step, batch())


def test_what_is_no_batch_is_refused():
    update = grl.compile_update(Regression().step, backend="eager")
    with pytest.raises(SpecError, match="the batch is a dict: expected a TensorDict"):
        update({"x": torch.zeros(2, 4)})
    with pytest.raises(KeyMissingError, match="the batch has no tensors"):
        update(TensorDict(batch_size=[2]))
