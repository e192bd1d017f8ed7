"""The page for people says what is left to the caller, as a formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from graphrl.compiler.bundle import ActionContract, Contract, Normalizer, ObservationTerm, export
from graphrl.graph import KeyedGraph


@pytest.mark.parametrize(
    ("term", "action", "given", "command"),
    [
        ({"normalizer": Normalizer("none")}, {}, "`sensor`.", "`action`."),
        (
            {"normalizer": Normalizer("outside", (1.0,) * 2, (2.0,) * 2, clip=5.0), "scale": 0.5, "low": (-9.0, -9.0)},
            {"squash": "tanh", "scale": 0.25, "offset": (0.1, 0.2), "clip": (-1.0, 1.0), "inside": ()},
            "`clip((sensor * scale - mean) / std, -5.0, 5.0)`; "
            "low and high below are of this value, not of the sensor's.",
            "`clip(tanh(action) * scale + offset, -1.0, 1.0)`.",
        ),
        (
            {"normalizer": Normalizer("none"), "clip": (-100.0, 100.0)},
            {"scale": 2.0, "offset": 0.5, "inside": ("scale",)},
            "`clip(sensor, -100.0, 100.0)`.", "`action + offset`.",
        ),
    ],
    ids=["as it is", "everything", "a part"],
)  # fmt: skip
def test_what_is_left_to_the_caller(
    term: dict[str, Any], action: dict[str, Any], given: str, command: str, tmp_path: Path
) -> None:
    graph = KeyedGraph((lambda x: x * 2, ["observation"], ["action"]))
    contract = Contract(rate_hz=50.0, observations=(ObservationTerm("observation", **term),),
                        action=ActionContract(**action))  # fmt: skip
    data = TensorDict(observation=torch.randn(4, 2), batch_size=[4])
    bundle = export(graph, tmp_path / "b", data, targets=("numpy",), contract=contract, waive=("action",))
    text = (bundle.path / "reports" / "contract.md").read_text()
    assert f"What to give: {given}\n" in text and f"The command to the motors: {command}\n" in text
