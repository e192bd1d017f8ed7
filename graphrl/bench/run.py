"""Which suites there are, and running several."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from graphrl.bench.tables import BenchOptions, cold_caches
from graphrl.compiler.benchmark import BenchmarkTable
from graphrl.errors import GraphRLError, did_you_mean

__all__ = ["SUITES", "run_suites"]

SUITES = ("policy", "update", "ensemble", "kernels", "collector", "foreign")
ON_REQUEST = ("precision", "deploy")  # whole trainings, and thirteen robots: each takes minutes


def run_suites(
    names: Sequence[str] = SUITES, device: str = "cpu", peers: bool = True, repeats: int = 30
) -> Iterator[BenchmarkTable]:
    """The tables of the suites called ``names``, each as soon as it is measured.

    device: ``cpu`` or ``cuda``. peers: include other libraries where installed. repeats: rounds, at least 2.
    Raises :class:`GraphRLError` for an unknown suite or a missing device, before anything is measured.
    """
    import torch

    for name in names:
        if name not in (known := SUITES + ON_REQUEST):
            raise GraphRLError(f"no suite {name!r}; there are {', '.join(known)}.{did_you_mean(name, known)}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise GraphRLError(f"device {device!r}: expected cpu, or cuda on a machine that has it")
    if repeats < 2:
        raise GraphRLError(f"repeats={repeats}: quartiles need at least 2")
    options = BenchOptions(device=device, peers=peers, repeats=repeats)
    for name in names:
        with cold_caches():
            yield from importlib.import_module(f"graphrl.bench.{name}").suite(options)
