from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from c_cases import Case, cases
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from graphrl.compiler.backends.c99 import Unsupported, generate
from graphrl.compiler.backends.c99.layout import Step, plan
from graphrl.compiler.backends.c99.mathlib import MAX_ULP, helpers_text
from graphrl.compiler.backends.c99.values import Buffer, View
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.graph import KeyedGraph

CC = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")
STRICT = "-std=c99 -Wall -Wextra -Werror -pedantic -Wconversion -Wdouble-promotion".split()
HEAD = "#include <math.h>\n#include <stdint.h>\n\n"
ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.ELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.GELU)


def source(program: Program, name: str, embed: bool = True, weights: str = "float32") -> str:
    """C text with an exported ``name(void *const *p)`` over inputs and then outputs."""
    generated = generate(program, embed=embed, name=f"{name}_run", weights=weights)
    place = {"input": 0, "output": len(program.inputs)}
    cast = ", ".join(
        f"({'' if a.written else 'const '}{a.c_type} *)p[{place[a.kind] + a.index}]" for a in generated.arguments
    )
    entry, given = f"void {name}(void *const *p)", [cast]
    own = ""
    if embed:  # a robot's caller owns the scratch memory
        own = "".join(f"    static {kind} {arena}[{size}];\n" for arena, kind, size in generated.scratch)
        given += [arena for arena, _, _ in generated.scratch]
    return (
        f"{HEAD}{generated.code}\n{entry};\n{entry}\n{{\n{own}    {name}_run({', '.join(filter(None, given))});\n}}\n"
    )


def build(folder: Path, sources: dict[str, str], *flags: str, compiler: str | None = CC) -> ctypes.CDLL:
    for name, text in sources.items():
        (folder / f"{name}.c").write_text(text)
    files = [str(folder / f"{name}.c") for name in sources]
    command = [compiler, *STRICT, *(flags or ("-O1",)), "-shared", "-fPIC", "-o", str(folder / "all.so"), *files, "-lm"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
    return ctypes.CDLL(str(folder / "all.so"))


def call(library: ctypes.CDLL, name: str, program: Program, inputs: list[Tensor]) -> list[Tensor]:
    outputs = [torch.empty(p.shape, dtype=p.dtype) for p in program.outputs]
    tensors = [*(t.contiguous() for t in inputs), *outputs]
    getattr(library, name)((ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors)))
    return outputs


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    finite = wanted.isfinite()
    assert torch.equal(found[~finite].nan_to_num(7.0), wanted[~finite].nan_to_num(7.0))
    error = (found[finite].double() - wanted[finite].double()).abs() / (1 + wanted[finite].double().abs())
    assert not error.numel() or error.max() <= tolerance


CASES = cases()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, dict[str, Program]]:
    """Every case in one library, weights and constants embedded, compiled with every warning an error."""
    programs = {c.name: run_passes(c.program(), deploy=True) for c in CASES}
    texts = {f"case_{name}": source(p, f"case_{name}") for name, p in programs.items()}
    return build(tmp_path_factory.mktemp("c99"), texts), programs


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_operation_equals_eager(case: Case, compiled: tuple[ctypes.CDLL, dict[str, Program]]) -> None:
    library, programs = compiled
    program, inputs = programs[case.name], case.values()
    wanted = program.run(*inputs)
    for found, ref in zip(call(library, f"case_{case.name}", program, inputs), wanted, strict=True):
        assert_close(found, ref, case.tolerance)


PLAIN = (
    "tanh sigmoid relu silu elu selu celu softplus leaky_relu hardtanh relu6 mish exp expm1 abs neg sign clamp "
    "clamp_min clamp_max square cube nan_to_num log log1p sqrt rsqrt softmax amax amin argmax layer_norm sum mean"
)
UNARY = [c for c in CASES if c.inputs == 1 and c.name in PLAIN.split()]


@pytest.mark.parametrize("case", UNARY, ids=lambda c: c.name)
def test_nan_and_extremes_come_out_as_in_eager(case: Case, compiled: tuple[ctypes.CDLL, dict[str, Program]]) -> None:
    library, programs = compiled
    program = programs[case.name]
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor(
        [[nan, 1, 0, -0.0, 1e-40, 2, -3], [inf, -1, 88, -88, 100, 0.5, 1], [-inf, 1, 30, -30, 1e10, -1e10, 0]]
    )
    (wanted,) = program.run(rows)
    (found,) = call(library, f"case_{case.name}", program, [rows])
    if case.name in ("softmax", "layer_norm"):  # an infinity in the row: NaN on both sides
        assert found[0].isnan().all() and torch.equal(found.isnan(), wanted.isnan())
        return
    assert_close(found, wanted, 4e-6)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_networks_of_odd_sizes(batch: int, tmp_path: Path) -> None:
    sizes = [(1, 1, 1), (7, 65, 3), (17, 64, 6), (5, 80, 81), (65, 130, 24), (3, 16, 97)]
    texts, wanted = {}, {}
    for i, (size, act) in enumerate(zip(sizes, ACTIVATIONS, strict=False)):
        torch.manual_seed(i)
        net = nn.Sequential(
            nn.Linear(size[0], size[1]), act(), nn.Linear(size[1], size[1]), act(), nn.Linear(*size[1:])
        )
        graph = KeyedGraph(TensorDictModule(net, in_keys=["observation"], out_keys=["action"]))
        x = torch.randn(batch, size[0])
        program = run_passes(trace(graph, TensorDict(observation=x, batch_size=[batch])), deploy=True)
        texts[f"net{i}"] = source(program, f"net{i}")
        wanted[f"net{i}"] = (program, x, net(x).detach())
    library = build(tmp_path, texts, "-O3", "-march=native")
    for name, (program, x, ref) in wanted.items():
        assert_close(call(library, name, program, [x])[0], ref, 2e-6)


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_clang_has_no_warnings_either(tmp_path: Path) -> None:
    texts = {f"case_{c.name}": source(run_passes(c.program(), deploy=True), f"case_{c.name}") for c in CASES}
    build(tmp_path, texts, "-O1", compiler="clang")


def test_own_functions_keep_their_error_bounds(tmp_path: Path) -> None:
    """All exponents and signs, 512 mantissas each, against numpy in float64."""
    loops = "".join(
        f"void v_{n}(const float *x, float *y, int n);\nvoid v_{n}(const float *x, float *y, int n)\n"
        f"{{\n    for (int i = 0; i < n; ++i) {{ y[i] = {n}(x[i]); }}\n}}\n"
        for n in MAX_ULP
    )
    library = build(tmp_path, {"f": HEAD + helpers_text([loops]) + "\n" + loops}, "-O3", "-march=native")
    bits = np.arange(0, 2**32, 2**14 - 3, dtype=np.uint64).astype(np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 88.7, -104.0], np.float32)
    x = np.concatenate([bits.view(np.float32), special, np.linspace(-20, 20, 200001, dtype=np.float32)])
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        exact = {"k_expf": np.exp(wide), "k_expm1f": np.expm1(wide), "k_tanhf": np.tanh(wide), "k_logf": np.log(wide),
                 "k_sigmoidf": 1 / (1 + np.exp(-wide)), "k_log1pf": np.log1p(wide),
                 "k_erff": torch.erf(torch.from_numpy(wide)).numpy()}  # fmt: skip
        for name, bound in MAX_ULP.items():
            y = np.empty_like(x)
            getattr(library, f"v_{name}")(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), len(x))
            ref, ref32 = exact[name], exact[name].astype(np.float32)
            assert np.array_equal(np.isnan(y), np.isnan(ref32)), name
            finite = np.isfinite(ref32)
            assert np.array_equal(y[~finite & ~np.isnan(y)], ref32[~finite & ~np.isnan(ref32)]), name
            if name == "k_sigmoidf":  # below the normal range it gives zero
                assert (np.abs(y[finite] - ref[finite])[np.abs(ref[finite]) < 1.2e-38] <= 1.2e-38).all()
                finite &= np.abs(ref) >= 1.2e-38
            ulp = np.abs(y[finite] - ref[finite]) / np.spacing(np.abs(ref32[finite])).astype(np.float64)
            assert ulp.max() <= bound, (name, ulp.max())


def test_tanh_is_odd_to_the_bit_and_bounded(tmp_path: Path) -> None:
    text = "void t(const float *x, float *y, int n);\nvoid t(const float *x, float *y, int n)\n{\n" \
        "    for (int i = 0; i < n; ++i) { y[i] = k_tanhf(x[i]); }\n}\n"  # fmt: skip
    library = build(tmp_path, {"t": HEAD + helpers_text([text]) + "\n" + text})
    x = torch.cat([torch.linspace(-12, 12, 100001), torch.randn(1000) * 1e-30])
    y, z = torch.empty_like(x), torch.empty_like(x)
    library.t(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), len(x))
    minus = -x
    library.t(ctypes.c_void_p(minus.data_ptr()), ctypes.c_void_p(z.data_ptr()), len(x))
    assert torch.equal(y, -z) and y.abs().max() <= 1
    assert (y.double() - torch.tanh(x.double())).abs().max() < 1.5e-7


@pytest.mark.skipif(shutil.which("gcc") is None, reason="reads gcc's vectoriser report")
def test_network_loops_vectorise_without_fast_math(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 6))
    graph = KeyedGraph(TensorDictModule(net, in_keys=["observation"], out_keys=["action"]))
    program = run_passes(trace(graph, TensorDict(observation=torch.zeros(1, 17), batch_size=[1])), deploy=True)
    text = source(program, "policy")
    (tmp_path / "policy.c").write_text(text)
    command = ["gcc", *STRICT, "-O3", "-fopt-info-vec", "-c", str(tmp_path / "policy.c"), "-o", str(tmp_path / "p.o")]
    report = subprocess.run(command, capture_output=True, text=True).stderr
    loops = {int(line.split(":")[1]) for line in report.splitlines() if "loop vectorized" in line}
    wanted = [i for i, line in enumerate(text.splitlines(), 1) if "acc[j] += (" in line or "(a0" in line]
    assert len(wanted) == 5
    for line in wanted:
        assert any(line - 2 <= n < line for n in loops), (line, report)


def test_generated_text() -> None:
    """The whole C of a small graph: a change here is a change of every robot's code."""
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(3, 2))
        layer.bias.fill_(0.5)
    graph = KeyedGraph(
        TensorDictModule(layer, in_keys=["observation"], out_keys=["hidden"]),
        (lambda h: torch.relu(h * 2) - 1, ["hidden"], ["action"]),
        out_keys=["action"],
    )
    program = trace(graph, TensorDict(observation=torch.zeros(1, 2), batch_size=[1]))
    assert generate(program, embed=False).function == GOLDEN
    embedded = generate(program, embed=True)
    assert re.search(r"static const float c\d\[3\] = \{\n    0.5f, 0.5f, 0.5f\n\};", embedded.code)
    assert embedded.code == generate(program, embed=True).code


GOLDEN = """\
static void run(
    const float *const restrict input0,
    const float *const restrict state0,
    const float *const restrict state1,
    float *const restrict b3
)
{
    float scratch[16];
    float *const b0 = scratch;
    for (int n = 0; n < 3; n += 3) {
        for (int m = 0; m < 1; m += 1) {
            const float *const x0 = input0;
            const float *const w0 = state0 + n * 2;
            const float *const w1 = state0 + (n + 1) * 2;
            const float *const w2 = state0 + (n + 2) * 2;
            float s0_0 = 0.0f, s0_1 = 0.0f, s0_2 = 0.0f;
            for (int i = 0; i < 2; ++i) {
                s0_0 += x0[i] * w0[i];
                s0_1 += x0[i] * w1[i];
                s0_2 += x0[i] * w2[i];
            }
            b0[n] = s0_0 + state1[n];
            b0[(n + 1)] = s0_1 + state1[(n + 1)];
            b0[(n + 2)] = s0_2 + state1[(n + 2)];
        }
    }
    for (int i0 = 0; i0 < 3; ++i0) {
        const float a0 = b0[i0];
        const float t0 = a0 * 2.0f;
        const float t1 = k_select(t0 < 0.0f, 0.0f, t0);
        const float t2 = t1 - 1.0f;
        b3[i0] = t2;
    }
}"""


def test_refusal_names_operation_node_and_key() -> None:
    graph = KeyedGraph((torch.special.bessel_j0, ["x"], ["h"]), (torch.tanh, ["h"], ["y"]), (torch.exp, ["x"], ["z"]))
    program = trace(graph, TensorDict(x=torch.zeros(1, 2), batch_size=[1]))
    with pytest.raises(Unsupported) as caught:
        generate(program, embed=True)
    text = caught.value.explain(program)
    assert "special_bessel_j0" in text and "node 'special_bessel_j0'" in text and "'y'" in text and "'z'" not in text


def test_float64_is_refused() -> None:
    graph = KeyedGraph((torch.tanh, ["x"], ["y"]))
    program = trace(graph, TensorDict(x=torch.zeros(1, 2, dtype=torch.float64), batch_size=[1]))
    with pytest.raises(Unsupported, match="float64 is not supported"):
        generate(program, embed=True)


def test_scratch_is_reused() -> None:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    graph = KeyedGraph(TensorDictModule(nn.Sequential(*layers), in_keys=["x"], out_keys=["y"]))
    program = trace(graph, TensorDict(x=torch.zeros(1, 64), batch_size=[1]))
    assert generate(program, embed=True).scratch_bytes == 2 * 64 * 4


def test_buffers_alive_together_never_overlap() -> None:
    buffers = [Buffer(f"b{i}", torch.float32, 10 + 7 * i, "scratch") for i in range(8)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        steps = [Step(["x"], set(rng.choice(buffers, 2)), {buffers[i]}) for i in rng.permutation(8)]
        layout = plan(steps, dict.fromkeys(buffers, "float"))
        spans = {}
        for b in buffers:
            uses = [t for t, s in enumerate(steps) if b in s.reads | s.writes]
            spans[b] = (min(uses), max(uses), layout.offsets[b], layout.offsets[b] + b.size)
        for a in buffers:
            for b in buffers:
                if a is not b and spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]:
                    assert spans[a][3] <= spans[b][2] or spans[b][3] <= spans[a][2]


def test_views_agree_with_torch() -> None:
    data = torch.arange(24.0)
    view = View.whole(Buffer("b", torch.float32, 24, "constant", data=data), (2, 3, 4))
    tensor = data.view(2, 3, 4)
    pairs = [
        (view.permute([2, 0, 1]), tensor.permute(2, 0, 1)),
        (view.narrow(1, 1, 2).select(0, 1), tensor[1, 1:3]),
        (view.flip([0, 2]), tensor.flip(0, 2)),
        (view.select(1, -1).expand((5, 2, 4)), tensor[:, -1].expand(5, 2, 4)),
        (view.permute([1, 0, 2]).reshape((3, 2, 2, 2)), tensor.permute(1, 0, 2).reshape(3, 2, 2, 2)),
        (view.narrow(2, 0, 4, 1).reshape((6, 4)), tensor.reshape(6, 4)),
    ]
    for mine, wanted in pairs:
        assert mine is not None and torch.equal(mine.as_torch(), wanted)
    assert view.permute([1, 0, 2]).reshape((6, 4)) is None
