"""How the weights of products lie in a robot's memory: float32, float16 bit patterns, or int8 with a scale a column.

A format only stores: a matrix that it cannot hold exactly stays float32. The export rounds weights so that it can
(``compiler/bundle/weights.py``), for every runtime alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FORMATS", "Stored", "encode"]

FORMATS = ("float32", "float16", "int8")
"""Formats of weights; sums are float32 in each."""

LOW_BITS = 0x7F
"""Bits that an int8 scale leaves zero: 17 significant bits of its own and 7 of a code fit a float32 exactly."""


@dataclass(frozen=True)
class Stored:
    """``values`` [B, K, N]: codes, or the weights themselves. scale: [B, N], the factor of a column of codes."""

    values: Tensor
    scale: Tensor | None = None

    def decode(self) -> Tensor:
        """The float32 weights that the codes stand for."""
        if self.scale is not None:
            return self.values.float() * self.scale.unsqueeze(-2)
        return self.values.view(torch.float16).float() if self.values.dtype == torch.uint16 else self.values


def encode(weights: Tensor, form: str) -> Stored:
    """Nearest codes for float32 ``weights`` [B, K, N]; exact for weights that were decoded from such codes.

    int8: ``w = q s``, q in -127..127, with one s for each column of K weights, the smallest of 17 bits that reaches the
    column's largest. float16: IEEE 754 binary16, to nearest even.
    """
    if form == "float16":
        return Stored(weights.half().contiguous().view(torch.uint16))
    if form == "int8":
        scale = weights.abs().amax(-2) / 127.0
        scale = ((scale.view(torch.int32) + LOW_BITS) & ~LOW_BITS).view(torch.float32)
        codes = (weights / scale.unsqueeze(-2).clamp_min(torch.finfo(torch.float32).tiny)).round()
        return Stored(codes.clamp(-127, 127).to(torch.int8), scale)
    return Stored(weights)
