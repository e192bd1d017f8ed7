"""What can step a robot's policy: its bundle's C, ONNX, AOTInductor package and numpy, and what PyTorch offers.

Every runtime carries its own recurrent state and is handed the same observation. Run as a program, this file counts
the allocations of each (``compiler/bundle/allocations.py``).
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.bench.robot_policies import Policy, make_policy
from graphrl.compiler.bundle.allocations import allocations_per_call, counted
from graphrl.compiler.bundle.c_policy import CPolicy, find_compiler
from graphrl.compiler.bundle.load import Bundle, load
from graphrl.compiler.bundle.parity import Row, Run
from graphrl.compiler.bundle.runners import RUNNERS, onnx_session, run_c_row
from graphrl.compiler.compiled import compile
from graphrl.errors import BundleError
from graphrl.keys import encode_key
from graphrl.training.threads import torch_threads

__all__ = ["C", "SAME_C", "Runtime", "Subject", "count_allocations", "makers"]

C, SAME_C = "C of the bundle", "graphrl native, call"
Call = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Runtime:
    """step: one step on the fixed observation; gives what the runtime gives. run: a row in the manifest's order, for
    parity; ``None``: known already.

    times: microseconds of each of a number of steps, where something else than Python should look at the clock.
    """

    step: Callable[[], Any]
    run: Run | None = None
    times: Callable[[int], list[float]] | None = None

    def timed(self, calls: int) -> list[float]:
        """Microseconds of each of ``calls`` steps."""
        if self.times is not None:
            return self.times(calls)
        found, clock, step = [], time.perf_counter, self.step
        for _ in range(calls):
            start = clock()
            step()
            found.append(1e6 * (clock() - start))
        return found


@dataclass(frozen=True)
class Subject:
    """A policy, its bundle, and the one with the AOTInductor package, with the observation that every step gets."""

    policy: Policy
    bundle: Bundle
    package: Bundle | None

    @property
    def td(self) -> TensorDict:
        """One random observation in the middle of an episode; the state is zero."""
        td: TensorDict = next(self.policy.episode(1, starts=()))
        return td

    def keys(self, side: str) -> list[str]:
        """Encoded keys of the program's ``inputs`` or ``outputs``, in order."""
        return [port["key"] for port in self.bundle.manifest[side]]

    def named(self) -> dict[str, np.ndarray]:
        """The observation and the state it starts from, by encoded key."""
        return {encode_key(key): value.numpy() for key, value in self.td.items(True, True)}

    def observation(self) -> dict[str, np.ndarray]:
        """What a runtime with a state of its own is given, by encoded key."""
        carried = {s["key"] for s in self.bundle.contract["recurrent"] or ()}
        return {key: value for key, value in self.named().items() if key not in carried}

    def state(self) -> list[tuple[str, str]]:
        """Encoded key and next key of what is carried."""
        return [(encode_key(key), encode_key(following)) for key, following in self.policy.state]


def makers(subject: Subject) -> dict[str, Callable[[], Runtime]]:
    """By name, what builds each runtime. Building raises where it does not work here."""
    found: dict[str, Callable[[], Runtime]] = {
        C: lambda: _c(subject),
        "eager graph": lambda: _eager(subject),
        "TorchScript, frozen": lambda: _torchscript(subject),
    }
    if "onnx" in subject.bundle.manifest["targets"]:
        found["ONNX Runtime, run"] = lambda: _onnx(subject)
        found["ONNX Runtime, IO binding"] = lambda: _bound_onnx(subject)
    if subject.package is not None:
        found["AOTInductor from Python"] = lambda: _package(subject)
    found[SAME_C] = lambda: _compiled(subject, "native")
    found["graphrl inductor, call"] = lambda: _compiled(subject, "inductor")
    found["numpy runtime"] = lambda: _numpy(subject)
    return found


def count_allocations(subject: Subject, shrink: int, calls: int = 100) -> dict[str, float | None]:
    """Allocations a step of every runtime that works, in a process of its own; ``None`` where nothing can count."""
    folders = [str(b.source) for b in (subject.bundle, subject.package) if b is not None]
    command = [sys.executable, "-m", __name__, subject.policy.name, str(shrink), str(calls), *folders]
    with counted() as environment:
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise BundleError(f"counting allocations fails: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, float | None] = json.loads(result.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str]) -> None:
    """What :func:`count_allocations` runs: prints one line of JSON."""
    name, shrink, calls, *folders = arguments
    bundles = [load(folder) for folder in folders]
    subject = Subject(make_policy(name, int(shrink)), bundles[0], bundles[1] if len(bundles) > 1 else None)
    found = {}
    with torch.no_grad(), torch_threads(1):
        for label, make in makers(subject).items():
            try:
                runtime = make()
            except Exception:  # its reason is told where it is timed
                continue
            found[label] = allocations_per_call(runtime.step, int(calls))
    print(json.dumps(found))


# ---- each runtime


def _c(subject: Subject) -> Runtime:
    """Timed by C: a loop that calls the step through a pointer and reads the clock before and after."""
    policy = CPolicy(subject.bundle.path)
    policy(subject.observation())  # leaves it in its struct
    loop, step = _step_loop(), ctypes.cast(policy._step, ctypes.c_void_p)

    def times(calls: int) -> list[float]:
        us = (ctypes.c_double * calls)()
        loop(step, *policy._arguments, calls, us)
        return list(us)

    return Runtime(lambda: policy._step(*policy._arguments), lambda row: run_c_row(policy, row), times)


def _step_loop() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "steps.c"), Path(folder, "steps.so")
        source.write_text(_STEPS)
        build = [find_compiler() or "cc", "-std=c99", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(build, check=True, capture_output=True)
        loop = ctypes.CDLL(str(library)).time_steps
    pointer = ctypes.c_void_p
    loop.argtypes, loop.restype = [pointer, pointer, pointer, pointer, ctypes.c_long, pointer], None
    return loop


_STEPS = """#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <time.h>
typedef uint32_t step_function(void *state, const void *obs, void *command);
static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}
void time_steps(step_function *step, void *state, const void *obs, void *command, long n, double *us)
{
    for (long i = 0; i < n; ++i) {
        const double start = now_us();
        (void)step(state, obs, command);
        us[i] = now_us() - start;
    }
}
"""


def _eager(subject: Subject) -> Runtime:
    graph, td, state = subject.policy.graph, subject.td, subject.policy.state

    def step() -> TensorDict:
        graph(td)
        for key, following in state:
            td.set(key, td.get(following))
        return td

    return Runtime(step)


class _Tensors(nn.Module):
    """The graph as a function of tensors in the manifest's order, for ``torch.jit.trace``."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.graph = subject.policy.graph
        by_name = {encode_key(k): k for k in (*subject.policy.graph.in_keys, *subject.policy.graph.out_keys)}
        self.reads = [by_name[name] for name in subject.keys("inputs")]
        self.writes = [by_name[name] for name in subject.keys("outputs") if name in by_name]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        td = self.graph(TensorDict(dict(zip(self.reads, inputs, strict=True)), batch_size=[1]))
        return tuple(td.get(key) for key in self.writes)


def _torchscript(subject: Subject) -> Runtime:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated, and doubts every check of a shape
        named = subject.named()
        example = tuple(torch.from_numpy(named[key]) for key in subject.keys("inputs"))
        tensors = _Tensors(subject).eval()
        traced = torch.jit.freeze(torch.jit.trace(tensors, example))
    writes = [encode_key(key) for key in tensors.writes]
    return _of_tensors(subject, traced, subject.keys("inputs"), writes)


def _compiled(subject: Subject, backend: str) -> Runtime:
    fast = compile(subject.policy.graph, subject.td, backend=backend, strict=True)
    reads, writes = ([encode_key(k) for k in keys] for keys in (fast.in_keys, fast.out_keys))
    return _of_tensors(subject, fast.call, reads, writes)


def _package(subject: Subject) -> Runtime:
    assert subject.package is not None
    loader = torch._inductor.aoti_load_package(str(subject.package.path / "model.pt2")).loader
    return _of_tensors(subject, lambda *a: loader.run(list(a)), subject.keys("inputs"), subject.keys("outputs"))


def _of_tensors(subject: Subject, call: Call, reads: Sequence[str], writes: Sequence[str]) -> Runtime:
    named = subject.named()
    values = [torch.from_numpy(named[key]) for key in reads]
    pairs = [(reads.index(key), writes.index(following)) for key, following in subject.state()]
    order = [subject.keys("inputs").index(key) for key in reads]
    lowered = np.zeros((1, 1), np.bool_)  # a bundle writes the flag of a first step, a graph only reads it

    def step() -> Sequence[Tensor]:
        found = call(*values)
        for i, j in pairs:
            values[i] = found[j]
        return found

    def run(row: Sequence[np.ndarray]) -> Row:
        found = call(*(torch.from_numpy(np.array(row[i])) for i in order))
        named = dict(zip(writes, found, strict=True))
        return [named[key].numpy().copy() if key in named else lowered for key in subject.keys("outputs")]

    return Runtime(step, run)


def _onnx(subject: Subject) -> Runtime:
    session = onnx_session(subject.bundle.path)
    reads, writes = ([port.name for port in ports] for ports in (session.get_inputs(), session.get_outputs()))
    feed = {name: value for name, value in subject.named().items() if name in reads}
    pairs = [(key, writes.index(following)) for key, following in subject.state()]

    def step() -> Row:
        found: Row = session.run(writes, feed)
        for key, j in pairs:
            feed[key] = found[j]
        return found

    return Runtime(step, RUNNERS["onnx"](subject.bundle.path, subject.bundle.manifest)[0])


def _bound_onnx(subject: Subject) -> Runtime:
    """All memory bound once. The state has two places: each of two bindings reads one and writes the other."""
    import onnxruntime

    session = onnx_session(subject.bundle.path)
    reads, writes = ([port.name for port in ports] for ports in (session.get_inputs(), session.get_outputs()))
    ports = {port["key"]: port for port in subject.bundle.manifest["outputs"]}
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value.copy()) for name, value in subject.named().items()}
    places = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(ports[name]["shape"], ports[name]["dtype"]))
              for name in writes}  # fmt: skip
    bindings = [session.io_binding() for _ in range(2)]
    after = {following: key for key, following in subject.state()}
    before = {key: following for following, key in after.items()}
    for turn, binding in enumerate(bindings):
        for name in reads:
            swapped = turn and name in before
            binding.bind_ortvalue_input(name, places[before[name]] if swapped else values[name])
        for name in writes:
            swapped = turn and name in after
            binding.bind_ortvalue_output(name, values[after[name]] if swapped else places[name])
    turn = 0

    def step() -> Any:
        nonlocal turn
        session.run_with_iobinding(bindings[turn])
        turn ^= 1
        return bindings[turn ^ 1]

    def run(row: Sequence[np.ndarray]) -> Row:
        for name, value in zip(subject.keys("inputs"), row, strict=True):
            values[name].update_inplace(np.ascontiguousarray(value))
        session.run_with_iobinding(bindings[0])
        return [places[name].numpy().copy() for name in subject.keys("outputs")]

    return Runtime(step, run)


def _numpy(subject: Subject) -> Runtime:
    run, player = RUNNERS["numpy"](subject.bundle.path, subject.bundle.manifest)
    assert player is not None
    row = subject.observation()
    player.reset()
    return Runtime(lambda: player.step(row), run)


if __name__ == "__main__":
    main(sys.argv[1:])
