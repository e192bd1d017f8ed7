"""Objectives and value estimators: pure functions of tensors, and the keyed graphs that join them to models.

A loss returns a new TensorDict of scalars; an estimator writes into the batch. Networks belong in ``models``.
"""

if __name__ != "graphrl.losses":  # a second copy would register every op twice
    raise ImportError("import graphrl.losses, not losses")

from graphrl.losses.common import LossGraph, LossTerm, require_same_shape
from graphrl.losses.functional import (
    approximate_kl,
    clipped_surrogate,
    effective_sample_size,
    entropy_bonus,
    explained_variance,
    joint_log_prob,
    normalize_advantage,
    value_error,
)
from graphrl.losses.policy import evaluate_action
from graphrl.losses.ppo import PPOLoss
from graphrl.losses.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator
from graphrl.losses.value_estimator import ValueEstimator
from graphrl.losses.vtrace import VTrace

__all__ = [
    "GAE",
    "LossGraph",
    "LossTerm",
    "PPOLoss",
    "TD0Estimator",
    "TD1Estimator",
    "TDLambdaEstimator",
    "VTrace",
    "ValueEstimator",
    "approximate_kl",
    "clipped_surrogate",
    "effective_sample_size",
    "entropy_bonus",
    "evaluate_action",
    "explained_variance",
    "joint_log_prob",
    "normalize_advantage",
    "require_same_shape",
    "value_error",
]
