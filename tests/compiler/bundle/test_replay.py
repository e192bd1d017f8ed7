"""Replaying a recorded log: the first step, output and joint that differ."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_gru import CONTRACT, START, gru

from graphrl.compiler.bundle import ActionContract, Bundle, export
from graphrl.compiler.bundle.replay import replay
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    contract = replace(CONTRACT, action=ActionContract(names=("left", "right")))
    return export(gru(), tmp_path_factory.mktemp("r") / "b", START, contract=contract, targets=("numpy",))


@pytest.fixture
def log(made: Bundle) -> dict[str, Any]:
    """Two episodes of ten steps, as a robot would have written them down."""
    policy = Policy.load(made.path)
    xs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    actions, states = [], []
    for t, x in enumerate(xs):
        if t % 10 == 0:
            policy.reset()
        actions.append(policy.step({"observation": x})["action"])
        states.append(policy.state["h"][0])
    reset = np.arange(20) % 10 == 0
    return {
        "observation": xs,
        "action": np.stack(actions),
        "next/h": np.stack(states),
        "reset": reset,
        "time": xs[:, 0],
    }


def save(path: Path, log: dict[str, Any]) -> Path:
    np.savez(path, **log)
    return path


def write_csv(path: Path, log: dict[str, Any], names: dict[str, Any]) -> Path:
    head = [f"{key}[{n}]" for key, given in names.items() for n in given]
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["time", *head, "reset"])
        for t in range(len(log["reset"])):
            values = [v for key in names for v in log[key][t].tolist()]
            rows.writerow([t / 50, *values, int(log["reset"][t])])
    return path


def test_a_log_that_agrees(made: Bundle, log: dict[str, Any], tmp_path: Path) -> None:
    found = replay(made, save(tmp_path / "log.npz", log))
    assert (found.steps, found.divergence) == (20, None) and found.largest_error == 0
    names = {"observation": ("hip", "knee", "speed"), "action": ("left", "right")}
    assert replay(made, write_csv(tmp_path / "a.csv", log, names)) == found
    assert replay(made, write_csv(tmp_path / "b.csv", log, {"action": (0, 1), "observation": (0, 1, 2)})) == found


def test_the_first_difference_is_named(made: Bundle, log: dict[str, Any], tmp_path: Path) -> None:
    log["action"][13, 1] += 0.25
    log["action"][15, 0] += 1.0
    log["observation"][14, 2] = 6.0
    found = replay(made, save(tmp_path / "log.npz", log))
    where = found.divergence
    assert where is not None and (where.step, where.key, where.name) == (13, "action", "right")
    assert where.recorded - where.computed == pytest.approx(0.25) and where.notes == () and found.steps == 13
    assert "step 13: 'action', right: recorded" in str(where)
    assert replay(made, tmp_path / "log.npz", tolerance=10).divergence is None


def test_what_was_unusual_about_the_observation_is_told(made: Bundle, log: dict[str, Any], tmp_path: Path) -> None:
    log["observation"][4] = [6.0, 0.0, np.nan]
    where = replay(made, save(tmp_path / "log.npz", log)).divergence
    assert where is not None and where.step == 4
    assert where.notes == ("'observation', hip is 6.0, expected -5.0 to 5.0",
                           "'observation', speed is nan, expected -5.0 to 5.0")  # fmt: skip


def test_a_missed_reset_and_a_lost_state_are_found(made: Bundle, log: dict[str, Any], tmp_path: Path) -> None:
    unmarked = {k: v for k, v in log.items() if k != "reset"}
    where = replay(made, save(tmp_path / "log.npz", unmarked)).divergence
    assert where is not None and where.step == 10  # the log started anew there
    assert where.notes == ("the log marks no `reset` after its first step, and ['h'] carry over",)
    log["next/h"][6, 3] += 0.01
    where = replay(made, save(tmp_path / "log.npz", log)).divergence
    assert where is not None and (where.step, where.key, where.name) == (6, "next/h", "next/h[3]")


def test_what_a_log_lacks_is_named(made: Bundle, log: dict[str, Any], tmp_path: Path) -> None:
    def attempt(message: str, drop: str = "", **changes: Any) -> None:
        given = {k: v for k, v in {**log, **changes}.items() if k != drop}
        with pytest.raises(BundleError, match=message):
            replay(made, save(tmp_path / "log.npz", given))

    attempt("no 'observation', which the policy reads.*Did you mean 'observations'", "observation",
            observations=log["observation"])  # fmt: skip
    attempt("lengths are .*'observation': 7", observation=log["observation"][:7])
    attempt("'observation' has 2 entries a step, expected 3", observation=log["observation"][:, :2])
    only = {"observation": log["observation"]}
    np.savez(tmp_path / "only.npz", **only)
    with pytest.raises(BundleError, match=r"no output to compare: expected one of \['action', 'next/h'\]"):
        replay(made, tmp_path / "only.npz")
    with pytest.raises(BundleError, match="nothing.npz cannot be read"):
        replay(made, tmp_path / "nothing.npz")
    path = write_csv(tmp_path / "half.csv", log, {"observation": (0, 1, 2), "action": (0, "rigth")})
    missing = r"1 of the 2 columns of 'action' are there; missing \['right'\], not known \['action\[rigth\]'\]"
    with pytest.raises(BundleError, match=missing):
        replay(made, path)


@pytest.mark.parametrize(("change", "told"), [
    (lambda action: np.concatenate([action[:1], action[:-1]]), "a step late"),
    (lambda action: action[:, ::-1], r"in the order \[1, 0\]"),
    (lambda action: np.clip(action, -0.05, 0.05), "before clipping"),
], ids=["late", "swapped", "clipped"])  # fmt: skip
def test_what_a_difference_usually_means_is_told(log: dict[str, Any], tmp_path: Path, change: Any, told: str) -> None:
    action = ActionContract(names=("left", "right"), low=(-0.05,) * 2, high=(0.05,) * 2, inside=())
    made = export(gru(), tmp_path / "b", START, contract=replace(CONTRACT, action=action), targets=("numpy",))
    log["action"] = change(log["action"])
    where = replay(made, save(tmp_path / "log.npz", log)).divergence
    assert where is not None and len(where.notes) == 1
    assert re.search(told, where.notes[0])
