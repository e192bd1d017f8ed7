"""``graphrl export RUN OUT``: a trained policy as a bundle for a robot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

__all__ = ["export_run", "run"]


@dataclass(frozen=True)
class Export:
    """Write the policy of a training run as C99 and ONNX with its contract, golden vectors and parity report."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Run folder, or the checkpoint folder inside it."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write."""
    targets: tuple[str, ...] = ("c99", "onnx")
    overwrite: bool = False
    """Replace a bundle that is there."""


def run(arguments: list[str]) -> None:
    """Export, and print what was written."""
    options = tyro.cli(Export, prog="graphrl export", args=arguments)
    bundle = export_run(options.checkpoint, options.out, options.targets, overwrite=options.overwrite)
    parity = ", ".join(f"{name} {error:.1e}" for name, error in bundle.parity.items())
    print(f"{bundle.path}: {', '.join(bundle.manifest['targets'])}; largest error against float64: {parity}")


def export_run(
    checkpoint: Path | str, out: Path | str, targets: tuple[str, ...] = ("c99", "onnx"), *, overwrite: bool = False
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
        contract = contract_of(env, config)
    return export(policy, out, example, targets=targets, contract=contract, overwrite=overwrite)


def contract_of(env: Any, config: Any) -> Any:
    """What an environment and a run tell a robot; the rest stays null."""
    from graphrl.compiler.bundle import ActionContract, Contract, Normalizer, ObservationTerm
    from graphrl.specs import Bounded

    inside = Normalizer(where="inside" if config.normalize_observation else "none")
    observations = tuple(
        ObservationTerm(key=key, shape=tuple(env.observation_spec[key].shape[1:]), normalizer=inside)
        for key in env.observation_spec.keys(True, True)
    )
    spec = env.action_spec
    bounds: dict[str, Any] = {}
    if isinstance(spec, Bounded):
        bounds = {"low": tuple(spec.low[0].tolist()), "high": tuple(spec.high[0].tolist()), "inside": ()}
    return Contract(
        rate_hz=env.rate_hz,
        observations=observations,
        action=ActionContract(key="action", **bounds),
        notes=f"trained on {config.env.id}; clip the action to its bounds before use",
    )
