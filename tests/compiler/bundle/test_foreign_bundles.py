"""Other libraries' policies as bundles, by the code of docs/foreign.md: the runtimes act as the libraries do."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn
from torch.distributions import Distribution

import graphrl as grl
from graphrl.bench.foreign import FOREIGN_GRAPHS, graph_example
from graphrl.compiler.bundle import CPolicy, load
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import TraceError

for package in ("torchrl", "stable_baselines3", "onnxruntime"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[3] / "docs" / "foreign.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bundles land in a folder of their own; compiling their C is what takes time."""
    monkeypatch.chdir(tmp_path)
    Distribution.set_default_validate_args(False)  # as importing torchrl does: its TanhNormal fails its own checks
    monkeypatch.setattr(CPolicy.__init__, "__defaults__", (None, ("-O0",)))


def run(*blocks: int, **names: Any) -> dict[str, Any]:
    """The page's blocks as one program, with ``names`` known before."""
    for block in blocks:
        exec(compile(BLOCKS[block], f"{PAGE}, block {block}", "exec"), names)
    return names


def assert_acts_like(folder: str, observations: np.ndarray, wanted: np.ndarray) -> None:
    """Both runtimes that a robot steps, on each observation; every target already agreed with float64."""
    assert set(load(folder).parity) == {"eager", "c99", "onnx", "numpy"}
    assert wanted.std(0).max() > 0.05 * np.abs(wanted).max()  # the action does depend on the observation
    runtime, compiled = Policy.load(folder), CPolicy(folder)
    for observation, action in zip(observations, wanted, strict=True):
        for found in (runtime.step({"observation": observation})["action"], compiled(observation)):
            np.testing.assert_allclose(found.reshape(action.shape), action, atol=1e-5 * np.abs(wanted).max(), rtol=0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_a_torchrl_actor_behind_its_environment_s_normaliser() -> None:
    torch.manual_seed(0)
    made = run(0)
    observations = 3 * draw(6, 3)
    with set_interaction_type(InteractionType.DETERMINISTIC), torch.no_grad():
        seen = TensorDict(observation=observations.clone(), batch_size=[6])
        wanted = made["actor"](made["env"].transform.freeze()._step(seen, seen))["action"]
    assert_acts_like("torchrl_bundle", observations.numpy(), wanted.numpy())
    said = load("torchrl_bundle").manifest["checks"]
    assert said["normalizer"] == said["action"] == "passed"


def lopsided() -> Any:
    """An environment whose bounds are not symmetric, and differ from action to action."""
    import gymnasium as gym

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
        action_space = gym.spaces.Box(np.float32([-1, -0.1, 2]), np.float32([3, 0.4, 5]))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self._observe(), {}

        def step(self, action: Any) -> Any:
            return self._observe(), 0.0, False, False, {}

        def _observe(self) -> np.ndarray:
            return self.np_random.normal(2, 3, 5).astype(np.float32)

    return Env()


@pytest.mark.parametrize(("algorithm", "normalised"), [("PPO", True), ("SAC", True), ("TD3", False)])
def test_an_sb3_policy_with_its_bounds_and_normaliser(algorithm: str, normalised: bool) -> None:
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env: Any = DummyVecEnv([lopsided])
    env = VecNormalize(env, clip_obs=1.5) if normalised else env
    model = getattr(stable_baselines3, algorithm)("MlpPolicy", env, seed=0, device="cpu")
    env.reset()
    for _ in range(20):
        env.step(np.zeros((1, 3)))
    with torch.no_grad():
        for parameter in model.policy.parameters():  # as trained: the first action is not next to nothing
            parameter.add_(0.1 * draw(*parameter.shape))
    observations = (2 + 3 * draw(8, 5)).numpy()
    wanted, _ = model.predict(env.normalize_obs(observations) if normalised else observations, deterministic=True)
    graph, fields = run(1)["from_sb3"](model)
    example = {"observation": torch.from_numpy(observations)}
    bundle = grl.export(graph, "bundle", example, contract=grl.Contract(rate_hz=50, **fields))
    assert_acts_like("bundle", observations, wanted)
    assert bundle.contract["action"]["low"] == pytest.approx([-1, -0.1, 2])
    if normalised:
        mean = bundle.contract["observations"][0]["normalizer"]["mean"]
        assert mean == pytest.approx(env.obs_rms.mean.tolist(), rel=1e-12)


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_an_sb3_policy_that_chooses(algorithm: str) -> None:
    import stable_baselines3

    model = getattr(stable_baselines3, algorithm)("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    with torch.no_grad():
        for parameter in (
            p for p in model.policy.parameters() if p.dim() == 2
        ):  # as trained: it depends on what it sees
            parameter.copy_(draw(*parameter.shape))
    observations = draw(12, 4)
    wanted, _ = model.predict(observations.numpy(), deterministic=True)
    graph, fields = run(1)["from_sb3"](model)
    grl.export(graph, "bundle", {"observation": observations}, contract=grl.Contract(rate_hz=50, **fields))
    assert_acts_like("bundle", observations.numpy(), wanted)


def test_the_page_s_sb3_example() -> None:
    model = run(1, 2)["model"]
    observations = draw(6, 3).numpy()
    seen = model.get_vec_normalize_env().normalize_obs(observations)
    assert_acts_like("sb3_bundle", observations, model.predict(seen, deterministic=True)[0])


class EmpiricalNormalization(nn.Module):
    """In rsl_rl's manner: it learns whenever it is called in training mode."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name, value in (("_mean", torch.zeros(1, size)), ("_var", torch.ones(1, size)), ("count", torch.tensor(0))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += x.shape[0]
            rate = x.shape[0] / self.count
            shift = x.mean(0, keepdim=True) - self._mean
            self._mean += rate * shift
            self._var += rate * (x.var(0, unbiased=False, keepdim=True) - self._var + shift * (x.mean(0) - self._mean))
        return (x - self._mean) / (self._var.sqrt() + 1e-2)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(48, 64), nn.ELU(), nn.Linear(64, 12))
        self.critic = nn.Sequential(nn.Linear(48, 64), nn.ELU(), nn.Linear(64, 1))
        self.std = nn.Parameter(torch.ones(12))

    def act_inference(self, observations: Tensor) -> Tensor:
        return self.actor(observations)


def test_an_rsl_rl_actor_critic_with_a_normaliser_that_was_learning() -> None:
    torch.manual_seed(0)
    policy, normalizer = ActorCritic(), EmpiricalNormalization(48)
    for _ in range(3):
        normalizer(1 + 2 * torch.randn(64, 48))
    before = copy.deepcopy(normalizer.state_dict())
    runner = SimpleNamespace(obs_normalizer=normalizer, alg=SimpleNamespace(policy=policy))
    made = run(1, 3, runner=runner)
    assert normalizer.training and all(torch.equal(before[k], v) for k, v in normalizer.state_dict().items())
    observations = 1 + 2 * draw(6, 48)
    with torch.no_grad():
        wanted = policy.act_inference(normalizer.eval()(observations))
    assert_acts_like("rsl_rl_bundle", observations.numpy(), wanted.numpy())
    assert made["graph"].out_keys == ["normed", "action"]
    assert load("rsl_rl_bundle").contract["action"]["scale"] == 0.25


def test_a_branch_of_a_library_that_inputs_decide_is_refused() -> None:
    module = FOREIGN_GRAPHS["GRUModule"]()  # skips its reset where no row starts anew
    with pytest.raises(TraceError, match=r"GRUModule branches on values of its inputs \(rnn.py:\d+"):
        grl.trace(module, graph_example("GRUModule"))
