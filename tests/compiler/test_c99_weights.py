"""How weights are stored in C: every code means what it should, and a format never changes a matrix."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_c99 import CC, HEAD, build, call, source
from torch import Tensor, nn

from graphrl.compiler.backends.c99 import generate
from graphrl.compiler.backends.c99.mathlib import helpers_text
from graphrl.compiler.backends.c99.weights import encode
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph

pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")


def test_every_half_is_decoded_to_the_bit(tmp_path: Path) -> None:
    """All 65536 patterns; infinity and NaN, which are never stored, must at least not look like a number in range."""
    text = "void h(const uint16_t *x, float *y, int n);\nvoid h(const uint16_t *x, float *y, int n)\n{\n" \
        "    for (int i = 0; i < n; ++i) { y[i] = k_halff(x[i]); }\n}\n"  # fmt: skip
    codes = np.arange(65536, dtype=np.uint16)
    wanted = codes.view(np.float16).astype(np.float32)
    for level in ("-O0", "-O3"):
        library = build(tmp_path, {"h": HEAD + helpers_text([text]) + "\n" + text}, level)
        found = np.empty(65536, np.float32)
        library.h(ctypes.c_void_p(codes.ctypes.data), ctypes.c_void_p(found.ctypes.data), 65536)
        finite = np.isfinite(wanted)
        assert finite.sum() == 63488
        assert np.array_equal(found[finite].view(np.uint32), wanted[finite].view(np.uint32))
        assert (np.abs(found[~finite]) > 65504).all()


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_codes_give_back_what_they_stand_for(form: str) -> None:
    torch.manual_seed(0)
    size = torch.logspace(-12, 4, 40)
    weights = torch.randn(2, 64, 40) * (size if form == "int8" else size.clamp(max=1e3))
    weights[:, :, 3] = 0.0
    weights[:, 5:, 4] = 0.0
    once = encode(weights, form).decode()
    again = encode(once, form)
    assert torch.equal(again.decode(), once)
    if form == "float16":
        assert torch.equal(once, weights.half().float())
        return
    assert again.scale is not None and again.values.dtype == torch.int8
    step = weights.abs().amax(1, keepdim=True) / 127
    assert ((once - weights).abs() <= 0.5001 * step).all()  # half a step, and the scale's own rounding
    wide = again.values.double() * again.scale.double().unsqueeze(1)
    assert torch.equal(wide, once.double())  # q s is a float32, so C may multiply after the sum


def network(round_to: str) -> tuple[Program, Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Unflatten(1, (3, 9)), nn.Conv1d(3, 10, 4), nn.ELU(), nn.Flatten(), nn.Linear(60, 70),
                        nn.Tanh(), nn.Linear(70, 5))  # fmt: skip
    with torch.no_grad():
        for layer in (net[1], net[4]):  # the last layer's weights fit no format
            columns = encode(layer.weight.flatten(1).t()[None], round_to).decode()
            layer.weight.copy_(columns[0].t().reshape(layer.weight.shape))
    x = torch.randn(1, 27)
    graph = KeyedGraph(TensorDictModule(net, in_keys=["x"], out_keys=["y"]))
    return run_passes(trace(graph, TensorDict(x=x, batch_size=[1])), deploy=True), x


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_only_matrices_that_fit_exactly_are_stored_small(form: str, tmp_path: Path) -> None:
    program, x = network(form)
    text = source(program, "net", weights=form)
    kinds = re.findall(r"^static const (\w+) \w+\[(\d+)\]", text, re.MULTILINE)
    small = {"float16": "uint16_t", "int8": "int8_t"}[form]
    assert [int(n) for kind, n in kinds if kind == small] == [12 * 24, 60 * 72]  # columns are padded
    assert ("float", str(70 * 24)) in kinds
    wide = generate(program, embed=True).weight_bytes
    assert generate(program, embed=True, weights=form).weight_bytes < wide * {"float16": 0.7, "int8": 0.6}[form]
    library = build(tmp_path, {"net": text, "plain": source(program, "plain")}, "-O3")
    (found,), (plain,) = (call(library, name, program, [x]) for name in ("net", "plain"))
    if form == "float16":
        assert torch.equal(found, plain)
    wanted = program.run(x)[0]
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()


def test_numbers_that_no_half_holds_stay_float32() -> None:
    layer = nn.Linear(4, 30)
    for value in (float("inf"), float("nan"), 1e5):
        with torch.no_grad():
            layer.weight.fill_(0.5)[0, 0] = value
        graph = KeyedGraph(TensorDictModule(layer, in_keys=["x"], out_keys=["y"]))
        program = run_passes(trace(graph, TensorDict(x=torch.zeros(1, 4), batch_size=[1])), deploy=True)
        assert "uint16_t" not in generate(program, embed=True, weights="float16").tables
