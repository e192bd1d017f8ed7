"""Side by side with TorchRL's distributional DQN loss, whose target this projection is."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from graphrl.kernels import categorical_projection


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the peer's own, at import
@pytest.mark.parametrize(("reward", "gamma"), [(0.0, 1.0), (0.5, 0.9), (3.0, 0.99)])
def test_the_loss_of_torchrl_is_the_cross_entropy_with_this_target(reward, gamma):
    modules, objectives = pytest.importorskip("torchrl.modules"), pytest.importorskip("torchrl.objectives")
    atoms, actions, rows = 21, 3, 40
    support = torch.linspace(-4, 4, atoms)
    network = torch.nn.Sequential(
        torch.nn.Linear(5, atoms * actions), torch.nn.Unflatten(-1, (atoms, actions)), torch.nn.LogSoftmax(-2)
    )
    actor = modules.DistributionalQValueActor(network, support, action_space="one-hot")
    loss = objectives.DistributionalDQNLoss(actor, gamma=gamma, delay_value=False, reduction="none")
    observation, following, index = torch.randn(rows, 5), torch.randn(rows, 5), torch.randint(actions, (rows,))
    rewards, terminated = reward + torch.zeros(rows, 1), torch.rand(rows, 1) < 0.3
    batch = {"observation": observation, "action": torch.nn.functional.one_hot(index, actions)}
    batch["next"] = {"observation": following, "reward": rewards, "done": terminated, "terminated": terminated}
    found = loss(TensorDict(batch, [rows]))["loss"]

    with torch.no_grad():
        next_probs = network(following).exp()
        best = (next_probs * support[:, None]).sum(-2).argmax(-1)
        chosen = next_probs[torch.arange(rows), :, best]
        target = categorical_projection(chosen, rewards, terminated, gamma, support)
        log_probs = network(observation)[torch.arange(rows), :, index]
    torch.testing.assert_close(found.detach(), -(target * log_probs).sum(-1))
