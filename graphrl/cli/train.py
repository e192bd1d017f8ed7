"""``graphrl train ppo``: every field of the configuration is an option."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import tyro

from graphrl.errors import GraphRLError, did_you_mean
from graphrl.training.config import PPOConfig

__all__ = ["run"]

ALGORITHMS = ("ppo",)


@dataclasses.dataclass(frozen=True)
class TrainPPO:
    """Train PPO. With --resume every option defaults to what the run was started with."""

    config: Annotated[PPOConfig, tyro.conf.arg(name="")]
    resume: str | None = None
    """Run folder to go on from."""
    quiet: bool = False
    """Show no progress."""


def run(arguments: list[str]) -> None:
    """Train, and print where the run is and how it ended."""
    if arguments[:1] and arguments[0] in ("-h", "--help"):
        print(f"usage: graphrl train {{{','.join(ALGORITHMS)}}} [OPTIONS]")
        return
    if not arguments or arguments[0] not in ALGORITHMS:
        found = repr(arguments[0]) if arguments else "none"
        hint = did_you_mean(arguments[0], ALGORITHMS) if arguments else ""
        raise GraphRLError(f"train: expected an algorithm, one of {', '.join(ALGORITHMS)}, found {found}.{hint}")
    options = tyro.cli(
        TrainPPO,
        prog="graphrl train ppo",
        args=arguments[1:],
        default=TrainPPO(_defaults(arguments)),
    )
    from graphrl.training.trainer import Trainer

    config = options.config
    if options.resume is not None:
        config = dataclasses.replace(config, out=options.resume)
    trainer = Trainer(config, resume=options.resume is not None, quiet=options.quiet)
    if not options.quiet:
        print(f"{config.env.id}: {config.frames} frames in {trainer.folder}", file=sys.stderr)
    result = trainer.train()
    line = f"{result.frames} frames in {result.seconds:.1f} s, mean training return {result.mean_return:.1f}"
    if result.evaluation is not None:
        score, spread = result.evaluation.mean, result.evaluation.std
        line += f", evaluation {score:.1f} +- {spread:.1f} over {len(result.evaluation.returns)} episodes"
    print(f"{line}\n{result.folder}: progress.csv, checkpoint/")


def _defaults(arguments: list[str]) -> PPOConfig:
    """The configuration of the run to resume, if one is named."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--resume" and (equals or i + 1 < len(arguments)):
            from graphrl.training.trainer import load_config

            return load_config(value if equals else arguments[i + 1])
    return PPOConfig()
