"""Draws inside programs: eager's own, one for one, and so rightly distributed."""

import math

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn
from torch.distributions import Bernoulli, Categorical, Exponential, Normal

import graphrl as grl

ROWS = 4000


def normal(x):
    return Normal(x, 2.0).rsample()


def uniform(x):
    return torch.rand_like(x)


def exponential(x):
    return Exponential(torch.ones_like(x)).rsample()


CONTINUOUS = {
    normal: lambda v: 0.5 * (1 + torch.erf(v / (2.0 * math.sqrt(2)))),
    uniform: lambda v: v.clamp(0, 1),
    exponential: lambda v: 1 - torch.exp(-v.clamp_min(0)),
}


def run(function, backend, seed=0):
    graph = grl.KeyedGraph((function, ["x"], ["y"]))
    td = TensorDict(x=torch.zeros(ROWS, 1), batch_size=[ROWS])
    fast = grl.compile(graph, td, backend=backend)
    with torch.no_grad():
        torch.manual_seed(seed)
        found = fast(td.clone())["y"]
        torch.manual_seed(seed)
        again = fast(td.clone())["y"]
        torch.manual_seed(seed)
        eager = graph(td.clone())["y"]
        later = fast(td.clone())["y"]
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=1e-6)
    assert torch.equal(found, again) and not torch.equal(found, later)
    return later.double().flatten()


@pytest.mark.parametrize("backend", ["inductor", "native"])
@pytest.mark.parametrize("function", CONTINUOUS, ids=lambda f: f.__name__)
def test_a_kolmogorov_smirnov_test_finds_the_right_distribution(function, backend):
    sample = run(function, backend).sort().values
    cdf, grid = CONTINUOUS[function](sample), torch.arange(ROWS + 1, dtype=torch.float64) / ROWS
    distance = torch.maximum((cdf - grid[:-1]).abs().max(), (grid[1:] - cdf).abs().max())
    assert distance * math.sqrt(ROWS) < 1.95  # passed by 99.9 % of right samples
    wrong = CONTINUOUS[function](sample * 1.2)  # the test can fail
    assert torch.maximum((wrong - grid[:-1]).abs().max(), (grid[1:] - wrong).abs().max()) * math.sqrt(ROWS) > 1.95


def choice(x):
    return Categorical(logits=x + torch.tensor([0.0, 1.0, 2.0])).sample().float()


def coin(x):
    return Bernoulli(torch.full_like(x, 0.3)).sample()


def dropped(x):
    return F.dropout(x + 1, 0.25)


@pytest.mark.parametrize("backend", ["inductor", "native"])
@pytest.mark.parametrize(
    ("function", "probabilities"),
    [
        (choice, dict(zip((0.0, 1.0, 2.0), torch.tensor([0.0, 1.0, 2.0]).softmax(-1).tolist(), strict=True))),
        (coin, {0.0: 0.7, 1.0: 0.3}),
        (dropped, {0.0: 0.25, 4 / 3: 0.75}),
    ],
    ids=["categorical", "bernoulli", "dropout"],
)
def test_a_chi_square_test_finds_the_right_frequencies(function, probabilities, backend):
    sample = run(function, backend)
    statistic = 0.0
    for value, p in probabilities.items():
        seen = int((sample - value).abs().lt(1e-5).sum())
        statistic += (seen - ROWS * p) ** 2 / (ROWS * p)
    assert statistic < 13.8  # two degrees of freedom: passed by 99.9 % of right samples


class Ensemble(nn.Module):
    """Two equal networks with dropout over stacked weights, under ``vmap``."""

    def __init__(self, p):
        super().__init__()
        member = nn.Sequential(nn.Linear(3, 64), nn.Dropout(p))
        self.weights = nn.ParameterList(nn.Parameter(torch.stack([w, w])) for w in member.parameters())
        self.names = [name for name, _ in member.named_parameters()]
        self.__dict__["member"] = member

    def forward(self, x):
        def one(weights):
            return torch.func.functional_call(self.member, dict(zip(self.names, weights, strict=True)), (x,))

        return torch.vmap(one, randomness="different")(list(self.weights))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dropout_under_vmap_differs_between_members_and_equals_the_loop_where_it_is_off(backend):
    td = TensorDict(x=torch.ones(5, 3), batch_size=[])
    for p in (0.5, 0.0):
        torch.manual_seed(0)
        module = Ensemble(p)
        graph = grl.KeyedGraph((module, ["x"], ["y"]))
        with torch.no_grad():
            torch.manual_seed(1)
            y = grl.compile(graph, td, backend=backend)(td.clone())["y"]
            torch.manual_seed(1)
            torch.testing.assert_close(y, graph(td.clone())["y"])
            assert torch.equal(y[0], y[1]) is (p == 0.0)
            if p == 0.0:
                torch.testing.assert_close(y[0], module.member.eval()(td["x"]))
