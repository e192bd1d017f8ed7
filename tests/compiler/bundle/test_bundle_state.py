"""State in a bundle: read off the graph into the contract, and the same in every runtime as in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import graphrl as grl
from graphrl.compiler.bundle import (
    ActionContract,
    Bundle,
    Contract,
    Normalizer,
    ObservationTerm,
    RecurrentState,
    load,
)
from graphrl.compiler.bundle.c_policy import find_compiler
from graphrl.compiler.bundle.parity import Carried
from graphrl.compiler.bundle.runners import RUNNERS
from graphrl.errors import BundleError, ContractError
from graphrl.models import GRUModule, LowPassFilter, ObservationHistory, PhaseClock, PreviousAction

TERM = ObservationTerm("observation", normalizer=Normalizer("none"))
EXAMPLE = {"observation": torch.linspace(-1, 1, 12).reshape(4, 3)}
TARGETS = tuple(t for t in ("c99", "onnx", "numpy") if t != "c99" or find_compiler())


def everything() -> grl.KeyedGraph:
    """Every kind of state: a GRU, a window and a filter that start at their input, the last action, a clock."""
    torch.manual_seed(0)
    previous = PreviousAction(2, initial=(0.5, -0.25), clip=(-0.5, 0.5))
    net = nn.Linear(8 + 9 + 3 + 2 + 2, 2)
    keys = ["features", "history", "filtered", "previous_action", "phase"]
    return grl.KeyedGraph(
        GRUModule(3, 8), ObservationHistory(3, 3, order="newest_first"), LowPassFilter(3, alpha=0.25), previous,
        PhaseClock(2.0, 50.0), (lambda *x: net(torch.cat(x, -1)), keys, ["action"]), previous.feedback(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    pytest.importorskip("onnxruntime")
    contract = Contract(observations=(TERM,))
    return grl.export(everything(), tmp_path_factory.mktemp("state") / "b", EXAMPLE, targets=TARGETS, contract=contract)


def test_the_contract_is_filled_from_the_graph(bundle: Bundle) -> None:
    contract = bundle.contract
    found = {s["key"]: (s["next_key"], s["initial"], s["reset_rule"]) for s in contract["recurrent"]}
    assert found == {
        "recurrent_state": ("next/recurrent_state", 0.0, "initial value"),
        "history_state": ("next/history_state", 0.0, "first input"),
        "filtered_state": ("next/filtered_state", 0.0, "first input"),
        "previous_action_state": ("next/previous_action_state", [0.5, -0.25], "initial value"),
        "phase_state": ("next/phase_state", [1.0, 0.0], "initial value"),
        "is_init": ("next/is_init", 1.0, "first step"),
    }
    (term,) = contract["observations"]
    assert [term[f"history_{name}"] for name in ("length", "order", "reset_fill")] == [
        3, "newest_first", "first observation",
    ]  # fmt: skip
    assert (contract["action"]["previous_action"], contract["action"]["previous_action_initial"]) == (
        "clipped", [0.5, -0.25],
    )  # fmt: skip
    assert contract["rate_hz"] == 50.0
    assert "`is_init`: true after a reset" in (bundle.path / "reports" / "contract.md").read_text()


def trained(resets: list[bool], x: Tensor) -> np.ndarray:
    """The actions of the policy as a collector runs it: state fed back, zero and is_init where an episode starts."""
    graph, actions = everything(), []
    state = {m.state_key: m.initial_state(1) for m in graph.modules() if hasattr(m, "state_key")}
    for reset, row in zip(resets, x, strict=True):
        state = {key: torch.zeros_like(v) if reset else v for key, v in state.items()}
        td = TensorDict({"observation": row[None], "is_init": torch.tensor([[reset]]), **state}, batch_size=[1])
        with torch.no_grad():
            graph(td)
        actions.append(td["action"][0].numpy())
        state = {key: td["next", key] for key in state}
    return np.stack(actions)


@pytest.mark.parametrize("target", TARGETS)
def test_every_runtime_starts_an_episode_as_training_does(bundle: Bundle, target: str) -> None:
    """Nothing but observations is given; a state left behind, garbage included, does not outlive a reset."""
    x, resets = torch.randn(12, 3), [t in (0, 5, 6) for t in range(12)]
    run, player = RUNNERS[target](bundle.path, bundle.manifest)
    player = player or Carried(bundle.manifest, run)
    for _ in range(3):
        player.step({"observation": np.full((1, 3), 1e30, np.float32)})
    found = []
    for reset, row in zip(resets, x, strict=True):
        if reset:
            player.reset()
        found.append(np.array(player.step({"observation": row[None].numpy()})["action"]).reshape(-1))
    np.testing.assert_allclose(np.stack(found), trained(resets, x), rtol=1e-5, atol=1e-6)


def test_a_state_that_is_given_is_where_the_next_step_goes_on(bundle: Bundle) -> None:
    x = torch.randn(6, 3).numpy()
    _, policy = RUNNERS["numpy"](bundle.path, bundle.manifest)
    policy.reset()
    wanted = [policy.step({"observation": row}) for row in x[:3]]
    kept = policy.state
    wanted += [policy.step({"observation": row}) for row in x[3:]]
    kept.pop("is_init")
    for target in sorted({"numpy", *TARGETS} - {"onnx"}):
        _, other = RUNNERS[target](bundle.path, bundle.manifest)
        other.reset(kept)
        for row, result in zip(x[3:], wanted[3:], strict=True):
            np.testing.assert_allclose(
                other.step({"observation": row})["action"], result["action"], rtol=1e-5, atol=1e-6
            )


def told(**stated: object) -> Contract:
    return Contract(**stated)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (told(rate_hz=100.0), r"contract: the contract says rate_hz 100.0, the policy's graph 50.0"),
        (told(observations=(ObservationTerm("observation", history_length=5),)), "history_length 5.*graph 3"),
        (told(observations=(ObservationTerm("observation", history_order="oldest_first"),)), "history_order"),
        (told(action=ActionContract(previous_action="raw")), "previous_action 'raw', the policy's graph 'clipped'"),
        (told(action=ActionContract(previous_action_initial=0.0)), "previous_action_initial"),
        (told(recurrent=(RecurrentState("recurrent_state", ("next", "recurrent_state"), 0.5),)),
         "recurrent state 'recurrent_state': the contract says initial 0.5, the policy's graph 0.0"),
        (told(rate_hz=50.0, observations=(TERM, ObservationTerm("is_init"))), "'is_init' marks an episode's first"),
    ],
)  # fmt: skip
def test_a_contract_that_says_otherwise_is_refused(contract: Contract, message: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        grl.export(everything(), tmp_path / "b", EXAMPLE, targets=("numpy",), contract=contract)


def test_a_contract_that_says_the_same_is_kept(tmp_path: Path) -> None:
    mine = RecurrentState("previous_action_state", ("next", "previous_action_state"), (0.5, -0.25), "as the simulator")
    contract = Contract(rate_hz=50, recurrent=(mine,), action=ActionContract(previous_action="clipped", unit="rad"))
    grl.export(everything(), tmp_path / "b", EXAMPLE, targets=("numpy",), contract=contract)
    found = load(tmp_path / "b").contract
    assert found["recurrent"][0]["reset_rule"] == "as the simulator" and found["action"]["unit"] == "rad"


def test_a_previous_action_that_nobody_keeps_is_an_error(tmp_path: Path) -> None:
    graph = grl.KeyedGraph(PreviousAction(1), (lambda p, x: p + x, ["previous_action", "observation"], ["action"]))
    with pytest.raises(BundleError, match=r"'previous_action_state'.*PreviousAction.feedback\(\)"):
        grl.export(graph, tmp_path / "b", {"observation": torch.zeros(1, 1)})


def test_a_first_step_that_depends_on_what_was_left_is_an_error(tmp_path: Path) -> None:
    graph = grl.KeyedGraph(
        (lambda x, h, is_init: (x + h + is_init, h + x), ["observation", "h", "is_init"], ["action", ("next", "h")])
    )
    example = TensorDict(observation=torch.ones(1, 1), h=torch.zeros(1, 1), batch_size=[1])
    contract = Contract(recurrent=(RecurrentState("h", ("next", "h")),))
    with pytest.raises(BundleError, match="check 'state': an episode's first step depends on what"):
        grl.export(graph, tmp_path / "b", example, targets=("numpy",), contract=contract)


def test_bounds_of_a_filtered_action_are_judged_on_states_that_happen(tmp_path: Path) -> None:
    pose = torch.tensor([0.5, -1.0])
    graph = grl.KeyedGraph(
        (nn.Linear(3, 2), ["observation"], ["raw"]),
        (lambda raw: torch.tanh(raw) * 0.25 + pose, ["raw"], ["target"]),
        LowPassFilter(2, in_key="target", out_key="action", alpha=0.3),
    )
    action = ActionContract(squash="tanh", scale=0.25, offset=(0.5, -1.0), inside=("squash", "scale", "offset"),
                            low=(0.25, -1.25), high=(0.75, -0.75))  # fmt: skip
    contract = Contract(rate_hz=50.0, action=action)
    bundle = grl.export(
        graph, tmp_path / "b", {"observation": torch.randn(8, 3)}, contract=contract, targets=("numpy",)
    )
    assert bundle.manifest["checks"]["action"] == "passed"
    (state, *_) = bundle.contract["recurrent"]
    assert state["shape"] == [2]
    for low in ((0.3, -1.25), (0.25, -0.9)):
        wrong = replace(contract, action=replace(action, low=low))
        with pytest.raises(BundleError, match="check 'action'"):
            grl.export(
                graph, tmp_path / "c", {"observation": torch.randn(64, 3) * 9}, contract=wrong, targets=("numpy",)
            )


def test_a_history_that_no_node_keeps_is_refused(tmp_path: Path) -> None:
    graph = grl.KeyedGraph(
        (lambda a, b: torch.cat([a, b], -1), ["a", "b"], ["both"]),
        ObservationHistory(4, 3, in_key="both", out_key="history"),
        (nn.Linear(12, 1), ["history"], ["action"]),
    )
    none = Normalizer("none")

    def attempt(path: str, **said: Any) -> None:
        terms = tuple(ObservationTerm(key, normalizer=none, **said) for key in ("a", "b"))
        grl.export(graph, tmp_path / path, {"a": torch.randn(4, 2), "b": torch.randn(4, 2)}, targets=("numpy",),
                   contract=Contract(rate_hz=50.0, observations=terms))  # fmt: skip

    attempt("a", history_length=3, history_order="oldest_first")
    for said in ({"history_length": 5}, {"history_length": 3, "history_order": "newest_first"}):
        with pytest.raises(ContractError, match=r"the contract says length .*graph keeps \[\(3, 'oldest_first'\)\]"):
            attempt("b", **said)


def test_an_action_of_the_network_s_own_that_is_fed_back_is_told(tmp_path: Path) -> None:
    previous = PreviousAction(2, action_key="raw")
    graph = grl.KeyedGraph(
        previous,
        (lambda x, p: torch.cat([x, p], -1), ["observation", "previous_action"], ["joined"]),
        (nn.Linear(5, 2), ["joined"], ["raw"]),
        (lambda raw: raw * 0.25, ["raw"], ["action"]),
        previous.feedback(),
    )
    bundle = grl.export(graph, tmp_path / "b", {"observation": torch.randn(4, 3)}, targets=("numpy",))
    assert bundle.contract["action"]["previous_action"] == "raw"
