"""The operator against the float64 reference, over shapes, dtypes and layouts, and the numbers of known defects."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trajectories import Trajectory, random_trajectory, steps

from graphrl.errors import SpecError
from graphrl.kernels import gae
from graphrl.kernels.gae.reference import gae_reference

SHAPES = [
    ((1, 1, 1), -2),
    ((3, 7, 1), -2),
    ((8, 128, 1), -2),
    ((2, 3, 40, 1), -2),
    ((13, 1100, 1), -2),  # more rows than lanes, several tiles
    ((1, 5000, 1), -2),  # one long row
    ((2, 1023, 1), -2),
    ((50,), -1),
    ((6, 50), -1),
    ((50, 6), 0),
    ((50, 300), 0),  # time-major: lanes along memory
    ((4, 60, 3, 1), -3),  # agents
    ((11, 700, 7, 1), -3),
    ((3, 20, 17, 1), 1),
    ((0, 5, 1), -2),
    ((5, 0, 1), -2),
    ((5, 4, 0, 1), -3),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.008}


def assert_matches_reference(trajectory, gamma, lmbda, time_dim, dtype):
    found = gae(*trajectory, gamma, lmbda, time_dim=time_dim)
    expected = gae_reference(*trajectory, gamma, lmbda, time_dim=time_dim)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype and x.shape == trajectory.reward.shape and x.is_contiguous()
        torch.testing.assert_close(x.double(), y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES, ids=str)
def test_equals_the_reference(shape, time_dim, dtype):
    assert_matches_reference(random_trajectory(shape, dtype), 0.99, 0.95, time_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES, ids=str)
def test_per_step_coefficients_equal_the_reference(shape, time_dim, dtype):
    trajectory = random_trajectory(shape, dtype)
    gamma, lmbda = torch.rand(shape).to(dtype), torch.rand(shape).to(dtype)
    assert_matches_reference(trajectory, gamma, lmbda, time_dim, dtype)
    assert_matches_reference(trajectory, gamma, 0.9, time_dim, dtype)
    assert_matches_reference(trajectory, torch.tensor(0.9), lmbda, time_dim, dtype)


def test_no_cut_over_many_tiles_equals_the_reference():
    for shape in ((1, 3000, 1), (9, 3000, 1), (3, 1500, 2, 1)):
        trajectory = random_trajectory(shape, end=0.0)
        assert_matches_reference(trajectory, 1.0, 1.0, 1, torch.float64)


def test_large_batch_on_several_threads_equals_the_reference():
    for shape, time_dim in (((600, 500, 1), -2), ((500, 600, 1), 0)):
        assert_matches_reference(random_trajectory(shape, torch.float32), 0.99, 0.95, time_dim, torch.float32)


def test_non_contiguous_inputs_equal_contiguous_ones():
    trajectory = random_trajectory((5, 30, 4, 1))
    views = Trajectory(*(x.transpose(1, 2) for x in trajectory))
    expected = gae(*(x.contiguous() for x in views), 0.9, 0.8)
    for x, y in zip(gae(*views, 0.9, 0.8), expected, strict=True):
        assert torch.equal(x, y) and x.is_contiguous()
    strided = Trajectory(*(x[:, ::2] for x in trajectory))
    assert_matches_reference(strided, 0.9, 0.8, 1, torch.float64)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_flags_equal_boolean_ones(dtype):
    t = random_trajectory((4, 20, 1))
    found = gae(*t[:3], t.done.to(dtype) * 2, t.terminated.to(dtype), 0.9, 0.8)
    assert torch.equal(found[0], gae(*t, 0.9, 0.8)[0])


def test_coefficients_broadcast_and_keep_their_precision():
    t = random_trajectory((4, 20, 1), torch.bfloat16)
    gamma = torch.rand(20, 1, dtype=torch.float64)
    assert torch.equal(gae(*t, gamma, 0.9)[0], gae(*t, gamma.expand(4, 20, 1), 0.9)[0])
    assert torch.equal(gae(*t, 0.99, 0.9)[0], gae(*t, torch.tensor(0.99), 0.9)[0])
    assert torch.equal(gae(*t, 1, 1)[0], gae(*t, 1.0, 1.0)[0])


def test_mixed_float_dtypes_are_promoted():
    t = random_trajectory((4, 20, 1), torch.float32)
    assert gae(t.reward, t.value.bfloat16(), t.next_value, *t[3:], 0.9, 0.8)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": lambda x: x.squeeze(-1)}, r"value is \[4, 9\], but reward is \[4, 9, 1\].*value.unsqueeze\(-1\)"),
        ({"reward": lambda x: x.squeeze(-1)}, r"value is \[4, 9, 1\], but reward is \[4, 9\].*reward.unsqueeze"),
        ({"done": lambda x: x[:1]}, r"done is \[1, 9, 1\].*Nothing is broadcast"),
        ({"done": lambda x: x.float()}, r"done is torch.float32, expected bool or an integer.*done.bool\(\)"),
        ({"reward": lambda x: x.long()}, r"reward is torch.int64, expected float32.*reward.float\(\)"),
        ({"terminated": lambda x: x.tolist()}, r"terminated is a list, expected a torch.Tensor"),
        ({"value": lambda x: x.to("meta")}, r"value is on meta, but reward is on cpu"),
        ({"gamma": lambda x: torch.ones(5, 1)}, r"gamma is \[5, 1\] and does not broadcast to reward \[4, 9, 1\]"),
        ({"lmbda": lambda x: torch.ones(1, 4, 9, 1)}, r"lmbda is \[1, 4, 9, 1\] and does not broadcast"),
        ({"gamma": lambda x: torch.tensor(True)}, r"gamma is torch.bool, expected a float"),
        ({"time_dim": lambda x: 3}, r"time_dim=3 is not a dimension of reward \[4, 9, 1\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(change, message):
    arguments = random_trajectory((4, 9, 1))._asdict() | {"gamma": 0.9, "lmbda": 0.9, "time_dim": -2}
    arguments |= {name: edit(arguments[name]) for name, edit in change.items()}
    with pytest.raises(SpecError, match=message):
        gae(**arguments)


def test_vector_without_trailing_one_names_the_right_time_dim():
    with pytest.raises(SpecError, match=r"time_dim=-2 is not a dimension of reward \[9\].*time_dim=-1"):
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("shape", "time_dim"), [((9, 600, 1), -2), ((1, 900, 1), -2), ((600, 40, 1), 0)], ids=str)
def test_non_finite_values_stay_on_their_side_of_a_cut(shape, time_dim, bad):
    t = random_trajectory(shape)
    clean = gae(*t, 0.9, 0.8, time_dim=time_dim)
    hidden = t._replace(next_value=t.next_value.masked_fill(t.terminated, bad))
    assert torch.equal(gae(*hidden, 0.9, 0.8, time_dim=time_dim)[0], clean[0])
    # Another trajectory's reward is lost: steps before its start keep their advantages.
    cut = t.done.clone()
    cut.select(time_dim, 299).fill_(True)
    lost = t.reward.clone()
    lost.narrow(time_dim, 300, 1).fill_(bad)
    before = [gae(t[0], *t[1:3], cut, t[4], 0.9, 0.8, time_dim=time_dim)[0].narrow(time_dim, 0, 300)]
    after = [gae(lost, *t[1:3], cut, t[4], 0.9, 0.8, time_dim=time_dim)[0].narrow(time_dim, 0, 300)]
    assert torch.equal(before[0], after[0])


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 has several versions")
@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_every_instruction_set_equals_the_reference(isa):
    code = """
import torch
from trajectories import random_trajectory
from graphrl.kernels import gae
from graphrl.kernels.gae.reference import gae_reference
for shape, time_dim in (((13, 1100, 1), 1), ((1, 900, 1), 1), ((60, 300), 0), ((5, 50, 3, 1), 1)):
    for dtype in (torch.float32, torch.float64):
        results = []
        for function in (gae, gae_reference):
            t = random_trajectory(shape, dtype)
            value = t.value.requires_grad_()
            out = function(t.reward, value, *t[2:], .99, .95, time_dim=time_dim)
            results.append((*out, *torch.autograd.grad(out[0].square().sum(), value)))
        for x, y in zip(*results):
            torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-4)
"""
    environment = os.environ | {"GRAPHRL_ISA": isa}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, env=environment, timeout=120)
