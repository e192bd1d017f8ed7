"""What only the discounted sum has: the numbers of known defects, and TorchRL's."""

from __future__ import annotations

import pytest
import torch
from trajectories import random_trajectory

from graphrl.kernels import discounted_sum


def steps(rewards, done):
    return torch.tensor(rewards).double(), torch.tensor(done).bool()


def test_a_cut_leaks_nothing_into_the_previous_trajectory():
    assert discounted_sum(*steps([1, 1, 1], [0, 1, 0]), 0.5).tolist() == [1.5, 1.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_after_a_reset_reaches_nothing_before_it(bad):
    reward, done = steps([1, 1, bad], [0, 1, 1])
    reward.requires_grad_()
    found = discounted_sum(reward, done, 0.5)
    assert found[:2].tolist() == [1.5, 1.0]
    (grad,) = torch.autograd.grad(found[:2].sum(), reward)
    assert grad.tolist() == [1.0, 1.5, 0.0]


def test_gamma_zero_keeps_each_reward_and_one_adds_them():
    reward, done = steps([1, 2, 4], [0, 0, 0])
    assert discounted_sum(reward, done, 0.0).tolist() == [1, 2, 4]
    assert discounted_sum(reward, done, 1.0).tolist() == [7, 6, 4]


def test_terminal_last_step_ignores_gamma():
    for gamma in (0.0, 0.5, 1.0):
        assert discounted_sum(*steps([1, 1, 1], [0, 0, 1]), gamma)[-1].item() == 1.0


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peer's own, at import
@pytest.mark.parametrize("end", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("shape", [(1, 30, 1), (5, 100, 1), (2, 3, 40, 1)], ids=str)
def test_equals_torchrl(shape, end):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    t = random_trajectory(shape, end=end)
    expected = functional.reward2go(t.reward, t.done, 0.99)
    torch.testing.assert_close(discounted_sum(t.reward, t.done, 0.99), expected)
