import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from graphrl.collectors import SyncCollector
from graphrl.envs import EnvBase, GymEnv, check_env_specs, evaluate, step_mdp
from graphrl.errors import EnvError, KeyMissingError
from graphrl.specs import Bounded, Composite, Unbounded


class PointEnv(EnvBase):
    """A batched torch environment: row i counts to ``lengths[i]`` and then terminates."""

    def __init__(self, lengths=(2, 3, 7)):
        rows = len(lengths)
        super().__init__(Composite({"observation": Unbounded((rows, 1))}, [rows]), Bounded(-1.0, 1.0, (rows, 1)))
        self.lengths, self.t, self.resets = torch.tensor(lengths).unsqueeze(-1), torch.zeros(rows, 1), 0

    def _observe(self):
        return TensorDict({"observation": self.t.clone()}, batch_size=self.batch_size)

    def _reset(self, mask):
        self.resets += int(mask.sum())
        self.t[mask] = 0
        return self._observe()

    def _step(self, action):
        self.t += 1
        done = self.t >= self.lengths
        outcome = {"reward": self.t.clone(), "terminated": done, "truncated": torch.zeros_like(done)}
        return self._observe().update(outcome)


def test_two_methods_make_an_environment():
    env = PointEnv()
    check_env_specs(env, steps=10)
    data = env.rollout(6, break_when_any_done=False)
    assert data["observation"][..., 0].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert data["next", "observation"][0, :, 0].tolist() == [1, 2, 1, 2, 1, 2]
    assert env.rate_hz is None


def test_a_collector_gives_the_rows_of_a_rollout():
    torch.manual_seed(0)
    expected = PointEnv().rollout(6, lambda td: td.set("action", td["observation"] * 0), break_when_any_done=False)
    env = PointEnv()
    for batch in SyncCollector(env, lambda td: td.set("action", td["observation"] * 0), frames_per_batch=18):
        assert (batch.exclude("collector") == expected).all()
        break
    assert env.resets == 3 + 3 + 2


def test_step_mdp_moves_next_up():
    row = PointEnv().rollout(1)[:, 0].set("hidden", torch.ones(3))
    root = step_mdp(row)
    assert set(root.keys()) == {"observation", "done", "terminated", "truncated", "hidden"}
    assert torch.equal(root["observation"], row["next", "observation"]) and "next" in row
    assert set(step_mdp(row, keep_other=False, exclude_done=True).keys()) == {"observation"}
    assert {"reward", "action"} <= set(step_mdp(row, exclude_reward=False, exclude_action=False).keys())
    with pytest.raises(KeyMissingError, match="step_mdp reads 'next'"):
        step_mdp(root)


class Broken(PointEnv):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def _step(self, action):
        return self.fault(super()._step(action))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda td: td.set("observation", td["observation"].double()), r"'observation'.* torch.float64"),
        (lambda td: td.set("extra", td["observation"]), "keys without a spec.*extra"),
        (lambda td: td.exclude("observation"), "keys missing from real data.*observation"),
        (lambda td: td.set("reward", td["reward"][:, 0]), r"'reward'.*of shape \[3\]"),
    ],
)
def test_the_checker_names_what_breaks_the_contract(fault, message):
    with pytest.raises(EnvError, match=message):
        check_env_specs(Broken(fault))


def test_the_checker_finds_values_outside_their_spec():
    env = PointEnv()
    env.observation_spec = Composite({"observation": Bounded(0.0, 1.0, (3, 1))}, [3])
    with pytest.raises(EnvError, match="step 1: 'next' at 'observation': holds 2.0"):
        check_env_specs(env)


def test_evaluate_counts_short_episodes_no_more_than_long_ones():
    stats = evaluate(PointEnv((1, 9)), None, episodes=6)  # the first row could end all six within six steps
    assert stats.lengths.tolist() == [1, 1, 1, 9, 9, 9]
    assert stats.returns.tolist() == [1, 1, 1, 45, 45, 45]
    assert stats.mean == 23 and stats.std == 22
    assert evaluate(PointEnv((1, 9, 2)), None, episodes=1).lengths.tolist() == [1]
    with pytest.raises(EnvError, match="at least 1"):
        evaluate(PointEnv(), None, episodes=0)


def test_evaluate_is_deterministic_and_repeats_under_a_seed():
    modes = []

    def act(observation):
        modes.append(interaction_type())
        return observation[:, :1].clamp(-1, 1)

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    with GymEnv("Pendulum-v1", num_envs=2) as env, set_interaction_type(InteractionType.RANDOM):
        first, again = (evaluate(env, policy, 3, seed=1) for _ in range(2))
    assert first.returns.shape == (3,) and first.lengths.tolist() == [200] * 3
    assert torch.equal(first.returns, again.returns)
    assert set(modes) == {InteractionType.DETERMINISTIC}
