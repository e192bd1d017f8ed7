import pytest
import torch
from tensordict import TensorDict
from torch import nn

from graphrl.errors import GraphError
from graphrl.losses import evaluate_action
from graphrl.models import CategoricalActor, GaussianActor, TanhGaussianActor


@pytest.mark.parametrize("actor", [GaussianActor(3, 2), CategoricalActor(3, 4), TanhGaussianActor(3, 2)])
def test_log_prob_of_stored_actions_under_the_policy_of_now(actor):
    td = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5])).detach()
    node = evaluate_action(actor)
    assert node.in_keys == ["observation", "action"] and node.out_keys == ["new_log_prob", "new_entropy"]
    out = node(td.clone())
    torch.testing.assert_close(out["new_log_prob"], td["action_log_prob"], rtol=1e-4, atol=1e-4)
    assert out["new_entropy"].shape == (5,) and torch.equal(out["action"], td["action"])


def test_an_entropy_without_formula_is_estimated():
    actor = TanhGaussianActor(3, 2)
    td = actor(TensorDict(observation=torch.zeros(20_000, 3), batch_size=[20_000])).detach()
    estimate = evaluate_action(actor)(td.clone())["new_entropy"].mean()
    assert estimate.item() == pytest.approx(-td["action_log_prob"].mean().item(), abs=0.05)


def test_no_gradient_reaches_the_action():
    actor = GaussianActor(3, 2)
    td = TensorDict(observation=torch.randn(5, 3), action=torch.randn(5, 2, requires_grad=True), batch_size=[5])
    evaluate_action(actor)(td)["new_log_prob"].sum().backward()
    assert td["action"].grad is None and next(actor.parameters()).grad is not None


def test_a_network_is_no_policy():
    with pytest.raises(GraphError, match="Linear is no stochastic policy"):
        evaluate_action(nn.Linear(3, 2))
