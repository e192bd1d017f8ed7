"""Training runs: PPO as one object, the loop around it, checkpoints, loggers and curves.

A file here holds one part of a run. Losses belong in ``losses``, collection in ``collectors``.
"""

from graphrl.training.checkpoint import load_checkpoint, save_checkpoint
from graphrl.training.config import EnvConfig, PPOConfig
from graphrl.training.loggers import CSVLogger, Logger, TensorBoardLogger
from graphrl.training.plot import plot_curve
from graphrl.training.ppo import PPO
from graphrl.training.presets import preset
from graphrl.training.trainer import Trainer, TrainResult, load_config, load_policy

__all__ = [
    "PPO",
    "CSVLogger",
    "EnvConfig",
    "Logger",
    "PPOConfig",
    "TensorBoardLogger",
    "TrainResult",
    "Trainer",
    "load_checkpoint",
    "load_config",
    "load_policy",
    "plot_curve",
    "preset",
    "save_checkpoint",
]
