"""What holds for every value estimator, each against its kernel's float64 reference and against torchrl."""

import warnings

import pytest
import torch
from rollouts import chained, rollout, with_policy
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictSequential, set_interaction_type
from torch import nn

import graphrl as grl
from graphrl.errors import GraphError, KeyMissingError
from graphrl.kernels.gae.reference import gae_reference
from graphrl.kernels.td_lambda.reference import td_lambda_reference
from graphrl.kernels.vtrace.reference import vtrace_reference
from graphrl.losses import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from graphrl.models import GaussianActor, ValueCritic

ACTOR = GaussianActor(3, 2, num_cells=[8])
LAMBDA = {"GAE": 0.9, "TD0": 0.0, "TD1": 1.0, "TDLambda": 0.9, "VTrace": 0.9}
ESTIMATORS = {
    "GAE": lambda critic, **o: GAE(critic, **{"gamma": 0.97, "lmbda": 0.9, **o}),
    "TD0": lambda critic, **o: TD0Estimator(critic, **{"gamma": 0.97, **o}),
    "TD1": lambda critic, **o: TD1Estimator(critic, **{"gamma": 0.97, **o}),
    "TDLambda": lambda critic, **o: TDLambdaEstimator(critic, **{"gamma": 0.97, "lmbda": 0.9, **o}),
    "VTrace": lambda critic, **o: VTrace(critic, ACTOR, **{"gamma": 0.97, "lmbda": 0.9, **o}),
}
AVERAGE = {"GAE": "average_gae", "VTrace": "average_adv"}


@pytest.fixture(params=ESTIMATORS)
def kind(request):
    return request.param


def critic_of(dtype=torch.float32):
    return ValueCritic(3, num_cells=[8], dtype=dtype)


def batch(make=rollout, **options):
    return with_policy(make(**options), ACTOR)


def expected(kind, td, critic, gamma=0.97):
    """Advantage and target from the kernel's float64 reference, on the critic's own values."""
    with torch.no_grad():
        value, next_value = critic(td["observation"]), critic(td["next", "observation"])
        ratio = (ACTOR.get_dist(td).log_prob(td["action"]) - td["action_log_prob"]).exp().unsqueeze(-1)
    reward, done, terminated = (td["next", key] for key in ("reward", "done", "terminated"))
    if kind == "GAE":
        return gae_reference(reward, value, next_value, done, terminated, gamma, 0.9)
    if kind == "VTrace":
        return vtrace_reference(reward, value, next_value, done, terminated, ratio, gamma, 0.9)
    target = td_lambda_reference(reward, next_value, done, terminated, gamma, LAMBDA[kind])
    return target - value, target


def close(td, pair, rtol=1e-5, atol=1e-5):
    for key, wanted in zip(("advantage", "value_target"), pair, strict=True):
        torch.testing.assert_close(td[key].double(), wanted.double(), rtol=rtol, atol=atol)


def test_is_the_reference_on_the_critics_values(kind):
    critic, td = critic_of(), batch(ends=0.3)
    before = set(td.keys(True, True))
    out = ESTIMATORS[kind](critic)(td)
    assert out is td and set(td.keys(True, True)) - before == {
        "state_value", ("next", "state_value"), "advantage", "value_target"}  # fmt: skip
    close(td, expected(kind, td, critic))
    torch.testing.assert_close(td["next", "state_value"], critic(td["next", "observation"]))
    assert not td["advantage"].requires_grad and not td["state_value"].requires_grad


def test_differentiable_reaches_critic_rewards_and_discounts(kind):
    critic, gamma = critic_of(), nn.Parameter(torch.tensor(0.97))
    td = batch()
    td["next", "reward"].requires_grad_()
    lmbda = {"lmbda": nn.Parameter(torch.tensor(0.9))} if kind in ("GAE", "TDLambda", "VTrace") else {}
    estimator = ESTIMATORS[kind](critic, gamma=gamma, **lmbda, differentiable=True)
    assert sum(p is gamma for p in estimator.parameters()) == 1
    estimator(td)["value_target"].sum().backward()
    assert gamma.grad.abs() > 0 and all(p.grad.abs() > 0 for p in lmbda.values())
    assert td["next", "reward"].grad.abs().sum() > 0
    assert all(p.grad is not None for p in critic.parameters()) and all(p.grad is None for p in ACTOR.parameters())


def test_discounts_are_live_and_in_the_state_dict_from_the_start(kind):
    critic, td = critic_of(), batch()
    estimator = ESTIMATORS[kind](critic, gamma=0.5)
    names = list(estimator.state_dict())
    estimator.gamma.fill_(0.97)
    close(estimator(td), expected(kind, td, critic))
    assert list(estimator.state_dict()) == names
    fresh = ESTIMATORS[kind](critic_of(), gamma=0.1)
    fresh.load_state_dict(estimator.state_dict(), strict=True)
    assert fresh.gamma.item() == 0.97


def test_a_discount_may_differ_from_step_to_step(kind):
    critic, td = critic_of(), batch()
    gamma = torch.rand(8, 1)
    close(ESTIMATORS[kind](critic, gamma=gamma)(td), expected(kind, td, critic, gamma))


def test_padding_under_a_mask_changes_nothing(kind):
    critic = critic_of()
    options = {"differentiable": True, AVERAGE.get(kind, "average_rewards"): True}
    whole = batch(n=2, t=5)
    padded = TensorDict({}, batch_size=[2, 9])
    for key in whole.keys(True, True):
        x = whole[key]
        fill = torch.full_like(x[:, :1], float("nan")) if x.is_floating_point() else torch.zeros_like(x[:, :1])
        padded[key] = torch.cat([x, fill.expand(2, 4, *x.shape[2:])], 1)
    padded["collector", "mask"] = (torch.arange(9) < 5).expand(2, 9)
    results = []
    for td, mask in ((whole, None), (padded, ("collector", "mask"))):
        critic.zero_grad()
        out = ESTIMATORS[kind](critic, mask_key=mask, **options)(td)
        (out["value_target"] * torch.arange(td.shape[1]).unsqueeze(-1)).sum().backward()
        results.append((out, [p.grad.clone() for p in critic.parameters()]))
    (plain, grads), (masked, masked_grads) = results
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(masked[key][:, :5], plain[key], rtol=1e-4, atol=1e-5)
        assert (masked[key][:, 5:] == 0).all()
    torch.testing.assert_close(masked_grads, grads, rtol=1e-4, atol=1e-5)


def test_values_already_in_the_batch_may_be_used(kind):
    critic, td = critic_of(), batch()
    wanted = ESTIMATORS[kind](critic)(td.clone())
    td["state_value"], td["next", "state_value"] = wanted["state_value"], wanted["next", "state_value"]
    estimator = ESTIMATORS[kind](critic, skip_existing=True)
    assert estimator.critic is None and "state_value" in estimator.in_keys
    before = td["state_value"].clone()
    out = estimator(td.clone())
    assert torch.equal(out["advantage"], wanted["advantage"]) and torch.equal(out["state_value"], before)
    with pytest.raises(KeyMissingError, match="state_value"):
        estimator(batch())


def test_one_call_over_a_chain_gives_what_two_calls_give(kind):
    critic, td = critic_of(), batch(chained)
    close(ESTIMATORS[kind](critic, shifted=True)(td), expected(kind, td, critic))


def test_keys_are_set_by_role(kind):
    critic, td = critic_of(), batch()
    estimator = ESTIMATORS[kind](critic, mask_key="mask")
    estimator.set_keys(advantage="adv", value_target="ret", reward=("agents", "reward"), done="over",
                       terminated="dead", mask="valid")  # fmt: skip
    wanted = expected(kind, td, critic)
    td["next", "agents", "reward"], td["next", "over"] = td["next"].pop("reward"), td["next"].pop("done")
    td["next", "dead"], td["valid"] = td["next"].pop("terminated"), torch.ones(3, 8, 1, dtype=torch.bool)
    estimator(td)
    td["advantage"], td["value_target"] = td["adv"], td["ret"]
    close(td, wanted)


def test_a_lost_final_observation_is_said_to_be_lost(kind):
    td = batch()
    del td["next", "observation"]
    estimator = ESTIMATORS[kind](critic_of())
    for graph in (estimator, grl.KeyedGraph(estimator), grl.compile(estimator, backend="eager")):
        with pytest.raises(KeyMissingError, match="[?.] V\\(next\\) needs .*time limit.*Let the collector keep it"):
            graph(td)


def test_compiled_is_eager_with_gradients(kind):
    critic, td = critic_of(), batch()
    estimator = ESTIMATORS[kind](critic, differentiable=True)
    fast = grl.compile(estimator, backend="eager", strict=True)
    results = []
    for run in (estimator, fast):
        critic.zero_grad()
        out = run(td.clone())
        out["value_target"].square().sum().backward()
        results.append([out["advantage"], out["value_target"], *(p.grad for p in critic.parameters())])
    torch.testing.assert_close(*results)
    assert len(fast.entries()) == 1 and fast.retraces == []


def test_all_of_them_through_inductor():
    critic, td = critic_of(), batch()
    graphs = []
    for name, make in ESTIMATORS.items():
        estimator = make(critic)
        estimator.set_keys(advantage=f"{name}_advantage", value_target=f"{name}_target")
        graphs.append(estimator)
    graph = grl.KeyedGraph(*graphs, out_keys=[f"{n}_{w}" for n in ESTIMATORS for w in ("advantage", "target")])
    fast = grl.compile(graph, backend="inductor", strict=True)
    with torch.no_grad():
        out = fast(td.clone())
    for name in ESTIMATORS:
        for found, wanted in zip(("advantage", "target"), expected(name, td, critic), strict=True):
            torch.testing.assert_close(out[f"{name}_{found}"].double(), wanted.double(), rtol=1e-4, atol=1e-5)


def test_data_from_a_memory_map_and_the_lock_are_respected(kind, tmp_path):
    critic, td = critic_of(), batch()
    td.memmap(tmp_path)
    mapped = TensorDict.load_memmap(tmp_path).lock_()
    with pytest.raises((GraphError, RuntimeError), match="locked"):
        ESTIMATORS[kind](critic)(mapped)
    assert mapped.is_locked and "advantage" not in mapped.keys()
    copied = ESTIMATORS[kind](critic)(mapped.copy())
    close(copied, expected(kind, td, critic))
    turned = ESTIMATORS[kind](critic, time_dim=0)(mapped.copy().transpose(0, 1))
    torch.testing.assert_close(turned["advantage"].transpose(0, 1), copied["advantage"])


@pytest.mark.parametrize("gamma", [-0.1, 1.5, float("nan")])
def test_what_is_no_discount_is_refused(kind, gamma):
    with pytest.raises(GraphError, match=f"{type(ESTIMATORS[kind](critic_of())).__name__}: gamma="):
        ESTIMATORS[kind](critic_of(), gamma=gamma)


def test_average_rewards_normalises_them_and_leaves_the_batch_its_own():
    critic, td = critic_of(), batch()
    reward = td["next", "reward"].clone()
    out = TDLambdaEstimator(critic, gamma=0.97, lmbda=0.9, average_rewards=True)(td.clone())
    assert torch.equal(out["next", "reward"], reward)
    td["next", "reward"] = (reward - reward.mean()) / reward.std()
    close(out, expected("TDLambda", td, critic))


@pytest.mark.peers
@pytest.mark.parametrize("average", [False, True])
def test_equals_torchrls_module(kind, average):
    """Its V-trace weighs a new action of the policy, not the batch's: the two are one where both are the mode."""
    with warnings.catch_warnings(), set_interaction_type(InteractionType.DETERMINISTIC):
        warnings.simplefilter("ignore")
        peers = pytest.importorskip("torchrl.objectives.value")
        critic, td = critic_of(), batch(n=4, t=20, ends=0.3)
        td["action"] = ACTOR(td.select("observation"))["action"].detach()
        options = {AVERAGE.get(kind, "average_rewards"): average}
        actor = ProbabilisticTensorDictSequential(*ACTOR)
        theirs = {
            "GAE": lambda: peers.GAE(gamma=0.97, lmbda=0.9, value_network=critic, **options),
            "TD0": lambda: peers.TD0Estimator(gamma=0.97, value_network=critic, **options),
            "TD1": lambda: peers.TD1Estimator(gamma=0.97, value_network=critic, **options),
            "TDLambda": lambda: peers.TDLambdaEstimator(gamma=0.97, lmbda=0.9, value_network=critic, **options),
            "VTrace": lambda: peers.VTrace(gamma=0.97, value_network=critic, actor_network=actor, **options),
        }[kind]()(td.clone())
    if kind == "VTrace":
        options["lmbda"] = 1.0  # torchrl's has none
    ours = ESTIMATORS[kind](critic, **options)(td.clone())
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)
