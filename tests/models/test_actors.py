import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn
from torch.distributions import Categorical

from graphrl.errors import GraphError
from graphrl.graph import KeyedGraph
from graphrl.models import (
    Actor,
    CategoricalActor,
    GaussianActor,
    IndependentNormal,
    RunningNorm,
    TanhGaussianActor,
    TanhNormal,
)

ACTORS = {
    "gaussian": lambda **k: GaussianActor(3, 2, **k),
    "gaussian, state-dependent": lambda **k: GaussianActor(3, 2, state_dependent_std=True, **k),
    "tanh": lambda **k: TanhGaussianActor(3, 2, low=-2.0, high=1.0, **k),
    "categorical": lambda **k: CategoricalActor(3, 4, **k),
}


@pytest.fixture(params=ACTORS)
def make(request):
    return ACTORS[request.param]


def batch(*size):
    return TensorDict(observation=torch.randn(*size, 3), batch_size=size)


def test_writes_parameters_action_and_its_log_prob(make):
    actor = make()
    td = actor(batch(5))
    assert actor.in_keys == ["observation"] and actor.out_keys[-2:] == ["action", "action_log_prob"]
    assert set(td.keys()) == {"observation", *actor.out_keys}
    torch.testing.assert_close(td["action_log_prob"], actor.get_dist(td).log_prob(td["action"]), rtol=1e-4, atol=1e-4)
    assert td["action_log_prob"].shape == (5,)


@pytest.mark.parametrize("size", [(), (0,), (1,), (2, 3)])
def test_any_batch_size(make, size):
    assert make()(batch(*size))["action_log_prob"].shape == size


def test_without_noise_the_action_is_the_mode(make):
    actor, td = make(), batch(5)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        first, second = actor(td.clone())["action"], actor(td.clone())["action"]
    assert torch.equal(first, second) and torch.equal(first, actor.get_dist(td).mode)
    actions = torch.stack([actor(td.clone())["action"] for _ in range(20)])
    assert (actions != actions[0]).any()  # and drawn by default


def test_keys_stay_beside_a_nested_action(make):
    actor = make(in_keys=[("agents", "observation")], action_key=("agents", "action"))
    assert actor.in_keys == [("agents", "observation")]
    assert actor.out_keys[-2:] == [("agents", "action"), ("agents", "action_log_prob")]
    assert all(key[0] == "agents" for key in actor.out_keys)
    td = TensorDict(agents=TensorDict(observation=torch.randn(5, 2, 3), batch_size=[5, 2]), batch_size=[5])
    assert actor(td)["agents", "action_log_prob"].shape == (5, 2)


def test_several_observations_are_joined():
    actor = GaussianActor(5, 2, in_keys=["a", "b"], normalizer=RunningNorm(5))
    assert actor.in_keys == ["a", "b"]
    assert actor(TensorDict(a=torch.randn(4, 2), b=torch.randn(4, 3), batch_size=[4]))["action"].shape == (4, 2)


def test_a_normalizer_adds_no_key_and_no_name_changes(make):
    norm = RunningNorm(3)
    with_norm, without = make(normalizer=norm), make()
    assert with_norm.out_keys == without.out_keys and with_norm.in_keys == without.in_keys
    added = set(with_norm.state_dict()) - set(without.state_dict())
    assert set(without.state_dict()) <= set(with_norm.state_dict()) and all(".normalizer." in name for name in added)
    with_norm.load_state_dict(without.state_dict(), strict=False)
    norm.update(torch.randn(100, 3) * 3 + 5)
    td = batch(5)
    normalised = TensorDict(observation=norm(td["observation"]), batch_size=[5])
    with set_interaction_type(InteractionType.DETERMINISTIC):
        assert torch.equal(with_norm(td)["action"], without(normalised)["action"])


def test_float64_observations_are_taken(make):
    actor, td = make(normalizer=RunningNorm(3)), batch(5)
    td["observation"] = td["observation"].double()
    assert actor(td)["action_log_prob"].dtype == torch.float32


def test_starts_with_the_spread_asked_for_and_nearly_blind_to_the_observation():
    for actor in (GaussianActor(3, 2, init_std=0.5), TanhGaussianActor(3, 2, init_std=0.5)):
        td = actor(batch(100))
        torch.testing.assert_close(td["scale"], torch.full((100, 2), 0.5), rtol=0.05, atol=0)
        assert td["loc"].abs().max() < 0.1
    hidden = actor[0].module.mlp[2].weight
    torch.testing.assert_close(hidden @ hidden.T, 2 * torch.eye(64), rtol=1e-4, atol=1e-4)


def test_squashed_actions_stay_in_their_box():
    actor = TanhGaussianActor(3, 2, low=torch.tensor([-1.0, 2.0]), high=torch.tensor([1.0, 3.0]), init_std=5.0)
    action = actor(batch(500))["action"]
    assert (action >= torch.tensor([-1.0, 2.0])).all() and (action <= torch.tensor([1.0, 3.0])).all()
    assert isinstance(actor.get_dist(batch(2)), TanhNormal)
    with pytest.raises(GraphError, match="must lie below"):
        TanhGaussianActor(3, 2, low=1.0, high=-1.0)


def test_takes_a_network_of_ones_own():
    actor = Actor(
        (nn.Linear(3, 8), ["pixels"], ["hidden"]),
        (nn.Linear(8, 4), ["hidden"], ["scores"]),
        distribution_class=Categorical,
        dist_keys={"logits": "scores"},
        action_key="move",
    )
    td = actor(TensorDict(pixels=torch.randn(5, 3), batch_size=[5]))
    assert actor.out_keys == ["hidden", "scores", "move", "move_log_prob"] and td["move"].dtype == torch.int64


def test_a_network_may_be_a_graph_with_hidden_keys():
    layers = (nn.Linear(3, 8), ["observation"], ["hidden"]), (nn.Linear(8, 4), ["hidden"], ["logits"])
    actor = Actor(KeyedGraph(*layers, out_keys=["logits"]), distribution_class=Categorical, dist_keys=["logits"])
    td = actor(batch(5))
    assert "hidden" not in td.keys() and torch.equal(actor.get_dist(td).log_prob(td["action"]), td["action_log_prob"])


def test_parameters_nobody_writes_are_refused():
    with pytest.raises(GraphError, match=r"IndependentNormal needs 'scale', but the network writes \['loc'\]"):
        Actor((nn.Linear(3, 2), ["observation"], ["loc"]), distribution_class=IndependentNormal)


def test_export_of_the_action_leaves_the_training_policy_as_it_was(make):
    actor = make()
    assert actor.select(out_keys=["action"]).out_keys == ["action"]
    assert actor.out_keys[-1] == "action_log_prob" and "action_log_prob" in actor(batch(3)).keys()


def test_trace_of_draw_and_gradient_equals_eager(make, trace):
    actor = make(normalizer=RunningNorm(3))
    weights = list(actor.parameters())

    def run(observation):
        td = actor(TensorDict(observation=observation, batch_size=[5]))
        return td["action"], *torch.autograd.grad(td["action_log_prob"].sum(), weights, materialize_grads=True)

    observation = torch.randn(5, 3)
    program = trace(run, observation)
    torch.manual_seed(3)
    eager = run(observation)
    torch.manual_seed(3)
    torch.testing.assert_close(program(observation), eager)
