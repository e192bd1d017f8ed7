"""The start of a program: what happens to an input before the first layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, fx

from graphrl.compiler.program import Program

__all__ = ["holds", "subtracted"]


def subtracted(program: Program, i: int, constants: Mapping[fx.Node, Tensor]) -> str | None:
    """The weight or buffer that is subtracted from an input before another divides it, if there is one."""
    aten = torch.ops.aten
    passed = ("view", "_to_copy", "cat", "clamp", "unsqueeze", "squeeze", "slice", "reshape", "permute")
    front, seen = [[n for n in program.graph_module.graph.nodes if n.op == "placeholder"][i]], set()
    while front:
        node = front.pop()
        for user in (u for u in node.users if u not in seen):
            seen.add(user)
            if user.target is aten.sub.Tensor and user.args[1] in constants:
                for after in user.users:
                    if after.target in (aten.div.Tensor, aten.mul.Tensor) and after.args[1] in constants:
                        return str(user.args[1])
            if str(user.target).removeprefix("aten.").split(".")[0] in passed:
                front.append(user)
    return None


def holds(value: Tensor, numbers: np.ndarray) -> bool:
    """Whether ``numbers`` stand in a tensor, one after another."""
    flat, n = value.double().cpu().reshape(-1).numpy(), numbers.size
    if not value.is_floating_point() or not 0 < n <= flat.size or flat.size > 1_000_000:
        return False
    starts = np.flatnonzero(np.isclose(flat[: flat.size - n + 1], numbers[0], rtol=1e-4, atol=1e-7))
    return any(np.allclose(flat[s : s + n], numbers, rtol=1e-4, atol=1e-7) for s in starts)
