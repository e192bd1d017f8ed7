"""Long runs of updates with everything around them that training has: metrics, state, schedules, targets, restarts."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from regression import Regression, batch, distance
from tensordict import TensorDict
from torch import nn, optim

import graphrl as grl

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.05),
    "SGD momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "AdamW amsgrad": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_metrics_and_optimiser_state_equal_eager_s_for_a_hundred_steps(name, dtype):
    compiled, eager = (Regression(OPTIMIZERS[name], dtype, clip=1.0) for _ in range(2))
    update = grl.compile_update(compiled.step, batch(dtype=dtype), backend="eager")
    allowed = 1e-5 if dtype == torch.float32 else 1e-10
    if dtype == torch.float64 and name == "NAdam":
        allowed = 1e-8  # torch keeps NAdam's running product in the default dtype, float32
    for i in range(100):
        td = batch(dtype=dtype, seed=i)
        found, expected = update(td), eager.step(td)
        for key in ("loss", "norm"):
            assert distance([found[key]], [expected[key]]) < 10 * allowed, (i, key)
    assert distance(compiled.net.parameters(), eager.net.parameters()) < allowed
    own, wanted = compiled.optimizer.state_dict(), eager.optimizer.state_dict()
    assert own["param_groups"] == wanted["param_groups"]
    for number, state in wanted["state"].items():
        assert set(own["state"][number]) == set(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert distance([own["state"][number][key]], [value]) < 10 * allowed, key


class TwoLosses:
    """A critic with two parameter groups under Adam, an actor under RMSprop, a temperature under SGD."""

    def __init__(self):
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(4, 4).double(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).double()
        self.log_alpha = nn.Parameter(torch.zeros((), dtype=torch.float64))
        groups = [{"params": self.critic[0].parameters(), "lr": 0.01}, {"params": self.critic[1].parameters()}]
        self.optimizers = [
            optim.Adam(groups, 0.001, weight_decay=0.01),
            optim.RMSprop(self.actor.parameters(), 0.01),
            optim.SGD([self.log_alpha], 0.1),
        ]
        self.schedulers = [
            optim.lr_scheduler.StepLR(self.optimizers[0], 7, 0.5),
            optim.lr_scheduler.CosineAnnealingLR(self.optimizers[1], 50),
        ]

    def step(self, td):
        value = self.critic(td["x"])
        losses = {
            "critic": (value - td["y"]).square().mean(),
            "actor": -(self.critic(self.actor(td["x"])).mean() + self.log_alpha.detach().exp() * td["x"].mean()),
            "alpha": self.log_alpha.exp() * (value.detach().mean() + 1),
        }
        for optimizer, loss in zip(self.optimizers, losses.values(), strict=True):
            optimizer.zero_grad()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
            nn.utils.clip_grad_value_(parameters, 0.2)
        for optimizer in self.optimizers:
            optimizer.step()
        return losses

    def tensors(self):
        states = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        return [*self.actor.parameters(), *self.critic.parameters(), self.log_alpha, *states]


def test_losses_optimisers_groups_schedules_and_clipped_values_equal_eager():
    compiled, eager = TwoLosses(), TwoLosses()
    update = grl.compile_update(compiled.step, batch(), backend="eager")
    for i in range(60):
        found, expected = update(batch(seed=i)), eager.step(batch(seed=i))
        for key, value in expected.items():
            assert distance([found[key]], [value]) < 1e-9, (i, key)
        for scheduler in (*compiled.schedulers, *eager.schedulers):
            scheduler.step()
    assert distance(compiled.tensors(), eager.tensors()) < 1e-10
    rates = [[group["lr"] for o in owner.optimizers for group in o.param_groups] for owner in (compiled, eager)]
    assert rates[0] == rates[1] and rates[0][0] == pytest.approx(0.01 * 0.5**8)
    assert update.retraces == [] and len(update.entries()) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dropout_inside_an_update_is_eager_s_draw_for_draw(backend):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1), nn.Dropout(0.1)).double()
        optimizer = optim.Adam(net.parameters(), 0.01)

        def step(td):
            optimizer.zero_grad()
            loss = (net(td["x"]) - td["y"]).square().mean()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        return net, step

    (net, step), (other, eager) = make(), make()
    update = grl.compile_update(step, batch(), backend=backend)
    states = []
    for call in (update, eager):
        torch.manual_seed(7)
        for i in range(10):
            call(batch(seed=i))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert distance(net.parameters(), other.parameters()) < 1e-10


@pytest.mark.parametrize("every", [1, 5], ids=["soft", "hard"])
def test_a_target_network_follows_softly_or_is_copied(every):
    def make():
        owner = Regression()
        target = copy.deepcopy(owner.net)

        def step(td, copy_target=True):
            with torch.no_grad():
                goal = td["y"] + 0.5 * target(td["x"])
            metrics = owner.step(TensorDict(x=td["x"], y=goal, batch_size=td.batch_size))
            if copy_target and every > 1:
                target.load_state_dict(owner.net.state_dict())
            elif copy_target:
                for old, new in zip(target.parameters(), owner.net.parameters(), strict=True):
                    old.data.mul_(0.95).add_(new.data, alpha=0.05)
            return metrics

        return [*owner.net.parameters(), *target.parameters()], step

    (found, step), (expected, eager) = make(), make()
    update = grl.compile_update(step, backend="eager")
    for i in range(20):
        now = i % every == 0
        update(batch(seed=i), copy_target=now), eager(batch(seed=i), copy_target=now)
    assert distance(found, expected) < 1e-10


_RESUME = """
import sys
import torch
from regression import Regression, batch
import graphrl as grl

folder, backend = sys.argv[1:]
owner = Regression(clip=1.0)
saved = torch.load(f"{folder}/half.pt")
owner.net.load_state_dict(saved["net"])
owner.optimizer.load_state_dict(saved["optimizer"])
torch.set_rng_state(saved["random"])
update = grl.compile_update(owner.step, backend=backend)
losses = [update(batch())["loss"] for _ in range(5)]
end = {"net": owner.net.state_dict(), "optimizer": owner.optimizer.state_dict(), "losses": losses}
torch.save(end, f"{folder}/end.pt")
"""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_new_process_continues_from_plain_state_dicts_bit_for_bit(backend, tmp_path):
    owner = Regression(clip=1.0)
    update = grl.compile_update(owner.step, backend=backend)
    for _ in range(5):
        update(batch())
    half = {"net": owner.net.state_dict(), "optimizer": owner.optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(half, tmp_path / "half.pt")
    losses = [update(batch())["loss"] for _ in range(5)]
    (tmp_path / "resume.py").write_text(_RESUME)
    here = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, tmp_path / "resume.py", tmp_path, backend]
    subprocess.run(command, check=True, timeout=300, capture_output=True, env={**os.environ, **here})
    end = torch.load(tmp_path / "end.pt")
    assert all(torch.equal(a, b) for a, b in zip(losses, end["losses"], strict=True))
    for name, value in owner.net.state_dict().items():
        assert torch.equal(value, end["net"][name])
    for number, state in owner.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, end["optimizer"]["state"][number][name]) for name, value in state.items())
