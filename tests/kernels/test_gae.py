"""What only GAE has: messages and the numbers of known defects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from trajectories import random_trajectory, steps

from graphrl.errors import SpecError
from graphrl.kernels import gae


def test_mixed_float_dtypes_are_promoted():
    t = random_trajectory((4, 20, 1), torch.float32)
    assert gae(t.reward, t.value.bfloat16(), t.next_value, *t[3:], 0.9, 0.8)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": lambda x: x.squeeze(-1)}, r"value is \[4, 9\], but reward is \[4, 9, 1\].*value.unsqueeze\(-1\)"),
        ({"reward": lambda x: x.squeeze(-1)}, r"value is \[4, 9, 1\], but reward is \[4, 9\].*reward.unsqueeze"),
        ({"terminated": lambda x: x.tolist()}, r"terminated is a list, expected a torch.Tensor"),
        ({"value": lambda x: x.to("meta")}, r"value is on meta, but reward is on cpu"),
        ({"lmbda": lambda x: torch.ones(1, 4, 9, 1)}, r"lmbda is \[1, 4, 9, 1\] and does not broadcast"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_wrong_arguments_are_refused(change, message):
    arguments = random_trajectory((4, 9, 1))._asdict() | {"gamma": 0.9, "lmbda": 0.9, "time_dim": -2}
    arguments |= {name: edit(arguments[name]) for name, edit in change.items()}
    with pytest.raises(SpecError, match=message):
        gae(**arguments)


def test_vector_without_trailing_one_names_the_right_time_dim():
    with pytest.raises(SpecError, match=r"time_dim=-2 is not a dimension of reward \[9\].*time_dim=-1 for \[\*B, T\]"):
        gae(*random_trajectory((9,)), 0.9, 0.9, time_dim=-2)


# Numbers reported against other libraries. V' is the value of the true next observation, also at a time limit.


def assert_advantage(trajectory, gamma, lmbda, expected):
    advantage, value_target = gae(*trajectory, gamma, lmbda)
    torch.testing.assert_close(advantage.squeeze(-1), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(value_target, advantage + trajectory[1])


def test_time_limit_bootstraps_and_does_not_leak():
    assert_advantage(steps([1, 1], [0.5, 0.5], [2, 3], [1, 0], [0, 0]), 0.9, 0.9, [2.3, 3.2])


def test_time_limit_bootstraps_from_the_final_observation():
    assert_advantage(steps([1], [5], [0], [1], [0]), 0.9, 0.9, [-4.0])


def test_nan_behind_a_terminal_step_reaches_nothing():
    for done in ([0, 1], [0, 0]):  # a terminated step is done, whatever the other flag says
        trajectory = steps([1, 1], [0.5, 0.5], [0.5, float("nan")], done, [0, 1])
        assert_advantage(trajectory, 0.9, 0.9, [1.355, 0.5])


def test_lambda_zero_keeps_the_value_of_the_last_state():
    trajectory = steps([0, 1], [0, 0.95], [0.95, 0], [0, 1], [0, 1])
    torch.testing.assert_close(gae(*trajectory, 0.9, 0.0)[1].flatten(), torch.tensor([0.855, 1.0]).double())


def test_window_end_is_bootstrapped_once():
    assert_advantage(steps([1, 1], [0, 0], [0, 10], [0, 0], [0, 0]), 0.5, 1.0, [4.0, 6.0])


def test_terminal_last_step_ignores_gamma():
    for gamma in (0.0, 0.5, 1.0):
        advantage, _ = gae(*steps([1, 1, 1], [2, 2, 2], [2, 2, 2], [0, 0, 1], [0, 0, 1]), gamma, 0.95)
        assert advantage[-1].item() == -1.0


def test_kernels_run_where_triton_is_not_installed():
    # That triton stays unimported where it is installed cannot be asked: tensordict imports Dynamo, which imports it.
    code = """
import sys
sys.modules["triton"] = None
import torch
from graphrl.kernels import gae
x, f = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.bool)
gae(x, x, x, f, f, .9, .9)
assert "graphrl.kernels.gae.triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_forked_child_has_its_own_threads():
    code = """
import os, torch
from graphrl.kernels import gae
x = torch.ones(600, 500, 1); f = torch.zeros(600, 500, 1, dtype=torch.bool)
expected = gae(x, x, x, f, f, .9, .9)[0].numpy().tobytes()
child = os.fork()
if child == 0:
    # bytes: torch's own threads do not survive a fork
    os._exit(0 if gae(x, x, x, f, f, .9, .9)[0].numpy().tobytes() == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this platform")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
