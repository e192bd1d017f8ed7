from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    set_interaction_type,
)
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import graphrl
from graphrl.compiler.bundle import (
    ActionContract,
    Bundle,
    Contract,
    CPolicy,
    Normalizer,
    ObservationTerm,
    RecurrentState,
    export,
    load,
    verify,
)
from graphrl.compiler.bundle.files import hash_files, sealed
from graphrl.errors import BundleError, ContractError
from graphrl.graph import KeyedGraph

CC = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")
HAS_ONNX = all(__import__("importlib").util.find_spec(p) for p in ("onnx", "onnxruntime"))
TARGETS = ("c99", "onnx", "numpy") if HAS_ONNX else ("c99", "numpy")
STRICT = "-std=c99 -Wall -Wextra -Werror -pedantic -Wconversion -Wdouble-promotion".split()


def diagonal_normal(loc: Tensor, scale: Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


class Normalize(nn.Module):
    def __init__(self, size: int, mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((size,), mean))
        self.register_buffer("std", torch.full((size,), std))
        self.register_buffer("count", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.mean(0))
            self.count.add_(1)
        return (x - self.mean) / self.std


def actor(seed: int = 0, obs: int = 17, act: int = 6) -> KeyedGraph:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(obs, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 2 * act)
    )
    return KeyedGraph(
        TensorDictModule(Normalize(obs, 0.5, 2.0), in_keys=["observation"], out_keys=["scaled"]),
        TensorDictModule(net, in_keys=["scaled"], out_keys=["parameters"]),
        (lambda p: (p[..., :act], p[..., act:].exp()), ["parameters"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=diagonal_normal, return_log_prob=True,
            log_prob_key="action_log_prob", default_interaction_type=InteractionType.RANDOM,
        ),
        out_keys=["loc", "scale", "action", "action_log_prob"],
    )  # fmt: skip


def example(rows: int = 5, obs: int = 17) -> TensorDict:
    return TensorDict(observation=torch.randn(rows, obs, generator=torch.Generator().manual_seed(7)), batch_size=[rows])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeyedGraph, Bundle]:
    policy = actor()
    return policy, export(policy, tmp_path_factory.mktemp("made") / "bundle", example(), contract=Contract(rate_hz=50),
                          targets=TARGETS)  # fmt: skip


def copy_of(bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.path, tmp_path / "copy"))


def test_every_listed_file_is_there(made: tuple[KeyedGraph, Bundle]) -> None:
    wanted = {"graph.json", "weights.safetensors", "golden.npz", "c_policy.py", "reports/parity.json", "c/policy.h",
              "c/policy.c", "c/policy_golden.h", "c/selftest.c", "c/bench.c", "c/CMakeLists.txt", "runtime.py",
              "reports/contract.md"}  # fmt: skip
    wanted |= {"model.onnx"} if HAS_ONNX else set()
    assert set(made[1].manifest["files"]) == wanted
    assert made[1].contract["rate_hz"] == 50 and made[1].contract["quaternion_order"] is None
    assert all(error <= 1e-5 for error in made[1].parity.values())
    assert set(made[1].parity) == {"eager", *TARGETS}


def test_round_trip(made: tuple[KeyedGraph, Bundle]) -> None:
    policy, bundle = made
    report = verify(bundle.path)
    assert set(report.errors) == set(TARGETS) and "files intact" in str(report)
    run, program = bundle.policy(), bundle.program()
    policy.eval()
    for row in example(8):
        with set_interaction_type(InteractionType.DETERMINISTIC), torch.no_grad():
            wanted = policy(row.clone())["action"]
        found = run(row["observation"].numpy())
        assert run.status == 0 and found.shape == (6,)
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=2e-6, rtol=0)
        torch.testing.assert_close(program.run(row["observation"][None])[0][0], wanted, atol=2e-6, rtol=0)


def test_runner_needs_neither_torch_nor_graphrl(made: tuple[KeyedGraph, Bundle], tmp_path: Path) -> None:
    folder = copy_of(made[1], tmp_path)
    code = (
        "import sys, numpy as np\nfrom c_policy import CPolicy\n"
        f"policy = CPolicy({str(folder)!r})\n"
        "assert policy.selftest() == 0\n"
        "state = np.zeros(17)\n"
        "for step in range(200): state = 0.9 * state + 0.1 * np.tile(policy(state), 3)[:17]\n"
        "assert np.isfinite(state).all() and policy.status == 0\n"
        "assert 'torch' not in sys.modules and 'graphrl' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    command = [sys.executable, "c_policy.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0 and "files intact, golden vectors agree" in result.stdout
    _flip(folder / "weights.safetensors")
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 1 and "weights.safetensors was changed" in result.stdout


def test_verify_needs_no_torch(made: tuple[KeyedGraph, Bundle]) -> None:
    """The package's own __init__ may import torch; these modules must not."""
    root = Path(graphrl.__file__).parent
    code = (
        "import sys, types\npackage = types.ModuleType('graphrl')\n"
        f"package.__path__ = [{str(root)!r}]\nsys.modules['graphrl'] = package\n"
        "from graphrl.compiler.bundle.verify import verify\n"
        f"verify({str(made[1].path)!r})\nassert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_c_is_clean_under_warnings_and_sanitizers(
    compiler: str, made: tuple[KeyedGraph, Bundle], tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    c = made[1].path / "c"
    files = [str(c / "policy.c"), str(c / "selftest.c"), "-lm"]
    program = str(tmp_path / "selftest")
    for flags in (["-O2"], ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]):
        command = [compiler, *STRICT, *flags, "-DPOLICY_SELFTEST_MAIN", *files, "-o", program]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        result = subprocess.run([program], capture_output=True, text=True)
        assert result.returncode == 0 and result.stdout.startswith("0 of "), result.stdout + result.stderr
    command = [compiler, *STRICT, "-O2", str(c / "policy.c"), str(c / "bench.c"), "-lm", "-o", program]
    assert subprocess.run(command, capture_output=True).returncode == 0
    lines = subprocess.run([program, "100", "1000"], capture_output=True, text=True).stdout.splitlines()
    names = ["hot", "threads", "paced", "late", "overruns", "period bias", "subnormal"]
    assert [line.split(":")[0] for line in lines] == names


def test_no_allocation_and_no_mutable_globals(made: tuple[KeyedGraph, Bundle], tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    c = made[1].path / "c" / "policy.c"
    subprocess.run([CC, "-std=c99", "-O2", "-c", str(c), "-o", str(tmp_path / "p.o")], check=True)
    symbols = [line.split()[-2:] for line in subprocess.run(
        ["nm", str(tmp_path / "p.o")], capture_output=True, text=True).stdout.splitlines()]  # fmt: skip
    assert not [name for kind, name in symbols if kind in "bBdDC"]  # writable data
    assert {name for kind, name in symbols if kind == "U"} <= {"memcpy", "memset", "sqrtf", "__stack_chk_fail",
                                                              "_GLOBAL_OFFSET_TABLE_"}  # fmt: skip


def test_two_instances_run_interleaved(tmp_path: Path) -> None:
    cell = nn.GRUCell(4, 8)
    graph = KeyedGraph(
        TensorDictModule(cell, in_keys=["observation", "h"], out_keys=[("next", "h")]),
        TensorDictModule(nn.Linear(8, 2), in_keys=[("next", "h")], out_keys=["action"]),
    )
    start = TensorDict(observation=torch.zeros(1, 4), h=torch.zeros(1, 8), batch_size=[1])
    contract = Contract(recurrent=(RecurrentState("h", ("next", "h"), 0.25),))
    bundle = export(graph, tmp_path / "gru", start, contract=contract, targets=TARGETS)
    a, b = bundle.policy(), bundle.policy()
    first, second = torch.randn(20, 1, 4), torch.randn(20, 1, 4)

    def eager(sequence: Tensor) -> list[Tensor]:
        h, out = torch.full((1, 8), 0.25), []
        for x in sequence:
            td = graph(TensorDict(observation=x, h=h, batch_size=[1]))
            h = td["next", "h"].detach()
            out.append(td["action"].detach()[0])
        return out

    for x, y, wanted_a, wanted_b in zip(first, second, eager(first), eager(second), strict=True):
        torch.testing.assert_close(torch.from_numpy(a(x.numpy())), wanted_a, atol=1e-6, rtol=0)
        torch.testing.assert_close(torch.from_numpy(b(y.numpy())), wanted_b, atol=1e-6, rtol=0)
    again = a(first[0].numpy())
    a.reset()
    fresh = a(first[0].numpy())
    assert np.array_equal(fresh, CPolicy(bundle.path)(first[0].numpy())) and not np.array_equal(fresh, again)


def test_normaliser_is_inside(tmp_path: Path) -> None:
    """Running mean 100, deviation 10, observation 110: the robot's number is 1.0, not 110."""
    graph = KeyedGraph(
        TensorDictModule(Normalize(1, 100.0, 10.0), in_keys=["observation"], out_keys=["scaled"]),
        (lambda x: x * 1.0, ["scaled"], ["action"]),
    )
    bundle = export(
        graph, tmp_path / "b", TensorDict(observation=torch.full((1, 1), 110.0), batch_size=[1]), targets=TARGETS
    )
    assert bundle.policy()(np.array([110.0])) == pytest.approx([1.0], abs=1e-6)


def test_policy_is_not_edited(tmp_path: Path) -> None:
    policy = actor()
    policy.train()
    policy[1].eval()
    keys, flags = list(policy.out_keys), {n: m.training for n, m in policy.named_modules()}
    state = {k: v.clone() for k, v in policy.state_dict().items()}
    rng = torch.get_rng_state()
    export(policy, tmp_path / "b", example(8), targets=("c99",))
    assert policy.out_keys == keys
    assert {n: m.training for n, m in policy.named_modules()} == flags
    assert all(torch.equal(v, state[k]) for k, v in policy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.requires_grad and p.grad is None for p in policy.parameters())


def test_same_policy_same_bytes(tmp_path: Path, made: tuple[KeyedGraph, Bundle]) -> None:
    again = export(actor(), tmp_path / "again", example(), contract=Contract(rate_hz=50), targets=TARGETS)
    assert again.manifest == made[1].manifest
    for name in [*again.manifest["files"], "manifest.json"]:
        assert (again.path / name).read_bytes() == (made[1].path / name).read_bytes(), name


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def test_tampering_with_any_file_is_found(made: tuple[KeyedGraph, Bundle], tmp_path: Path) -> None:
    for name in made[1].manifest["files"]:
        folder = Path(shutil.copytree(made[1].path, tmp_path / "t", dirs_exist_ok=True))
        _flip(folder / name)
        with pytest.raises(BundleError, match=Path(name).name):
            verify(folder)
        (folder / name).unlink()
        with pytest.raises(BundleError, match=f"{Path(name).name} is missing"):
            load(folder)


def test_foreign_files_and_changed_contracts_are_found(made: tuple[KeyedGraph, Bundle], tmp_path: Path) -> None:
    folder = copy_of(made[1], tmp_path)
    (folder / "extra.pkl").write_bytes(b"x")
    with pytest.raises(BundleError, match="extra.pkl does not belong"):
        load(folder)
    (folder / "extra.pkl").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["contract"]["rate_hz"] = 100
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="manifest.json: the contract is not the one"):
        load(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="manifest.json is damaged"):
        load(folder)
    with pytest.raises(BundleError, match="is no bundle"):
        load(tmp_path / "nothing")


def test_files_of_another_bundle_are_found(made: tuple[KeyedGraph, Bundle], tmp_path: Path) -> None:
    """Even with matching hashes in the manifest: the contract hash inside the file gives it away."""
    other = export(actor(), tmp_path / "other", example(), contract=Contract(rate_hz=60), targets=("c99",))
    for name in ("golden.npz", "reports/parity.json", "c/policy.h"):
        folder = Path(shutil.copytree(made[1].path, tmp_path / "mix", dirs_exist_ok=True))
        shutil.copy(other.path / name, folder / name)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = other.manifest["files"][name]
        (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
        with pytest.raises(BundleError, match=Path(name).name):
            verify(folder)


def test_wrong_weights_fail_the_selftest(made: tuple[KeyedGraph, Bundle], tmp_path: Path) -> None:
    folder = copy_of(made[1], tmp_path)
    source = (folder / "c" / "policy.c").read_text()
    at = source.index("static const float") + 200
    comma = source.index(",", at)
    (folder / "c" / "policy.c").write_text(source[:comma] + " + 0.5f" + source[comma:])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = hash_files(folder)
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(BundleError, match="self-test fails"):
        verify(folder)


def test_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrl.compiler.bundle import checks

    target = tmp_path / "bundle"
    with monkeypatch.context() as patch:
        patch.setattr(checks, "verify", lambda folder: (_ for _ in ()).throw(BundleError("stop")))
        with pytest.raises(BundleError, match="stop"):
            export(actor(), target, example(), targets=("c99",))
        assert list(tmp_path.iterdir()) == []
    first = export(actor(0), target, example(), targets=("c99",))
    with pytest.raises(BundleError, match="exists.*overwrite=True"):
        export(actor(1), target, example(), targets=("c99",))
    with monkeypatch.context() as patch:
        patch.setattr(checks, "verify", lambda folder: (_ for _ in ()).throw(BundleError("stop")))
        with pytest.raises(BundleError, match="stop"):
            export(actor(1), target, example(), targets=("c99",), overwrite=True)
    assert load(target).manifest == first.manifest
    second = export(actor(1), target, example(), targets=("c99",), overwrite=True)
    assert second.manifest["weight_hash"] != first.manifest["weight_hash"]
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]
    (tmp_path / "other").mkdir()
    with pytest.raises(BundleError, match="is not a bundle"):
        export(actor(), tmp_path / "other", example(), targets=("c99",), overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot write"):
        export(actor(), tmp_path / "file" / "bundle", example(), targets=("c99",))


def _no_mode(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def _nan_weights() -> KeyedGraph:
    policy = actor()
    with torch.no_grad():
        policy[1].module[0].weight[3, 2] = float("nan")
    return policy


FAULTS: list[tuple[str, Callable[[], KeyedGraph], str]] = [
    ("nan weight", _nan_weights, "not finite"),
    ("sampling", lambda: KeyedGraph((_no_mode, ["observation"], ["action"])), "sampling left in"),
    ("bernoulli", lambda: KeyedGraph((torch.bernoulli, ["observation"], ["action"])), "sampling left in"),
    ("dropout", lambda: KeyedGraph((lambda x: nn.functional.dropout(x, 0.5, True), ["observation"], ["action"])),
     "left in"),
    ("no action", lambda: KeyedGraph((torch.tanh, ["observation"], ["actions"])), "does not write 'action'.*'actions'"),
    ("learning", lambda: KeyedGraph(TensorDictModule(_Learning(), in_keys=["observation"], out_keys=["action"])),
     "changes its own buffer"),
    ("infinite", lambda: KeyedGraph((lambda x: x / 0.0, ["observation"], ["action"])), "not finite for any golden"),
    ("bessel", lambda: KeyedGraph((torch.special.bessel_j0, ["observation"], ["action"])), "bessel_j0.*'action'"),
]  # fmt: skip


class _Learning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(17))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0))
        return x - self.mean


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f[0])
def test_export_stops_with_the_reason(fault: tuple[str, Callable[[], KeyedGraph], str], tmp_path: Path) -> None:
    _, make, message = fault
    data = TensorDict(observation=torch.rand(2, 17), batch_size=[2])
    with pytest.raises(BundleError, match=message):
        export(make(), tmp_path / "b", data, targets=("c99",))
    assert list(tmp_path.iterdir()) == []


def test_parity_beyond_tolerance_stops_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrl.compiler.bundle import write

    monkeypatch.setattr(write, "TOLERANCE", 1e-12)
    with pytest.raises(BundleError, match="differs from the float64 reference"):
        export(actor(), tmp_path / "b", example(), targets=("c99",))
    assert list(tmp_path.iterdir()) == []


def test_contract_is_checked(tmp_path: Path) -> None:
    def attempt(**fields: object) -> None:
        export(actor(), tmp_path / "b", example(), targets=("c99",), contract=Contract(**fields))  # type: ignore[arg-type]

    with pytest.raises(ContractError, match="privileged.*Did you mean 'observations'"):
        attempt(observations=(ObservationTerm("observations"),))
    with pytest.raises(ContractError, match="names has 2 entries, the policy has 17"):
        attempt(observations=(ObservationTerm("observation", names=("hip", "knee")),))
    with pytest.raises(ContractError, match="'hip' stands twice"):
        attempt(action=ActionContract(names=("hip", "hip")))
    with pytest.raises(ContractError, match="action: low has 1 entries"):
        attempt(action=ActionContract(low=(0.0,)))
    with pytest.raises(BundleError, match="leaves its bounds.*squash or scale missing"):
        attempt(action=ActionContract(low=(-0.01,) * 6, high=(0.01,) * 6, inside=("squash",)))
    with pytest.raises(ContractError, match="rate_hz is -1"):
        attempt(rate_hz=-1)
    with pytest.raises(ContractError, match="where is 'maybe'; expected 'inside'"):
        attempt(observations=(ObservationTerm("observation", normalizer=Normalizer("maybe")),))


def test_status_bits(tmp_path: Path) -> None:
    norm = Normalizer("inside", (0.5,) * 17, (2.0,) * 17)
    term = ObservationTerm("observation", low=(-5.0,) * 17, high=(5.0,) * 17, normalizer=norm)
    contract = Contract(rate_hz=50, observations=(term,))
    policy = export(actor(), tmp_path / "b", example(), targets=("c99",), contract=contract, prefix="walk").policy()
    x = np.zeros(17)
    policy(x)
    assert policy.status == 0
    policy(x + 6)
    assert policy.status == 4
    x[3] = np.nan
    assert np.isnan(policy(x)).all() and policy.status == 3
    with pytest.raises(ValueError, match=r"'observation' has shape \(3,\), expected \(?17"):
        policy(np.zeros(3))
    with pytest.raises(ValueError, match="'observation' is missing"):
        policy({"obs": np.zeros(17)})


def test_several_inputs_and_nested_keys(tmp_path: Path) -> None:
    graph = KeyedGraph(
        (lambda a, b: torch.cat([a, b * 2], -1), [("agents", "observation"), "default"], ["h"]),
        (lambda h: h.argmax(-1), ["h"], ["action"]),
    )
    data = TensorDict({("agents", "observation"): torch.randn(4, 3), "default": torch.randn(4, 2)}, batch_size=[4])
    bundle = export(graph, tmp_path / "b", data, targets=TARGETS)
    header = (bundle.path / "c" / "policy.h").read_text()
    assert "float agents__observation[3]" in header and "float default_[2]" in header and "int64_t action[1]" in header
    policy = bundle.policy()
    assert policy({"default": np.array([0.0, 9.0]), "agents/observation": np.zeros(3)}) == 4
    clash = KeyedGraph((lambda a, b: a + b, [("a", "b"), "a__b"], ["action"]))
    data = TensorDict({("a", "b"): torch.randn(1, 3), "a__b": torch.randn(1, 3)}, batch_size=[1])
    with pytest.raises(BundleError, match="would both be called a__b"):
        export(clash, tmp_path / "c", data, targets=("c99",))


def test_no_golden_text_depends_on_the_day(made: tuple[KeyedGraph, Bundle]) -> None:
    with np.load(made[1].path / "golden.npz", allow_pickle=False) as golden:
        kinds = golden["kind"].tolist()
        assert {"random", "example", "extreme"} == set(kinds) and len(kinds) >= 20
        assert golden["in/observation"].dtype == np.float32 and golden["out/action"].dtype == np.float64


def test_unknown_targets_and_prefixes(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no export target 'c98'.*Did you mean 'c99'"):
        export(actor(), tmp_path / "b", example(), targets=("c98",))
    with pytest.raises(BundleError, match="prefix '9x' cannot start C names"):
        export(actor(), tmp_path / "b", example(), targets=("c99",), prefix="9x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Contract(action={"low": (0,)}),
            "Contract: action is a dict; .*graphrl.compiler.bundle.ActionContract",
        ),
        (lambda: Contract(observations=("x",)), "observations is a tuple of str .*graphrl.compiler.bundle.Observation"),
        (lambda: Contract(rate_hz="20"), "rate_hz is '20'; expected float or None"),
        (lambda: ActionContract(names="ab"), "ActionContract: names is 'ab'; expected"),
        (lambda: ActionContract(low=np.zeros(2)), "low is a ndarray"),
        (lambda: ActionContract(clip=(1.0,)), "clip is a tuple of float"),
        (lambda: ObservationTerm("x", normalizer="inside"), "graphrl.compiler.bundle.Normalizer"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(make, message):
    with pytest.raises(ContractError, match=message):
        make()


def test_a_contract_takes_lists_and_integers():
    Contract(rate_hz=20, observations=[ObservationTerm("x", low=[0, 1])], command_ranges={"speed": [0, 1]})


def test_a_bundle_prints_path_targets_and_parity(tmp_path):
    bundle = export(
        actor(), tmp_path / "b", TensorDict(observation=torch.zeros(2, 17), batch_size=[2]), targets=("c99",)
    )
    lines = str(bundle).splitlines()
    assert lines[0] == f"bundle {bundle.path}: c99" and any("c99: largest error" in line for line in lines[1:])
    assert repr(bundle) == f"Bundle({str(bundle.path)!r}, targets=['c99'])"
