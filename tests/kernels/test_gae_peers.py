"""Side by side with TorchRL, on finite data where both are right."""

from __future__ import annotations

import pytest
import torch
from trajectories import random_trajectory

from graphrl.kernels import gae


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peer's own, at import
@pytest.mark.parametrize("end", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("shape", [(1, 30, 1), (5, 200, 1), (2, 3, 60, 1)], ids=str)
def test_equals_torchrl(shape, end):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    t = random_trajectory(shape, end=end)
    expected = functional.vec_generalized_advantage_estimate(
        0.99, 0.95, t.value, t.next_value, t.reward, t.done, t.terminated
    )
    for found, y in zip(gae(*t, 0.99, 0.95), expected, strict=True):
        torch.testing.assert_close(found, y)
