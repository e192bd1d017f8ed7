"""``graphrl export RUN OUT``: a trained policy as a bundle for a robot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

__all__ = ["export_run", "run"]

SEED = 1_000_000
"""Of the first episode in closed loop: far from the seeds that training uses."""


@dataclass(frozen=True)
class Export:
    """Write the policy of a training run as C99, ONNX and for numpy, with contract and parity report."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Run folder, or the checkpoint folder inside it."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write, or one file that ends in .zip."""
    targets: tuple[str, ...] = ("c99", "onnx", "numpy")
    """Also "pt2", an AOTInductor package: takes tens of seconds, and runs on this kind of CPU with this torch; and
    "executorch", where its extra is installed."""
    contract: str | None = None
    """File, .json or .toml, with fields of the contract that the environment does not tell, or tells otherwise."""
    rate_hz: float | None = None
    """Control steps a second, where the environment does not tell."""
    episodes: int = 5
    """Episodes in the environment, of the bundle beside the eager policy; 0 for none."""
    waive: tuple[str, ...] = ()
    """Checks whose failure the manifest records instead of stopping the export."""
    weights: str = "float32"
    """Or "float16", "int8": weights of products rounded so, in every runtime, and stored so in the C."""
    prefix: str = "policy"
    """Start of the names in C; two policies in one program need two."""
    overwrite: bool = False
    """Replace a bundle that is there."""


def run(arguments: list[str]) -> None:
    """Export, and print what was written."""
    options = tyro.cli(Export, prog="graphrl export", args=arguments)
    from graphrl.compiler.bundle.contract_text import closed_loop_text

    bundle = export_run(
        options.checkpoint,
        options.out,
        options.targets,
        contract_file=options.contract,
        rate_hz=options.rate_hz,
        episodes=options.episodes,
        waive=options.waive,
        weights=options.weights,
        prefix=options.prefix,
        overwrite=options.overwrite,
    )
    parity = ", ".join(f"{name} {error:.1e}" for name, error in bundle.parity.items())
    print(f"{bundle.source}: {', '.join(bundle.manifest['targets'])}; largest error against float64: {parity}")
    print(bundle.checks)
    loop = bundle.manifest["reports"]["parity"]["closed_loop"]
    if loop is not None:
        print(f"{options.episodes} episodes: {closed_loop_text(loop)}")


def export_run(
    checkpoint: Path | str,
    out: Path | str,
    targets: tuple[str, ...] = ("c99", "onnx", "numpy"),
    *,
    contract_file: Path | str | None = None,
    rate_hz: float | None = None,
    episodes: int = 5,
    waive: tuple[str, ...] = (),
    weights: str = "float32",
    prefix: str = "policy",
    overwrite: bool = False,
) -> Any:
    """The policy of a run as a bundle; its contract says what environment and policy know, and what a file adds.

    The action is clipped to its bounds inside, as the environment did in training.
    episodes: run in the environment with the bundle and with the eager policy, seeds :data:`SEED` and on; what the
    policy sees there are the recorded data of the bundle. Raises :class:`CheckpointError`, :class:`BundleError`.
    """
    from graphrl.compiler.bundle import export
    from graphrl.compiler.bundle.contract_file import merge_contract, read_contract_file
    from graphrl.envs import GymEnv, closed_loop, contract_from_env
    from graphrl.training.trainer import load_policy

    policy, config = load_policy(checkpoint)
    with GymEnv(config.env.id, num_envs=16, seed=config.env.seed) as env:
        example = env.reset()
        policy = within_bounds(policy, env.action_spec)
        contract = contract_from_env(env, policy)
    contract = contract if contract_file is None else merge_contract(contract, read_contract_file(contract_file))
    contract = contract if rate_hz is None else replace(contract, rate_hz=rate_hz)
    drive = closed_loop(config.env.id, episodes, SEED) if episodes else None
    return export(
        policy,
        out,
        example,
        targets=targets,
        contract=contract,
        waive=waive,
        weights=weights,
        prefix=prefix,
        overwrite=overwrite,
        closed_loop=drive,
    )


def within_bounds(policy: Any, spec: Any) -> Any:
    """``policy`` with its action clipped to the bounds of ``spec``, where it has any."""
    from graphrl import KeyedGraph
    from graphrl.specs import Bounded

    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return policy
    low, high = spec.low[0], spec.high[0]
    if not (low.isfinite() | high.isfinite()).any():
        return policy
    return KeyedGraph(policy, (lambda action: action.clamp(low, high), ["action"], ["action"]), out_keys=["action"])
