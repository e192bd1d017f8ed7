import copy
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from graphrl.errors import GraphError, SpecError
from graphrl.graph import KeyedGraph
from graphrl.losses import PPOLoss
from graphrl.models import (
    MLP,
    Actor,
    CategoricalActor,
    GaussianActor,
    GaussianHead,
    IndependentNormal,
    TanhGaussianActor,
    Trunk,
    ValueCritic,
)

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
ACTORS = {
    "gaussian": lambda: GaussianActor(3, 2, num_cells=[8]),
    "tanh": lambda: TanhGaussianActor(3, 2, num_cells=[8]),
    "categorical": lambda: CategoricalActor(3, 4, num_cells=[8]),
}


def batch(actor, n=16):
    """What a slightly older policy collected."""
    with torch.no_grad():
        td = actor(TensorDict(observation=torch.randn(n, 3), batch_size=[n]))
        td["action_log_prob"] += 0.3 * torch.randn(n)
        for key in ("advantage", "value_target", "state_value"):
            td[key] = torch.randn(n, 1)
    return td


def total(out):
    return sum(out[key] for key in LOSSES if key in out.keys())


def gradients(out, module):
    return torch.autograd.grad(total(out), list(module.parameters()), materialize_grads=True)


@pytest.fixture(params=ACTORS)
def actor(request):
    return ACTORS[request.param]()


def test_reads_and_returns_what_it_says(actor):
    loss, td = PPOLoss(actor, ValueCritic(3)), batch(actor)
    before = td.clone()
    out = loss(td)
    assert set(loss.in_keys) == {"observation", "action", "action_log_prob", "advantage", "value_target"}
    assert set(out.keys()) == {*LOSSES, "kl_approx", "clip_fraction", "ESS", "entropy", "explained_variance"}
    assert all(value.shape == () and value.isfinite() for value in out.values()) and out.batch_size == torch.Size([])
    assert {key for key in out.keys() if out[key].requires_grad} == set(LOSSES)
    assert set(td.keys()) == set(before.keys()) and (td == before).all()
    plain = dict(zip(loss.out_keys, loss(**{key: td[key] for key in loss.in_keys}), strict=True))
    assert torch.equal(plain["loss_critic"], out["loss_critic"])


def test_each_term_moves_its_own_network(actor):
    loss = PPOLoss(actor, ValueCritic(3), entropy_coeff=0.1)
    td = batch(actor)
    routes = {"loss_objective": actor, "loss_entropy": actor, "loss_critic": loss.critic}
    for term, network in routes.items():
        loss.zero_grad()
        loss(td)[term].backward()
        moved = {name for name, p in loss.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        mine = {name for name, p in loss.named_parameters() if any(p is own for own in network.parameters())}
        assert moved and moved <= mine, term
        if term != "loss_entropy":  # a Gaussian's entropy does not depend on its location
            assert moved == mine, term


def test_a_shared_trunk_is_moved_by_both_and_registered_once():
    trunk = nn.Linear(3, 8)
    shared = (trunk, ["observation"], ["hidden"])
    actor = Actor(
        shared,
        (Trunk(mlp=nn.Linear(8, 2), head=GaussianHead(2)), ["hidden"], ["loc", "scale"]),
        distribution_class=IndependentNormal,
    )
    critic = KeyedGraph(shared, (nn.Linear(8, 1), ["hidden"], ["state_value"]))
    loss, td = PPOLoss(actor, critic), batch(actor).exclude("hidden")
    parts = [torch.autograd.grad(loss(td)[key], trunk.weight)[0] for key in ("loss_objective", "loss_critic")]
    assert all(part.abs().sum() > 0 for part in parts)
    whole = torch.autograd.grad(total(loss(td)), trunk.weight)[0]
    torch.testing.assert_close(whole, parts[0] + parts[1])
    assert sum(p is trunk.weight for p in loss.parameters()) == 1


def test_terms_are_the_equations_in_float64():
    actor, critic = GaussianActor(3, 2, num_cells=[8], dtype=torch.float64), ValueCritic(3, dtype=torch.float64)
    td = batch(actor).double()
    out = PPOLoss(actor, critic, clip_epsilon=0.1, entropy_coeff=0.02, critic_coeff=0.7, loss_critic_type="l2")(td)
    dist = torch.distributions.Normal(*[actor(td.clone())[k] for k in ("loc", "scale")])
    ratio = (dist.log_prob(td["action"]).sum(-1) - td["action_log_prob"]).exp().unsqueeze(-1)
    gain = torch.min(ratio * td["advantage"], ratio.clamp(0.9, 1.1) * td["advantage"])
    torch.testing.assert_close(out["loss_objective"], -gain.mean())
    torch.testing.assert_close(out["loss_critic"], 0.7 * ((critic(td["observation"]) - td["value_target"]) ** 2).mean())
    torch.testing.assert_close(out["loss_entropy"], -0.02 * dist.entropy().sum(-1).mean())
    torch.testing.assert_close(out["clip_fraction"], ((ratio < 0.9) | (ratio > 1.1)).double().mean())


def test_clipped_critic_reads_the_value_of_acting_time():
    actor, critic = GaussianActor(3, 2), ValueCritic(3)
    loss, td = PPOLoss(actor, critic, clip_value=0.2, loss_critic_type="l2"), batch(actor)
    assert "state_value" in loss.in_keys
    value, old, target = critic(td["observation"]), td["state_value"], td["value_target"]
    near = old + (value - old).clamp(-0.2, 0.2)
    expected = torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
    torch.testing.assert_close(loss(td)["loss_critic"], expected)
    assert PPOLoss(actor, critic, clip_value=True).state_dict()["nodes.value_error.clip_value"].item() == 0.2


def test_normalized_advantage_changes_only_the_objective():
    actor, critic = GaussianActor(3, 2), ValueCritic(3)
    td = batch(actor)
    out = PPOLoss(actor, critic, normalize_advantage=True)(td)
    td["advantage"] = (td["advantage"] - td["advantage"].mean()) / td["advantage"].std()
    torch.testing.assert_close(out["loss_objective"], PPOLoss(actor, critic)(td)["loss_objective"])


def test_numbers_can_be_scheduled_and_the_entropy_left_out():
    actor, critic = GaussianActor(3, 2), ValueCritic(3)
    loss, td = PPOLoss(actor, critic), batch(actor)
    loss.clip_epsilon.fill_(1e-4), loss.entropy_coeff.fill_(0.0), loss.critic_coeff.fill_(0.0)
    out = loss(td)
    assert out["clip_fraction"] > 0.9 and out["loss_entropy"] == 0 and out["loss_critic"] == 0
    assert "loss_entropy" not in PPOLoss(actor, critic, entropy_bonus=False)(td).keys()


def test_state_dict_is_whole_from_the_start(actor):
    loss = PPOLoss(actor, ValueCritic(3))
    before = set(loss.state_dict())
    loss(batch(actor))
    PPOLoss(copy.deepcopy(actor), ValueCritic(3)).load_state_dict(loss.state_dict(), strict=True)
    assert set(loss.state_dict()) == before
    assert len(list(loss.parameters())) == len(list(actor.parameters())) + len(list(loss.critic.parameters()))


def test_keys_can_be_set_by_role():
    actor = GaussianActor(3, 2)
    loss, td = PPOLoss(actor, ValueCritic(3)), batch(actor)
    expected = loss(td)["loss_objective"]
    loss.set_keys(advantage="adv", action="deed", sample_log_prob="old_log_prob")
    for old, new in (("advantage", "adv"), ("action", "deed"), ("action_log_prob", "old_log_prob")):
        td.rename_key_(old, new)
    assert torch.equal(loss(td)["loss_objective"], expected)


def test_keys_of_a_cut_loss_are_its_own():
    loss, td = PPOLoss(GaussianActor(3, 2), ValueCritic(3)), batch(GaussianActor(3, 2))
    expected = loss(td)["loss_critic"]
    cut = loss.select("loss_critic")
    cut.set_keys(value_target="ret")
    assert torch.equal(loss(td)["loss_critic"], expected)
    td["ret"] = td["value_target"] + 1
    assert not torch.equal(cut(td)["loss_critic"], expected)
    cut.set_keys(value_target="value_target")
    assert torch.equal(cut(td)["loss_critic"], expected)
    assert cut.term("value_error").option("critic_coeff") is loss.critic_coeff
    with pytest.raises(GraphError, match="build the critic with value_key"):  # it would train on the batch's values
        loss.set_keys(value="v")


def test_agents_keep_their_dimension():
    actor = GaussianActor(3, 2, in_keys=[("agents", "observation")], action_key=("agents", "action"))
    critic = ValueCritic(3, in_keys=[("agents", "observation")], value_key=("agents", "state_value"))
    loss = PPOLoss(actor, critic)
    loss.set_keys(advantage=("agents", "advantage"), value_target=("agents", "value_target"))
    td = TensorDict(agents=TensorDict(observation=torch.randn(5, 2, 3), batch_size=[5, 2]), batch_size=[5])
    with torch.no_grad():
        actor(td)
    td["agents", "advantage"], td["agents", "value_target"] = torch.randn(5, 2, 1), torch.randn(5, 2, 1)
    assert loss(td)["loss_objective"].shape == ()


def test_shapes_that_do_not_pair_up_are_refused():
    actor = GaussianActor(3, 2)
    loss = PPOLoss(actor, ValueCritic(3))
    for key in ("advantage", "value_target"):
        td = batch(actor)
        td[key] = td[key].squeeze(-1)
        with pytest.raises(SpecError, match=key):
            loss(td)
    td = batch(actor)
    td["action_log_prob"] = td["action_log_prob"].unsqueeze(-1)
    with pytest.raises(SpecError, match="sample_log_prob='action_log_prob'"):
        loss(td)


@pytest.mark.parametrize(
    "options", [{"clip_epsilon": 0.0}, {"clip_epsilon": 1.5}, {"loss_critic_type": "l1"}, {"actor": nn.Linear(3, 2)}]
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(GraphError):
        PPOLoss(**{"actor": GaussianActor(3, 2), "critic": ValueCritic(3), **options})


def test_running_statistics_of_a_critic_are_the_users_own():
    bn = nn.BatchNorm1d(3)
    critic = KeyedGraph((nn.Sequential(bn, nn.Linear(3, 1)), ["observation"], ["state_value"]))
    actor = GaussianActor(3, 2)
    td = batch(actor)
    td["observation"] = torch.full((16, 3), 2.0)
    PPOLoss(actor, critic)(td)
    assert bn.running_mean.tolist() == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("options", [{}, {"clip_value": 0.2, "normalize_advantage": True, "loss_critic_type": "l2"}])
def test_trace_of_loss_and_gradient_equals_eager(actor, options, trace):
    loss = PPOLoss(actor, ValueCritic(3, num_cells=[8]), **options)
    td = batch(actor)
    keys = list(loss.in_keys)

    def run(*tensors):
        out = loss(TensorDict(dict(zip(keys, tensors, strict=True)), batch_size=[16]))
        return *out.values(), *gradients(out, loss)

    inputs = [td[key] for key in keys]
    program = trace(run, *inputs)
    torch.manual_seed(5)
    eager = run(*inputs)
    torch.manual_seed(5)
    torch.testing.assert_close(program(*inputs), eager)


def tensordict_actor():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(MLP(3, 4, num_cells=[8]), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
            log_prob_key="action_log_prob",
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


@pytest.mark.peers
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_critic_type": "l2", "critic_coeff": 0.5, "entropy_coeff": 0.1, "clip_epsilon": 0.1},
        {"normalize_advantage": True},
        {"clip_value": 0.2},
    ],
)
def test_losses_and_gradients_equal_torchrls_clip_ppo(options):
    actor, critic = tensordict_actor(), ValueCritic(3)
    td = batch(actor)
    ours = PPOLoss(actor, critic, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objectives = pytest.importorskip("torchrl.objectives")
        theirs = objectives.ClipPPOLoss(actor, critic, functional=False, **options)
        reference = theirs(td.clone())
    out = ours(td)
    for key in (*LOSSES, "clip_fraction", "entropy", "ESS", "explained_variance"):
        torch.testing.assert_close(out[key], reference[key].reshape(()), rtol=1e-5, atol=1e-6)
    for network in (actor, critic):
        torch.testing.assert_close(gradients(out, network), gradients(reference, network), rtol=1e-4, atol=1e-6)
        out, reference = ours(td), theirs(td.clone())
