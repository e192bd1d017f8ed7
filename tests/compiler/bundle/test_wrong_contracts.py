"""Contracts that say what the policy does not do: refused by name, with the numbers that are true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.bench.robot_policies import make_policy
from graphrl.compiler.bundle import ActionContract, Bundle, Contract, Normalizer, ObservationTerm, export
from graphrl.compiler.bundle.front import stages
from graphrl.compiler.bundle.tail import tail_steps
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.trace import trace
from graphrl.errors import BundleError, ContractError
from graphrl.graph import KeyedGraph
from graphrl.models import RunningNorm

POSITION = Normalizer("inside", (0.1, -0.2, 0.3), (0.5, 0.25, 2.0))
VELOCITY = Normalizer("inside", (1.0, 2.0, -3.0), (4.0, 5.0, 0.1))
JOINTS = ("hip", "knee", "ankle")
POSE = (0.1, 0.8, -1.5)
SCALE = (0.5, 0.6, 0.7)


def norm_of(stated: Normalizer, clip: float | None = None) -> RunningNorm:
    norm = RunningNorm(3, eps=0.0, clip=clip)
    norm.mean.copy_(torch.tensor(stated.mean))
    norm.var.copy_(torch.tensor(stated.std) ** 2)
    return norm


class Command(nn.Module):
    """tanh, times :data:`SCALE`, plus :data:`POSE`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(SCALE))
        self.register_buffer("pose", torch.tensor(POSE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale + self.pose


def legs(clip: float | None = None) -> KeyedGraph:
    """Two sensors, each behind its own normaliser; a command around a pose."""
    torch.manual_seed(0)
    return KeyedGraph(
        (norm_of(POSITION, clip), ["joint_position"], ["p"]),
        (norm_of(VELOCITY, clip), ["joint_velocity"], ["v"]),
        (lambda p, v: torch.cat([p, v], -1), ["p", "v"], ["features"]),
        (nn.Sequential(nn.Linear(6, 3), Command()), ["features"], ["action"]),
    )


ACTION = ActionContract(
    squash="tanh", scale=SCALE, offset=POSE, inside=("squash", "scale", "offset"), names=JOINTS,
    low=(-0.4, 0.2, -2.2), high=(0.6, 1.4, -0.8),
)  # fmt: skip


def stated(position: Normalizer = POSITION, velocity: Normalizer = VELOCITY, **more: Any) -> Contract:
    terms = (ObservationTerm("joint_position", names=JOINTS, normalizer=position),
             ObservationTerm("joint_velocity", names=more.pop("names", JOINTS), normalizer=velocity))  # fmt: skip
    return Contract(**{"rate_hz": 50, "observations": terms, "action": ACTION, **more})


def example(rows: int = 8) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    keys = ("joint_position", "joint_velocity")
    return TensorDict({k: torch.randn(rows, 3, generator=generator) for k in keys}, batch_size=[rows])


def attempt(folder: Path, contract: Any, policy: KeyedGraph | None = None, data: Any = None, **more: Any) -> Bundle:
    data = example() if data is None else data
    return export(policy or legs(), folder / "b", data, contract=contract, targets=("numpy",), **more)


def acting(**changed: Any) -> Contract:
    return stated(action=replace(ACTION, **changed))


WRONG: dict[str, tuple[str, Contract, str]] = {
    "another key's statistics": ("normalizer", stated(velocity=POSITION),
                                 r"'joint_velocity' has other numbers.*\('hip'\) is \(x - 1\) / 4 in.*says \(x - 0.1\)"
                                 r" / 0.5.*stated numbers are what the program does to 'joint_position'"),
    "statistics swapped": ("normalizer", stated(VELOCITY, POSITION),
                           "program's are the numbers that the contract states for 'joint_velocity'.*swapped"),
    "variance as std": ("normalizer", stated(replace(POSITION, std=(0.25, 0.0625, 4.0))), "stated std is the variance"),
    "std inverted": ("normalizer", stated(replace(POSITION, std=(2.0, 4.0, 0.5))), "stated std is 1 / std"),
    "one entry's mean": ("normalizer", stated(replace(POSITION, mean=(0.1, 0.2, 0.3))), r"entry 1 \('knee'\) is \(x -"),
    "mean alone": ("normalizer", stated(replace(POSITION, mean=(0.0, 0.0, 0.0))), "Of another training"),
    "clip": ("normalizer", stated(replace(POSITION, clip=5.0)), r"to \+-5, and the program does not"),
    "not said to be there": ("normalizer", stated(Normalizer("outside", (0.0,) * 3, (1.0,) * 3)), "twice on the robot"),
    "scale of one entry": ("action", acting(scale=(0.5, 0.5, 0.5)), r"scale is .*0.5\), and the program's \(0.5, 0.6"),
    "scale and offset": ("action", acting(scale=0.25, offset=7.0), "scale is 0.25, and the program's"),
    "offset": ("action", acting(offset=7.0), "offset is 7.0, and the program's"),
    "offset not said": ("action", acting(offset=None), r"no offset is stated: .*offset=\(0.1, 0.8, -1.5\)"),
    "pose for offset": ("action", acting(offset=None, default_pose=POSE), "default_pose is not added"),
    "squash not said": ("action", acting(squash=None), "squash='tanh'"),
    "another squash": ("action", acting(squash="sigmoid"), "squash is 'sigmoid', and the program ends in 'tanh'"),
    "scale left to the caller": ("action", acting(inside=("squash", "offset")), "leaves the scale to the caller"),
    "mechanical limits": ("action", acting(low=(-3.0,) * 3, high=(3.0,) * 3),
                          r"can reach \(-0.4, 0.2, -2.2\).*not the joint's mechanical limits: say low=\(-0.4, 0.2, -2"),
    "a clip that binds": ("action", acting(clip=(-1.0, 1.0), inside=("squash", "scale", "offset", "clip")),
                          r"clips the action to \(-1.0, 1.0\)"),
    "two orders": ("order", stated(names=("knee", "hip", "ankle")),
                   r"'joint_position' and 'joint_velocity' have .* two orders, \['hip', .* and \['knee', 'hip'"),
    "the action's order": ("order", acting(names=("knee", "hip", "ankle")), "the action's names have the same names"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_contract_that_the_policy_does_not_keep_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    check, contract, message = WRONG[wrong]
    with pytest.raises(BundleError, match=f"check '{check}': .*{message}"):
        attempt(tmp_path, contract)
    assert list(tmp_path.iterdir()) == []


def test_the_true_contract_passes(tmp_path: Path) -> None:
    bundle = attempt(tmp_path, stated(replace(POSITION, clip=5.0)), legs(clip=5.0))
    said = bundle.manifest["checks"]
    assert all(said[name] == "passed" for name in ("normalizer", "action", "order", "rate"))
    assert str(bundle).endswith("checks: 13 passed, 2 had nothing to check (range, allocation): fill the contract")


@pytest.mark.parametrize("name", ["go1", "g1_fast_sac"])
def test_a_robot_policy_keeps_what_its_program_and_statistics_tell(name: str, tmp_path: Path) -> None:
    policy = make_policy(name, 16)
    (norm,) = (m for m in policy.graph.modules() if isinstance(m, RunningNorm))
    std = (norm.var + norm.eps).sqrt()
    statistics = Normalizer("inside", tuple(norm.mean.tolist()), tuple(std.tolist()), norm.eps, norm.clip)
    rows = torch.cat([*policy.episode(4)])
    with torch.no_grad():
        steps = tail_steps(run_passes(trace(policy.graph, rows[:1])), "action")
    contract = Contract(policy.rate_hz, observations=(ObservationTerm("observation", normalizer=statistics),),
                        action=ActionContract(**steps))  # fmt: skip
    said = attempt(tmp_path, contract, policy.graph, rows).manifest["checks"]
    assert said["normalizer"] == said["action"] == "passed"


def test_a_wrong_order_can_be_waived(tmp_path: Path) -> None:
    bundle = attempt(tmp_path, stated(names=("knee", "hip", "ankle")), waive=("order",))
    assert bundle.manifest["checks"]["order"].startswith("waived: 'joint_position' and 'joint_velocity'")


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "multiplied": lambda x, mean, std: (x - mean) * (1 / std),
    "folded": lambda x, mean, std: x * (1 / std) + (-mean / std),
    "one operation": lambda x, mean, std: torch.addcmul(-mean / std, x, 1 / std),
    "a row of one": lambda x, mean, std: (x - mean[None]) / (std[None] + 1e-12),
    "in parts": lambda x, mean, std: torch.cat([(x[..., i] - mean[i]) / std[i] for i in (slice(1), slice(1, 3))], -1),
    "batch normalisation": lambda x, mean, std: nn.functional.batch_norm(x, mean, std**2, eps=0.0),
    "reversed": lambda x, mean, std: ((x.flip(-1) - mean.flip(-1)) / std.flip(-1)),
    "clipped": lambda x, mean, std: ((x - mean) / std).clamp(-5, 5),
    "joined": lambda x, mean, std: (torch.cat([x, x * 0 + 1], -1) - torch.cat([mean, std])) / torch.cat([std, mean]),
    "in a window": lambda x, mean, std: (torch.stack([x, x], 1).flatten(1) - mean.repeat(2)) / std.repeat(2),
}  # fmt: skip


class Form(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor], mean: Any, std: Any) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.mean, self.std)


@pytest.mark.parametrize("form", FORMS)
def test_a_normaliser_is_found_in_whatever_form_it_is_written(form: str) -> None:
    assert VELOCITY.mean is not None and VELOCITY.std is not None
    module = Form(FORMS[form], VELOCITY.mean, VELOCITY.std)
    graph = KeyedGraph((nn.Sequential(module, nn.LazyLinear(2)), ["x"], ["action"]))
    row = TensorDict(x=torch.randn(1, 3), batch_size=[1])
    with torch.no_grad():
        graph(row.clone())
        found = stages(run_passes(trace(graph.eval(), row)), 0)
    std = torch.tensor(VELOCITY.std).double()
    wanted = torch.stack([1 / std, -torch.tensor(VELOCITY.mean).double() / std])
    for told, gain, shift in (stage.entries(3) for stage in found):
        if told.all() and torch.allclose(torch.tensor(np.stack([gain, shift])), wanted):
            return
    pytest.fail(f"no stage has {wanted}: {found}")


def test_a_second_normaliser_is_found(tmp_path: Path) -> None:
    graph = KeyedGraph((nn.Sequential(norm_of(VELOCITY), norm_of(POSITION), nn.Linear(3, 2)), ["x"], ["action"]))
    contract = Contract(rate_hz=50, observations=(ObservationTerm("x", normalizer=VELOCITY),))
    with pytest.raises(ContractError, match="check 'normalizer': the program normalises 'x' again"):
        attempt(tmp_path, contract, graph, TensorDict(x=torch.randn(4, 3), batch_size=[4]))


def test_rows_in_another_unit_are_refused_with_their_share(tmp_path: Path) -> None:
    rows = example(40)
    limits = replace(stated().observations[0], low=(-3.2, -3.2, None), high=(3.2, 3.2, None))  # type: ignore[index]
    contract = replace(stated(), observations=(limits, stated().observations[1]))  # type: ignore[index]
    rows["joint_position"] = rows["joint_position"].clamp(-1, 1)
    rows["joint_position"][0, 0] = 4.0  # an outlier is no fault
    assert attempt(tmp_path, contract, data=rows).manifest["checks"]["range"] == "passed"
    rows["joint_position"] = rows["joint_position"].clamp(-1, 1) * 180 / torch.pi
    said = (
        r"'joint_position': \d+% of 40 rows.*\('(hip|knee)'\) as far as -?57.* where -3.2 to 3.2.*degrees where radians"
    )
    with pytest.raises(ContractError, match=f"check 'range': {said}"):
        attempt(tmp_path, contract, data=rows, overwrite=True)


def refused(tmp_path: Path, node: Any, data: Mapping[str, Tensor], contract: Any = None) -> str:
    graph = KeyedGraph((node, ["x"], ["action"]))
    with pytest.raises(BundleError) as error:
        attempt(tmp_path, contract, graph, TensorDict(data, batch_size=[4]))
    return str(error.value)


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def test_errors_name_the_row_the_dtype_the_dictionary_and_the_frozen_value(tmp_path: Path) -> None:
    holed = X.clone()
    holed[2, 1] = torch.nan
    assert "NaN or infinity in 1 row(s), the first is row 2" in refused(tmp_path, nn.Linear(3, 2), {"x": holed})
    said = refused(tmp_path, nn.Linear(3, 2), {"x": X.double()})
    assert "'x' is float64 in the example" in said and "example['x'].float()" in said
    assert "Contract.from_dict(...)" in refused(tmp_path, nn.Linear(3, 2), {"x": X}, {"rate_hz": 50})
    numpy = refused(tmp_path, lambda x: torch.from_numpy(x.numpy() * 2), {"x": X})
    assert "check 'parity': eager" in numpy and "a value was frozen while tracing (numpy" in numpy
    terms = (ObservationTerm("x", normalizer=Normalizer("none")),)
    numpy = refused(tmp_path, lambda x: torch.from_numpy(x.numpy() * 2), {"x": X}, Contract(observations=terms))
    assert "check 'normalizer'" in numpy and "frozen while tracing" in numpy


def test_words_that_a_field_does_not_know_are_refused_with_the_nearest() -> None:
    with pytest.raises(ContractError, match=r"squash is 'sigmiod'; expected 'tanh' or .*Did you mean 'sigmoid'"):
        ActionContract(squash="sigmiod")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"inside is \('tanh',\); expected .*'squash'.*'tanh' is a squash"):
        ActionContract(inside=("tanh",))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"inside is \('squash', 'scales'\).*Did you mean 'scale'"):
        ActionContract(inside=("squash", "scales"))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="previous_action is 'clip'; .*Did you mean 'clipped'"):
        ActionContract(previous_action="clip")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="history_order is 'oldest'; .*Did you mean 'oldest_first'"):
        ObservationTerm("x", history_order="oldest")  # type: ignore[arg-type]
