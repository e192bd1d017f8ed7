"""Follow one small actor through the compiler: drawn graph, traced program, each pass, and the program for a robot.

python examples/follow_one_actor.py
graphrl explain examples/follow_one_actor.py:actor --example batch --html actor.html    # the same as a page
"""

from dataclasses import replace

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type

import graphrl as grl
from graphrl.compiler.passes.pipeline import DEPLOY, LIVE
from graphrl.models import GaussianActor, RunningNorm


def follow(program: grl.Program, passes: tuple) -> grl.Program:
    """Run the passes one by one and print the program after each that changed it."""
    for step in passes:
        before = program.code
        program = step(program)
        changed = "" if program.code != before else " (nothing to do)"
        print(f"\n---- after {step.__name__}: {step.__doc__.splitlines()[0]}{changed}")
        if not changed:
            print(program.code)
    return program


def actor() -> grl.KeyedGraph:
    """A two-layer actor with an observation normaliser that has seen some data."""
    torch.manual_seed(0)
    normalizer = RunningNorm(3, clip=None)
    normalizer.update(5 + 2 * torch.randn(256, 3))
    return GaussianActor(3, 1, num_cells=[4], normalizer=normalizer).eval()


def batch() -> TensorDict:
    """One observation."""
    return TensorDict(observation=torch.randn(1, 3), batch_size=[1])


if __name__ == "__main__":
    graph, example = actor(), batch()

    print("==== the graph\n" + graph.to_mermaid())

    program = grl.trace(graph, example)
    print("\n==== traced, for training: weights are read at every call, the draw is an input\n" + program.code)
    follow(program, LIVE)

    with set_interaction_type(InteractionType.DETERMINISTIC):
        program = replace(grl.trace(graph.select(out_keys=["action"]), example), name="policy")
    print("\n==== traced, for a robot: the graph cut to the action, no draw\n" + program.code)
    follow(program, DEPLOY)
