"""Networks and the keyed graphs built on them: perceptrons, distributions, normalisers, state, actors, critics.

A file here holds one kind of model. What trains a model belongs in ``losses``, what lowers it in ``compiler``.
"""

if __name__ != "graphrl.models":  # a second copy would register every op twice
    raise ImportError("import graphrl.models, not models")

from graphrl.models.actors import Actor, CategoricalActor, GaussianActor, TanhGaussianActor
from graphrl.models.critics import ValueCritic
from graphrl.models.distributions import Categorical, IndependentNormal, TanhNormal
from graphrl.models.heads import GaussianHead, Trunk
from graphrl.models.init import orthogonal_init_
from graphrl.models.mlp import MLP
from graphrl.models.normalizer import RunningNorm
from graphrl.models.recurrent import GRUModule, LSTMModule
from graphrl.models.state import LowPassFilter, ObservationHistory, PhaseClock, PreviousAction

__all__ = [
    "Actor",
    "Categorical",
    "CategoricalActor",
    "GaussianActor",
    "GRUModule",
    "GaussianHead",
    "IndependentNormal",
    "LSTMModule",
    "LowPassFilter",
    "MLP",
    "ObservationHistory",
    "PhaseClock",
    "PreviousAction",
    "RunningNorm",
    "TanhGaussianActor",
    "TanhNormal",
    "Trunk",
    "ValueCritic",
    "orthogonal_init_",
]
