"""Each operation of deployed policies in ONNX Runtime against the same in float64: one table, one model file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from test_c99_convolution import CASES as LAYERS
from test_c99_convolution import assert_equal, traced
from torch import Tensor, nn

from graphrl.compiler.backends.onnx import BACKEND, export_onnx
from graphrl.compiler.trace import trace
from graphrl.compiler.verify import float64_reference
from graphrl.graph import KeyedGraph

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

at = torch.tensor


def _angles(x: Tensor) -> Tensor:
    grid = at([-2.0, -1.0, 0.0, 1.0]) + x[0, 0] * 0
    return torch.atan2(grid[:, None], grid)


OPERATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "transposed": ("image", nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, groups=1)),
    "transposed groups": ("line", nn.ConvTranspose1d(5, 10, 2, groups=5, dilation=2)),
    "adaptive max even": ("wide", nn.AdaptiveMaxPool2d((3, 1))),
    "adaptive max of one": ("image", lambda x: F.adaptive_max_pool2d(x[0], (3, 4))),
    "mean of one": ("wide", lambda x: F.avg_pool2d(x[0], 3, 2, 1, ceil_mode=True)),
    "places of one": ("image", lambda x: F.max_pool2d(x[0], 3, 2, 1, return_indices=True)[1]),
    "several indices": ("wide", lambda x: x[at([[0], [1]]), at([2, 0, -1])]),
    "several indices inside": ("wide", lambda x: x[:, at([[0], [1]]), at([2, 0, -1])]),
    "several indices last": ("wide", lambda x: x[:, :, at([[0], [1]]), at([2, 0, -1])]),
    "indices apart": ("wide", lambda x: x[at([0, 1]), :, at([2, 0])]),
    "indices apart inside": ("wide", lambda x: x[:, at([0, 1]), :, at([2, 0])]),
    "put": ("row", lambda x: x.index_put((at([[0], [1]]), at([2, 0, -1])), x[:, 3:6])),
    "put and add": ("row", lambda x: x.index_put((at([[0], [1]]), at([2, 2, -1])), x[:, 3:6], accumulate=True)),
    "scatter add": ("row", lambda x: x.scatter_add(1, torch.ones(2, 3, dtype=torch.int64), x)),
    "select scatter": ("image", lambda x: torch.select_scatter(x, x[:, :, 0] * 2, 2, -2)),
    "slice scatter": ("image", lambda x: torch.slice_scatter(x, x[:, :, :2] * 2, 2, 1, -1, 4)),
    "angles": ("row", _angles),
    "remainder": ("row", lambda x: torch.stack([x % 0.7, x % -0.7, (x * 3).round() % 1])),
    "remainder of tensors": ("row", lambda x: torch.remainder(x, x.flip(1))),
    "whole tenths": ("row", lambda x: torch.div(x.round(), 0.1, rounding_mode="floor")),
    "whole parts of tensors": ("row", lambda x: torch.floor_divide(x, x.flip(1))),
    "inverse hyperbolic": ("row", lambda x: torch.asinh(x) + torch.acosh(1 + x * x)),
}  # fmt: skip
CASES = {**LAYERS, **OPERATIONS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: what ONNX Runtime computed from the file, and the reference in float64."""
    program, inputs = traced(2, deploy=True, cases=CASES)
    path = tmp_path_factory.mktemp("onnx") / "all.onnx"
    export_onnx(program, path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, dict(zip(program.in_keys, (x.numpy() for x in inputs), strict=True)))
    wanted = float64_reference(program, inputs)
    return {k: (torch.from_numpy(a), b) for k, a, b in zip(program.out_keys, found, wanted, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_in_a_file_equals_float64(name: str, results: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_equal(*results[name])


def test_nan_infinity_and_zeros_of_either_sign_are_as_in_torch(tmp_path: Path) -> None:
    special = at([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan])
    ports = {"y": special.repeat(7)[None], "x": special.repeat_interleave(7)[None]}
    made = {"angle": torch.atan2, "sign": lambda y, x: torch.sign(y), "sgn": lambda y, x: torch.sgn(y),
            "root": lambda y, x: y**0.5, "floor": torch.floor_divide}  # fmt: skip
    program = trace(KeyedGraph(*((fn, ["y", "x"], [name]) for name, fn in made.items())), TensorDict(ports, [1]))
    export_onnx(program, tmp_path / "f.onnx")
    session = ort.InferenceSession(str(tmp_path / "f.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(None, {key: ports[key].numpy() for key in program.in_keys})
    for key, value in zip(program.out_keys, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), made[key](ports["y"], ports["x"]), equal_nan=True)


def test_a_convolution_keeps_its_batch_open(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2), nn.Flatten())
    program, _ = traced(2, deploy=True, cases={"y": ("image", net)})
    export_onnx(program, tmp_path / "f.onnx", symbolic_batch=True)
    session = ort.InferenceSession(str(tmp_path / "f.onnx"), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, 3, 8, 9)
        (found,) = session.run(None, {"image": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), net(x).detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True)[1], "places .* in uneven windows"),
        (lambda x: x.index_put((x > 0,), x[0, 0, 0]), "indexing by a mask"),
        (lambda x: torch.ops.aten.index_put(x, [None, at([1])], x[:, :1]), "other dims than the first"),
    ],
)
def test_refusals_name_what_is_missing(fn: Callable[[Tensor], Tensor], reason: str) -> None:
    program = trace(KeyedGraph((fn, ["x"], ["y"])), TensorDict(x=torch.zeros(4, 5, 7), batch_size=[]))
    refusal = BACKEND.supports(program)
    assert refusal is not None
    assert re.search(reason, refusal.reason)
