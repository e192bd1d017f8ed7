"""Plain options, epochs of minibatches, and what happens to an update that must not be made."""

import copy

import pytest
import torch
from regression import Regression, batch, distance
from tensordict import TensorDict
from torch import nn, optim
from torch.distributions import Normal

import graphrl as grl
from graphrl.errors import GraphRLError, KeyMissingError, NonFiniteError, SpecError, TraceError


class ActorCritic:
    """A delayed actor: TD3's schedule in small."""

    def __init__(self):
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(4, 1).double(), nn.Linear(5, 1).double()
        self.target = copy.deepcopy(self.critic)
        self.optimizers = [optim.Adam(m.parameters(), 0.01) for m in (self.actor, self.critic)]

    def step(self, batch, update_actor=True):
        actor_optimizer, critic_optimizer = self.optimizers
        x, y = batch["x"], batch["y"]
        loss = (self.critic(torch.cat([x, y], -1)) - self.target(torch.cat([x, y], -1)) - y).square().mean()
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        if update_actor:
            gain = self.critic(torch.cat([x, self.actor(x)], -1)).mean()
            actor_optimizer.zero_grad()
            (-gain).backward()
            actor_optimizer.step()
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.05)
        return {"loss": loss}

    def tensors(self):
        states = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        return [*self.actor.parameters(), *self.critic.parameters(), *self.target.parameters(), *states]


@pytest.mark.parametrize("first", [True, False], ids=["actor first", "critic first"])
def test_a_delayed_actor_is_two_programs_over_the_same_weights(first):
    compiled, eager = ActorCritic(), ActorCritic()
    update = grl.compile_update(compiled.step, backend="eager")
    for i in range(40):
        td = batch(seed=i)
        delayed = (i % 3 == 0) is first
        a, b = update(td, update_actor=delayed), eager.step(td, update_actor=delayed)
        assert distance([a["loss"]], [b["loss"]]) < 1e-10
    assert distance(compiled.tensors(), eager.tensors()) < 1e-10
    assert len(update.entries()) == 2 and len(update.retraces) == 1
    assert "update_actor=" in update.entries()[0].reason


@pytest.mark.parametrize("value", [torch.tensor(1), [1], object()])
def test_an_option_is_a_plain_value(value):
    update = grl.compile_update(ActorCritic().step, backend="eager")
    with pytest.raises(SpecError, match="update_actor is a .*: an option is a plain bool"):
        update(batch(), update_actor=value)


def test_programs_for_many_options_do_not_pile_up():
    owner = Regression()
    update = grl.compile_update(lambda td, n: owner.step(td), backend="eager", verify=False)
    for n in range(20):
        update(batch(), n=n)
    assert len(update.entries()) == 16


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_epoch_is_one_update_for_each_row_of_indices(backend):
    one, many, eager = Regression(clip=1.0), Regression(clip=1.0), Regression(clip=1.0)
    td = batch(32, seed=1)
    indices = torch.randperm(32).view(4, 8)
    whole, single = grl.compile_update(many.step, backend=backend), grl.compile_update(one.step, backend=backend)
    stacked = whole.epoch(td, indices)
    rows = [single(td, row) for row in indices]
    wanted = [eager.step(td[row]) for row in indices]
    assert stacked["loss"].shape == (4,) and whole.calls == 4 and len(whole.entries()) == 1
    assert torch.equal(stacked["norm"], torch.stack([m["norm"] for m in rows]))
    assert all(torch.equal(a, b) for a, b in zip(many.tensors(), one.tensors(), strict=True))
    assert distance([stacked["loss"]], [torch.stack([m["loss"] for m in wanted])]) < 1e-10
    assert distance(many.tensors(), eager.tensors()) < 1e-10


def test_an_epoch_stops_after_the_minibatch_that_passes_the_limit():
    owner, same = Regression(), Regression()
    td, indices = batch(32, seed=1), torch.arange(32).view(8, 4)
    update = grl.compile_update(owner.step, backend="eager")
    losses = grl.compile_update(same.step, backend="eager").epoch(td, indices)["loss"]
    limit = float(losses[:3].max())
    stop = next(i for i, loss in enumerate(losses) if loss > limit) if (losses > limit).any() else 7
    done = update.epoch(td, indices, stop_key="loss", stop_above=limit)["loss"]
    assert torch.equal(done, losses[: stop + 1]) and update.calls == stop + 1


def test_an_epoch_of_tensordict_metrics_and_of_none():
    owner = Regression()
    td, indices = batch(8), torch.arange(8).view(2, 4)
    kept = grl.compile_update(lambda b: TensorDict(owner.step(b)), backend="eager").epoch(td, indices)
    assert kept["loss"].shape == (2,)

    def silent(b):
        owner.step(b)

    assert grl.compile_update(silent, backend="eager").epoch(td, indices) is None


@pytest.mark.parametrize("indices", [torch.arange(4), torch.empty(0, 4, dtype=torch.int64), [[0, 1]]])
def test_what_is_no_table_of_indices_is_refused(indices):
    with pytest.raises(SpecError, match="expected a table of row numbers"):
        grl.compile_update(Regression().step, backend="eager").epoch(batch(), indices)


class RootLoss(Regression):
    """A finite loss whose gradient is not: the root of zero."""

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = (self.net(batch["x"]) * batch["y"]).square().sum().sqrt()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_gradient_that_is_nan_names_the_parameter_and_changes_nothing(backend):
    owner = RootLoss()
    update = grl.compile_update(owner.step, batch(), backend=backend, strict=True)
    update(batch())
    before = [t.clone() for t in owner.tensors()]
    bad = batch()
    bad["y"].zero_()
    with pytest.raises(NonFiniteError, match="update 2: the gradient of net.0.weight, .* is NaN"):
        update(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, owner.tensors(), strict=True))
    update(batch())
    assert not any(torch.equal(a, b) for a, b in zip(before[:4], owner.tensors()[:4], strict=True))


def test_skipping_counts_the_update_and_returns_its_metrics():
    owner, same = Regression(), Regression()
    update = grl.compile_update(owner.step, batch(), backend="eager", on_nonfinite="skip")
    bad = batch()
    bad["x"][0] = float("inf")
    assert not update(bad)["loss"].isfinite()
    assert update.skipped == 1 and update.calls == 1
    update(batch(seed=3))
    same.step(batch(seed=3))
    assert distance(owner.tensors(), same.tensors()) < 1e-10
    with pytest.raises(SpecError, match="expected 'raise' or 'skip'"):
        grl.compile_update(owner.step, on_nonfinite="ignore")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_argument_check_inside_a_step_keeps_its_own_error(backend):
    net = nn.Linear(4, 1).double()
    optimizer = optim.SGD(net.parameters(), 0.1)

    def step(td):
        loss = -Normal(net(td["x"]), td["scale"]).log_prob(td["y"]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    td = batch(scale=torch.ones(16, 1, dtype=torch.float64))
    update = grl.compile_update(step, td, backend=backend)
    update(td)
    before = [p.clone() for p in net.parameters()]
    td["scale"][5] = -1.0
    with pytest.raises(ValueError, match="Expected parameter scale"):
        update(td)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert any("distribution.py" in line for line in update.entries()[0].program.assumptions)


def test_gradients_may_be_accumulated_inside_a_step():
    compiled, eager = Regression(), Regression()

    def accumulate(owner):
        def step(td):
            owner.optimizer.zero_grad()
            for part in td.split(8):
                ((owner.net(part["x"]) - part["y"]).square().mean() / 2).backward()
            owner.optimizer.step()
            return {"norm": owner.net[0].weight.grad.norm()}

        return step

    update, step = grl.compile_update(accumulate(compiled), backend="eager"), accumulate(eager)
    for i in range(20):
        a, b = update(batch(seed=i)), step(batch(seed=i))
        assert distance([a["norm"]], [b["norm"]]) < 1e-10
    assert distance(compiled.tensors(), eager.tensors()) < 1e-10


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autocast_inside_a_step_is_traced(backend):
    compiled, eager = (Regression(lambda p: optim.SGD(p, 0.05), torch.float32) for _ in range(2))

    def autocast(owner):
        def step(td):
            owner.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = owner.net(td["x"])
            loss = (out.float() - td["y"]).square().mean()
            loss.backward()
            owner.optimizer.step()
            return {"loss": loss}

        return step

    update, step = grl.compile_update(autocast(compiled), backend=backend), autocast(eager)
    for i in range(20):
        td = batch(dtype=torch.float32, seed=i)
        a, b = update(td)["loss"], step(td)["loss"]
        assert abs(a - b) < 0.02 * b.abs() + 0.01
    assert distance(compiled.tensors(), eager.tensors()) < 0.02


@pytest.mark.parametrize("name", sorted(n for n in dir(optim) if isinstance(getattr(optim, n), type)))
def test_every_optimiser_of_torch_is_followed_or_refused_by_name(name):
    kind = getattr(optim, name)
    if not issubclass(kind, optim.Optimizer) or kind is optim.Optimizer:
        return

    def make(parameters):
        parameters = [p for p in parameters if p.dim() == 2] if name == "Muon" else list(parameters)
        return kind(parameters, lr=0.01)

    compiled, eager = Regression(make, torch.float64), Regression(make, torch.float64)
    try:
        update = grl.compile_update(compiled.step, batch(), backend="eager")
    except GraphRLError as refusal:
        assert name in str(refusal)
        return
    except Exception as error:  # eager's own: a sparse optimiser given dense gradients, one that wants a closure
        with pytest.raises(type(error)):
            eager.step(batch())
        return
    for i in range(30):
        update(batch(seed=i))
        eager.step(batch(seed=i))
    allowed = 1e-6 if name in ("ASGD", "NAdam") else 1e-10  # both keep a running factor in float32
    assert distance(compiled.tensors(), eager.tensors()) < allowed


def test_options_of_another_type_choose_another_program():
    owner = Regression()
    update = grl.compile_update(lambda td, k: owner.step(td) | {"kind": td["x"].sum() * 0 + isinstance(k, bool)},
                                backend="eager")  # fmt: skip
    assert [float(update(batch(), k=k)["kind"]) for k in (1, True, 1.0, 1)] == [0, 1, 0, 0]
    assert len(update.entries()) == 3


@pytest.mark.parametrize(
    ("key", "message"), [("los", "no such metric.*Did you mean 'loss'"), ("rows", r"has shape \[8\]")]
)
def test_a_wrong_stop_key_is_told_before_any_update(key, message):
    owner = Regression()
    update = grl.compile_update(lambda td: owner.step(td) | {"rows": td["x"].sum(-1)}, backend="eager")
    before = [t.clone() for t in owner.net.parameters()]
    with pytest.raises(SpecError, match=message):
        update.epoch(batch(32), torch.randperm(32).view(4, 8), stop_key=key, stop_above=0.0)
    assert distance(before, list(owner.net.parameters())) == 0


def test_a_wrong_backend_or_step_is_told_at_once():
    with pytest.raises(GraphRLError, match="no backend 'induktor'"):
        grl.compile_update(lambda td: None, backend="induktor")
    with pytest.raises(SpecError, match="the step is a NoneType"):
        grl.compile_update(None)


def test_a_parameter_put_in_place_of_another_is_the_one_that_is_trained():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = optim.SGD(weights[:2], 0.1)

    def step(td):
        loss = sum((w * td["x"]).sum() for w in weights)
        for w in weights:
            w.grad = None
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, backend="eager")
    td = TensorDict(x=torch.ones(3), batch_size=[])
    update(td)
    optimizer.param_groups[0]["params"][1] = weights[2]
    update(td)
    assert distance([w.detach() for w in weights], [torch.full((3,), v) for v in (0.8, 0.9, 0.9)]) < 1e-6


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_check_that_passes_by_another_way_is_told_and_not_skipped(on_nonfinite):
    owner = Regression()

    def step(td):
        assert (td["y"] > 0).all() or (td["y"] < 0).all()
        return owner.step(td)

    update = grl.compile_update(step, backend="eager", on_nonfinite=on_nonfinite)
    td = batch().set("y", torch.ones(16, 1, dtype=torch.float64))
    update(td)
    before = [t.clone() for t in owner.tensors()]
    with pytest.raises(TraceError, match="passes by another way"):
        update(td.set("y", -td["y"]))
    assert distance(before, owner.tensors()) == 0 and update.skipped == 0


def test_a_key_that_the_batch_lacks_is_named_with_the_nearest():
    owner = Regression()
    with pytest.raises(KeyMissingError, match="the step reads 'x', but the batch has .*Did you mean 'xx'"):
        grl.compile_update(owner.step, batch().rename_key_("x", "xx"), backend="eager")


def test_an_optimiser_that_calls_the_loss_itself_is_refused_by_name():
    owner = Regression(optim.LBFGS)
    with pytest.raises(TraceError, match="LBFGS cannot be traced"):
        grl.compile_update(owner.step, batch(), backend="eager")


def test_compiling_on_a_batch_that_is_not_finite_says_what_to_do():
    owner = Regression()
    bad = batch()
    bad["x"][0] = float("nan")
    before = [p.clone() for p in owner.net.parameters()]
    with pytest.raises(NonFiniteError, match="nothing was updated: compile on an example that is finite"):
        grl.compile_update(owner.step, bad, backend="eager", on_nonfinite="skip")
    assert all(torch.equal(a, b) for a, b in zip(before, owner.net.parameters(), strict=True))


def test_skipping_covers_a_nan_that_an_argument_check_would_refuse():
    net = nn.Linear(4, 1).double()
    optimizer = optim.SGD(net.parameters(), 0.1)

    def step(td):
        loss = -Normal(net(td["x"]), 1.0).log_prob(td["y"]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, batch(), backend="eager", on_nonfinite="skip")
    bad, before = batch(), net.weight.clone()
    bad["x"][0] = float("nan")
    update(bad)
    assert update.skipped == 1 and torch.equal(net.weight, before)


def test_a_branch_in_an_update_gets_advice_for_updates():
    def step(td):
        return {"loss": td["x"] if td["x"].sum() > 0 else -td["x"]}

    with pytest.raises(TraceError, match="return the tensor itself as a metric") as caught:
        grl.compile_update(step, batch())
    assert "opaque" not in str(caught.value)


def test_an_index_out_of_range_is_eager_s_error_in_plain_words():
    owner = Regression()
    update = grl.compile_update(owner.step, backend="inductor", strict=True).warm_up(batch(32), torch.arange(8))
    with pytest.raises(IndexError, match="an index in the update is out of range"):
        update(batch(32), torch.arange(28, 36))
