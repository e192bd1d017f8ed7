"""``graphrl export RUN OUT``: a trained policy as a bundle for a robot."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

__all__ = ["export_run", "run"]


@dataclass(frozen=True)
class Export:
    """Write the policy of a training run as C99, ONNX and for numpy, with contract and parity report."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Run folder, or the checkpoint folder inside it."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write, or one file that ends in .zip."""
    targets: tuple[str, ...] = ("c99", "onnx", "numpy")
    """Also "pt2", an AOTInductor package: takes tens of seconds, and runs on this kind of CPU with this torch."""
    rate_hz: float | None = None
    """Control steps a second, where the environment does not tell."""
    waive: tuple[str, ...] = ()
    """Checks whose failure the manifest records instead of stopping the export."""
    weights: str = "float32"
    """Or "float16", "int8": weights of products rounded so, in every runtime, and stored so in the C."""
    overwrite: bool = False
    """Replace a bundle that is there."""


def run(arguments: list[str]) -> None:
    """Export, and print what was written."""
    options = tyro.cli(Export, prog="graphrl export", args=arguments)
    bundle = export_run(
        options.checkpoint,
        options.out,
        options.targets,
        rate_hz=options.rate_hz,
        waive=options.waive,
        weights=options.weights,
        overwrite=options.overwrite,
    )
    parity = ", ".join(f"{name} {error:.1e}" for name, error in bundle.parity.items())
    print(f"{bundle.source}: {', '.join(bundle.manifest['targets'])}; largest error against float64: {parity}")


def export_run(
    checkpoint: Path | str,
    out: Path | str,
    targets: tuple[str, ...] = ("c99", "onnx", "numpy"),
    *,
    rate_hz: float | None = None,
    waive: tuple[str, ...] = (),
    weights: str = "float32",
    overwrite: bool = False,
) -> Any:
    """The policy of a run as a bundle; its contract says what the environment knows: rate, action bounds.

    Raises :class:`CheckpointError`, :class:`BundleError`.
    """
    from graphrl.compiler.bundle import export
    from graphrl.envs import GymEnv
    from graphrl.training.trainer import load_policy

    policy, config = load_policy(checkpoint)
    with GymEnv(config.env.id, num_envs=16, seed=config.env.seed) as env:
        example = env.reset()
        contract = contract_of(env, config, policy)
        contract = contract if rate_hz is None else replace(contract, rate_hz=rate_hz)
    return export(
        policy, out, example, targets=targets, contract=contract, waive=waive, weights=weights, overwrite=overwrite
    )


def contract_of(env: Any, config: Any, policy: Any) -> Any:
    """What an environment and a trained policy tell a robot; the rest stays null."""
    from graphrl.compiler.bundle import Contract, ObservationTerm

    start, terms = 0, []
    for key in policy.in_keys:
        shape = tuple(env.observation_spec[key].shape[1:])
        stop = start + math.prod(shape)
        terms.append(ObservationTerm(key=key, shape=shape, normalizer=normalizer_of(policy, start, stop)))
        start = stop
    action, note = action_of(env.action_spec)
    return Contract(
        rate_hz=env.rate_hz,
        observations=tuple(terms),
        action=action,
        notes=f"trained on {config.env.id}; {note}",
    )


def normalizer_of(policy: Any, start: int, stop: int) -> Any:
    """The statistics of entries ``start`` to ``stop`` of what the policy's normaliser reads."""
    from graphrl.compiler.bundle import Normalizer
    from graphrl.models import RunningNorm

    norm = next((m for m in policy.modules() if isinstance(m, RunningNorm)), None)
    if norm is None:
        return Normalizer(where="none")
    mean, std = norm.mean[start:stop], (norm.var[start:stop] + norm.eps).sqrt()
    return Normalizer("inside", tuple(mean.tolist()), tuple(std.tolist()), norm.eps)


def action_of(spec: Any) -> tuple[Any, str]:
    """The action's names and bounds, and what the robot must do with it."""
    from graphrl.compiler.bundle import ActionContract
    from graphrl.specs import Bounded, Categorical

    if isinstance(spec, Categorical):
        bounds: dict[str, Any] = {"low": (0.0,), "high": (float(spec.n - 1),), "inside": ()}
        return ActionContract(names=("action_0",), **bounds), f"the action is one of {spec.n} choices, counted from 0"
    names = tuple(f"action_{i}" for i in range(spec.shape[-1]))
    if not isinstance(spec, Bounded):
        return ActionContract(names=names), "the action has no bounds"
    low, high = tuple(spec.low[0].tolist()), tuple(spec.high[0].tolist())
    return ActionContract(names=names, low=low, high=high, inside=()), "clip the action to its bounds before use"
