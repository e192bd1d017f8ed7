"""What the checks of an export look at."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from graphrl.compiler.bundle.contract import Contract, ObservationTerm
from graphrl.compiler.bundle.golden import Golden
from graphrl.compiler.bundle.parity import Carried, Parity, Player, Run
from graphrl.compiler.bundle.recorded import Recording
from graphrl.compiler.bundle.runners import CPlayer
from graphrl.compiler.bundle.runtime import Policy
from graphrl.compiler.bundle.state import start_like
from graphrl.compiler.program import Program
from graphrl.compiler.verify import float64_reference
from graphrl.keys import Key, encode_key

__all__ = ["Skipped", "Subject", "fingerprint", "frozen"]

FAR_OFF = 1e-3
"""Error of the eager policy, of the action's scale, that is no rounding."""


class Skipped(Exception):
    """A check that has nothing to look at, with the reason."""


@dataclass
class Subject:
    """An export on its way: what was traced, and, once the files are written, its folder and runtimes by target."""

    contract: Contract
    action: Key
    policy: nn.Module
    state: str  # fingerprint of the policy before anything was run
    live: Program
    golden: Golden
    eager: Run
    tolerance: float
    targets: Sequence[str]
    folder: Path = field(default_factory=Path)
    manifest: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, tuple[Run, Player | None]] = field(default_factory=dict)
    parity: dict[str, Parity] = field(default_factory=dict)
    example: TensorDictBase | None = None  # all of its rows
    recorded: Recording | None = None
    closed_loop: dict[str, Any] | None = None
    weights: str = "float32"
    rounding: Parity | None = None  # what rounded weights move

    @property
    def initial(self) -> dict[Key, Any]:
        """Recurrent values as an episode starts with them, by key: a number, or all of them."""
        return {s.key: s.initial for s in self.contract.recurrent or ()}

    @property
    def observations(self) -> list[int]:
        """Positions of the inputs that are floats and no recurrent values."""
        ports = enumerate(self.live.inputs)
        return [i for i, p in ports if p.dtype.is_floating_point and p.key not in self.initial and np.prod(p.shape)]

    @property
    def players(self) -> dict[str, Any]:
        """Each runtime at hand, with a state of its own."""
        return {name: player or Carried(self.manifest, run) for name, (run, player) in self.runs.items()}

    @property
    def typed(self) -> dict[str, CPlayer | Policy]:
        """The runtimes of graphrl's own: those that check what they are given, and report a status."""
        return {name: p for name, (_, p) in self.runs.items() if isinstance(p, (CPlayer, Policy))}

    def terms(self) -> dict[int, ObservationTerm]:
        """The contract's statement on each observation, by the position of the input."""
        if self.contract.observations is None:
            raise Skipped("the contract declares no observations")
        stated = {t.key: t for t in self.contract.observations}
        return {i: stated[self.live.inputs[i].key] for i in self.observations if self.live.inputs[i].key in stated}

    def row(self, changed: Mapping[int, Tensor] | None = None, at: int = 0) -> list[Tensor]:
        """A golden row, recurrent values at their start, and ``changed`` at these positions."""
        row = [start_like(v, self.initial[p.key]) if p.key in self.initial else v.clone()
               for v, p in zip(self.golden.inputs[at], self.live.inputs, strict=True)]  # fmt: skip
        for i, value in (changed or {}).items():
            row[i] = value.to(row[i].dtype)
        return row

    def command(self, row: Sequence[Tensor]) -> Tensor:
        """The action of one row, in float64."""
        position = list(self.live.out_keys).index(self.action)
        return float64_reference(self.live, row)[position].double().reshape(-1)

    def seen(self, row: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """A row as a runtime with its own state reads it."""
        ports = zip(self.live.inputs, row, strict=True)
        return {encode_key(p.key): value.numpy() for p, value in ports if p.key not in self.initial}


def fingerprint(policy: nn.Module) -> str:
    """Hash of every parameter and buffer of a policy."""
    digest = hashlib.sha256()
    for name, tensor in (*policy.named_parameters(), *policy.named_buffers()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def frozen(subject: Subject) -> str:
    """What to add to an error where the traced program is plainly not the policy: a value was frozen on the way."""
    found = subject.parity["eager"]
    if found.worst <= FAR_OFF:
        return ""
    return (f". The policy itself differs from its traced program by {found.worst:.1e} of the action's scale: a value "
            "was frozen while tracing (numpy, .tolist(), math, random or a clock in forward): write it with torch "
            "operations")  # fmt: skip
