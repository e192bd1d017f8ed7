"""Running normalisation of observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphrl.errors import GraphError, NonFiniteError, SpecError

__all__ = ["RunningNorm"]


class RunningNorm(nn.Module):
    """Normalise by the mean and variance of everything seen so far.

        y = clamp((x - mean) / sqrt(var + eps), -clip, clip)

    ``shape``: of one sample, [F]. Call: [*B, F] -> [*B, F], same floating dtype, gradient to ``x``; it never changes
    the statistics. Only :meth:`update` does, and it refuses after ``eval()`` or :meth:`freeze`. Buffers ``count`` [],
    ``mean`` [F], ``var`` [F] (population variance) are in the state dict; they are float64 and stay so under
    ``.half()`` or ``.to(dtype)``: a float32 count stops growing at 1.7e7 samples, a float32 mean loses a batch's
    share of it long before 1e8. ``var`` is 1 until two samples are known. ``clip=None`` leaves ``y`` unclipped.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        eps: float = 1e-8,
        clip: float | None = 10.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        if not eps >= 0 or (clip is not None and not clip > 0):
            raise GraphError(f"RunningNorm: eps={eps} must not be negative, and clip={clip} must be positive or None")
        self.shape = torch.Size(size)
        self.eps = eps
        self.clip = clip
        self.frozen = False
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised ``x``: [*B, *shape] in the dtype of ``x`` (integers become the default float)."""
        if mismatch := self._mismatch(x):
            raise ValueError(mismatch)  # plain, so that a keyed graph adds the node and the key
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        std = torch.sqrt(self.var + self.eps).to(dtype)
        y = (x - self.mean.to(dtype)) / std
        return y if self.clip is None else y.clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take the samples ``x``: [*B, *shape] into the statistics, exactly as if all had been seen at once.

            n' = n + m;   d = mean_x - mean;   mean' = mean + d m / n'
            n' var' = n var + m var_x + d^2 n m / n'

        Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", eq. 2.1, in float64. An empty
        batch changes nothing. Raises, before anything changes: :class:`GraphError` after ``eval()`` or ``freeze()``,
        :class:`SpecError` for another shape, :class:`NonFiniteError` for a NaN or an infinity.
        """
        if self.frozen or not self.training:
            why = "is frozen: call unfreeze() first" if self.frozen else "is in eval mode: call train() first"
            raise GraphError(f"RunningNorm.update: the normaliser {why}, if its statistics are meant to move")
        if mismatch := self._mismatch(x):
            raise SpecError(mismatch)
        batch = x.reshape(-1, *self.shape).to(self.mean)
        if batch.shape[0] == 0:
            return
        if not torch.isfinite(batch).all():
            rows = int((~torch.isfinite(batch)).reshape(batch.shape[0], -1).any(-1).sum())
            raise NonFiniteError(
                f"RunningNorm.update: {rows} of {batch.shape[0]} samples hold a NaN or an infinity; "
                "the statistics are unchanged"
            )
        added = batch.shape[0]
        total = self.count + added
        mean = batch.mean(0)
        shift = mean - self.mean
        squares = torch.where(self.count < 2, 0.0, self.count * self.var)  # one sample has no spread; var says 1 there
        squares = squares + (batch - mean).square().sum(0) + shift.square() * (self.count * added / total)
        self.mean.add_(shift * (added / total))
        self.var.copy_(torch.where(total < 2, 1.0, squares / total))
        self.count.copy_(total)

    def freeze(self) -> RunningNorm:
        """Refuse updates from now on, in training mode too. Returns the module."""
        self.frozen = True
        return self

    def unfreeze(self) -> RunningNorm:
        """Allow updates in training mode again. Returns the module."""
        self.frozen = False
        return self

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, eps={self.eps}, clip={self.clip}" + (", frozen" if self.frozen else "")

    def _mismatch(self, x: Tensor) -> str | None:
        if x.ndim >= len(self.shape) and x.shape[x.ndim - len(self.shape) :] == self.shape:
            return None
        return f"RunningNorm takes [..., {', '.join(map(str, self.shape))}], but was given {list(x.shape)}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move with the model, but keep the statistics in float64."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
