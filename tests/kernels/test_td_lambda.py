"""What only the TD(lambda) family has: its special cases, the numbers of known defects, and TorchRL's."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from trajectories import random_trajectory

from graphrl.errors import SpecError
from graphrl.kernels import lambda_return, td0, td1, td_lambda


def steps(*columns):
    """Rewards and next values as float64 [T, 1], then flags."""
    return [torch.tensor(x, dtype=torch.float64 if i < 2 else torch.bool).unsqueeze(-1) for i, x in enumerate(columns)]


def without_value(t):
    return t.reward, *t[2:]


@pytest.mark.parametrize("shape", [(5, 30, 1), (4, 9), (30,)], ids=str)
def test_lambda_zero_is_one_step_and_lambda_one_is_monte_carlo(shape):
    t = random_trajectory(shape)
    arguments = without_value(t)
    torch.testing.assert_close(td_lambda(*arguments, 0.9, 0.0), td0(t.reward, t.next_value, t.terminated, 0.9))
    assert torch.equal(td_lambda(*arguments, 0.9, 1.0), td1(*arguments, 0.9))


@pytest.mark.parametrize(
    ("shape", "time_dim"), [((5, 30, 1), -2), ((1, 900, 1), -2), ((9, 600, 3, 1), 1), ((40, 300), 0)], ids=str
)
def test_lambda_return_is_td_lambda_with_the_flag_in_the_discount(shape, time_dim):
    t = random_trajectory(shape)
    discount = torch.rand(shape).double() * ~t.terminated
    never = torch.zeros_like(t.done)
    results = []
    for gammas in (discount, torch.tensor(0.9, dtype=torch.float64)):
        for flags in (None, (never, never)):
            leaves = [x.detach().clone().requires_grad_() for x in (t.reward, t.next_value, gammas)]
            r, w, g = leaves
            if flags is None:
                out = lambda_return(r, w, g, 0.8, time_dim=time_dim)
            else:
                out = td_lambda(r, w, *flags, g, 0.8, time_dim=time_dim)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[3], rtol=0, atol=0)
    flagged = td_lambda(t.reward, t.next_value, t.terminated, t.terminated, discount, 0.8, time_dim=time_dim)
    torch.testing.assert_close(results[0][0], flagged)


def test_lambda_return_is_the_mixture_of_n_step_returns():
    reward, next_value, horizon, gamma, lmbda = torch.randn(6).double(), torch.randn(6).double(), 6, 0.9, 0.7
    powers = gamma ** torch.arange(horizon + 1).double()
    for t in range(horizon):
        left = horizon - t
        n_step = [
            (powers[:n] * reward[t : t + n]).sum() + powers[n] * next_value[t + n - 1] for n in range(1, left + 1)
        ]
        mixed = (1 - lmbda) * sum(lmbda ** (n - 1) * n_step[n - 1] for n in range(1, left)) + lmbda ** (
            left - 1
        ) * n_step[-1]
        torch.testing.assert_close(lambda_return(reward, next_value, gamma, lmbda)[t], mixed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_zero_discount_hides_reaches_neither_result_nor_gradients(bad):
    t = random_trajectory((4, 30, 1))
    discount = torch.full((4, 30, 1), 0.9).double().masked_fill(t.terminated, 0.0)
    clean = lambda_return(t.reward, t.next_value, discount, 0.8)
    reward = t.reward.clone().requires_grad_()
    next_value = t.next_value.masked_fill(t.terminated, bad).requires_grad_()
    lmbda = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    found = lambda_return(reward, next_value, discount, lmbda)
    assert torch.equal(found, clean)
    for create_graph in (True, False):
        for grad in torch.autograd.grad(found.sum(), (reward, next_value, lmbda), create_graph=create_graph):
            assert grad.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_td1_reads_next_values_at_cuts_only(bad):
    t = random_trajectory((4, 30, 1))
    last = torch.zeros_like(t.done)
    last[:, -1] = True
    hidden = t.next_value.masked_fill(~(t.done | last) | t.terminated, bad)
    assert torch.equal(td1(t.reward, hidden, *t[3:], 0.9), td1(*without_value(t), 0.9))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_td0_lets_nothing_through_a_terminal_step(bad):
    t = random_trajectory((4, 30, 1))
    reward, gamma = t.reward.clone().requires_grad_(), torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    next_value = t.next_value.masked_fill(t.terminated, bad).requires_grad_()
    found = td0(reward, next_value, t.terminated, gamma)
    assert torch.equal(found, td0(t.reward, t.next_value, t.terminated, 0.9))
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), (reward, next_value, gamma)))


def test_special_cases_differentiate_twice():
    t = random_trajectory((2, 5, 1))
    gamma = torch.rand(5, 1).double()
    leaves = [x.clone().requires_grad_() for x in (t.reward, t.next_value, gamma)]
    functions = [
        lambda r, w, g: td0(r, w, t.terminated, g),
        lambda r, w, g: td1(r, w, t.done, t.terminated, g),
        lambda r, w, g: lambda_return(r, w, g, 0.7),
    ]
    for function in functions:
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def test_lambda_return_builds_no_flags():
    program = make_fx(lambda *x: lambda_return(*x, 0.8))(*torch.rand(3, 4, 30, 1))
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert set(calls) <= {"graphrl.td_lambda.default", "aten.full.default", "aten.expand.default"}, calls
    assert calls.count("graphrl.td_lambda.default") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_td0_computes_in_float32_and_keeps_the_dtype(dtype):
    t = random_trajectory((4, 30, 1), dtype)
    found = td0(t.reward, t.next_value, t.terminated.int(), 0.99)
    exact = td0(t.reward.double(), t.next_value.double(), t.terminated, 0.99)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype))


def test_special_cases_name_themselves_in_errors():
    t = random_trajectory((4, 9, 1))
    for name, call in {
        "td0: terminated is": lambda: td0(t.reward, t.next_value, t.terminated[:1], 0.9),
        "td1: done is": lambda: td1(t.reward, t.next_value, t.done.float(), t.terminated, 0.9),
        "lambda_return: next_value is": lambda: lambda_return(t.reward, t.next_value[..., 0], 0.9, 0.9),
        "lambda_return: discount is": lambda: lambda_return(t.reward, t.next_value, torch.ones(5, 1), 0.9),
    }.items():
        with pytest.raises(SpecError, match=name):
            call()


# Numbers reported against other libraries. V' is the value of the true next observation, also at a time limit.


def assert_targets(trajectory, gamma, lmbda, expected):
    expected = torch.tensor(expected, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(td_lambda(*trajectory, gamma, lmbda), expected)
    if lmbda == 1.0:
        torch.testing.assert_close(td1(*trajectory, gamma), expected)
    if lmbda == 0.0:
        torch.testing.assert_close(td0(*trajectory[:2], trajectory[3], gamma), expected)


@pytest.mark.parametrize("lmbda", [0.0, 0.9, 1.0])
def test_time_limit_bootstraps_and_does_not_leak(lmbda):
    assert_targets(steps([1, 1], [2, 3], [1, 0], [0, 0]), 0.9, lmbda, [2.8, 3.7])


@pytest.mark.parametrize("lmbda", [0.0, 0.9, 1.0])
def test_nan_behind_a_terminal_step_reaches_nothing(lmbda):
    for done in ([1, 1], [0, 0]):  # a terminated step is done, whatever the other flag says
        assert_targets(steps([1, 1], [float("nan"), 0.5], done, [1, 0]), 0.9, lmbda, [1.0, 1.45])


def test_lambda_zero_keeps_the_value_of_the_last_state():
    assert_targets(steps([0, 1], [0.95, 0], [0, 1], [0, 1]), 0.9, 0.0, [0.855, 1.0])


def test_window_end_is_bootstrapped_once():
    trajectory = steps([1, 1], [0, 10], [0, 0], [0, 0])
    assert_targets(trajectory, 0.5, 1.0, [4.0, 6.0])
    assert lambda_return(*trajectory[:2], 0.5, 1.0).flatten().tolist() == [4.0, 6.0]


@pytest.mark.parametrize("lmbda", [0.0, 0.95, 1.0])
def test_terminal_last_step_ignores_gamma(lmbda):
    trajectory = steps([1, 1, 1], [2, 2, 2], [0, 0, 1], [0, 0, 1])
    for gamma in (0.0, 0.5, 1.0):
        assert td_lambda(*trajectory, gamma, lmbda)[-1].item() == 1.0
        assert td1(*trajectory, gamma)[-1].item() == td0(*trajectory[:2], trajectory[3], gamma)[-1].item() == 1.0


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peer's own, at import
@pytest.mark.parametrize("end", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("shape", [(1, 30, 1), (5, 100, 1), (2, 3, 40, 1)], ids=str)
def test_equals_torchrl(shape, end):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    t = random_trajectory(shape, end=end)
    theirs = (t.next_value, t.reward, t.done, t.terminated)
    for lmbda in (0.0, 0.9, 1.0):
        found = td_lambda(*without_value(t), 0.99, lmbda)
        torch.testing.assert_close(found, functional.td_lambda_return_estimate(0.99, lmbda, *theirs))
        if lmbda:  # the vectorised version raises an IndexError for zero, and drops weights below 1e-7
            expected = functional.vec_td_lambda_return_estimate(0.99, lmbda, *theirs)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(td1(*without_value(t), 0.99), functional.td1_return_estimate(0.99, *theirs))
    expected = functional.vec_td1_return_estimate(0.99, *theirs)
    torch.testing.assert_close(td1(*without_value(t), 0.99), expected, rtol=1e-5, atol=1e-5)
    expected = functional.td0_return_estimate(0.99, t.next_value, t.reward, t.terminated)
    torch.testing.assert_close(td0(t.reward, t.next_value, t.terminated, 0.99), expected)
