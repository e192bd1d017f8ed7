from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_c99 import CC, HEAD, STRICT, build, call, source
from torch import Tensor, nn

from graphrl.compiler.backends.c99 import Unsupported, generate
from graphrl.compiler.backends.native import BACKEND
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.compiler.verify import float64_reference
from graphrl.graph import KeyedGraph

pytestmark = [pytest.mark.skipif(CC is None, reason="needs a C compiler"), pytest.mark.usefixtures("fresh_cache")]

SHAPES = {"image": (3, 8, 9), "wide": (4, 9, 11), "line": (5, 12), "row": (7,)}


def norm_with_statistics(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (module.weight, getattr(module, "running_var", module.weight)):
            tensor.uniform_(0.3, 2)
        for tensor in (module.bias, getattr(module, "running_mean", module.bias)):
            tensor.uniform_(-1, 1)
    return module


def layers() -> dict[str, tuple[str, nn.Module]]:
    torch.manual_seed(0)
    conv = nn.Conv2d
    return {
        "plain": ("image", conv(3, 8, 3)),
        "padded": ("image", conv(3, 40, 3, padding=(2, 1), stride=(2, 1))),
        "dilated": ("wide", conv(4, 70, (3, 2), padding=(2, 1), dilation=(2, 3))),
        "grouped": ("wide", conv(4, 6, 3, groups=2, padding=1, bias=False)),
        "depthwise": ("wide", conv(4, 8, 3, groups=4)),
        "pointwise": ("wide", conv(4, 20, 1)),
        "whole image": ("image", nn.Sequential(conv(3, 8, (8, 9)), nn.Flatten())),
        "circular": ("image", conv(3, 4, 3, padding=1, padding_mode="circular")),
        "deep": ("image", nn.Sequential(conv(3, 8, 3), nn.ELU(), conv(8, 20, 3, padding=1, stride=2), nn.ReLU(),
                                        conv(20, 12, 1), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))),
        "deep groups": ("image", nn.Sequential(conv(3, 8, 3), nn.ELU(), conv(8, 20, 3, padding=1, groups=4),
                                               nn.ReLU(), conv(20, 20, 3, groups=20))),
        "over time": ("line", nn.Sequential(nn.Conv1d(5, 8, 3, stride=2), nn.ELU(), nn.Conv1d(8, 6, 2, padding=1))),
        "batch norm": ("image", nn.Sequential(conv(3, 8, 3), norm_with_statistics(nn.BatchNorm2d(8)), nn.ReLU())),
        "group norm": ("image", nn.Sequential(conv(3, 8, 3), norm_with_statistics(nn.GroupNorm(2, 8)))),
        "instance norm": ("image", nn.InstanceNorm2d(3)),
        "max": ("image", nn.MaxPool2d(2)),
        "max padded": ("image", nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
        "max dilated": ("image", nn.MaxPool2d(2, 2, dilation=2)),
        "max of channels": ("image", nn.Sequential(conv(3, 8, 3), nn.MaxPool2d(3, 2, 1), nn.Tanh(), nn.AvgPool2d(2))),
        "max over time": ("line", nn.MaxPool1d(3, 2)),
        "mean": ("image", nn.AvgPool2d(2)),
        "mean padded": ("wide", nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
        "mean of what is there": ("wide", nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
        "mean by five": ("wide", nn.AvgPool2d(3, divisor_override=5)),
        "mean over time": ("line", nn.AvgPool1d(3, 2, 1)),
        "adaptive": ("wide", nn.AdaptiveAvgPool2d((4, 3))),
        "adaptive even": ("image", nn.AdaptiveAvgPool2d((4, 3))),
        "adaptive upwards": ("wide", nn.AdaptiveAvgPool2d((12, 5))),
        "adaptive over time": ("line", nn.AdaptiveAvgPool1d(5)),
        "adaptive max": ("wide", nn.AdaptiveMaxPool2d((4, 3))),
        "adaptive channels": ("wide", nn.Sequential(conv(4, 8, 3), nn.AdaptiveAvgPool2d((4, 3)), nn.Flatten())),
    }  # fmt: skip


def functions() -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    torch.manual_seed(1)
    weight, mask = torch.randn(3, 3, 3, 3), torch.rand(9, 9) > 0.7

    def assigned(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 1:5:2] = x[:, :2] * 2
        y[:, -1] = 0.5
        return y

    def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.flatten(2), x.flatten(2) * 0.5, x.flatten(2) + 1

    return {
        "channels last": ("image", lambda x: F.conv2d(x.permute(0, 3, 1, 2), torch.ones(4, 9, 2, 2))),
        "no batch": ("image", lambda x: F.adaptive_avg_pool2d(F.conv2d(x[0], weight), (2, 2))),
        "shortcut": ("image", lambda x: torch.relu(F.conv2d(x, weight, padding=1) + x)),
        "computed weights": ("image", lambda x: F.conv2d(x, x[:1, :, :3, :3].expand(2, 3, 3, 3))),
        "places": ("image", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]),
        "places of channels": ("image", lambda x: F.max_pool2d(F.conv2d(x, weight), 2, return_indices=True)[1]),
        "attention": ("wide", lambda x: F.scaled_dot_product_attention(*heads(x))),
        "causal attention": ("wide", lambda x: F.scaled_dot_product_attention(*heads(x), is_causal=True)),
        "masked attention": ("image", lambda x: F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (x.reshape(-1, 24, 9),) * 3), attn_mask=mask)),
        "assigned": ("row", assigned),
        "one hot": ("row", lambda x: torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)),
        "scattered": ("row", lambda x: x.scatter(-1, x[:, :2].abs().long().clamp(0, 6), x[:, 2:4])),
        "gathered": ("row", lambda x: F.embedding((x * 3).long().clamp(-2, 4) + 2, weight.view(27, 3))),
    }  # fmt: skip


CASES = {**layers(), **functions()}


def traced(batch: int, deploy: bool, cases: dict) -> tuple[Program, list[Tensor]]:
    """The cases in one program, so that they also share scratch memory."""
    generator = torch.Generator().manual_seed(3)
    inputs = {key: torch.randn(batch, *shape, generator=generator) for key, shape in SHAPES.items()}
    nodes = [
        TensorDictModule(fn.eval() if isinstance(fn, nn.Module) else fn, in_keys=[key], out_keys=[name])
        for name, (key, fn) in cases.items()
    ]
    with torch.no_grad():
        program = run_passes(trace(KeyedGraph(*nodes), TensorDict(inputs, batch_size=[])), deploy=deploy)
    return program, [inputs[key] for key in program.in_keys]


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    assert (found.double() - wanted).abs().max() <= 2e-6 * (1 + wanted.abs().max())


def parts(batch: int, deploy: bool, names: Iterable[str] = CASES) -> dict[str, tuple[Program, list[Tensor]]]:
    """The cases as programs of five: one function of all of them takes compilers minutes."""
    names = list(names)
    groups = [names[i::9] for i in range(9)]
    return {f"part{i}": traced(batch, deploy, {n: CASES[n] for n in group}) for i, group in enumerate(groups)}


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[Program, list[Tensor]]]:
    return parts(2, deploy=True)


@pytest.fixture(scope="module")
def results(programs: dict, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """By name: what strict C computed, and the reference in float64."""
    library = build(tmp_path_factory.mktemp("c"), {n: source(p, n) for n, (p, _) in programs.items()}, "-O1")
    results = {}
    for part, (program, inputs) in programs.items():
        found, wanted = call(library, part, program, inputs), float64_reference(program, inputs)
        results |= {name: (a, b) for name, a, b in zip(program.out_keys, found, wanted, strict=True)}
    return results


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_in_float64(name: str, results: dict) -> None:
    assert_equal(*results[name])


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_clang_has_no_warnings(programs: dict, tmp_path: Path) -> None:
    for name, (program, _) in programs.items():
        (tmp_path / f"{name}.c").write_text(source(program, name))
    command = ["clang", *STRICT, "-fsyntax-only", *map(str, tmp_path.glob("*.c"))]
    assert not subprocess.run(command, capture_output=True, text=True, timeout=300).stderr


def test_no_access_outside_under_sanitizers(programs: dict, tmp_path: Path) -> None:
    """As a program of its own: each input and output is a heap block of exactly its size."""
    main = ["#include <stdlib.h>"]
    for name, (program, _) in programs.items():
        (tmp_path / f"{name}.c").write_text(source(program, name))
        sizes = [p.dtype.itemsize * torch.Size(p.shape).numel() for p in (*program.inputs, *program.outputs)]
        main += [f"void {name}(void *const *p);", f"static void run_{name}(void)", "{", f"    void *p[{len(sizes)}];"]
        main += [f"    p[{i}] = calloc(1, {n});" for i, n in enumerate(sizes)]
        main += [f"    {name}(p);", f"    for (int i = 0; i < {len(sizes)}; ++i) {{ free(p[i]); }}", "}"]
    main += ["int main(void)", "{", *(f"    run_{name}();" for name in programs), "    return 0;", "}", ""]
    (tmp_path / "main.c").write_text("\n".join(main))
    flags = [*STRICT, "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    run = [CC, *flags, *map(str, tmp_path.glob("*.c")), "-o", str(tmp_path / "all"), "-lm"]
    made = subprocess.run(run, capture_output=True, text=True, timeout=300)
    if made.returncode and ("libasan" in made.stderr or "libubsan" in made.stderr):
        pytest.skip("this compiler has no sanitizers")
    assert made.returncode == 0, made.stderr[:2000]
    ran = subprocess.run([str(tmp_path / "all")], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[:2000]


NATIVE = ("deep", "grouped", "max of channels", "over time", "adaptive", "shortcut", "places")


def test_native_runs_one_image_with_live_weights() -> None:
    program, inputs = traced(1, deploy=False, cases={name: CASES[name] for name in NATIVE})
    lowered = BACKEND.lower(program)
    for _ in range(2):
        for found, wanted in zip(lowered(program.arguments(inputs)), float64_reference(program, inputs), strict=True):
            assert_equal(found, wanted)
        with torch.no_grad():
            for slot in program.state:
                if slot.kind == "parameter":
                    slot.read().mul_(0.7)


def test_native_leaves_a_batch_of_images_to_the_next_backend() -> None:
    program, _ = traced(2, deploy=False, cases={"plain": CASES["plain"]})
    assert "convolution over 2 images" in BACKEND.supports(program).reason


@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (nn.ConvTranspose2d(3, 4, 2), (1, 3, 5, 5), "a transposed convolution"),
        (nn.Conv3d(3, 4, 2), (1, 3, 5, 5, 5), "a convolution in 3 dimensions"),
    ],
)
def test_refusals_name_what_is_missing(layer: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    graph = KeyedGraph(TensorDictModule(layer, in_keys=["x"], out_keys=["y"]))
    program = trace(graph, TensorDict(x=torch.zeros(shape), batch_size=[1]))
    with pytest.raises(Unsupported, match=reason):
        generate(program, embed=True)


def test_channels_stay_next_to_each_other_from_layer_to_layer() -> None:
    """One loop over all of a layer's values for the activation, and no copy between convolutions."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1))
    program, _ = traced(1, deploy=True, cases={"y": ("image", net)})
    text = generate(program, embed=True).function
    assert f"for (int i0 = 0; i0 < {6 * 7 * 8}; ++i0) {{\n        const float a0" in text
    before, after = text.split("k_maxf(x[c], y[c])")
    assert "from[" in before and "from[" not in after  # the image's rows are gathered, the second layer reads in place


@pytest.mark.skipif(shutil.which("gcc") is None, reason="reads gcc's vectoriser report")
def test_inner_loops_vectorise_under_strict_rules(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.MaxPool2d(2), nn.ELU(), nn.Conv2d(32, 64, 3))
    program, _ = traced(1, deploy=True, cases={"y": ("image", net)})
    text = f"{HEAD}{source(program, 'net').removeprefix(HEAD)}"
    (tmp_path / "net.c").write_text(text)
    command = ["gcc", *STRICT, "-O3", "-fopt-info-vec", "-c", str(tmp_path / "net.c"), "-o", str(tmp_path / "net.o")]
    report = subprocess.run(command, capture_output=True, text=True, timeout=300).stderr
    loops = {int(line.split(":")[1]) for line in report.splitlines() if "loop vectorized" in line}
    wanted = [i for i, line in enumerate(text.splitlines(), 1)
              if "acc[j] += (" in line or "k_maxf(x[c]" in line or "const float a0 =" in line]  # fmt: skip
    assert len(wanted) == 5  # two positions and the odd last, the pooling, the activation, the one of the second layer
    for line in wanted:
        assert any(line - 2 <= n <= line for n in loops), (line, report)
