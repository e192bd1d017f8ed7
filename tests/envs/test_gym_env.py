import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from graphrl.envs import GymEnv, StepBuffers, check_env_specs, step_mdp
from graphrl.errors import EnvError, MissingExtraError, SpecError
from graphrl.specs import Binary, Bounded, Categorical, MultiCategorical, Unbounded


class CountingEnv(gym.Env):
    """Observes 10 * episode + step; ends after ``length`` steps by termination or truncation."""

    def __init__(self, length=3, truncate=False, action_space=None):
        self.length, self.truncate, self.episode, self.seeds, self.actions = length, truncate, -1, [], []
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = action_space or spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        end = self.t >= self.length
        return self._observation(), np.float64(self.t), end and not self.truncate, end and self.truncate, {}

    def _observation(self):
        return np.array([10.0 * self.episode + self.t])


class SpaceEnv(gym.Env):
    """Any observation and action space, sampled at random."""

    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), np.array([1.0]), bool(self.np_random.random() < 0.2), False, {}


def zero_actions(env):
    return TensorDict({"action": env.action_spec.zero()}, batch_size=env.batch_size)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1", "HalfCheetah-v5"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_real_environments_do_what_their_specs_say(env_id, num_envs):
    with GymEnv(env_id, num_envs=num_envs, seed=0) as env:
        check_env_specs(env, steps=30)
        root = env.reset()
        assert root.batch_size == torch.Size([num_envs]) and root["observation"].dtype == torch.float32
        row = env.step(env.rand_action(root))
        assert row["next", "reward"].shape == (num_envs, 1) == row["next", "done"].shape
        assert row["next", "reward"].dtype == torch.float32


def test_the_control_rate_is_known_where_the_environment_says_it():
    with GymEnv("HalfCheetah-v5") as env:
        assert env.dt == pytest.approx(0.05) and env.rate_hz == pytest.approx(20.0)
        assert "rate_hz=20" in repr(env)
    with GymEnv("CartPole-v1") as env:
        assert env.dt is None and env.rate_hz is None


@pytest.mark.parametrize("truncate", [False, True])
def test_next_keeps_the_true_final_observation(truncate):
    env = GymEnv(lambda: CountingEnv(3, truncate))
    root, seen = env.reset(), []
    for _ in range(5):
        row, root = env.step_and_maybe_reset(root.update(zero_actions(env)))
        seen.append([row["observation"].item(), row["next", "observation"].item(), row["next", "done"].item()])
        assert not row["done"].item() and not root["done"].item()
        assert row["next", "terminated"].item() == (row["next", "done"].item() and not truncate)
        assert row["next", "truncated"].item() == (row["next", "done"].item() and truncate)
    assert seen == [[0, 1, False], [1, 2, False], [2, 3, True], [10, 11, False], [11, 12, False]]


def test_only_the_rows_that_ended_are_reset():
    lengths = iter([2, 5])
    env = GymEnv(lambda: CountingEnv(next(lengths)), num_envs=2)
    data = env.rollout(4, lambda td: td.update(zero_actions(env)), break_when_any_done=False)
    assert data.batch_size == torch.Size([2, 4])
    assert data["observation"][..., 0].tolist() == [[0, 1, 10, 11], [0, 1, 2, 3]]
    assert data["next", "observation"][..., 0].tolist() == [[1, 2, 11, 12], [1, 2, 3, 4]]
    assert data["next", "done"][..., 0].int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    assert [len(raw.seeds) for raw in env.envs] == [3, 1]


def test_a_reset_mask_resets_its_rows_and_keeps_the_others():
    env = GymEnv(CountingEnv, num_envs=3)
    root = env.step_and_maybe_reset(env.reset().update(zero_actions(env)))[1]
    for mask in (torch.tensor([False, True, False]), torch.tensor([[False], [True], [False]])):
        out = env.reset(root.copy().set("_reset", mask.view(3, -1)))
        assert out["observation"][:, 0].tolist()[::2] == [1, 1] and out["observation"][1, 0] >= 10
    assert len(env.envs[0].seeds) == 1 and len(env.envs[1].seeds) == 3
    with pytest.raises(SpecError, match="one flag per environment"):
        env.reset(root.copy().set("_reset", torch.ones(3, 2, dtype=torch.bool)))


def test_rollout_stops_at_the_first_end_or_goes_on_without_dummy_rows():
    env = GymEnv(lambda: CountingEnv(3))
    assert env.rollout(10).batch_size == torch.Size([1, 3])
    assert env.rollout(2).batch_size == torch.Size([1, 2])
    long = env.rollout(8, break_when_any_done=False)
    assert long["next", "reward"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert long["next", "done"].flatten().nonzero().flatten().tolist() == [2, 5]
    seen = []
    root = env.reset()
    env.rollout(2, tensordict=root, auto_reset=False, callback=lambda e, td: seen.append(td["observation"].item()))
    assert seen[1] == seen[0] + 1 == root["observation"].item() + 1
    with pytest.raises(EnvError, match="pass tensordict="):
        env.rollout(2, auto_reset=False)
    with pytest.raises(EnvError, match="at least 1"):
        env.rollout(0)


def test_the_first_reset_of_each_row_is_seeded_and_no_later_one():
    env = GymEnv(lambda: CountingEnv(1), num_envs=2, seed=7)
    env.reset()
    env.reset()
    assert [raw.seeds for raw in env.envs] == [[7, None], [8, None]]
    assert env.set_seed(20) == 22
    env.reset()
    assert [raw.seeds[-1] for raw in env.envs] == [20, 21]


def test_runs_with_one_seed_are_equal_and_differ_between_rows():
    def run(seed):
        torch.manual_seed(0)
        with GymEnv("CartPole-v1", num_envs=2, seed=seed) as env:
            return env.rollout(60, break_when_any_done=False)

    first, again, other = run(3), run(3), run(4)
    assert (first == again).all() and first["next", "done"].any()
    assert not torch.equal(first["observation"], other["observation"])
    assert torch.equal(first["observation"][1, 0], other["observation"][0, 0])  # row i is seeded with seed + i


def test_array_steps_equal_tensordict_steps():
    for make, num_envs in ((lambda: CountingEnv(3, True), 1), (lambda: CountingEnv(2), 3), ("CartPole-v1", 2)):
        torch.manual_seed(0)
        plain, arrays = (GymEnv(make, num_envs=num_envs, seed=0) for _ in range(2))
        expected = plain.rollout(40, break_when_any_done=False)
        buffers = StepBuffers(40, arrays.observation_spec, arrays.action_spec)
        buffers.root["observation"][0] = arrays.reset()["observation"]
        buffers.action.copy_(expected["action"].transpose(0, 1))
        step = arrays.bind(buffers)
        for t in range(40):
            step(t)
        assert (buffers.to_tensordict() == expected).all()


def test_box_actions_are_clipped_for_the_environment_only():
    env = GymEnv(CountingEnv)
    row = env.reset().set("action", torch.tensor([[2.0, -float("inf")]]))
    assert env.step(row)["action"].tolist() == [[2.0, -float("inf")]]
    assert env.envs[0].actions[0].tolist() == [1.0, -1.0]
    wide = GymEnv(lambda: CountingEnv(3, action_space=spaces.Box(-np.inf, np.inf, (1, 2), np.float64)))
    wide.step(wide.reset().set("action", torch.full((1, 1, 2), 1e30)))
    assert wide.envs[0].actions[0].shape == (1, 2) and wide.envs[0].actions[0].dtype == np.float64
    ints = GymEnv(lambda: CountingEnv(3, action_space=spaces.Box(0, 5, (2,), np.int32)))
    ints.step(ints.reset().set("action", torch.tensor([[9, 3]], dtype=torch.int32)))
    assert ints.envs[0].actions[0].tolist() == [5, 3]


def test_an_environment_may_keep_its_last_action():
    env = GymEnv(CountingEnv)
    action = torch.zeros(1, 2)
    env.step(env.reset().set("action", action))
    action.fill_(1.0)
    assert env.envs[0].actions[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.full((2, 2), float("nan")), "the action holds NaN"),
        (torch.zeros(2, 3), r"torch.float32 of shape \[2, 3\].*expects torch.float32 of shape \[2, 2\]"),
        (torch.zeros(2, 2, dtype=torch.float64), "'action' is torch.float64"),
    ],
)
def test_an_action_that_does_not_fit_is_refused_before_any_row_steps(action, message):
    env = GymEnv(CountingEnv, num_envs=2)
    root = env.reset()
    with pytest.raises(SpecError, match=message):
        env.step(root.set("action", action))
    assert [raw.actions for raw in env.envs] == [[], []]
    with pytest.raises(SpecError, match="step reads 'action'"):
        env.step(env.reset())


def test_index_actions_out_of_range_are_refused_and_shifted_by_start():
    env = GymEnv(lambda: CountingEnv(5, action_space=spaces.Discrete(3, start=-1)))
    env.step(env.reset().set("action", torch.tensor([0])))
    assert env.envs[0].actions == [-1] and env.action_spec == Categorical(3, (1,))
    with pytest.raises(SpecError, match="the action is 3, outside 0 .. 2"):
        env.step(env.reset().set("action", torch.tensor([3])))
    several = GymEnv(lambda: CountingEnv(5, action_space=spaces.MultiDiscrete([5, 5])))
    assert several.action_spec == MultiCategorical([5, 5], (1, 2))  # one action of two choices, not two actions
    several.step(several.reset().set("action", torch.tensor([[4, 0]])))
    assert several.envs[0].actions[0].tolist() == [4, 0]
    with pytest.raises(SpecError, match=r"the action is \[5, 0\]"):
        several.step(several.reset().set("action", torch.tensor([[5, 0]])))


def test_stepping_an_ended_or_closed_environment_is_an_error():
    env = GymEnv(lambda: CountingEnv(1))
    with pytest.raises(EnvError, match="call reset"):
        env.step(zero_actions(env))
    row = env.step(env.reset().update(zero_actions(env)))
    with pytest.raises(EnvError, match="no running episode"):
        env.step(step_mdp(row).update(zero_actions(env)))
    env.close()
    env.close()
    with pytest.raises(EnvError, match="is closed"):
        env.reset()


def test_named_observations_keep_their_names():
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "joints": spaces.Dict({"angle": spaces.Box(-3.0, 3.0, (2,), np.float64), "on": spaces.MultiBinary(3)}),
            "pair": spaces.Tuple([spaces.Discrete(4, start=2), spaces.MultiDiscrete([3, 2])]),
        }
    )
    env = GymEnv(lambda: SpaceEnv(space), num_envs=2, seed=0)
    spec = env.observation_spec
    assert spec["camera"] == Bounded(0, 255, (2, 4, 4, 3), dtype=torch.uint8)
    assert spec["joints", "angle"] == Bounded(-3.0, 3.0, (2, 2)) and spec["joints", "on"] == Binary(3, (2, 3))
    assert spec["pair", "0"] == Categorical(4, (2,)) and spec["pair", "1"] == MultiCategorical([3, 2], (2, 2))
    check_env_specs(env, steps=20)
    assert env.rollout(5, break_when_any_done=False)["next", "joints", "angle"].shape == (2, 5, 2)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), spaces.Tuple([spaces.Discrete(3)]), spaces.Box(-1, 1, (), np.float32)], ids=str
)
@pytest.mark.parametrize("num_envs", [1, 2])
def test_scalar_observations_work_by_arrays_and_tensordicts(space, num_envs):
    env = GymEnv(lambda: SpaceEnv(space), num_envs=num_envs, seed=0)
    check_env_specs(env, steps=20)
    buffers = StepBuffers(20, env.observation_spec, env.action_spec)
    env.reset()
    buffers.action.zero_()
    step = env.bind(buffers)
    for t in range(20):
        step(t)
    key = "observation" if not isinstance(space, spaces.Tuple) else ("observation", "0")
    assert env.observation_spec[key].is_in(buffers.next[key]) and (buffers.reward == 1).all()


def test_unbounded_and_half_bounded_boxes():
    high = np.array([np.inf, 1.0], dtype=np.float32)
    env = GymEnv(lambda: SpaceEnv(spaces.Box(np.array([-np.inf, -1.0], dtype=np.float32), high)))
    assert isinstance(env.observation_spec["observation"], Bounded)
    assert isinstance(GymEnv(CountingEnv).observation_spec["observation"], Unbounded)
    check_env_specs(env)


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (spaces.Text(5), None, "observation 'observation' is Text"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), None, "observation 'a' is Sequence"),
        (spaces.Dict({"reward": spaces.Discrete(2)}), None, "has the name 'reward'"),
        (spaces.Discrete(2), spaces.Tuple([spaces.Discrete(2)]), "the action is Tuple"),
    ],
)
def test_spaces_that_cannot_be_read_are_named(space, action, message):
    with pytest.raises(SpecError, match=message):
        GymEnv(lambda: SpaceEnv(space, action))


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(EnvError, match="no environment 'HalfCheeta-v5' is registered. Did you mean 'HalfCheetah-v5'"):
        GymEnv("HalfCheeta-v5")
    with pytest.raises(EnvError, match="Did you mean 'CartPole-v"):
        GymEnv("CartPole-v9")
    with pytest.raises(EnvError, match="no environment 'Zzzz/Qqqq-v0'"):
        GymEnv("Zzzz/Qqqq-v0")


def test_a_missing_simulator_names_the_pip_command():
    def needs_simulator(**kwargs):
        raise gym.error.DependencyNotInstalled("simulator missing")

    gym.register("NeedsSimulator-v0", entry_point=needs_simulator)
    try:
        with pytest.raises(MissingExtraError, match="NeedsSimulator-v0 needs a package.*simulator missing"):
            GymEnv("NeedsSimulator-v0")
    finally:
        del gym.registry["NeedsSimulator-v0"]


def test_what_is_no_constructor_of_one_environment_is_refused():
    shared = CountingEnv()
    with pytest.raises(EnvError, match="pass a constructor"):
        GymEnv(shared)
    with pytest.raises(EnvError, match="same environment twice"):
        GymEnv(lambda: shared, num_envs=2)
    with pytest.raises(EnvError, match="returned a SyncVectorEnv"):
        GymEnv(lambda: gym.vector.SyncVectorEnv([CountingEnv]))
    with pytest.raises(EnvError, match="Autoreset"):
        GymEnv(lambda: gym.wrappers.Autoreset(CountingEnv()))
    with pytest.raises(EnvError, match="is a int"):
        GymEnv(3)
    with pytest.raises(EnvError, match="at least 1"):
        GymEnv(CountingEnv, num_envs=0)


def test_keyword_arguments_reach_the_environment():
    env = GymEnv(CountingEnv, length=2)
    assert env.rollout(9).batch_size == torch.Size([1, 2])
    with GymEnv("CartPole-v1", max_episode_steps=4) as limited:
        data = limited.rollout(9)
        assert data.batch_size == torch.Size([1, 4])
        assert data["next", "truncated"][0, -1].item() and not data["next", "terminated"].any()


def test_importing_the_rooms_imports_no_environment_library():
    code = "import sys, graphrl.envs, graphrl.collectors; print({'gymnasium', 'mujoco'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1", "HalfCheetah-v5"])
def test_rollouts_equal_torchrl(env_id):
    torchrl_envs = pytest.importorskip("torchrl.envs")
    theirs = torchrl_envs.GymEnv(env_id, categorical_action_encoding=True)
    theirs.set_seed(5)
    expected = theirs.rollout(50, break_when_any_done=False)
    actions = iter(expected["action"].unbind(0))
    with GymEnv(env_id, seed=5) as env:
        env.reset()  # TorchRL's set_seed has reset its environment once
        data = env.rollout(50, lambda td: td.set("action", next(actions).unsqueeze(0)), break_when_any_done=False)
    assert set(data.keys(True)) == set(expected.keys(True))
    for key in expected.keys(True, True):
        want = expected[key].float() if expected[key].dtype == torch.float64 else expected[key]  # ours are float32
        assert data[key].dtype == want.dtype and torch.equal(data[key][0], want), key
    theirs.close()
