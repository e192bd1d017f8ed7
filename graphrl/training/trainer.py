"""The training loop: collect, learn, log, save; with hooks between, and a checkpoint whenever it stops."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from graphrl.collectors import SyncCollector
from graphrl.envs import EpisodeStats, GymEnv, evaluate
from graphrl.errors import CheckpointError, GraphRLError, did_you_mean, require_extra
from graphrl.training.checkpoint import (
    check_writable,
    has_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from graphrl.training.config import PPOConfig
from graphrl.training.interrupt import InterruptGuard
from graphrl.training.loggers import CSVLogger, Logger, TensorBoardLogger
from graphrl.training.plot import plot_curve
from graphrl.training.ppo import PPO
from graphrl.training.report import Report
from graphrl.training.threads import torch_threads

__all__ = ["TrainResult", "Trainer", "load_config", "load_policy"]

FIXED = ("env.id", "num_cells", "normalize_observation")
"""Fields that a resumed run must share with its checkpoint."""
HOOKS = ("before_collection", "after_collection", "after_optimization", "after_logging")
EVAL_SEED = 1_000_003
"""Added to the environment's seed for evaluation, so that it never sees the training's first states."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. ``evaluation``: of the deterministic policy, ``curve``: the picture; None when not asked for."""

    frames: int
    seconds: float
    mean_return: float
    evaluation: EpisodeStats | None
    folder: Path
    curve: Path | None = None


class Trainer:
    """Runs PPO as ``config`` says. The folder is checked, and everything built, before the first step.

        trainer = Trainer(PPOConfig(env=EnvConfig("Pendulum-v1", num_envs=8), out="runs/pendulum"))
        trainer.register("after_logging", lambda trainer, row: print(row["mean_return"]))
        trainer.train()

    Hooks: ``before_collection(trainer)``, ``after_collection(trainer, batch)``, ``after_optimization(trainer,
    metrics)``, ``after_logging(trainer, row)``; a hook may call :meth:`stop`. loggers: beside progress.csv.
    resume: go on from the checkpoint in ``config.out``. Weights, optimiser, statistics, counters and torch's generator
    are as they were, bit for bit on a CPU; the episodes in progress are not part of a checkpoint: they start anew.
    Raises :class:`CheckpointError`, :class:`EnvError`, :class:`SpecError`.
    """

    def __init__(
        self, config: PPOConfig, *, resume: bool = False, loggers: Sequence[Logger] = (), quiet: bool = False
    ) -> None:
        config.check()
        tensorboard = _wanted(config.tensorboard, "tensorboard", "tensorboard")
        self._curve = _wanted(config.curve, "matplotlib", "plot")
        self.folder = config.run_folder()
        self.config = config = replace(config, out=str(self.folder))
        self.quiet = quiet
        loaded = load_checkpoint(self.folder / "checkpoint") if resume else None
        if loaded is not None:
            _check_same(_config_of(loaded[1], self.folder), config)
        if not resume and has_checkpoint(self.folder / "checkpoint") and not config.overwrite:
            raise CheckpointError(
                f"{self.folder} holds the checkpoint of another run: resume it (--resume {self.folder}), choose "
                "another folder (--out), or replace it (--overwrite)"
            )
        torch.manual_seed(config.seed)
        self.env = GymEnv(config.env.id, num_envs=config.env.num_envs, seed=config.env.seed)
        self.loggers: list[Logger] = []
        try:
            self.algorithm = PPO(config, self.env)
            self.collector = SyncCollector(
                self.env,
                self.algorithm.policy,
                frames_per_batch=config.frames_per_batch,
                total_frames=config.frames,
                device=None if config.device == "cpu" else config.device,
            )
            self.batches, self.seconds, self._stopped = 0, 0.0, False
            self._saved = -1
            self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in HOOKS}
            if loaded is not None:
                self._load(*loaded)
            check_writable(self.folder)
            if not resume:
                remove_checkpoint(self.folder / "checkpoint")
                shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
            self.loggers.append(CSVLogger(self.folder / "progress.csv", self.frames if resume else None))
            if tensorboard:
                self.loggers.append(TensorBoardLogger(self.folder / "tensorboard"))
        except BaseException:
            self.close()
            raise
        self.loggers += loggers

    @property
    def frames(self) -> int:
        """Environment steps collected so far, all environments together."""
        return self.collector.frames

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 finished training episodes, or NaN before the first."""
        returns = self.collector.episode_returns
        return fmean(returns) if returns else float("nan")

    def register(self, point: str, hook: Callable[..., Any]) -> None:
        """Call ``hook(trainer, ...)`` at ``point``, one of ``HOOKS``. Raises :class:`GraphRLError` for another name."""
        if point not in self._hooks:
            raise GraphRLError(f"no hook point {point!r}; there are {', '.join(HOOKS)}.{did_you_mean(point, HOOKS)}")
        self._hooks[point].append(hook)

    def stop(self) -> None:
        """End the run after the present batch."""
        self._stopped = True

    # ---- the loop

    def train(self) -> TrainResult:
        """Train to ``total_frames``, save, evaluate; closes the environment and the loggers in any case.

        Ctrl-C saves the last complete update and raises KeyboardInterrupt with a line that says where and how to go on.
        """
        try:
            with torch_threads(self.config.threads), InterruptGuard() as guard, self._report() as report:
                try:
                    self._loop(guard, report)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(self._save_interrupted(guard)) from None
            self.save()
            curve = self.folder / "curve.png" if self._curve else None
            if curve is not None:
                plot_curve(self.folder / "progress.csv", curve, f"PPO, {self.config.env.id}")
            return TrainResult(self.frames, self.seconds, self.mean_return, self.evaluate(), self.folder, curve)
        finally:
            self.close()

    def _report(self) -> Report:
        return Report(self.config.frames, f"PPO {self.config.env.id}", quiet=self.quiet)

    def _loop(self, guard: InterruptGuard, report: Report) -> None:
        warm = False
        while self.frames < self.config.frames and not self._stopped:
            start = time.perf_counter()
            self.algorithm.set_progress(self.frames / self.config.frames)
            self._call("before_collection")
            batch = self.collector.rollout()
            self._call("after_collection", batch)
            if not warm:
                self.algorithm.warm_up(batch)
                warm = True
            with guard.held():
                metrics = self.algorithm.learn(batch)
                seconds = time.perf_counter() - start
                self.batches, self.seconds = self.batches + 1, self.seconds + seconds
                self._learned = self._counters()
            self._call("after_optimization", metrics)
            row = self._row(metrics, seconds)
            for logger in self.loggers:
                logger.log(row)
            report.update(row)
            self._call("after_logging", row)
            if self.batches % self.config.checkpoint_every == 0:
                with guard.held():
                    self.save()

    def _call(self, point: str, *arguments: Any) -> None:
        for hook in self._hooks[point]:
            hook(self, *arguments)

    def _row(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        return {
            "frames": self.frames,
            "seconds": self.seconds,
            "frames_per_s": self.config.frames_per_batch / seconds,
            "episodes": self.collector.state_dict()["episodes"]["finished"],
            "mean_return": self.mean_return,
            "lr": float(self.algorithm.optimizer.param_groups[0]["lr"]),
            **metrics,
        }

    def evaluate(self, episodes: int | None = None, seed: int | None = None) -> EpisodeStats | None:
        """Whole episodes of the deterministic policy in an environment of their own; None for 0 episodes."""
        episodes = self.config.eval_episodes if episodes is None else episodes
        if episodes == 0:
            return None
        seed = self.config.env.seed + EVAL_SEED if seed is None else seed
        with GymEnv(self.config.env.id, num_envs=episodes, seed=seed) as env:
            device = None if self.config.device == "cpu" else self.config.device
            return evaluate(env, self.algorithm.actor, episodes, device=device)

    def close(self) -> None:
        """Close the environment and the loggers. Calling it twice is harmless."""
        self.env.close()
        for logger in self.loggers:
            logger.close()

    # ---- saving

    def save(self) -> Path:
        """Write a checkpoint of the last complete update; returns its folder."""
        folder = self.folder / "checkpoint"
        tensors = {**self.algorithm.state_dict(), "rng.cpu": torch.get_rng_state()}
        if self.config.device != "cpu":
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        save_checkpoint(folder, tensors, {"algorithm": "ppo", "config": self.config.to_dict(), **self._learned})
        self._saved = self.batches
        return folder

    def _counters(self) -> dict[str, Any]:
        """Counters as of the last complete update: a batch collected after it does not count."""
        return {"batches": self.batches, "seconds": self.seconds, "collector": self.collector.state_dict()}

    def _save_interrupted(self, guard: InterruptGuard) -> str:
        if not self.batches:
            return "interrupted before the first update: there is nothing to save"
        with guard.held():
            folder = self.folder / "checkpoint" if self._saved == self.batches else self.save()
        return f"interrupted: checkpoint in {folder}; go on with  graphrl train ppo --resume {self.folder}"

    def _load(self, tensors: dict[str, torch.Tensor], data: dict[str, Any]) -> None:
        try:
            if data["algorithm"] != "ppo":
                raise CheckpointError(f"the checkpoint is of {data['algorithm']!r}; expected 'ppo'")
            self.algorithm.load_state_dict(tensors)
            self.collector.load_state_dict(data["collector"])
            self.batches, self.seconds = int(data["batches"]), float(data["seconds"])
            torch.set_rng_state(tensors["rng.cpu"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint in {self.folder} lacks or mistypes {error}") from error
        if self.config.device != "cpu" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
        self._learned = self._counters()
        self._saved = self.batches
        # New episodes must not repeat the first ones of the run.
        self.env.set_seed(self.config.env.seed + self.batches * self.config.env.num_envs)


def _wanted(choice: bool | None, package: str, extra: str) -> bool:
    """Whether to use an optional package: as chosen, or where it is installed. Raises :class:`MissingExtraError`."""
    if choice:
        require_extra(package, extra)
    return importlib.util.find_spec(package) is not None if choice is None else choice


def _check_same(saved: PPOConfig, config: PPOConfig) -> None:
    """Raise :class:`CheckpointError` where ``config`` asks a saved run to become another one."""
    for name in FIXED:
        before, now = attrgetter(name)(saved), attrgetter(name)(config)
        if before != now:
            raise CheckpointError(
                f"the run in {config.out} has {name}={before!r}, but {name}={now!r} was asked for: leave that out to "
                "resume, or start a run of its own in another folder (--out, without --resume)"
            )


def checkpoint_folder(folder: Path | str) -> Path:
    """The checkpoint inside a run folder, or ``folder`` itself."""
    inside = Path(folder) / "checkpoint"
    return inside if has_checkpoint(inside) else Path(folder) if has_checkpoint(Path(folder)) else inside


def load_config(folder: Path | str) -> PPOConfig:
    """The configuration saved in a run folder. Raises :class:`CheckpointError`."""
    _, data = load_checkpoint(checkpoint_folder(folder))
    return _config_of(data, folder)


def load_policy(folder: Path | str) -> tuple[Any, PPOConfig]:
    """The trained actor of a run folder, eager and in eval mode, and the configuration; or :class:`CheckpointError`."""
    tensors, data = load_checkpoint(checkpoint_folder(folder))
    config = replace(_config_of(data, folder), device="cpu")
    with GymEnv(config.env.id) as env:
        algorithm = PPO(config, env)
    algorithm.load_state_dict(tensors)
    return algorithm.actor.eval(), config


def _config_of(data: dict[str, Any], folder: Path | str) -> PPOConfig:
    try:
        return PPOConfig.from_dict(data["config"])
    except (KeyError, TypeError, GraphRLError) as error:
        raise CheckpointError(f"the checkpoint in {folder} holds no PPO configuration: {error}") from error
