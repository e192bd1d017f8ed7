"""What a PPO run is made of: plain data, checked before anything is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from graphrl.errors import SpecError, did_you_mean

__all__ = ["EnvConfig", "PPOConfig"]


@dataclass(frozen=True)
class EnvConfig:
    """The training environment."""

    id: str = "HalfCheetah-v5"
    """A Gymnasium id, or module:Id: the module is imported first, to register Id."""
    num_envs: int = 1
    """Copies stepped in turn."""
    seed: int = 0
    """Copy i is reset with seed + i."""


@dataclass(frozen=True)
class PPOConfig:
    """PPO; the defaults are those for MuJoCo: one environment, horizon 2048, 10 epochs, minibatch 64."""

    env: EnvConfig = field(default_factory=EnvConfig)
    total_frames: int = 1_000_000
    frames_per_batch: int = 2048
    """Steps between updates, all environments together."""
    epochs: int = 10
    minibatch: int = 64
    lr: float = 3e-4
    anneal_lr: bool = True
    """Lower the learning rate linearly, to zero at total_frames."""
    gamma: float = 0.99
    lmbda: float = 0.95
    clip_epsilon: float = 0.2
    critic_coeff: float = 0.5
    entropy_coeff: float = 0.0
    max_grad_norm: float = 0.5
    normalize_observation: bool = True
    """With a running mean and variance, updated once a batch, after its update."""
    normalize_advantage: bool = True
    """To mean 0 and variance 1 over the batch."""
    gae_each_epoch: bool = True
    """Estimate the advantage anew with the critic of each epoch, not once a batch."""
    reward_scale: float = 1.0
    """Factor on the reward the update sees; reported returns are never scaled."""
    num_cells: tuple[int, ...] = (64, 64)
    """Width of each hidden layer of actor and critic."""
    init_std: float = 1.0
    """Standard deviation of a continuous action at the start."""
    seed: int = 0
    """Of weights, action noise and minibatches."""
    policy_backend: str = "native"
    update_backend: str = "inductor"
    device: str = "cpu"
    threads: int = 1
    """CPU threads of torch while training: networks of this size gain nothing from more."""
    out: str | None = None
    """Run folder: progress.csv, checkpoint/, tensorboard/, curve.png. Default: a new folder under runs/."""
    overwrite: bool = False
    """Start anew in a folder that holds a checkpoint."""
    checkpoint_every: int = 50
    """Batches between checkpoints; one more is written at the end and on Ctrl-C."""
    tensorboard: bool | None = None
    """Write TensorBoard events too; None: where tensorboard is installed."""
    curve: bool | None = None
    """Draw curve.png at the end; None: where matplotlib is installed."""
    eval_episodes: int = 10
    """Episodes of the deterministic policy at the end; 0 leaves the evaluation out."""

    def check(self) -> None:
        """Raise :class:`SpecError` for values that cannot make a run."""
        for name in ("total_frames", "frames_per_batch", "epochs", "minibatch", "checkpoint_every", "threads"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.eval_episodes < 0:
            raise SpecError(f"eval_episodes={self.eval_episodes}: expected 0 or more")
        for name in ("lr", "reward_scale", "max_grad_norm", "init_std"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name}={getattr(self, name)}: expected a positive number")
        _multiple("frames_per_batch", self.frames_per_batch, "minibatch", self.minibatch)
        _multiple("frames_per_batch", self.frames_per_batch, "env.num_envs", self.env.num_envs)

    @property
    def frames(self) -> int:
        """The frames really collected: ``total_frames`` rounded up to whole batches."""
        return -(-self.total_frames // self.frames_per_batch) * self.frames_per_batch

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PPOConfig:
        """The inverse of :meth:`to_dict`. Raises :class:`SpecError` for a field that does not exist."""
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise SpecError(f"PPOConfig has no field {name!r}.{did_you_mean(name, known)}")
        values = dict(data)
        if "env" in values:
            values["env"] = EnvConfig(**values["env"])
        if "num_cells" in values:
            values["num_cells"] = tuple(values["num_cells"])
        return cls(**values)

    def run_folder(self) -> Path:
        """``out``, or the first ``runs/ppo-ENV-N`` that does not exist yet."""
        if self.out is not None:
            return Path(self.out)
        name = f"ppo-{self.env.id.replace('/', '-').replace(':', '-')}"
        number = 0
        while (Path("runs") / f"{name}-{number}").exists():
            number += 1
        return Path("runs") / f"{name}-{number}"


def _multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    if unit < 1:
        raise SpecError(f"{unit_name}={unit}: expected at least 1")
    if value % unit:
        low = value // unit * unit
        nearest = f"{low} or {low + unit}" if low else f"{unit}"
        raise SpecError(f"{name}={value} is not a multiple of {unit_name}={unit}; the nearest are {nearest}")
