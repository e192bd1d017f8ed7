"""Recorded observations in an export: golden rows, the size of a standard deviation, the range seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_gru import CONTRACT, START, gru
from tensordict import TensorDict
from torch import Tensor, nn

from graphrl.compiler.bundle import Bundle, Contract, Normalizer, ObservationTerm, export
from graphrl.compiler.bundle.recorded import read_recording
from graphrl.compiler.bundle.runtime import OUT_OF_RANGE, Policy
from graphrl.errors import BundleError
from graphrl.graph import KeyedGraph

STEPS = torch.arange(40.0)
SEEN = torch.stack([torch.sin(STEPS), 100 + 10 * torch.cos(STEPS), torch.ones(40)], -1)
DECLARED = Contract(rate_hz=50, observations=(ObservationTerm("observation", normalizer=Normalizer("none")),))


def write(path: Path, data: Any, policy: Any = None, contract: Contract = DECLARED, example: Any = None) -> Bundle:
    torch.manual_seed(0)
    policy = policy or KeyedGraph((nn.Linear(3, 2), ["observation"], ["action"]))
    example = TensorDict(observation=torch.zeros(2, 3), batch_size=[2]) if example is None else example
    return export(policy, path / "b", example, contract=contract, targets=("numpy",), data=data)


def test_recorded_rows_ranges_and_status(tmp_path: Path) -> None:
    bundle = write(tmp_path, {"observation": SEEN.numpy()})
    with np.load(bundle.path / "golden.npz") as golden:
        kinds, rows = golden["kind"].tolist(), golden["in/observation"][:, 0]
    recorded = rows[[k == "recorded" for k in kinds]]
    assert len(recorded) == 16 and (recorded[0] == SEEN[0].numpy()).all() and (recorded[-1] == SEEN[-1].numpy()).all()
    random = rows[[k == "random" for k in kinds]]
    assert abs(random[:, 1].mean() - 100) < 20 and (random[:, 2] - 1 < 1e-3).all()  # with the recording's spread
    (term,) = bundle.contract["observations"]
    low, high = SEEN.min(0).values, SEEN.max(0).values
    for found, wanted in ((term["low"], low - 0.5 * (high - low)), (term["high"], high + 0.5 * (high - low))):
        assert found[2] is None and found[:2] == pytest.approx(wanted[:2].tolist())  # the third never moved
    assert term["bounds_from"] == "recorded" and "recorded" in (bundle.path / "reports/contract.md").read_text()
    policy = Policy.load(bundle.path)
    for x, bit in (([0.0, 100.0, 1.0], 0), ([0.0, 121.0, 9.0], OUT_OF_RANGE), ([-2.1, 100.0, 1.0], OUT_OF_RANGE)):
        policy.step({"observation": x})
        assert policy.status == bit


def test_bounds_of_the_contract_stay(tmp_path: Path) -> None:
    (term,) = DECLARED.observations or ()
    contract = replace(DECLARED, observations=(replace(term, low=(None, 0.0, None), bounds_from="stated"),))
    (found,) = write(tmp_path, {"observation": SEEN}, contract=contract).contract["observations"]
    assert (found["low"], found["high"], found["bounds_from"]) == ([None, 0.0, None], None, "stated")


def test_a_standard_deviation_is_the_recording_s(tmp_path: Path) -> None:
    """A step in the middle of the action's slope is seen at 0.01 of the recorded spread, not at one."""

    class Coarse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.round(x[..., :2] / 50)

    graph = KeyedGraph((Coarse(), ["observation"], ["action"]))
    example = TensorDict(observation=torch.full((2, 3), 10.0), batch_size=[2])
    with pytest.raises(BundleError, match="check 'normalizer'.*one standard deviation"):
        write(tmp_path, None, graph, example=example)
    data = {"observation": torch.linspace(-200, 200, 20)[:, None].expand(20, 3).clone()}
    assert write(tmp_path, data, graph, example=example).manifest["checks"]["normalizer"] == "passed"


def test_the_recorded_episodes_are_in_the_sequence(tmp_path: Path) -> None:
    data = {"observation": SEEN, "reset": STEPS % 20 == 0}
    (term,) = CONTRACT.observations or ()
    contract = replace(CONTRACT, observations=(replace(term, low=(-200.0,) * 3, high=(200.0,) * 3),))
    bundle = write(tmp_path, data, gru(), contract, START)
    with np.load(bundle.path / "golden.npz") as golden:
        resets, seen = golden["sequence/reset"], golden["sequence/in/observation"]
    starts = np.flatnonzero(resets).tolist()
    assert starts == [0, 10, 20, 30] and len(resets) == 40
    assert (seen[20:30, 0] == SEEN[:10].numpy()).all() and (seen[30:40, 0] == SEEN[20:30].numpy()).all()
    episodes = TensorDict(observation=SEEN.view(2, 20, 3), batch_size=[2, 20])
    assert write(tmp_path / "again", episodes, gru(), contract, START).manifest == bundle.manifest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"observatio": SEEN}, "lack 'observation'.*Did you mean 'observatio'"),
        ({"observation": SEEN, "reset": STEPS[:3]}, r"have \[3, 40\] entries"),
        ({"observation": torch.full((4, 3), torch.nan)}, "'observation' is not finite"),
        (SEEN, "are a Tensor: expected a TensorDict or arrays"),
        (TensorDict(observation=torch.zeros(2, 2, 2, 3), batch_size=[2, 2, 2]), r"expected \[T\] or \[episodes, T\]"),
    ],
)
def test_data_that_do_not_fit_are_refused(data: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_recording(data, ["observation"])


def test_data_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="'observation' has 2 entries a step, the policy 3"):
        write(tmp_path, {"observation": SEEN[:, :2]})


@pytest.mark.parametrize(
    "value", [[torch.zeros(2, 3), torch.zeros(4, 3)], ["a", "b"], None, np.array([None])], ids=repr
)
def test_what_is_no_array_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(BundleError, match="the recorded 'observation' is no array"):
        read_recording({"observation": value}, ["observation"])


def test_no_step_at_all_is_refused() -> None:
    with pytest.raises(BundleError, match=r"batch size \[0\]: .* a step at least"):
        read_recording({"observation": torch.zeros(0, 3)}, ["observation"])
