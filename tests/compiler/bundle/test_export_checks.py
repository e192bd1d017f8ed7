"""One fault for each line of the table of checks: export stops, and names the check."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_gru import CONTRACT, START, gru
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import graphrl.compiler.bundle.checks as checks_module
import graphrl.compiler.bundle.write as write_module
from graphrl.compiler.bundle import (
    ActionContract,
    Bundle,
    Contract,
    Normalizer,
    ObservationTerm,
    RecurrentState,
    c_text,
    export,
)
from graphrl.compiler.bundle.runners import RUNNERS, CPlayer
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError
from graphrl.graph import KeyedGraph
from graphrl.models import RunningNorm

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
MEAN, STD = (10.0, -5.0, 100.0), (2.0, 0.5, 10.0)
INSIDE = Normalizer("inside", MEAN, STD, 0.0)


def normalised(*behind: Any) -> KeyedGraph:
    norm = RunningNorm(3, eps=0.0)
    norm.mean.copy_(torch.tensor(MEAN))
    norm.var.copy_(torch.tensor(STD) ** 2)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), *behind)
    return KeyedGraph((norm, ["observation"], ["z"]), (net, ["z"], ["action"]), out_keys=["action"])


def plain(*behind: Any) -> KeyedGraph:
    return KeyedGraph((nn.Sequential(nn.Linear(3, 2), *behind), ["observation"], ["action"]))


def stated(normalizer: Normalizer | None = INSIDE, **more: Any) -> Contract:
    terms = (ObservationTerm("observation", normalizer=normalizer, names=more.pop("names", None)),)
    return Contract(**{"rate_hz": 50, "observations": terms, **more})


def attempt(folder: Path, policy: KeyedGraph, contract: Contract | None = None, **options: Any) -> Bundle:
    options.setdefault("targets", ("numpy",))
    example = options.pop("example", TensorDict(observation=torch.tensor([MEAN]) + 0.1, batch_size=[1]))
    return export(policy, folder / "b", example, contract=contract, **options)


class Rebinding(nn.Module):
    """Learns by binding its buffer to a new tensor, evaluation mode or not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and type(x) is Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x[..., :2] - self.mean[:2]


def counted() -> Callable[[Tensor], Tensor]:
    calls = itertools.count()
    return lambda x: x[..., :2] + next(calls)


def with_bounds(inside: tuple[str, ...] | None, half: float = 0.5, **more: Any) -> Contract:
    action = ActionContract(low=(-half,) * 2, high=(half,) * 2, inside=inside, **more)
    return Contract(rate_hz=50, action=action)


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


NONE = Normalizer("none")
FAULTS: dict[str, tuple[str, Callable[[], KeyedGraph], Contract | None, str]] = {
    "nothing said": ("normalizer", normalised, stated(None), "nothing is said of how 'observation'"),
    "left out": ("normalizer", plain, stated(), "program does not normalise it"),
    "another training's": ("normalizer", normalised, stated(replace(INSIDE, std=(2.0, 0.5, 11.0))),
                           r"entry 2 is \(x - 100\) / 10 in the program, and the contract says \(x - 100\) / 11"),
    "done twice": ("normalizer", normalised, stated(NONE), "twice on the robot"),
    "saturated": ("normalizer", lambda: plain(nn.Hardtanh(), Times()), stated(NONE), "does not change when"),
    "learning by assignment": ("normalizer", lambda: KeyedGraph((Rebinding(), ["observation"], ["action"])), None,
                               "still learning"),
    "counts its calls": ("sampling", lambda: KeyedGraph((counted(), ["observation"], ["action"])), None, "two values"),
    "dropout": ("sampling", lambda: KeyedGraph((lambda x: nn.functional.dropout(x, 0.5, True), ["observation"],
                                                ["action"])), None, "left in"),
    "squash missing": ("action", lambda: plain(), with_bounds(("squash",), squash="tanh"), "the program has none"),
    "squash doubled": ("action", lambda: plain(nn.Tanh(), nn.Tanh()), with_bounds(("squash",), 1.0), "tanh and tanh"),
    "squash left to the caller": ("action", lambda: plain(nn.Tanh()), with_bounds((), squash="tanh"), "doubled"),
    "scale missing": ("action", lambda: normalised(nn.Tanh()), with_bounds(
        ("squash", "scale"), 2.0, squash="tanh", scale=2.0), "scale is 2.0, and the program's"),
    "scale doubled": ("action", lambda: normalised(nn.Tanh(), Times(), Times()), with_bounds(
        ("squash", "scale"), squash="tanh", scale=0.5), r"scale is 0.5, and the program's \(0.25"),
    "squash before the last layer": ("action", normalised, with_bounds(("squash",), 1e-3, squash="tanh"),
                                     "the action, .*, leaves its bounds"),
    "inside not said": ("action", lambda: plain(), with_bounds(None), "which of squash, scale"),
    "joints in another order": ("order", lambda: plain(), stated(NONE, action=ActionContract(
        names=("hip", "knee"), joint_names=("knee", "hip"))), "same names in two orders"),
    "privileged input": ("inputs", lambda: KeyedGraph((lambda x, y: x + y, ["observation", "friction"], ["action"])),
                         stated(NONE), "'friction'.*privileged"),
    "no rate": ("rate", plain, stated(NONE, rate_hz=None), "no rate_hz"),
    "keys collide": ("keys", lambda: KeyedGraph((lambda x, y, z: x + y + z, ["observation", "a__b", ("a", "b")],
                                                ["action"])), None, "both be called a__b"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_policy_or_its_contract_stops_the_export(fault: str, tmp_path: Path) -> None:
    check, make, contract, message = FAULTS[fault]
    example = TensorDict(observation=torch.tensor([[10.5, -5.0, 101.0]]), batch_size=[1])
    if check == "inputs":
        example["friction"] = torch.ones(1, 3)
    if check == "keys":
        example["a__b"], example["a", "b"] = torch.ones(1, 3), torch.ones(1, 3)
    targets = ("c99",) if check == "keys" else ("numpy",)
    policy = make()
    if fault == "saturated":
        with torch.no_grad():
            policy[0].module[0].weight.fill_(1.0)
    with pytest.raises(BundleError, match=f"check '{check}': .*{message}"):
        attempt(tmp_path, policy, contract, example=example, targets=targets)
    assert list(tmp_path.iterdir()) == []


def test_a_sound_policy_passes_them_all(tmp_path: Path) -> None:
    action = ActionContract(names=("hip", "knee"), low=(-0.5,) * 2, high=(0.5,) * 2, squash="tanh", scale=0.5,
                            inside=("squash", "scale"))  # fmt: skip
    contract = stated(action=action, names=("a", "b", "c"))
    (term,) = contract.observations or ()
    contract = replace(contract, observations=(replace(term, low=(-100.0,) * 3, high=(200.0,) * 3),))
    bundle = attempt(tmp_path, normalised(nn.Tanh(), Times()), contract, targets=("c99", "numpy"))
    assert bundle.manifest["checks"] == dict.fromkeys(checks_module.CHECKS, "passed")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Break a part of the machinery; the export of a recurrent policy must notice."""

    def run(where: Any, name: str, wrong: Any, message: str, targets: tuple[str, ...] = ("numpy",)) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, wrong)
            with pytest.raises(BundleError, match=message):
                export(gru(), tmp_path / "b", START, contract=CONTRACT, targets=targets)
        assert list(tmp_path.iterdir()) == []

    return run


def test_order_of_names_in_a_runtime(broken: Callable[..., None]) -> None:
    take = Policy._take

    def the_other_way(self: Policy, key: str, value: Any) -> np.ndarray:
        return take(self, key, [value[n] for n in sorted(value, reverse=True)] if isinstance(value, Mapping) else value)

    broken(Policy, "_take", the_other_way, "check 'order': numpy: moving '(hip|knee|speed)' of 'observation' alone")


def test_a_stale_state_is_seen_by_its_own_check(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks_module.RUNTIME_CHECKS, "parity", lambda subject: None)
    monkeypatch.setitem(checks_module.RUNTIME_CHECKS, "order", lambda subject: None)
    broken(CPlayer, "reset", lambda self, state=None: None, "check 'state': c99: the same observations after", ("c99",))


def test_a_state_without_effect_or_with_another_start(tmp_path: Path) -> None:
    still = KeyedGraph((nn.GRUCell(3, 8), ["observation", "h"], [("next", "h")]),
                       (nn.Linear(3, 2), ["observation"], ["action"]))  # fmt: skip
    with pytest.raises(BundleError, match="check 'state': the second step's action is the same"):
        attempt(tmp_path, still, CONTRACT, example=START)

    def step(x: Tensor, h: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.where(is_init, 0.0, h)
        return x[..., :2] + h[..., :2], h + 1.0

    graph = KeyedGraph((step, ["observation", "h", "is_init"], ["action", ("next", "h")]))
    example = START.clone().update({"is_init": torch.zeros(1, 1, dtype=torch.bool)})
    contract = Contract(recurrent=(RecurrentState("h", ("next", "h"), 0.25),))
    with pytest.raises(BundleError, match="check 'state': .*is RecurrentState.initial training's"):
        attempt(tmp_path, graph, contract, example=example)
    contract = Contract(recurrent=(RecurrentState("h", ("next", "h"), 0.0),))
    assert attempt(tmp_path, graph, contract, example=example).manifest["checks"]["state"] == "passed"


def test_a_file_that_the_manifest_forgets(broken: Callable[..., None]) -> None:
    whole = write_module.hash_files

    def forgetful(folder: Path) -> dict[str, str]:
        return {name: digest for name, digest in whole(folder).items() if name != "runtime.py"}

    broken(write_module, "hash_files", forgetful, "check 'files': .*runtime.py")


def test_types_at_the_edge(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    take = Policy._take
    monkeypatch.setitem(checks_module.RUNTIME_CHECKS, "order", lambda subject: None)

    def careless(self: Policy, key: str, value: Any) -> np.ndarray:
        return take(self, key, np.resize(value, self._ports[key]["shape"]))

    broken(Policy, "_take", careless, r"check 'types': numpy: 'observation' with shape \(1, 3, 2\) is taken")


def c_with(old: str, new: str) -> Callable[..., Any]:
    """Generated C in which ``old`` stands as ``new``."""
    write = c_text.write_c

    def edited(*args: Any) -> Any:
        files = write(*args)
        assert old in files.files["policy.c"]
        files.files["policy.c"] = files.files["policy.c"].replace(old, new)
        return files

    return edited


def test_c_that_allocates(broken: Callable[..., None]) -> None:
    waste = "uint32_t status = 0u; { extern void *calloc(size_t, size_t); char *volatile p = calloc(8u, 1u); (void)p; }"
    wrong = c_with("uint32_t status = 0u;", waste)
    broken(write_module, "write_c", wrong, "check 'allocation': c99: 1000 allocations in 1000 steps", ("c99",))


THREAD = """uint32_t status = 0u; { static int started; unsigned long id; extern int pause(void);
    extern int pthread_create(unsigned long *, const void *, void *(*)(void *), void *);
    if (!started) { started = pthread_create(&id, NULL, (void *(*)(void *))(void (*)(void))pause, NULL) == 0; } }"""
SCARRED = "{ static float scar; if (status & 1u) { scar = 1.0f; } command->action[0] += scar; } st->steps += 1u;"
WRONG_C = {
    "silent about NaN": ("status |= POLICY_STATUS_NON_FINITE_INPUT;", "status |= 0u;",
                         r"'extremes': c99, 'observation' = nan: status (0|2|8|10);"),
    "silent about NaN in its state": ("status |= POLICY_STATUS_NON_FINITE_STATE;", "status |= 0u;",
                                      "'extremes': c99: nan in the state 'h'"),
    "silent about its output": ("status |= POLICY_STATUS_NON_FINITE_OUTPUT;", "status |= 0u;",
                                "'extremes': c99, 'observation' = nan: the output is not finite and the status is 9"),
    "silent about its range": ("if (obs->observation[i] > high_observation[i])", "if (0)",
                               "'extremes': c99: 'observation' beyond its high, and the status does not tell"),
    "scarred by NaN": ("st->steps += 1u;", SCARRED, "'extremes': c99: after NaN and a reset the action is another one"),
    "forgets its state": ("{ st->h[i] = st->next__h[i]; }", "{ st->h[i] = st->h[i]; }",
                          r"'parity': c99 differs .*\(step \d+ of the sequence, 'action'\)"),
    "starts a thread": ("uint32_t status = 0u;", THREAD, "'allocation': c99: 1 threads before 1000 steps, 2 after"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_C)
def test_c_that_misbehaves(wrong: str, broken: Callable[..., None]) -> None:
    old, new, message = WRONG_C[wrong]
    broken(write_module, "write_c", c_with(old, new), f"check {message}", ("c99",))


def test_a_double_that_is_taken_for_something_else(broken: Callable[..., None]) -> None:
    take = Policy._take

    def careless(self: Policy, key: str, value: Any) -> np.ndarray:
        return take(self, key, value + 1.0 if getattr(value, "dtype", None) == np.float64 else value)

    broken(Policy, "_take", careless, "check 'types': numpy: 'observation' as float64 gives another action")


def test_a_runtime_that_drifts(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = RUNNERS["numpy"]

    def drifting(folder: Path, manifest: Mapping[str, Any]) -> Any:
        run, _ = numpy(folder, manifest)
        return lambda row: [value + 1e-3 for value in run(row)], None

    broken(write_module, "RUNNERS", {**RUNNERS, "numpy": drifting}, "check 'parity': numpy differs from the float64")


def test_a_waiver_is_recorded_and_must_be_a_checks_name(tmp_path: Path) -> None:
    bundle = attempt(tmp_path, normalised(), stated(None), waive=("normalizer", "rate"))
    said = bundle.manifest["checks"]
    assert said["normalizer"].startswith("waived: nothing is said of how 'observation'")
    assert said["rate"] == "passed (waived without need)" and said["allocation"].startswith("nothing to check: no C")
    with pytest.raises(BundleError, match="no check 'normaliser' to waive.*Did you mean 'normalizer'"):
        attempt(tmp_path, plain(), waive=("normaliser",))
    with pytest.raises(BundleError, match="check 'parity' cannot be waived; those that can are"):
        attempt(tmp_path, plain(), waive=("parity",))


def test_statistics_do_not_move_during_an_export(tmp_path: Path) -> None:
    """count 2, mean 2 3 4; eight rows of 100 go through every entry point."""
    norm = RunningNorm(3)
    norm.count.fill_(2)
    norm.mean.copy_(torch.tensor([2.0, 3.0, 4.0]))
    policy = KeyedGraph((norm, ["observation"], ["action"]))
    rows = TensorDict(observation=torch.full((8, 3), 100.0), batch_size=[8])
    bundle = attempt(tmp_path, policy, example=rows, targets=("c99", "numpy"))
    run = bundle.policy()
    for row in rows["observation"].numpy():
        run(row)
        Policy.load(bundle.path).step({"observation": row})
    bundle.program().run(rows["observation"][:1])
    assert norm.count == 2 and norm.mean.tolist() == [2.0, 3.0, 4.0]


def test_a_counter_is_refused_as_a_buffer_and_kept_as_a_state(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.ones(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            return x * 0 + self.n

    example = TensorDict(observation=torch.ones(1, 1), n=torch.ones(1, 1), batch_size=[1])
    with pytest.raises(BundleError, match="check 'normalizer': the policy changes its own buffer"):
        attempt(tmp_path, KeyedGraph((Counter(), ["observation"], ["action"])), example=example)
    graph = KeyedGraph(
        TensorDictModule(lambda x, n: (x * 0 + n + 1, n + 1), ["observation", "n"], ["action", ("next", "n")])
    )
    contract = Contract(recurrent=(RecurrentState("n", ("next", "n"), 1.0),))
    bundle = attempt(tmp_path, graph, contract, example=example, targets=("c99", "numpy"))
    for _ in range(2):  # a second copy starts anew
        c, py = bundle.policy(), Policy.load(bundle.path)
        assert [float(c(np.ones(1))[0]) for _ in range(3)] == [2.0, 3.0, 4.0]
        assert [float(py.step({"observation": np.ones(1)})["action"][0]) for _ in range(3)] == [2.0, 3.0, 4.0]


def test_inputs_are_found_by_key_and_entries_by_name(tmp_path: Path) -> None:
    """f(x1, x2) = 2 x1 + 3 x2, whatever the order at the call; doubles are taken as floats."""
    graph = KeyedGraph((lambda a, b: 2 * a + 3 * b, ["x1", "x2"], ["action"]))
    terms = tuple(ObservationTerm(k, names=("hip", "knee"), normalizer=NONE, history_length=1) for k in ("x2", "x1"))
    example = TensorDict(x1=torch.zeros(1, 2), x2=torch.zeros(1, 2), batch_size=[1])
    contract = Contract(rate_hz=50, observations=terms)
    bundle = attempt(tmp_path, graph, contract, example=example, targets=("c99", "numpy"))
    given = {"x2": np.array([1.0, 10.0]), "x1": np.array([0.0, 5.0])}
    policy, run = Policy.load(bundle.path), bundle.policy()
    for order in (given, dict(reversed(given.items()))):
        assert policy.step(order)["action"].tolist() == run(order).tolist() == [3.0, 40.0]
    named = {"x2": {"knee": 10.0, "hip": 1.0}, "x1": {"hip": 0.0, "knee": 5.0}}
    assert policy.step(named)["action"].tolist() == [3.0, 40.0] and policy.step(named)["action"].dtype == np.float32
    with pytest.raises(ValueError, match="'ankle'"):
        policy.step({**named, "x1": {"hip": 0.0, "ankle": 5.0}})
    for step in (policy.step, run):
        with pytest.raises(ValueError, match="'x1' is None: no reading came"):
            step({**given, "x1": None})
    with pytest.raises(ValueError, match="'knee' is missing"):
        policy.step({**named, "x1": {"hip": 0.0}})
    assert [t["key"] for t in bundle.contract["observations"]] == ["x2", "x1"]
    assert bundle.contract["observations"][0]["history_length"] == 1


def test_a_refused_policy_has_its_buffers_back(tmp_path: Path) -> None:
    policy = Rebinding()
    mean, before = policy.mean, policy.mean.clone()
    with pytest.raises(BundleError, match="check 'normalizer'"):
        attempt(tmp_path, KeyedGraph((policy, ["observation"], ["action"])))
    assert policy.mean is mean and torch.equal(mean, before)


def test_a_layer_norm_sees_an_observation_though_not_what_all_entries_do_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    bundle = attempt(tmp_path, KeyedGraph((net, ["observation"], ["action"])), stated(Normalizer("none")))
    assert bundle.manifest["checks"]["normalizer"] == "passed"


def test_bounds_are_those_of_the_command_after_the_caller_s_steps(tmp_path: Path) -> None:
    def action(offset: tuple[float, float]) -> ActionContract:
        numbers = {"scale": (0.5, 2.0), "offset": offset, "low": (-0.4, -3.0), "high": (0.6, 1.0)}
        return ActionContract(squash="tanh", inside=("squash",), **numbers)

    contract = stated(Normalizer("none"), action=action((0.1, -1.0)))
    near = TensorDict(observation=torch.zeros(2, 3), batch_size=[2])
    assert attempt(tmp_path, plain(nn.Tanh()), contract, example=near).manifest["checks"]["action"] == "passed"
    with pytest.raises(BundleError, match="the action, .*, leaves its bounds"):
        attempt(
            tmp_path / "far", plain(nn.Tanh()), stated(Normalizer("none"), action=action((9.0, -1.0))), example=near
        )


def test_a_mean_many_deviations_off_keeps_its_digits_in_c(tmp_path: Path) -> None:
    mean, std = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([1e-4, 1.0, 2.0])
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    graph = KeyedGraph((lambda x: (x - mean) / std, ["observation"], ["z"]), (net, ["z"], ["action"]))
    example = TensorDict(observation=mean + torch.randn(8, 3) * std, batch_size=[8])
    attempt(tmp_path, graph.select(out_keys=["action"]), example=example, targets=("c99", "onnx", "numpy"))
