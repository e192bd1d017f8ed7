import copy

import pytest
import torch
from regression import Regression, batch, distance, train_both
from tensordict import TensorDict
from torch import nn, optim

import graphrl as grl
from graphrl.errors import NonFiniteError, SpecError
from graphrl.losses import PPOLoss
from graphrl.models import GaussianActor, ValueCritic

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.05),
    "SGD momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9),
    "SGD nesterov decay": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam foreach decay": lambda p: optim.Adam(p, 0.01, foreach=True, weight_decay=0.1),
    "AdamW amsgrad": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_hundred_steps_equal_eager(make, dtype):
    compiled, eager = Regression(make, dtype), Regression(make, dtype)
    update = grl.compile_update(compiled.step, batch(dtype=dtype), backend="eager")
    allowed = 1e-5 if dtype == torch.float32 else 1e-10
    if dtype == torch.float64 and isinstance(compiled.optimizer, optim.NAdam):
        allowed = 1e-8  # torch keeps NAdam's running product in the default dtype, float32
    assert train_both(compiled, eager, update, dtype=dtype) < allowed
    assert update.retraces == [] and update.calls == 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_hundred_steps_through_inductor_equal_eager(dtype):
    compiled, eager = Regression(dtype=dtype, clip=0.1), Regression(dtype=dtype, clip=0.1)
    update = grl.compile_update(compiled.step, batch(dtype=dtype), backend="inductor", strict=True)
    assert train_both(compiled, eager, update, dtype=dtype) < (1e-5 if dtype == torch.float32 else 1e-10)
    assert update.entries()[0].backend == "inductor"


@pytest.mark.parametrize("clip", [1e-2, 100.0])
def test_gradient_clipping(clip):
    compiled, eager = Regression(clip=clip), Regression(clip=clip)
    update = grl.compile_update(compiled.step, backend="eager")
    assert train_both(compiled, eager, update, steps=20) < 1e-10


def test_a_ppo_update():
    def make():
        torch.manual_seed(0)
        loss = PPOLoss(GaussianActor(3, 2), ValueCritic(3), normalize_advantage=True).double()
        optimizer = optim.Adam(loss.parameters(), 1e-3)

        def step(td):
            terms = loss(td)
            optimizer.zero_grad()
            (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
            norm = nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
            return {**terms.detach(), "norm": norm}

        return loss, step

    n = 64
    td = TensorDict(
        {"observation": torch.randn(n, 3), "action": torch.randn(n, 2), "action_log_prob": torch.randn(n) - 3}
        | {"advantage": torch.randn(n, 1), "value_target": torch.randn(n, 1)},
        batch_size=[n],
    ).double()
    (loss, step), (other, eager) = make(), make()
    update = grl.compile_update(step, backend="eager")
    for i in range(10):
        index = torch.randperm(n, generator=torch.Generator().manual_seed(i))[:16]
        found, expected = update(td, index), eager(td[index])
        assert set(found) == set(expected)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key].detach(), rtol=1e-8, atol=1e-10)
    assert distance(loss.parameters(), other.parameters()) < 1e-10
    assert len(update.entries()) == 1


# ---- what may change between calls


def test_a_learning_rate_changed_midway_needs_no_new_program():
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, backend="eager")

    def halve(owner, i):
        if i % 10 == 9:
            owner.optimizer.param_groups[0]["lr"] *= 0.5

    assert train_both(compiled, eager, update, steps=50, between=halve) < 1e-10
    assert update.retraces == [] and compiled.optimizer.param_groups[0]["lr"] == 0.01 / 32


def test_a_scheduler_and_a_learning_rate_that_is_a_tensor():
    def make(p):
        return optim.Adam(p, torch.tensor(0.01, dtype=torch.float64))

    compiled, eager = Regression(make), Regression(make)
    update = grl.compile_update(compiled.step, backend="eager")

    def fill(owner, i):
        owner.optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + i))

    assert train_both(compiled, eager, update, steps=30, between=fill) < 1e-10
    assert update.retraces == []


def test_optimiser_state_loaded_midway_is_used():
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, backend="eager")
    saved = {}

    def rewind(owner, i):
        if i == 5:
            saved[owner] = copy.deepcopy(owner.optimizer.state_dict())
        if i == 10:
            owner.optimizer.load_state_dict(saved[owner])

    assert train_both(compiled, eager, update, steps=20, between=rewind) < 1e-10
    assert compiled.optimizer.state[compiled.net[0].weight]["step"] == 15


@pytest.mark.parametrize("change", [{"betas": (0.5, 0.9)}, {"weight_decay": 0.1}, {"eps": 1e-3}])
def test_another_hyperparameter_is_traced_anew(change):
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, backend="eager")

    def alter(owner, i):
        if i == 5:
            owner.optimizer.param_groups[0].update(change)

    assert train_both(compiled, eager, update, steps=10, between=alter) < 1e-10
    assert update.retraces == ["a hyperparameter, a mode or a weight was replaced"] and len(update.entries()) == 1


def test_a_reset_optimiser_starts_afresh():
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, backend="eager")

    def reset(owner, i):
        if i == 5:
            owner.optimizer.state.clear()

    assert train_both(compiled, eager, update, steps=10, between=reset) < 1e-10


def test_weights_loaded_midway_are_used():
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, backend="eager")
    other = Regression(lambda p: optim.SGD(p, 0.1)).net.state_dict()

    def load(owner, i):
        if i == 5:
            owner.net.load_state_dict({k: v + 0.1 for k, v in other.items()})

    assert train_both(compiled, eager, update, steps=10, between=load) < 1e-10
    assert update.retraces == []


def test_unrelated_keys_and_another_batch_size():
    owner = Regression()
    update = grl.compile_update(owner.step, backend="eager")
    update(batch(16))
    update(batch(16, extra=torch.zeros(16, 3), next=TensorDict(x=torch.zeros(16, 1), batch_size=[16])))
    assert len(update.entries()) == 1 and update.retraces == []
    assert [p.key for p in update.entries()[0].program.inputs] == ["x", "y"]
    update(batch(8))
    update(batch(16))
    assert len(update.entries()) == 2 and len(update.retraces) == 1


def test_train_and_eval_are_part_of_the_guard():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    optimizer = optim.SGD(net.parameters(), 0.0)

    def step(td):
        optimizer.zero_grad()
        loss = net(td["x"]).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    update = grl.compile_update(step, backend="eager")
    update(batch())
    net.eval()
    torch.testing.assert_close(update(batch(seed=1))["loss"], step(batch(seed=1))["loss"].detach())


# ---- index


def test_an_index_gathers_rows_inside_the_program():
    compiled, eager = Regression(), Regression()
    update = grl.compile_update(compiled.step, backend="eager")
    td = batch(32)
    for i in range(5):
        index = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i))
        update(td, index), eager.step(td[index])
    assert distance(compiled.net.parameters(), eager.net.parameters()) < 1e-10
    assert len(update.entries()) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_index_out_of_range_is_an_error_and_changes_nothing(backend):
    owner = Regression()
    update = grl.compile_update(owner.step, backend=backend, strict=True)
    update.warm_up(batch(32), torch.arange(8))
    before = [t.clone() for t in owner.tensors()]
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        update(batch(32), torch.arange(28, 36))
    assert all(torch.equal(a, b) for a, b in zip(before, owner.tensors(), strict=True))


def test_an_index_of_another_kind_is_refused():
    update = grl.compile_update(Regression().step, backend="eager")
    with pytest.raises(SpecError, match=r"index is torch\.int32 \[4\]: expected int64"):
        update(batch(), torch.arange(4, dtype=torch.int32))


# ---- NaN


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_nan_names_the_metric_and_changes_nothing(backend):
    owner = Regression(clip=1.0)
    update = grl.compile_update(owner.step, batch(), backend=backend, strict=True)
    update(batch())
    before = [t.clone() for t in owner.tensors()]
    bad = batch()
    bad["x"][3, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="update 2: loss, norm, the gradient of net.0.weight, .* is NaN"):
        update(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, owner.tensors(), strict=True))
    update(batch())
    assert not torch.equal(before[0], owner.tensors()[0])


# ---- what tracing leaves alone


@pytest.mark.parametrize("verify", [True, False])
def test_compiling_leaves_everything_as_it_was(verify):
    owner = Regression()
    owner.step(batch())
    log_alpha = nn.Parameter(torch.zeros(()))
    alpha_optimizer = optim.Adam([log_alpha], 0.1)

    def step(td):
        alpha_optimizer.zero_grad()
        (log_alpha.exp() * td["x"].mean() * torch.rand(())).backward()
        alpha_optimizer.step()
        return owner.step(td)

    weights = [p.detach().clone() for p in owner.net.parameters()]
    grads = [p.grad for p in owner.net.parameters()]
    values = [g.clone() for g in grads]
    states = copy.deepcopy(owner.optimizer.state_dict()["state"])
    random = torch.get_rng_state()
    td = batch()
    random = torch.get_rng_state()
    update = grl.compile_update(step, td, backend="eager", verify=verify)
    assert all(torch.equal(a, b) for a, b in zip(weights, owner.net.parameters(), strict=True))
    for p, grad, value in zip(owner.net.parameters(), grads, values, strict=True):
        assert p.grad is grad and torch.equal(grad, value)
    assert log_alpha.grad is None and log_alpha == 0
    for number, state in owner.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, states[number][name].to(value.dtype))
    assert owner.optimizer.param_groups[0]["lr"] == 0.01 and alpha_optimizer.state[log_alpha]["step"] == 0
    assert torch.equal(random, torch.get_rng_state())
    update(td)
    assert log_alpha.grad is None and all(p.grad is g for p, g in zip(owner.net.parameters(), grads, strict=True))
    assert log_alpha != 0


def test_gradients_left_over_from_before_are_not_part_of_the_program():
    owner = Regression(lambda p: optim.SGD(p, 0.1))
    for p in owner.net.parameters():
        p.grad = torch.full_like(p, 100.0)

    def step(td):  # clears at the end, as some do
        loss = (owner.net(td["x"]) * 0).mean()
        loss.backward()
        owner.optimizer.step()
        owner.optimizer.zero_grad()
        return {"loss": loss}

    weights = [p.detach().clone() for p in owner.net.parameters()]
    grl.compile_update(step, backend="eager")(batch())
    assert all(torch.equal(a, b) for a, b in zip(weights, owner.net.parameters(), strict=True))


def test_the_first_call_equals_eager_s_under_the_same_seed():
    def make():
        owner = Regression()

        def step(td):
            noise = torch.randn_like(td["x"])
            keep = torch.bernoulli(torch.full((16, 1), 0.5, dtype=torch.float64))
            return owner.step(TensorDict(x=td["x"] + keep * noise, y=td["y"], batch_size=td.batch_size))

        return owner, step

    (compiled, step), (eager, eager_step) = make(), make()
    update = grl.compile_update(step, backend="eager")
    for call in (update, eager_step):
        torch.manual_seed(5)
        for i in range(5):
            call(batch(seed=i))
    assert distance(compiled.net.parameters(), eager.net.parameters()) < 1e-10
