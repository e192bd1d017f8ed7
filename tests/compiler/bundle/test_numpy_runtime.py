"""The numpy runtime: whole policies, its edges, its files, and a Python without torch."""

from __future__ import annotations

import ast
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from small_gru import CONTRACT, START, gru
from tensordict import TensorDict

from graphrl.bench.robot_policies import POLICIES, make_policy
from graphrl.compiler.bundle import Bundle, Contract, export, runtime, verify
from graphrl.compiler.bundle.files import dump_json, hash_files, sealed, sha256
from graphrl.compiler.bundle.graph_json import program_to_json
from graphrl.compiler.bundle.runtime import Policy, read_safetensors
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import trace
from graphrl.compiler.verify import float64_reference
from graphrl.errors import BundleError
from graphrl.graph import KeyedGraph


def graph_of(program: Program) -> runtime._Graph:
    """The runtime's own form of a program, by way of JSON text."""
    data = json.loads(dump_json(program_to_json(program)))
    return runtime._Graph(data, {s.name: s.read().detach().numpy() for s in program.state})


@pytest.mark.parametrize("name", POLICIES)
def test_every_robot_s_policy_runs_with_a_reset_in_the_middle(name: str) -> None:
    policy = make_policy(name)
    with torch.no_grad():
        program = run_passes(trace(policy.graph, policy.example))
    graph, state = graph_of(program), dict(policy.state)
    ours: dict[Any, Any] = {key: policy.example[key].numpy() for key in state}
    theirs: dict[Any, Any] = {key: policy.example[key].double() for key in state}
    for td in policy.episode(5, starts=(0, 3)):
        found = graph.run([ours.get(k, td[k].numpy()) for k in program.in_keys])
        wanted = float64_reference(program, [theirs.get(k, td[k]) for k in program.in_keys])
        for mine, ref in zip(found, wanted, strict=True):
            assert mine.dtype == np.float32 and mine.shape == ref.shape
            assert np.abs(mine - ref.numpy()).max() <= 2e-6 * max(1.0, float(ref.abs().max()))
        named = dict(zip(program.out_keys, zip(found, wanted, strict=True), strict=True))
        ours, theirs = ({key: named[following][i] for key, following in state.items()} for i in (0, 1))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(gru(), tmp_path_factory.mktemp("gru") / "b", START, contract=CONTRACT, targets=("numpy",))


@pytest.fixture
def policy(made: Bundle) -> Policy:
    return Policy.load(made.path)


def rehash(folder: Path, **changes: Any) -> None:
    """A manifest that agrees with the folder as it is now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for key, file in (("program_hash", "graph.json"), ("weight_hash", "weights.safetensors")):
        manifest[key] = sha256((folder / file).read_bytes())
    manifest.update(files=hash_files(folder), **changes)
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


@pytest.fixture
def copy(made: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.path, tmp_path / "copy"))


def test_state_is_carried_as_eager_carries_it(policy: Policy) -> None:
    graph, h = gru(), torch.full((1, 8), 0.25)
    xs = torch.randn(20, 3)
    first = []
    for x in xs:
        td = graph(TensorDict(observation=x[None], h=h, batch_size=[1]))
        h = td["next", "h"].detach()
        first.append(policy.step({"observation": x.numpy()})["action"])
        torch.testing.assert_close(torch.from_numpy(first[-1]), td["action"][0].detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(policy.state["h"]), h, rtol=1e-6, atol=1e-6)
    policy.reset()
    assert all(
        np.array_equal(a, policy.step({"observation": x.numpy()})["action"]) for a, x in zip(first, xs, strict=True)
    )
    policy.reset()
    policy.step({"observation": xs[0].numpy()})
    carried = policy.step({"observation": xs[1].numpy()})["action"]
    policy.reset()
    assert not np.array_equal(carried, policy.step({"observation": xs[1].numpy()})["action"])


def test_a_start_of_one_s_own(policy: Policy) -> None:
    policy.reset({"h": np.full(8, -0.5)})
    assert (policy.state["h"] == -0.5).all() and policy.state["h"].shape == (1, 8)
    wanted = gru()(TensorDict(observation=torch.ones(1, 3), h=torch.full((1, 8), -0.5), batch_size=[1]))["action"]
    found = policy.step({"observation": np.ones(3)})["action"]
    torch.testing.assert_close(torch.from_numpy(found), wanted[0].detach(), rtol=1e-6, atol=1e-6)
    policy.state["h"][:] = 9  # a copy
    assert not (policy.state["h"] == 9).any()
    with pytest.raises(ValueError, match="no state 'c'.*reads \\['h'\\]"):
        policy.reset({"c": 0})


def test_two_policies_do_not_share_state(made: Bundle) -> None:
    a, b = Policy.load(made.path), Policy.load(made.path)
    x = {"observation": np.ones(3, np.float32)}
    first = a.step(x)["action"]
    a.step(x)
    assert np.array_equal(first, b.step(x)["action"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"observatoin": np.zeros(3)}, "no observation 'observatoin'.*Did you mean 'observation'"),
        ({}, "observation 'observation' is missing"),
        (np.zeros(3), "the observation is a ndarray; expected a dict with \\['observation'\\]"),
        ({"observation": np.zeros(4)}, r"'observation' has shape \(4,\), expected \(3,\)"),
        ({"observation": np.zeros((2, 3))}, r"shape \(2, 3\)"),
        ({"observation": np.zeros(3, complex)}, "is complex128, expected float32"),
        ({"observation": ["a", "b", "c"]}, "expected float32"),
        ({"observation": {"hip": 1, "knie": 2, "speed": 0}}, "no entry of 'observation' 'knie'.*Did you mean 'knee'"),
        ({"observation": {"hip": 1, "knee": 2}}, "'speed' is missing"),
        ({"observation": np.zeros(3), "h": np.zeros(8)}, "no observation 'h'"),
    ],
)
def test_what_does_not_fit_is_named_at_the_edge(given: Any, message: str, policy: Policy) -> None:
    with pytest.raises(ValueError, match=message):
        policy.step(given)


def test_any_real_numbers_become_float32_once(policy: Policy) -> None:
    values = np.array([0.1, 0.2, 0.3])
    results = []
    for given in (values, values.astype(np.float32)[None], values[::-1][::-1], {"speed": 0.3, "hip": 0.1, "knee": 0.2},
                  values.tolist()):  # fmt: skip
        policy.reset()
        results.append(policy.step({"observation": given})["action"])
        assert results[-1].dtype == np.float32 and results[-1].shape == (2,)
    assert all(np.array_equal(results[0], r) for r in results)
    policy.step({"observation": np.array([1, 0, 1])})


def test_status(policy: Policy) -> None:
    for value, wanted in ((1.0, 0), (6.0, 4), (-6.0, 4), (np.inf, 1 | 4), (np.nan, 1 | 2 | 8)):
        policy.reset()
        policy.step({"observation": [0.0, value, 0.0]})
        assert policy.status == wanted, value
    policy.step({"observation": np.zeros(3)})
    assert policy.status == 2 | 8  # the observation is well, what it left behind is not
    policy.reset()
    policy.step({"observation": np.zeros(3)})
    assert policy.status == 0


def test_integers_are_not_made_of_floats(tmp_path: Path) -> None:
    graph = KeyedGraph((lambda x, i: x[..., :1] * i, ["observation", "gait"], ["action"]))
    td = TensorDict(observation=torch.randn(1, 3), gait=torch.ones(1, 1, dtype=torch.int64), batch_size=[1])
    policy = Policy.load(export(graph, tmp_path / "b", td, targets=("numpy",)).path)
    assert policy.step({"observation": [2.0, 0, 0], "gait": np.array([3], np.int32)})["action"] == 6
    with pytest.raises(ValueError, match="'gait' is float64, expected int64"):
        policy.step({"observation": [2.0, 0, 0], "gait": [3.0]})


def test_the_self_test_knows_wrong_weights(made: Bundle, policy: Policy, copy: Path) -> None:
    assert 0 < policy.selftest() < 1e-6
    with np.load(made.path / "golden.npz") as golden:
        assert golden["sequence/reset"].tolist() == [True, *[False] * 9] * 2
        assert golden["sequence/in/observation"].shape == (20, 1, 3) and "sequence/in/h" not in golden.files
    data = bytearray((copy / "weights.safetensors").read_bytes())
    data[-30] ^= 64
    (copy / "weights.safetensors").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"weights.safetensors was changed"):
        Policy.load(copy)
    rehash(copy)
    with pytest.raises(ValueError, match="'(action|next/h)' is off by .* on golden row"):
        Policy.load(copy).selftest()
    with pytest.raises(BundleError, match="numpy of .* fails: ValueError: .*is off by"):
        verify(copy)


def test_a_state_that_is_not_carried_is_found(made: Bundle) -> None:
    """Single rows bring their own state; only the sequence can tell."""

    class Forgetful(Policy):
        def step(self, observation: Any) -> Any:
            self.reset()
            return super().step(observation)

    with pytest.raises(ValueError, match="step 1 of the sequence"):
        Forgetful.load(made.path).selftest()


def test_files_of_another_bundle_are_refused(copy: Path, tmp_path: Path) -> None:
    contract = Contract(rate_hz=60, recurrent=CONTRACT.recurrent)
    other = export(gru(), tmp_path / "o", START, contract=contract, targets=("numpy",)).path
    for name in ("weights.safetensors", "graph.json"):
        before = (copy / name).read_bytes()
        shutil.copy(other / name, copy / name)
        rehash(copy)
        with pytest.raises(ValueError, match=f"{name} belongs to another contract"):
            Policy.load(copy)
        (copy / name).write_bytes(before)
    shutil.copy(other / "golden.npz", copy / "golden.npz")
    rehash(copy)
    with pytest.raises(ValueError, match="golden.npz belongs to another contract"):
        Policy.load(copy).selftest()
    rehash(copy, schema_version=1)
    with pytest.raises(ValueError, match="schema version 1, this runtime reads 3"):
        Policy.load(copy)
    with pytest.raises(ValueError, match="is no bundle"):
        Policy.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("aten.addmm.default", "aten.bessel.default"), r"this runtime has no aten.bessel.default: run .* C or ONNX"),
        (
            ('"dtype": "float32"', '"dtype": "float64"'),
            "addmm.* gives float32.*the graph says float64|expected float64|other inputs or outputs than",
        ),
        (("weight_hh", "other"), "weight '.*other' is missing, expected float32"),
    ],
)
def test_a_graph_that_cannot_run_is_refused_when_it_is_loaded(
    change: tuple[str, str], message: str, copy: Path
) -> None:
    text = (copy / "graph.json").read_text()
    assert change[0] in text
    (copy / "graph.json").write_text(text.replace(*change))
    rehash(copy)
    with pytest.raises(ValueError, match=message):
        Policy.load(copy)


def test_safetensors_are_read_as_the_library_reads_them() -> None:
    dtypes = "float64 float32 float16 int64 int32 int16 int8 uint8 bool".split()
    tensors = {d: torch.randint(0, 2, (3, 2)).to(getattr(torch, d)) for d in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    found, metadata = read_safetensors(save(tensors, {"who": "me"}))
    assert metadata == {"who": "me"} and set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.numpy().dtype and np.array_equal(found[name], tensor.numpy())
    with pytest.raises(ValueError, match="BF16; numpy has F64"):
        read_safetensors(save({"x": torch.zeros(2, dtype=torch.bfloat16)}))


def _file(entries: dict[str, Any], body: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + body


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2) + b"[]",
        _file({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), _file({"a": 1}, bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, b""),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
        _file({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4)),
        _file({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, bytes(4)),
    ],
)  # fmt: skip
def test_unsound_weights_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_safetensors(data)


def test_the_file_runs_where_torch_cannot_be_imported(copy: Path) -> None:
    imported = {n.names[0].name if isinstance(n, ast.Import) else n.module
                for n in ast.walk(ast.parse((copy / "runtime.py").read_text()))
                if isinstance(n, (ast.Import, ast.ImportFrom))}  # fmt: skip
    assert {str(m).split(".")[0] for m in imported} - {"__future__", "numpy"} <= sys.stdlib_module_names
    code = "import runpy, sys; sys.modules.update(torch=None, graphrl=None); sys.argv = sys.argv[1:];"
    command = [sys.executable, "-I", "-c", f"{code} runpy.run_path(sys.argv[0], run_name='__main__')"]
    command += [str(copy / "runtime.py"), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "rate_hz: 50" in result.stdout and "self-test: largest error" in result.stdout
    assert "1000 steps: p50" in result.stdout
    (copy / "reports" / "parity.json").write_text("{}")
    result = subprocess.run(
        [sys.executable, "-I", str(copy / "runtime.py")], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1 and "parity.json was changed" in result.stderr


def test_the_bundle_s_copy_is_the_package_s_file(made: Bundle) -> None:
    assert (made.path / "runtime.py").read_bytes() == Path(runtime.__file__).read_bytes()


def test_an_operation_it_lacks_stops_the_export(tmp_path: Path) -> None:
    graph = KeyedGraph((lambda x: torch.erfinv(x.tanh()), ["observation"], ["action"]))
    td = TensorDict(observation=torch.randn(2, 3), batch_size=[2])
    with pytest.raises(BundleError, match="numpy: this runtime has no aten.erfinv.default"):
        export(graph, tmp_path / "b", td, targets=("numpy",))
    assert not (tmp_path / "b").exists()
