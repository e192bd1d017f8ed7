"""A critic with a memory: its next value is one step on from the state after the root."""

import warnings

import pytest
import torch
from rollouts import chained, rollout
from tensordict import TensorDict
from torch import nn

import graphrl as grl
from graphrl.losses import GAE, TDLambdaEstimator
from graphrl.models import GRUModule, LSTMModule

KINDS = [GRUModule, LSTMModule]


def recurrent(kind, **options):
    torch.manual_seed(1)
    module = kind(3, 5, dtype=torch.float64, **options)
    head = nn.Linear(5, 1, dtype=torch.float64)
    return module, grl.KeyedGraph(module.over_time(), (head, ["features"], ["state_value"]))


def sequences(module, make=rollout, state="recurrent_state", n=3, t=6):
    """Rows whose flags start a new episode after each end, and in the middle of the first at no end of this batch's."""
    td = make(n, t, dtype=torch.float64)
    td["is_init"] = torch.zeros(n, t, 1, dtype=torch.bool)
    td["is_init"][:, 1:] = td["next", "done"][:, :-1]
    td[state] = torch.randn(n, t, *module.state_shape, dtype=torch.float64)
    td["next", state] = torch.randn(n, t, *module.state_shape, dtype=torch.float64)
    return td


def step_by_step(module, head, td):
    """Root and next values, a plain loop of single steps."""
    value, next_value = [], []
    state = td["recurrent_state"][:, 0]

    def step(x, state, is_init):
        one = TensorDict(observation=x, recurrent_state=state, is_init=is_init, batch_size=[len(x)])
        module(one)
        return head(one["features"]), one["next", "recurrent_state"]

    for t in range(td.shape[1]):
        v, state = step(td["observation"][:, t], state, td["is_init"][:, t])
        w, _ = step(td["next", "observation"][:, t], state, torch.zeros_like(td["is_init"][:, t]))
        value.append(v), next_value.append(w)
    return torch.stack(value, 1), torch.stack(next_value, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_next_value_is_one_step_from_the_state_after_the_root(kind):
    module, critic = recurrent(kind)
    td = sequences(module)
    assert td["next", "done"][:, :-1].any() and (td["next", "done"] & ~td["next", "terminated"])[:, :-1].any()
    before = td.clone()
    estimator = GAE(critic)
    out = estimator(td)
    wanted = step_by_step(module, critic[1], before)
    torch.testing.assert_close((out["state_value"], out["next", "state_value"]), wanted)
    assert ("next", "recurrent_state") not in estimator.in_keys and ("next", "is_init") not in estimator.in_keys
    for key in before.keys(True, True):
        assert torch.equal(out[key], before[key]), key
    assert "features" not in out.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_time_may_be_the_first_dim_and_data_transposed(kind):
    module, critic = recurrent(kind)
    td = sequences(module)
    wanted = GAE(critic)(td.clone())["advantage"]
    turned = GAE(critic, time_dim=0)(td.transpose(0, 1).clone())["advantage"]
    torch.testing.assert_close(turned.transpose(0, 1), wanted)
    view = td.transpose(0, 1).contiguous().transpose(0, 1)
    assert not view["observation"].is_contiguous()
    torch.testing.assert_close(GAE(critic)(view.clone(False))["advantage"], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_over_a_chain_equals_two_calls(kind):
    module, critic = recurrent(kind)
    td = sequences(module, chained)
    wanted = GAE(critic)(td.clone())["advantage"]
    torch.testing.assert_close(GAE(critic, shifted=True)(td.clone())["advantage"], wanted)
    td["is_init"][0, 3], td["next", "terminated"][0, 2] = True, False
    with pytest.raises(grl.errors.SpecError, match="shifted=True"):
        GAE(critic, shifted=True)(td)


def test_keys_of_its_own_are_found():
    module, critic = recurrent(GRUModule, state_key="memory", is_init_key="fresh")
    td = sequences(module, state="memory")
    td["fresh"] = td.pop("is_init")
    estimator = GAE(critic)
    assert not {("next", "fresh"), ("next", "memory")} & set(estimator.in_keys)
    twin = td.clone().rename_key_("memory", "recurrent_state").rename_key_("fresh", "is_init")
    wanted = step_by_step(recurrent(GRUModule)[0], critic[1], twin)
    out = estimator(td)
    torch.testing.assert_close((out["state_value"], out["next", "state_value"]), wanted)


def test_a_missing_terminal_observation_reaches_no_gradient():
    module, critic = recurrent(LSTMModule)
    td = sequences(module)
    td["next", "observation"][td["next", "terminated"].squeeze(-1)] = float("nan")
    out = TDLambdaEstimator(critic, differentiable=True)(td)
    out["advantage"].sum().backward()
    assert out["advantage"].isfinite().all()
    assert all(p.grad.isfinite().all() for p in critic.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_is_eager(kind):
    module, critic = recurrent(kind)
    td = sequences(module, t=3)
    estimator = GAE(critic, differentiable=True)
    fast = grl.compile(estimator, backend="eager", strict=True)
    results = []
    for run in (estimator, fast):
        critic.zero_grad()
        out = run(td.clone())
        out["value_target"].square().sum().backward()
        results.append([out["advantage"], *(p.grad for p in critic.parameters())])
    torch.testing.assert_close(*results)
    assert len(fast.entries()) == 1


@pytest.fixture(params=["LSTM", "GRU"])
def foreign(request):
    """A critic on torchrl's recurrent module, over sequences, and its state keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = pytest.importorskip("torchrl.modules")
        options = {"input_size": 3, "hidden_size": 5, "in_key": "observation", "out_key": "features"}
        torch.manual_seed(1)
        module = getattr(modules, f"{request.param}Module")(default_recurrent_mode=True, **options)
        states = [key for key in module.in_keys if "recurrent" in key]
        head = nn.Linear(5, 1)
        critic = grl.KeyedGraph(module, (head, ["features"], ["state_value"]))
        yield modules, module, head, critic, states


def foreign_rows(states, make=rollout):
    td = make(3, 6)
    td["is_init"] = torch.zeros(3, 6, 1, dtype=torch.bool)
    td["is_init"][:, 1:] = td["next", "done"][:, :-1]
    for key in states:  # as a collector stores them: none where an episode starts
        td[key] = torch.randn(3, 6, 1, 5) * ~td["is_init"].unsqueeze(-1)
    return td


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["plain", "memory map", "transposed"])
def test_torchrls_recurrent_modules_are_critics(foreign, layout, tmp_path):
    modules, module, head, critic, states = foreign
    td = foreign_rows(states)
    before = td.clone()
    if layout == "memory map":
        td.memmap(tmp_path)
        td = TensorDict.load_memmap(tmp_path).copy()
    elif layout == "transposed":
        td = td.transpose(0, 1).contiguous().transpose(0, 1).clone(False)
        assert not td["observation"].is_contiguous()
    out = GAE(critic)(td)
    value, next_value = [], []
    with modules.set_recurrent_mode(False), torch.no_grad():
        held = {key: before[key][:, 0] for key in states}
        for t in range(6):
            for place, into, fresh in ((before, value, before["is_init"][:, t]), (before["next"], next_value, None)):
                one = TensorDict(observation=place["observation"][:, t], **held, batch_size=[3])
                one["is_init"] = torch.zeros(3, 1, dtype=torch.bool) if fresh is None else fresh
                module(one)
                into.append(head(one["features"]))
                if place is before:
                    held = {key: one["next", key] for key in states}
    torch.testing.assert_close(out["state_value"], torch.stack(value, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out["next", "state_value"], torch.stack(next_value, 1), rtol=1e-5, atol=1e-6)
    for key in before.keys(True, True):
        assert torch.equal(out[key], before[key]), key


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_torchrls_recurrent_critic_in_one_pass_and_compiled(foreign):
    *_, critic, states = foreign
    td = foreign_rows(states, chained)
    wanted = GAE(critic)(td.clone())["advantage"]
    torch.testing.assert_close(GAE(critic, shifted=True)(td.clone())["advantage"], wanted, rtol=1e-5, atol=1e-6)
    fast = grl.compile(GAE(critic), backend="eager", strict=True)
    torch.testing.assert_close(fast(td[:, :3].clone())["advantage"], GAE(critic)(td[:, :3].clone())["advantage"])


def test_a_shorter_row_ends_with_the_state_of_its_own_run():
    """The state after step 2 of a row that starts anew at 3 is that of a run of three steps."""
    module, critic = recurrent(LSTMModule)
    td = sequences(module, n=1, t=5)
    td["is_init"].zero_()
    td["is_init"][0, 3] = True
    whole, alone = critic(td.clone()), critic(td[:, :3].clone())
    torch.testing.assert_close(whole["next", "recurrent_state"][:, 2], alone["next", "recurrent_state"][:, -1])
    assert whole["next", "recurrent_state"][:, 2].abs().min() > 0
