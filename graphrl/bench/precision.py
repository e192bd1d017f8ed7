"""Learning in float32 beside learning with ``precision="bf16"``: PPO and SAC on Pendulum-v1, a few seeds of each.

Both precisions start from the same weights and draw the same numbers; what they do with them is all that differs.
Only what learns is rounded: the policy acts in float32, as it does on a robot, so PPO's update meets log-probabilities
that its own rounded networks would not give.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F

from graphrl.bench.tables import BenchOptions, TextTable
from graphrl.collectors import SyncCollector
from graphrl.compiler.benchmark import table_of
from graphrl.compiler.compiled import compile
from graphrl.compiler.update import compile_update
from graphrl.envs import GymEnv, evaluate
from graphrl.errors import GraphRLError
from graphrl.losses import GAE, PPOLoss
from graphrl.models import MLP, GaussianActor, RunningNorm, TanhGaussianActor, ValueCritic
from graphrl.training.threads import torch_threads

__all__ = ["LearningTable", "Training", "suite"]

ENV_ID, OBSERVATION, TORQUE = "Pendulum-v1", 3, 2.0
EPISODES = 10  # of an evaluation, with the deterministic policy, the same ten starts every time
PARTS = 4  # of a training, with an evaluation after each and one before the first
PRECISIONS: dict[str, str | None] = {"float32": None, "bf16": "bf16"}

Learner = Callable[[str | None, int, int], Iterator[Any]]


@dataclass(frozen=True)
class Training:
    """One training: mean returns before it and after each part, and microseconds per frame of each part.

    Times are those of the processor, which say more than a clock when it is shared; the first part's holds compiling.
    """

    precision: str
    seed: int
    returns: tuple[float, ...]
    us_per_frame: tuple[float, ...]


@dataclass(frozen=True)
class LearningTable(TextTable):
    """The learning curves of one task in both precisions. ``rows`` hold the speed of training, in time per frame."""

    trainings: tuple[Training, ...]

    def of(self, precision: str) -> list[Training]:
        """The trainings in one precision, in the order of their seeds."""
        return [t for t in self.trainings if t.precision == precision]

    def final(self, precision: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of the last evaluation (0 for a single seed)."""
        last = [t.returns[-1] for t in self.of(precision)]
        return statistics.fmean(last), statistics.stdev(last) if len(last) > 1 else 0.0

    @property
    def allowed(self) -> float:
        """By how much bf16 may end below float32 and still be no worse.

        The larger of the pooled standard deviation ``sqrt((s_float32^2 + s_bf16^2) / 2)`` and a tenth of what
        float32 gained from its first evaluation to its last.
        """
        mean, low = self.final("float32")
        pooled = ((low**2 + self.final("bf16")[1] ** 2) / 2) ** 0.5
        start = statistics.fmean(t.returns[0] for t in self.of("float32"))
        return max(pooled, (mean - start) / 10)

    @property
    def no_worse(self) -> bool:
        """Whether bf16 ends at most ``allowed`` below float32."""
        return self.final("bf16")[0] >= self.final("float32")[0] - self.allowed

    def verdict(self) -> str:
        """The comparison in one line."""
        (full, spread), (low, low_spread) = self.final("float32"), self.final("bf16")
        return (
            f"bf16 is {'no worse' if self.no_worse else 'worse'}: {low:.1f} +- {low_spread:.1f} against "
            f"{full:.1f} +- {spread:.1f}, a difference of {low - full:+.1f}; {self.allowed:.1f} below is allowed. "
            f"Rough speed of training: {self.row('bf16').ratio:.2f} times float32's"
        )

    def cells(self) -> list[list[str]]:
        """A line a training, then the means."""
        parts = [f"{100 * i // PARTS} %" for i in range(1, PARTS + 1)]
        lines = [["precision", "seed", "untrained", *parts, "CPU us/frame"]]
        for t in self.trainings:
            speed = statistics.median(t.us_per_frame[1:])
            lines.append([t.precision, str(t.seed), *(f"{r:.1f}" for r in t.returns), f"{speed:.0f}"])
        for precision in PRECISIONS:
            curves = zip(*(t.returns for t in self.of(precision)), strict=True)
            speed = self.row(precision).median_us
            lines.append([precision, "mean", *(f"{statistics.fmean(point):.1f}" for point in curves), f"{speed:.0f}"])
        return lines


def suite(
    options: BenchOptions, seeds: Sequence[int] = (0, 1, 2), ppo_frames: int = 131_072, sac_frames: int = 8_000
) -> list[LearningTable]:
    """Train with every seed in both precisions in turn; a table a task. Peers and repeats play no part."""
    if options.device != "cpu":
        raise GraphRLError(f"device {options.device!r}: the precision suite trains on the cpu only")
    tasks: tuple[tuple[str, Learner, int], ...] = (("PPO", _ppo, ppo_frames), ("SAC", _sac, sac_frames))
    with torch_threads(options.threads or torch.get_num_threads()):
        return [_table(f"{name} on {ENV_ID}, {frames} frames", learn, frames, seeds) for name, learn, frames in tasks]


def _table(title: str, learn: Learner, frames: int, seeds: Sequence[int]) -> LearningTable:
    trainings = [_train(learn, name, seed, frames) for seed in seeds for name in PRECISIONS]
    trainings.sort(key=lambda t: list(PRECISIONS).index(t.precision))
    times = {p: [us * 1e-6 for t in trainings if t.precision == p for us in t.us_per_frame[1:]] for p in PRECISIONS}
    speed = table_of(title, times)
    return LearningTable(title, speed.rows, speed.machine, tuple(trainings))


def _train(learn: Learner, precision: str, seed: int, frames: int) -> Training:
    torch.manual_seed(seed)
    returns, seconds = [], []
    learner = learn(PRECISIONS[precision], seed, frames)
    with GymEnv(ENV_ID, num_envs=EPISODES) as env:
        for _ in range(PARTS + 1):
            start = time.process_time()
            policy = next(learner)
            seconds.append(time.process_time() - start)
            returns.append(evaluate(env, policy, EPISODES, seed=1000).mean)
    part = frames / PARTS
    return Training(precision, seed, tuple(returns), tuple(1e6 * s / part for s in seconds[1:]))


def _ppo(precision: str | None, seed: int, frames: int) -> Iterator[Any]:
    """The README's PPO; yields the policy before the first part and after each."""
    per_batch = min(2048, frames // PARTS)
    norm = RunningNorm(OBSERVATION)
    actor = GaussianActor(OBSERVATION, 1, normalizer=norm)
    critic = ValueCritic(OBSERVATION, normalizer=norm)
    loss = PPOLoss(actor, critic, critic_coeff=0.5, loss_critic_type="l2", entropy_bonus=False)
    adam = torch.optim.Adam(loss.parameters(), lr=1e-3)

    def step(batch: TensorDictBase) -> dict[str, Tensor]:
        terms = loss(batch)
        adam.zero_grad()
        (terms["loss_objective"] + terms["loss_critic"]).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
        adam.step()
        return {"objective": terms["loss_objective"], "critic": terms["loss_critic"]}

    policy = compile(actor, backend="native")
    advantage = compile(GAE(critic, gamma=0.9, average_gae=True), precision=precision)
    update = compile_update(step, precision=precision)
    with GymEnv(ENV_ID, num_envs=8, seed=100 * seed) as env:
        collector = SyncCollector(env, policy, frames_per_batch=per_batch)
        yield policy
        for _ in range(PARTS):
            for _ in range(frames // PARTS // per_batch):
                batch = collector.rollout()
                for _ in range(10):
                    with torch.no_grad():
                        advantage(batch)
                    rows = batch.select(*loss.in_keys).reshape(-1)
                    for index in torch.randperm(per_batch).split(64):
                        update(rows, index)
                norm.update(batch["observation"])
            yield policy


def _sac(precision: str | None, seed: int, frames: int) -> Iterator[Any]:
    """Soft actor-critic (arXiv:1812.05905), an update a frame; the first sixteenth of the frames is random.

    Yields the policy before the first part and after each.
    """
    random = frames // 16
    actor = TanhGaussianActor(OBSERVATION, 1, low=-TORQUE, high=TORQUE, activation_class=nn.ReLU)
    policy = compile(actor, backend="native")
    update = compile_update(_sac_step(actor), precision=precision)
    keys = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"))
    with GymEnv(ENV_ID, seed=100 * seed) as env:
        collector = SyncCollector(env, policy, frames_per_batch=1, init_random_frames=random)
        replay: TensorDictBase | None = None
        yield policy
        for _ in range(PARTS):
            for _ in range(frames // PARTS):
                row = collector.rollout().select(*keys).reshape(-1)
                if replay is None:
                    replay = row.new_zeros(frames)
                replay[collector.frames - 1 : collector.frames] = row
                if collector.frames > random:
                    update(replay, torch.randint(collector.frames, (128,)))
            yield policy


def _sac_step(actor: TanhGaussianActor) -> Callable[[TensorDictBase], dict[str, Tensor]]:
    """Two critics with soft targets, the actor, and a temperature for an entropy of -1; Adam for each."""
    critics, targets = (
        [MLP(OBSERVATION + 1, 1, num_cells=(64, 64), activation_class=nn.ReLU) for _ in range(2)] for _ in range(2)
    )
    for target, critic in zip(targets, critics, strict=True):
        target.load_state_dict(critic.state_dict())
    log_alpha = nn.Parameter(torch.zeros(1))
    of_critics = [p for critic in critics for p in critic.parameters()]
    of_targets = [p for target in targets for p in target.parameters()]
    adams = [torch.optim.Adam(p, lr=1e-3) for p in (of_critics, list(actor.parameters()), [log_alpha])]

    def draw(observation: Tensor) -> tuple[Tensor, Tensor]:
        dist = actor.get_dist(TensorDict(observation=observation, batch_size=observation.shape[:-1]))
        action = dist.rsample()
        return action, dist.log_prob(action).unsqueeze(-1)

    def lowest(networks: Sequence[nn.Module], observation: Tensor, action: Tensor) -> Tensor:
        return torch.stack([network(observation, action) for network in networks]).min(0).values

    def descend(adam: torch.optim.Optimizer, loss: Tensor) -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()

    def step(batch: TensorDictBase) -> dict[str, Tensor]:
        observation, then = batch["observation"], batch["next"]
        with torch.no_grad():
            action, log_prob = draw(then["observation"])
            soft_value = lowest(targets, then["observation"], action) - log_alpha.exp() * log_prob
            target = then["reward"] + 0.99 * (~then["terminated"]) * soft_value
        values = [critic(observation, batch["action"]) for critic in critics]
        loss_qvalue = torch.stack([F.mse_loss(value, target) for value in values]).sum()
        descend(adams[0], loss_qvalue)
        action, log_prob = draw(observation)
        loss_actor = (log_alpha.exp().detach() * log_prob - lowest(critics, observation, action)).mean()
        descend(adams[1], loss_actor)
        loss_alpha = -(log_alpha.exp() * (log_prob.detach() - 1)).mean()
        descend(adams[2], loss_alpha)
        with torch.no_grad():
            for slow, fast in zip(of_targets, of_critics, strict=True):
                slow.lerp_(fast, 0.005)
        return {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor, "loss_alpha": loss_alpha}

    return step
