"""Action distributions whose log-probabilities are summed over the action dimension."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, Independent, Normal, constraints
from torch.nn.functional import softplus

__all__ = ["Categorical", "IndependentNormal", "TanhNormal"]


def _noise(like: Tensor, shape: torch.Size) -> Tensor:
    """Standard normal draws: a plain ``randn``, which every backend knows."""
    if shape == like.shape:
        return torch.randn_like(like)
    return torch.randn(shape, dtype=like.dtype, device=like.device)


class IndependentNormal(Independent):
    """A diagonal Gaussian over vectors.

        a = loc + scale e,  e ~ N(0, I);   log p(a) = sum_i log N(a_i; loc_i, scale_i)

    ``loc``, ``scale``: [*B, A], ``scale`` positive. Samples [*B, A], ``log_prob`` and ``entropy`` [*B] in nats;
    gradient flows to ``loc`` and ``scale`` through all of them (``sample`` excepted). ``mode``, ``mean`` and
    ``deterministic_sample`` are ``loc``. Raises ``ValueError`` for a non-positive scale or a NaN, unless
    ``validate_args`` is off.
    """

    def __init__(self, loc: Tensor, scale: Tensor, *, validate_args: bool | None = None) -> None:
        super().__init__(Normal(loc, scale, validate_args=validate_args), 1, validate_args=validate_args)

    @property
    def loc(self) -> Tensor:
        """Location: [*B, A]."""
        return self.base_dist.loc

    @property
    def scale(self) -> Tensor:
        """Standard deviation: [*B, A]."""
        return self.base_dist.scale

    @property
    def deterministic_sample(self) -> Tensor:
        """The action taken without noise, ``loc``: [*B, A]."""
        return self.base_dist.loc

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of ``value`` [*S, *B, A] in nats: [*S, *B]."""
        return self.base_dist.log_prob(value).sum(-1)  # torch's own sum cannot reshape an empty batch

    def entropy(self) -> Tensor:
        """Entropy in nats: [*B]."""
        return self.base_dist.entropy().sum(-1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Reparametrised draw: [*sample_shape, *B, A]."""
        return self.loc + self.scale * _noise(self.loc, self._extended_shape(sample_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw without gradient: [*sample_shape, *B, A]."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> IndependentNormal:
        """The same distribution over a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        return type(self)(self.loc.expand(shape), self.scale.expand(shape), validate_args=False)


class Categorical(TorchCategorical):
    """torch's categorical distribution, for empty batches too, with a most likely choice to act on without noise.

        P(a = k) = exp(logits_k) / sum_j exp(logits_j)

    ``logits``: [*B, K]. Samples [*B] int64, ``log_prob`` and ``entropy`` [*B] in nats, gradient to ``logits``. Raises
    ``ValueError`` for a NaN logit, unless ``validate_args`` is off.
    """

    arg_constraints = {
        "probs": constraints.simplex,
        "logits": constraints.real,  # torch's real_vector cannot reshape an empty batch
    }

    @property
    def deterministic_sample(self) -> Tensor:
        """The most likely choice: [*B]."""
        return self.mode


class TanhNormal(Distribution):
    """A diagonal Gaussian squashed into a box by tanh.

        z = loc + scale e,  e ~ N(0, I);   a = low + (high - low) (tanh z + 1) / 2
        log p(a) = sum_i log N(z_i; loc_i, scale_i) - log((high_i - low_i) / 2) - 2 (log 2 - z_i - softplus(-2 z_i))

    Haarnoja et al. 2018, "Soft Actor-Critic" (arXiv:1801.01290), appendix C, with log(1 - tanh^2 z) in its stable form.
    ``loc``, ``scale``: [*B, A]; ``low``, ``high``: floats or [A]. Samples [*B, A], ``log_prob`` [*B] in nats,
    gradient to ``loc``, ``scale`` and the action. The density of the last draw uses its own ``z``, exact however
    saturated; any other action is first clamped to 1 - eps of its dtype on either side (``z`` within 8.3 in
    float32), so an action on the border has a finite density and one outside has ``-inf``. ``mode`` and
    ``deterministic_sample`` are the squashed ``loc``. There is no closed-form entropy. Raises ``ValueError`` for a
    non-positive scale, an empty box or an action outside it, unless ``validate_args`` is off.
    """

    has_rsample = True
    arg_constraints = {
        "loc": constraints.real,  # an independent() constraint cannot reshape an empty batch
        "scale": constraints.positive,
    }

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: float | Tensor = -1.0,
        high: float | Tensor = 1.0,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            low, high = torch.as_tensor(low).to(self.loc), torch.as_tensor(high).to(self.loc)
        self.low, self.high = low, high
        self._last: tuple[Tensor, Tensor] | None = None
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:], validate_args=validate_args)
        if self._validate_args and not torch.as_tensor(self.high > self.low).all():
            raise ValueError(f"TanhNormal: low={low} must lie below high={high}")

    @property
    def support(self) -> constraints.Constraint:  # type: ignore[override]
        """The closed box."""
        return constraints.interval(self.low, self.high)

    @property
    def mode(self) -> Tensor:
        """The squashed ``loc``: [*B, A]. It maximises the density of ``z``, which is what acting greedily means."""
        return self._squash(self.loc)

    @property
    def deterministic_sample(self) -> Tensor:
        """The action taken without noise, ``mode``: [*B, A]."""
        return self.mode

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Reparametrised draw: [*sample_shape, *B, A]."""
        return self._squash(self.loc + self.scale * _noise(self.loc, self._extended_shape(sample_shape)))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw without gradient: [*sample_shape, *B, A]."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of ``value`` [*S, *B, A] in nats: [*S, *B]."""
        if self._last is not None and value is self._last[0]:
            return self._log_prob_of(self._last[1])
        if self._validate_args:
            self._validate_sample(value)
        middle, half = self._box()
        unit = (value - middle) / half
        limit = 1 - torch.finfo(unit.dtype).eps
        log_prob = self._log_prob_of(torch.atanh(unit.clamp(-limit, limit)))
        outside = ((value < self.low) | (value > self.high)).any(-1)
        return log_prob.masked_fill(outside, -math.inf)

    def expand(self, batch_shape: Any, _instance: Any = None) -> TanhNormal:
        """The same distribution over a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        return type(self)(self.loc.expand(shape), self.scale.expand(shape), self.low, self.high, validate_args=False)

    def _box(self) -> tuple[Any, Any]:
        """Middle and half width: floats, or tensors [A]."""
        return (self.high + self.low) / 2, (self.high - self.low) / 2

    def _squash(self, z: Tensor) -> Tensor:
        middle, half = self._box()
        action = (middle + half * torch.tanh(z)).clamp(self.low, self.high)  # rounding may take one step past the box
        self._last = (action, z)
        return action

    def _log_prob_of(self, z: Tensor) -> Tensor:
        """Log-density of the action that ``z`` squashes to."""
        normal = -0.5 * ((z - self.loc) / self.scale) ** 2 - self.scale.log() - 0.5 * math.log(2 * math.pi)
        _, half = self._box()
        log_half = half.log() if isinstance(half, Tensor) else math.log(half)
        return (normal - log_half - 2 * (math.log(2.0) - z - softplus(-2 * z))).sum(-1)
