"""Batches and critics that the tests of estimators share."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn


class Identity(nn.Module):
    """The value of an observation is the observation itself; counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def identity():
    return TensorDictModule(Identity(), in_keys=["observation"], out_keys=["state_value"])


def steps(root, following, reward, done=None, terminated=None):
    """A batch of one trajectory from lists, [T, 1]."""

    def column(x, dtype=torch.float64):
        return torch.tensor(x, dtype=dtype).unsqueeze(-1)

    size = [len(root)]
    over = [0] * len(root)
    return TensorDict(
        observation=column(root),
        next=TensorDict(
            observation=column(following),
            reward=column(reward),
            done=column(done or over, torch.bool),
            terminated=column(terminated or over, torch.bool),
            batch_size=size,
        ),
        batch_size=size,
    )


def rollout(n=3, t=8, dtype=torch.float32, ends=0.15):
    """Random rows [n, t]: next states are no following roots."""
    terminated = torch.rand(n, t, 1) < ends
    return TensorDict(
        observation=torch.randn(n, t, 3, dtype=dtype),
        next=TensorDict(
            observation=torch.randn(n, t, 3, dtype=dtype),
            reward=torch.randn(n, t, 1, dtype=dtype),
            done=terminated | (torch.rand(n, t, 1) < ends),
            terminated=terminated,
            batch_size=[n, t],
        ),
        batch_size=[n, t],
    )


def chained(n=3, t=8, dtype=torch.float32):
    """A rollout without truncations: each next state is the following root, but where the step terminated."""
    td = rollout(n, t, dtype)
    td["next", "done"] = td["next", "terminated"].clone()
    going_on = ~td["next", "terminated"][:, :-1]
    following = td["next", "observation"]
    following[:, :-1] = torch.where(going_on, td["observation"][:, 1:], following[:, :-1])
    return td


def with_policy(td, actor):
    """The rollout with the actions and log-probabilities of a slightly other policy than ``actor``."""
    with torch.no_grad():
        acted = actor(td.select("observation"))
    td["action"] = acted["action"]
    td["action_log_prob"] = acted["action_log_prob"] + 0.5 * torch.randn_like(acted["action_log_prob"])
    return td
