"""One policy call at batch 1: a 17-64-64-6 tanh network behind keys, and what its competitors take for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from graphrl.bench.tables import BenchOptions, installed
from graphrl.compiler.backends import BACKENDS
from graphrl.compiler.benchmark import BenchmarkRow, BenchmarkTable, benchmark
from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.graph import KeyedGraph
from graphrl.training.threads import torch_threads

__all__ = ["keyed_policy", "suite"]

SIZES = (17, 64, 64, 6)
C_ROW, C_CALLS = "generated C, loop in C", 2000


def keyed_policy(device: str = "cpu") -> tuple[KeyedGraph, nn.Sequential]:
    """The network as a graph of three keyed nodes, and the same layers as an ``nn.Sequential``."""
    torch.manual_seed(0)
    widths = list(zip(SIZES[:-1], SIZES[1:], strict=True))
    layers = [nn.Sequential(nn.Linear(a, b), *([nn.Tanh()] if b != SIZES[-1] else [])).to(device) for a, b in widths]
    keys = ["observation", "hidden_0", "hidden_1", "action"]
    nodes = [TensorDictModule(m, [keys[i]], [keys[i + 1]]) for i, m in enumerate(layers)]
    return KeyedGraph(*nodes), nn.Sequential(*(m for layer in layers for m in layer))


def suite(options: BenchOptions) -> list[BenchmarkTable]:
    """The policy table. Times of the C function are of a loop in C: no Python in them."""
    graph, network = keyed_policy(options.device)
    graph = graph.select(out_keys=["action"])
    example = TensorDict({"observation": torch.randn(1, SIZES[0], device=options.device)}, batch_size=[1])
    observation = example["observation"]
    sequential = TensorDictSequential(*graph)
    compiled = torch.compile(network)
    scratch = example.copy()
    others: dict[str, Callable[[], Any]] = {
        "tensordict.nn, eager": lambda: sequential(scratch),
        "nn.Sequential, eager": lambda: network(observation),
        "nn.Sequential, torch.compile": lambda: compiled(observation),
    }
    backends = ["inductor"] if options.device == "cuda" else [b for b in BACKENDS if b in ("inductor", "aot", "native")]
    with tempfile.TemporaryDirectory() as folder:
        bundle = None if options.device == "cuda" else _bundle(graph, example, Path(folder), options)
        if options.device == "cpu" and installed("torchrl", options):
            others["torchrl Actor, eager"] = _torchrl(network, example)
        if bundle is not None and "onnx" in bundle.manifest["targets"]:
            others["ONNX Runtime, 1 thread"] = _onnx(bundle.path / "model.onnx", observation)
        if bundle is not None and "c99" in bundle.manifest["targets"]:
            loop = _c_loop(bundle)
            others[C_ROW] = lambda: loop(C_CALLS)
        with torch_threads(options.threads or torch.get_num_threads()):
            table = benchmark(graph, example, tuple(backends), others=others, repeats=options.repeats)
    rows = tuple(_per_call(row) if row.name == C_ROW else row for row in table.rows)
    return [replace(table, title="policy 17-64-64-6, batch 1, per call", rows=rows)]


def _bundle(graph: KeyedGraph, example: TensorDict, folder: Path, options: BenchOptions) -> Any:
    from graphrl.compiler.bundle import export

    targets = ["c99"] if find_compiler() is not None else []
    if installed("onnx", options) and installed("onnxruntime", options):
        targets.append("onnx")
    return export(graph, folder / "bundle", example, targets=targets) if targets else None


def _torchrl(network: nn.Sequential, example: TensorDict) -> Callable[[], Any]:
    """The network as TorchRL's deterministic actor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.modules import Actor
    actor, scratch = Actor(network, in_keys=["observation"], out_keys=["action"]), example.copy()
    return lambda: actor(scratch)


def _onnx(file: Path, observation: Tensor) -> Callable[[], Any]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: observation.numpy()}
    return lambda: session.run(None, feed)


def _c_loop(bundle: Any) -> Callable[[int], Any]:
    """The generated step function in a loop that is C too: a function of the number of calls."""
    prefix = bundle.manifest["c"]["prefix"]
    folder = bundle.path.parent / "loop"
    shutil.copytree(bundle.path / "c", folder)
    (folder / "loop.c").write_text(_LOOP.replace("@prefix@", prefix))
    library = folder / "loop.so"
    command = [find_compiler() or "cc", "-std=c99", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(folder / "loop.c"), str(folder / f"{prefix}.c"), "-lm"], check=True)
    loop = ctypes.CDLL(str(library)).loop
    loop.argtypes, loop.restype = [ctypes.c_long], ctypes.c_float
    return loop


def _per_call(row: BenchmarkRow) -> BenchmarkRow:
    return replace(
        row,
        median_us=row.median_us / C_CALLS,
        quartile_1_us=row.quartile_1_us / C_CALLS,
        quartile_3_us=row.quartile_3_us / C_CALLS,
        ratio=row.ratio * C_CALLS,
        ratio_quartile_1=row.ratio_quartile_1 * C_CALLS,
        ratio_quartile_3=row.ratio_quartile_3 * C_CALLS,
    )


_LOOP = """#include "@prefix@.h"
#include <string.h>
float loop(long calls)
{
    static @prefix@_state st;
    static @prefix@_obs obs;
    static @prefix@_command command;
    float sum = 0.0f;
    @prefix@_init(&st);
    memset(&obs, 0, sizeof obs);
    for (long i = 0; i < calls; ++i) {
        float first;
        (void)@prefix@_step(&st, &obs, &command);
        memcpy(&first, &command, sizeof first); /* the next observation depends on this action: no call is left out */
        memcpy(&obs, &first, sizeof first);
        sum += first;
    }
    return sum;
}
"""
