import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from graphrl.collectors import SyncCollector
from graphrl.envs import GymEnv, evaluate
from graphrl.errors import EnvError, KeyMissingError, SpecError
from graphrl.specs import Unbounded


class CountingEnv(gym.Env):
    """Observes 10 * episode + step; episode e ends after ``lengths[e]`` steps, by truncation if ``truncate``."""

    def __init__(self, lengths=(3,), truncate=False):
        self.lengths, self.truncate, self.episode = lengths, truncate, -1
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        end = self.t >= self.lengths[self.episode % len(self.lengths)]
        return self._observation(), float(self.t), end and not self.truncate, end and self.truncate, {}

    def _observation(self):
        return np.array([10.0 * self.episode + self.t], dtype=np.float32)


class ArrayPolicy:
    """The interface of a compiled graph; its outputs are one buffer that each call overwrites."""

    in_keys, out_keys = ["observation"], ["loc", "action", "action_log_prob"]

    def __init__(self, num_envs):
        self.outputs = (torch.zeros(num_envs, 2), torch.zeros(num_envs, 2), torch.zeros(num_envs))
        self.calls = 0

    def call(self, observation):
        self.calls += 1
        self.outputs[0].copy_(observation * 2)
        self.outputs[1].copy_(observation * 3)
        self.outputs[2].copy_(observation[:, 0])
        return self.outputs


class IntoPolicy(ArrayPolicy):
    def call_into(self, inputs, outputs):
        for row, value in zip(outputs, self.call(*inputs), strict=True):
            row.copy_(value)


def collect(env, policy=None, batches=1, **kwargs):
    collector = SyncCollector(env, policy, **kwargs)
    return [batch for _, batch in zip(range(batches), collector, strict=False)]


def flat(batch, key):
    return batch[key].flatten().tolist()


@pytest.mark.parametrize("truncate", [False, True])
def test_a_batch_holds_true_final_observations_and_no_dummy_rows(truncate):
    first, second = collect(GymEnv(lambda: CountingEnv((3,), truncate)), batches=2, frames_per_batch=4)
    assert first.batch_size == torch.Size([1, 4])
    assert flat(first, "observation") + flat(second, "observation") == [0, 1, 2, 10, 11, 12, 20, 21]
    nexts = flat(first, ("next", "observation")) + flat(second, ("next", "observation"))
    assert nexts == [1, 2, 3, 11, 12, 13, 21, 22]
    assert flat(first, ("next", "reward")) + flat(second, ("next", "reward")) == [1, 2, 3, 1, 2, 3, 1, 2]
    ended, other = ("truncated", "terminated") if truncate else ("terminated", "truncated")
    for batch, ends in ((first, [0, 0, 1, 0]), (second, [0, 1, 0, 0])):
        assert flat(batch, ("next", "done")) == ends == flat(batch, ("next", ended))
        assert not batch["next", other].any()
        assert not batch["done"].any() and not batch["terminated"].any() and not batch["truncated"].any()
    ids = flat(first, ("collector", "traj_ids")) + flat(second, ("collector", "traj_ids"))
    assert ids == [0, 0, 0, 1, 1, 1, 2, 2]


def test_rows_of_several_environments_are_reset_apart():
    lengths = iter([(2,), (5,), (3,)])
    (batch,) = collect(GymEnv(lambda: CountingEnv(next(lengths)), num_envs=3), frames_per_batch=12)
    assert batch["observation"][..., 0].tolist() == [[0, 1, 10, 11], [0, 1, 2, 3], [0, 1, 2, 10]]
    assert batch["next", "done"][..., 0].int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 3, 3], [1, 1, 1, 1], [2, 2, 2, 4]]
    assert all(value.is_contiguous() for value in batch.values(True, True))


def test_marking_the_last_row_truncated_keeps_real_ends():
    env = GymEnv(lambda: CountingEnv((2, 9)))
    (batch,) = collect(env, frames_per_batch=4, set_truncated=True)
    assert flat(batch, ("next", "done")) == [0, 1, 0, 1]
    assert flat(batch, ("next", "terminated")) == [0, 1, 0, 0]
    assert flat(batch, ("next", "truncated")) == [0, 0, 0, 1]
    (exact,) = collect(GymEnv(lambda: CountingEnv((4,))), frames_per_batch=4, set_truncated=True)
    assert flat(exact, ("next", "terminated")) == [0, 0, 0, 1] and not exact["next", "truncated"].any()


def test_frames_are_counted_exactly():
    env = GymEnv(CountingEnv, num_envs=5)
    collector = SyncCollector(env, frames_per_batch=20, total_frames=60)
    sizes = []
    for batch in collector:
        sizes.append(batch.numel())
        assert collector.frames == sum(sizes)
    assert sizes == [20, 20, 20] and len(collector) == 3 and list(collector) == []
    endless = SyncCollector(env, frames_per_batch=5)
    with pytest.raises(TypeError, match="endless"):
        len(endless)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"frames_per_batch": 145}, r"frames_per_batch=145 .*environments \(10\): the nearest valid: 140 or 150"),
        ({"frames_per_batch": 5}, "the nearest valid: 10$"),
        ({"frames_per_batch": 0}, "the nearest valid: 10$"),
        ({"frames_per_batch": 50, "total_frames": 120}, r"total_frames=120 .*\(50\): the nearest valid: 100 or 150"),
    ],
)
def test_counts_that_do_not_divide_are_refused(counts, message):
    with pytest.raises(SpecError, match=message):
        SyncCollector(GymEnv(CountingEnv, num_envs=10), **counts)


@pytest.mark.parametrize("kind", [ArrayPolicy, IntoPolicy])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_array_policy_fills_the_rows_it_writes(kind, num_envs):
    policy = kind(num_envs)
    first, second = collect(GymEnv(CountingEnv, num_envs=num_envs), policy, 2, frames_per_batch=4 * num_envs)
    assert policy.calls == 8
    for batch in (first, second):
        observation = batch["observation"]
        assert torch.equal(batch["action"], (observation * 3).expand(-1, -1, 2))
        assert torch.equal(batch["loc"], (observation * 2).expand(-1, -1, 2))
        assert torch.equal(batch["action_log_prob"], observation[..., 0])


def test_all_policy_forms_give_the_same_batch():
    torch.manual_seed(0)
    net = nn.Linear(4, 2)

    def choose(observation):
        return net(observation).argmax(-1)

    class Compiled:
        in_keys, out_keys = ["observation"], ["action"]

        def call(self, observation):
            return (choose(observation),)

    module = TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])
    policies = [Compiled(), module, lambda td: td.set("action", choose(td["observation"]))]
    batches = []
    for policy in policies:
        with GymEnv("CartPole-v1", num_envs=2, seed=3, max_episode_steps=15) as env:
            batches.append(torch.cat(collect(env, policy, 3, frames_per_batch=40), dim=-1))
    assert (batches[0] == batches[1]).all() and (batches[0] == batches[2]).all()
    assert batches[0]["next", "done"].any() and not batches[0]["action"].requires_grad


def test_a_collector_equals_a_rollout_with_the_same_actions():
    with GymEnv("Pendulum-v1", num_envs=2, seed=1, max_episode_steps=7) as env:
        batches = torch.cat(collect(env, batches=2, frames_per_batch=40), dim=-1)
    actions = iter(batches["action"].unbind(1))
    with GymEnv("Pendulum-v1", num_envs=2, seed=1, max_episode_steps=7) as env:
        expected = env.rollout(40, lambda td: td.set("action", next(actions)), break_when_any_done=False)
    assert (batches.exclude("collector") == expected).all()
    assert int(expected["next", "truncated"].sum()) == 10


def test_exploration_is_random_while_collecting():
    seen = []

    def policy(td):
        seen.append((interaction_type(), torch.is_grad_enabled()))
        return td.set("action", torch.zeros(1, 2))

    collect(GymEnv(CountingEnv), policy, frames_per_batch=1)
    assert seen == [(InteractionType.RANDOM, False)] and torch.is_grad_enabled()


def test_each_batch_owns_its_memory():
    first, second = collect(GymEnv(CountingEnv), ArrayPolicy(1), 2, frames_per_batch=4)
    kept = second.clone()
    for value in first.values(True, True):
        value.zero_()
    assert (second == kept).all()
    pointers = [value.data_ptr() for batch in (first, second) for value in batch.values(True, True)]
    assert len(set(pointers)) == len(pointers)


def test_live_weights_act_at_once_and_given_weights_are_copied():
    net = TensorDictModule(nn.Linear(1, 2), in_keys=["observation"], out_keys=["action"])
    collector = SyncCollector(GymEnv(CountingEnv), net, frames_per_batch=4)
    assert collector.rollout()["action"].any()
    for parameter in net.parameters():
        parameter.data.zero_()
    collector.update_policy_weights_()
    assert not collector.rollout()["action"].any()
    ones = TensorDict.from_module(net).data.apply(torch.ones_like)
    collector.update_policy_weights_(ones)
    batch = collector.rollout()
    assert torch.equal(batch["action"], (batch["observation"] + 1).expand(-1, -1, 2))


def test_initial_frames_are_random_to_the_row_and_keep_the_keys():
    policy = ArrayPolicy(2)
    torch.manual_seed(0)
    env = GymEnv(CountingEnv, num_envs=2)
    first, second, third = collect(env, policy, 3, frames_per_batch=8, init_random_frames=12)
    assert set(first.keys(True)) == set(second.keys(True)) == set(third.keys(True))
    random_rows = torch.cat([first, second[:, :2]], dim=1)
    assert (random_rows["action"].abs() <= 1).all() and random_rows["action"].unique().numel() == 24
    assert random_rows["loc"].isnan().all() and random_rows["action_log_prob"].isnan().all()
    for rows in (second[:, 2:], third):
        assert torch.equal(rows["action"], (rows["observation"] * 3).expand(-1, -1, 2))
        assert not rows["loc"].isnan().any()
    assert policy.calls == 1 + 2 + 4  # one to learn the keys


def test_random_collection_repeats_under_a_seed():
    def run():
        torch.manual_seed(1)
        with GymEnv("HalfCheetah-v5", seed=2) as env:
            return torch.cat(collect(env, batches=2, frames_per_batch=30), dim=-1)

    assert (run() == run()).all()


def test_reset_at_each_iter_starts_new_episodes():
    first, second = collect(GymEnv(lambda: CountingEnv((9,))), batches=2, frames_per_batch=3, reset_at_each_iter=True)
    assert flat(second, "observation") == [10, 11, 12]
    assert flat(first, ("collector", "traj_ids")) + flat(second, ("collector", "traj_ids")) == [0, 0, 0, 1, 1, 1]


def test_an_evaluation_in_between_ends_the_collectors_episodes():
    env = GymEnv(lambda: CountingEnv((9,)))
    collector = SyncCollector(env, frames_per_batch=3)
    collector.rollout()
    evaluate(env, None, 1)
    batch = collector.rollout()
    root = flat(batch, "observation")
    assert root[0] % 10 == 0 and flat(batch, ("next", "observation")) == [x + 1 for x in root]


def test_episode_statistics_span_batches():
    collector = SyncCollector(GymEnv(lambda: CountingEnv((3, 5))), frames_per_batch=2, total_frames=20)
    for _ in collector:
        pass
    assert list(collector.episode_lengths) == [3, 5, 3, 5, 3]
    assert list(collector.episode_returns) == [6.0, 15.0, 6.0, 15.0, 6.0]


def test_counters_resume_from_a_state_dict():
    def make():
        return SyncCollector(GymEnv(lambda: CountingEnv((3,))), frames_per_batch=4, total_frames=12)

    first = make()
    first.rollout()
    second = make()
    second.load_state_dict(first.state_dict())
    batches = list(second)
    assert len(batches) == 2 and second.frames == 12
    assert list(second.episode_lengths)[:1] == list(first.episode_lengths)
    assert flat(batches[0], ("collector", "traj_ids"))[0] > 1


def test_an_interrupt_leaves_the_collector_usable():
    class Interrupted(ArrayPolicy):
        def call(self, observation):
            if self.calls == 6:
                self.calls += 1
                raise KeyboardInterrupt
            return super().call(observation)

    collector = SyncCollector(lambda: GymEnv(lambda: CountingEnv((9,))), Interrupted(1), frames_per_batch=4)
    kept = collector.rollout()
    with pytest.raises(KeyboardInterrupt):
        collector.rollout()
    assert collector.frames == 4 and torch.is_grad_enabled()
    batch = collector.rollout()
    assert flat(batch, "observation") == [10, 11, 12, 13] and collector.frames == 8
    assert flat(batch, ("collector", "traj_ids"))[0] not in flat(kept, ("collector", "traj_ids"))
    collector.shutdown()
    collector.shutdown()
    with pytest.raises(EnvError, match="is closed"):
        collector.rollout()


def test_a_given_environment_stays_open_and_postproc_sees_each_batch():
    env = GymEnv(CountingEnv)
    with SyncCollector(env, frames_per_batch=3, postproc=lambda td: td.set("seen", td["observation"])) as collector:
        assert "seen" in collector.rollout().keys()
        assert collector.set_seed(5) == 6
    assert not env.is_closed
    with pytest.raises(EnvError, match="constructor of one"):
        SyncCollector(lambda: 3, frames_per_batch=1)


def test_recurrent_state_is_carried_and_cleared():
    class Recurrent:
        in_keys, out_keys = ["observation", "memory", "is_init"], ["action", ("next", "memory")]

        def call(self, observation, memory, is_init):
            assert torch.equal(is_init[:, 0], memory[:, 0] == 0)
            return observation.expand(-1, 2), memory + 1

    lengths = iter([(3,), (4,)])
    env = GymEnv(lambda: CountingEnv(next(lengths)), num_envs=2)
    primers = {"memory": Unbounded((2, 1))}
    first, second = collect(env, Recurrent(), 2, frames_per_batch=8, primers=primers)
    both = torch.cat([first, second], dim=1)
    assert both["memory"][..., 0].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert torch.equal(both["next", "memory"], both["memory"] + 1)
    assert torch.equal(both["is_init"], both["memory"] == 0)
    random = collect(env, Recurrent(), 2, frames_per_batch=8, primers=primers, init_random_frames=16)
    assert not random[1]["memory"].any()


@pytest.mark.parametrize(
    ("in_keys", "out_keys", "outputs", "error", "message"),
    [
        (["obs"], ["action"], (torch.zeros(1, 2),), KeyMissingError, "reads 'obs'"),
        (["observatio"], ["action"], (torch.zeros(1, 2),), KeyMissingError, "Did you mean 'observation'"),
        (["observation"], ["actions"], (torch.zeros(1, 2),), KeyMissingError, "Did you mean 'actions'"),
        (["observation"], ["action", "observation"], (), SpecError, r"overwrites \['observation'\]"),
        (["observation"], ["action"], (torch.zeros(2),), SpecError, r"'action' has shape \[2\]"),
        (["observation"], ["action"], (torch.zeros(1, 3),), SpecError, r"\[1, 3\], the environment expects.*\[1, 2\]"),
        (["observation"], ["action"], (torch.zeros(1, 2).double(),), SpecError, "'action' is torch.float64"),
        (["observation"], ["action"], torch.zeros(1, 2), SpecError, "returned a Tensor; expected a tuple"),
        (["observation"], ["action", "loc"], (torch.zeros(1, 2),), SpecError, "returned 1 tensors for the 2 out_keys"),
        (["observation"], ["action"], (torch.full((1, 2), float("nan")),), SpecError, "the action holds NaN"),
    ],
)
def test_a_policy_that_does_not_fit_is_explained(in_keys, out_keys, outputs, error, message):
    class Policy:
        def call(self, *inputs):
            return outputs

    Policy.in_keys, Policy.out_keys = in_keys, out_keys
    with pytest.raises(error, match=message):
        collect(GymEnv(CountingEnv), Policy(), frames_per_batch=2)


def test_what_is_no_policy_is_refused():
    with pytest.raises(SpecError, match="the policy is a int"):
        SyncCollector(GymEnv(CountingEnv), 3, frames_per_batch=1)
    with pytest.raises(SpecError, match="returned a Tensor; expected the TensorDict"):
        collect(GymEnv(CountingEnv), lambda td: td["observation"], frames_per_batch=1)


def test_the_hot_loop_makes_no_tensordict_and_one_policy_call_per_step(monkeypatch):
    made = []
    plain = TensorDict.__init__
    monkeypatch.setattr(TensorDict, "__init__", lambda self, *a, **k: (made.append(1), plain(self, *a, **k))[1])
    collector = SyncCollector(GymEnv(CountingEnv), ArrayPolicy(1), frames_per_batch=100)
    collector.rollout()
    made.clear()
    collector.rollout()
    short = len(made)
    longer = SyncCollector(GymEnv(CountingEnv), ArrayPolicy(1), frames_per_batch=400)
    longer.rollout()
    made.clear()
    longer.rollout()
    assert len(made) == short < 10


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_a_batch_has_the_keys_and_dtypes_of_torchrl():
    collectors, envs = pytest.importorskip("torchrl.collectors"), pytest.importorskip("torchrl.envs")
    theirs = collectors.Collector(envs.GymEnv("Pendulum-v1"), None, frames_per_batch=10, total_frames=10)
    (expected,) = list(theirs)
    with GymEnv("Pendulum-v1") as env:
        (batch,) = collect(env, frames_per_batch=10)
    assert set(batch.keys(True)) == set(expected.keys(True))
    for key in expected.keys(True, True):
        assert batch[key].dtype == expected[key].dtype and batch[key].shape[1:] == expected[key].shape, key
