"""``graphrl train ppo``: every field of the configuration is an option."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from graphrl.errors import GraphRLError, did_you_mean
from graphrl.training.config import PPOConfig
from graphrl.training.presets import describe_preset, preset

__all__ = ["run"]

ALGORITHMS = ("ppo",)
OPTIONAL = ("--tensorboard", "--curve")


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
    arguments = _spelled_out(arguments[1:])
    options = tyro.cli(TrainPPO, prog="graphrl train ppo", args=arguments, default=TrainPPO(_defaults(arguments)))
    from graphrl.training.trainer import Trainer

    config = options.config
    if options.resume is not None:
        config = dataclasses.replace(config, out=options.resume)
    trainer = Trainer(config, resume=options.resume is not None, quiet=options.quiet)
    if trainer.frames >= config.frames:
        trainer.close()
        print(f"nothing left to do: {trainer.frames} of {config.frames} frames; raise --total-frames")
        return
    if not options.quiet:
        _announce(config, trainer.folder, options.resume is not None)
    result = trainer.train()
    line = f"{result.frames} frames in {result.seconds:.1f} s, mean training return {result.mean_return:.1f}"
    if result.evaluation is not None:
        score, spread = result.evaluation.mean, result.evaluation.std
        line += f", evaluation {score:.1f} +- {spread:.1f} over {len(result.evaluation.returns)} episodes"
    names = ("progress.csv", "checkpoint", "tensorboard", "curve.png")
    print(f"{line}\n{result.folder}: {', '.join(name for name in names if (result.folder / name).exists())}")


def _announce(config: PPOConfig, folder: Path, resumed: bool) -> None:
    if not resumed and (settings := describe_preset(config)):
        print(settings, file=sys.stderr)
    if config.frames != config.total_frames:
        rounded = f"rounded up to {config.frames}, whole batches of {config.frames_per_batch}"
        print(f"total_frames {config.total_frames} {rounded}", file=sys.stderr)
    print(f"{config.env.id}: {config.frames} frames in {folder}", file=sys.stderr)


def _defaults(arguments: Sequence[str]) -> PPOConfig:
    """What the options not given stand for: the configuration of the run to resume, or the environment's preset."""
    run = _value(arguments, "--resume")
    if run is not None:
        from graphrl.training.trainer import load_config

        return load_config(run)
    return preset(_value(arguments, "--env.id") or PPOConfig().env.id)


def _value(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option that must be known before the others are read; the last one counts."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name == option:
            found = value if equals else following
    return found


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """``--curve`` as ``--curve True`` and ``--no-curve`` as ``--curve False``, for the options that may be None."""
    spelled: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name = argument.replace("--no-", "--", 1)
        if name in OPTIONAL and following not in ("True", "False", "None"):
            spelled += [name, str(name == argument)]
        else:
            spelled.append(argument)
    return spelled
