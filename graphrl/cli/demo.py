"""``graphrl demo``: from nothing to a C policy in closed loop, on Pendulum-v1."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from graphrl.errors import GraphRLError
from graphrl.training.presets import preset

__all__ = ["DEMO_CONFIG", "compare_closed_loop", "run"]

EPISODES = 20
SEED = 2_000_003
TOLERANCE = 1e-3

DEMO_CONFIG = replace(
    preset("Pendulum-v1"),
    eval_episodes=EPISODES,
    overwrite=True,
)
"""The settings of ``graphrl train ppo --env.id Pendulum-v1``, in a folder that may be replaced."""


@dataclass(frozen=True)
class Demo:
    """Train PPO on Pendulum-v1, measure it compiled against eager, export it, and run the C policy without torch."""

    out: str = "runs/demo"
    seed: int = 0
    total_frames: int = DEMO_CONFIG.total_frames


def run(arguments: list[str]) -> None:
    """Run every step; one that needs a missing tool says so, and the demo goes on."""
    options = tyro.cli(Demo, prog="graphrl demo", args=arguments)
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    out = Path(options.out)
    say(console, "1 train", f"PPO on Pendulum-v1, {options.total_frames} frames, 8 environments, in {out}")
    trainer = _train(options, out, console)
    say(console, "2 measure", "the policy and the whole update, eager and compiled, taking turns")
    _measure(trainer, console)
    say(console, "3 export", f"C99 and ONNX in {out / 'bundle'}")
    bundle = _export(trainer, out / "bundle", console)
    say(console, "4 closed loop", f"{EPISODES} episodes on the C policy, in a process without torch and graphrl")
    if bundle is not None and "c99" in bundle.manifest["targets"]:
        compare_closed_loop(trainer, bundle.path, out / "closed_loop.npz", console)
    else:
        console.print("  no C in the bundle: skipped")
    names = ("checkpoint", "progress.csv", "curve.png", "tensorboard", "bundle")
    say(console, "done", f"{out}: {', '.join(name for name in names if (out / name).exists())}")


def say(console: Any, step: str, what: str) -> None:
    """A step's headline."""
    console.print(f"\n[bold]{step}[/bold]: {what}")


def _train(options: Demo, out: Path, console: Any) -> Any:
    from graphrl.compiler.bundle.c_policy import find_compiler
    from graphrl.training import Trainer
    from graphrl.training.trainer import EVAL_SEED

    backends: dict[str, Any] = {}
    if find_compiler() is None:
        console.print("  no C compiler: training runs eagerly, which is slower (install gcc or clang, or set CC)")
        backends = {"policy_backend": "eager", "update_backend": "eager"}
    config = replace(
        DEMO_CONFIG,
        **backends,
        env=replace(DEMO_CONFIG.env, seed=100 * options.seed),
        seed=options.seed,
        total_frames=options.total_frames,
        out=str(out),
    )
    start = time.perf_counter()
    trainer = Trainer(config)
    result = trainer.train()
    assert result.evaluation is not None
    console.print(
        f"  {result.frames} frames in {result.seconds:.1f} s, compilation included;"
        f" {time.perf_counter() - start:.1f} s with the evaluation"
    )
    first = config.env.seed + EVAL_SEED
    console.print(
        f"  return of the eager policy over {EPISODES} episodes, seeds {first} to {first + EPISODES - 1}:"
        f" {result.evaluation.mean:.1f}"
    )
    if result.curve is None:
        console.print("  no matplotlib: no learning curve (pip install 'graphrl[plot]')")
    return trainer


def _measure(trainer: Any, console: Any) -> None:
    from tensordict import TensorDict
    from tensordict.nn import InteractionType, set_interaction_type

    from graphrl import benchmark
    from graphrl.bench.tables import BenchOptions
    from graphrl.bench.update import eager_against_compiled
    from graphrl.envs import GymEnv
    from graphrl.training import PPO

    config = trainer.config
    with GymEnv(config.env.id, num_envs=config.env.num_envs) as env:
        observation = env.reset()["observation"][:1]
        with set_interaction_type(InteractionType.DETERMINISTIC):
            acting = trainer.algorithm.actor.select(out_keys=["action"])
            table = benchmark(acting, TensorDict({"observation": observation}, batch_size=[1]), ("inductor", "native"))
        console.print(replace(table, title="policy"))
        copy = PPO(config, env)  # the timed updates train a copy
        copy.load_state_dict(trainer.algorithm.state_dict())
        batch = env.rollout(config.frames_per_batch // env.num_envs, copy.actor, break_when_any_done=False)
        console.print(eager_against_compiled(copy, batch.detach(), BenchOptions()))


def _export(trainer: Any, path: Path, console: Any) -> Any:
    from graphrl.cli.export import export_run
    from graphrl.compiler.bundle.c_policy import find_compiler

    targets = ["c99", "numpy"]
    if find_compiler() is None:
        console.print("  no C compiler: the C is written but not run here (install gcc or clang, or set CC)")
    if all(importlib.util.find_spec(p) for p in ("onnx", "onnxruntime")):
        targets.append("onnx")
    else:
        console.print("  no ONNX (pip install 'graphrl[onnx]')")
    try:
        bundle = export_run(trainer.folder, path, tuple(targets), overwrite=True)
    except GraphRLError as error:
        console.print(f"  no bundle: {error}")
        return None
    parity = ", ".join(f"{name} {error:.1e}" for name, error in bundle.parity.items())
    console.print(f"  largest error against float64: {parity}")
    return bundle


def compare_closed_loop(trainer: Any, bundle: Path, out: Path, console: Any) -> float:
    """Episodes on the C policy beside the same episodes on the eager one; returns the largest action difference.

    The C runs in a fresh interpreter (``python -I``) that refuses torch and graphrl. The eager policy is evaluated on
    the observations that process saw, and in an environment of its own with the same seeds.
    Raises :class:`GraphRLError` when an action differs by more than 1e-3.
    """
    import numpy as np
    import torch
    from tensordict import TensorDict
    from tensordict.nn import InteractionType, set_interaction_type

    from graphrl.cli.export import within_bounds
    from graphrl.compiler.bundle.c_policy import find_compiler

    if find_compiler() is None:
        console.print("  no C compiler: skipped (install gcc or clang, or set CC)")
        return float("nan")
    script = Path(__file__).with_name("closed_loop.py")
    command = [
        sys.executable,
        "-I",
        str(script),
        str(bundle),
        trainer.config.env.id,
        str(EPISODES),
        str(SEED),
        str(out),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise GraphRLError(f"the C policy's process failed: {result.stderr.strip().splitlines()[-1:]}")
    with np.load(out) as data:
        observations, actions, returns = data["observations"], data["actions"], data["returns"]
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        td = TensorDict({"observation": torch.from_numpy(observations)}, batch_size=[len(observations)])
        eager = within_bounds(trainer.algorithm.actor, trainer.env.action_spec)(td)["action"].numpy()
    difference = float(np.abs(eager - actions).max())
    same_seeds = trainer.evaluate(EPISODES, SEED)
    console.print(f"  {EPISODES} other episodes, seeds {SEED} to {SEED + EPISODES - 1}:")
    console.print(f"  return of the C policy      {returns.mean():9.2f}")
    console.print(f"  return of the eager policy  {same_seeds.mean:9.2f}   (same episodes)")
    console.print(f"  largest difference of an action over {len(actions)} steps: {difference:.1e}")
    if not difference <= TOLERANCE:
        raise GraphRLError(f"the C policy's actions differ from the eager ones by {difference:.1e}, over {TOLERANCE}")
    return difference
