"""A small regression, trained by the update tests compiled and eagerly side by side."""

import torch
from tensordict import TensorDict
from torch import nn, optim


def batch(n=16, dtype=torch.float64, seed=None, **more):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDict({"x": x, "y": x.sum(-1, keepdim=True).sin(), **more}, batch_size=[n])


class Regression:
    """A network, its optimiser and a step, equal for equal arguments."""

    def __init__(self, make_optimizer=lambda p: optim.Adam(p, 0.01), dtype=torch.float64, clip=None):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        self.optimizer = make_optimizer(self.net.parameters())
        self.clip = clip

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = (self.net(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        metrics = {"loss": loss}
        if self.clip is not None:
            metrics["norm"] = nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        return metrics

    def tensors(self):
        states = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [*self.net.parameters(), *states]


def distance(a, b):
    """Relative distance of two lists of tensors, in the Euclidean norm."""
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).norm() / y.norm().clamp_min(1e-8)) for x, y in pairs)


def train_both(compiled, eager, update, steps=100, dtype=torch.float64, between=lambda owner, i: None):
    for i in range(steps):
        between(compiled, i), between(eager, i)
        found, expected = update(batch(dtype=dtype, seed=i)), eager.step(batch(dtype=dtype, seed=i))
    torch.testing.assert_close(found["loss"], expected["loss"].detach(), rtol=1e-4, atol=1e-8)
    return distance(compiled.net.parameters(), eager.net.parameters())
