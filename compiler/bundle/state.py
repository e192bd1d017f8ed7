"""What a policy's own nodes say of its state, read off the graph into the contract; refused where the two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from graphrl.compiler.bundle.contract import FIRST_STEP, ActionContract, Contract, ObservationTerm, RecurrentState
from graphrl.errors import BundleError, ContractError, did_you_mean
from graphrl.graph import KeyedGraph
from graphrl.keys import Key, next_key, normalize_key, normalize_keys

__all__ = ["acting_graph", "start_like"]

Part = TypeVar("Part")


def acting_graph(
    policy: TensorDictModuleBase, action: Key, contract: Contract
) -> tuple[KeyedGraph, Contract, dict[Key, Tensor]]:
    """The policy cut down to its action and its state; the contract with what the graph says; states before an episode.

    A node with state (``graphrl.models.StateModule``) fills ``recurrent`` and the fields that follow from it. Flags for
    an episode's first step become state too: true after a reset, false after a step, so nobody has to give them.
    The third: a value for one row, by key, of each state whose shape is known here.
    Raises :class:`BundleError` for a state that would be lost, :class:`ContractError` where contract and graph differ.
    """
    graph = policy if isinstance(policy, KeyedGraph) else KeyedGraph(policy)
    known = normalize_keys(list(graph.out_keys))
    wanted = [action, *(s.next_key for s in contract.recurrent or ())]
    for key in wanted:
        if key not in known:
            raise BundleError(f"the policy does not write {key!r}; it writes {known}.{did_you_mean(key, known)}")
    nodes = _nodes(graph.select(out_keys=wanted))
    for node in nodes:
        if next_key(node.state_key) not in known:
            raise BundleError(
                f"{type(node).__name__} reads {node.state_key!r}, and the policy does not show "
                f"{next_key(node.state_key)!r}, its value for the next step: add it to out_keys, or the node that "
                "writes it (PreviousAction.feedback())"
            )
    following = [next_key(node.state_key) for node in nodes]
    graph = graph.select(out_keys=list(dict.fromkeys([*wanted, *following])))
    contract = _filled_in(contract, nodes, action)
    carried = {normalize_key(s.key) for s in contract.recurrent or ()}
    for key in normalize_keys(list(graph.in_keys)):
        if next_key(key) in known and key not in carried:
            raise BundleError(
                f"the policy reads {key!r} and writes its next value {next_key(key)!r}, which this bundle would "
                "lose: declare it in Contract(recurrent=...)"
            )
    starts = {node.state_key: node.initial_state(1).detach().cpu() for node in nodes}
    return _with_flags(graph, contract, nodes, starts)


def start_like(value: Tensor, initial: Any) -> Tensor:
    """The initial value of a state, a number or all of its numbers, shaped as ``value``."""
    start = torch.as_tensor(initial, dtype=value.dtype, device=value.device)
    return start.reshape(value.shape if start.dim() else ()).expand(value.shape).clone()


def _nodes(graph: nn.Module) -> list[Any]:
    """The nodes with state whose state the graph reads."""
    read = normalize_keys(list(graph.in_keys))  # type: ignore[arg-type]
    found = [m for m in graph.modules() if hasattr(m, "contract_facts") and m.state_key in read]
    return list({node.state_key: node for node in found}.values())


def _with_flags(
    graph: KeyedGraph, contract: Contract, nodes: list[Any], starts: dict[Key, Tensor]
) -> tuple[KeyedGraph, Contract, dict[Key, Tensor]]:
    """The graph and contract with each flag for an episode's first step as a state of its own."""
    names = {"is_init", *(node.is_init_key for node in nodes)}
    carried = [normalize_key(s.key) for s in contract.recurrent or ()]
    keys = [k for k in normalize_keys(list(graph.in_keys)) if k in names or k[-1] == "is_init"]
    for key in keys:
        if key in [normalize_key(t.key) for t in contract.observations or ()]:
            raise ContractError(f"{key!r} marks an episode's first step: the bundle's reset sets it and its step "
                                "clears it, so it is no observation of the robot's: leave it out")  # fmt: skip
    flags = [key for key in keys if key not in carried]
    if flags:
        clears = [(torch.zeros_like, [key], [next_key(key)]) for key in flags]
        graph = KeyedGraph(graph, *clears, out_keys=[*graph.out_keys, *map(next_key, flags)])
        made = [RecurrentState(key, next_key(key), 1.0, FIRST_STEP) for key in flags]
        contract = replace(contract, recurrent=(*(contract.recurrent or ()), *made))
        starts = {**starts, **{key: torch.zeros(1, 1, dtype=torch.bool) for key in flags}}
    return graph, contract, starts


def _filled_in(contract: Contract, nodes: list[Any], action: Key) -> Contract:
    """The contract with what the nodes say in its empty fields."""
    facts = _facts(nodes)
    stated = {normalize_key(s.key): s for s in contract.recurrent or ()}
    for (part, key), said in facts.items():
        if part == "recurrent" and key is not None:
            what = f"recurrent state {key!r}"
            stated[key] = _filled(stated[key], said, what) if key in stated else RecurrentState(key, **said)
    contract = _filled(contract, facts.get(("contract", None), {}), "contract")
    observations = contract.observations
    if observations is not None:
        observations = tuple(
            _filled(t, facts.get(("observation", normalize_key(t.key)), {}), f"observation {t.key!r}")
            for t in observations
        )
        _check_histories(observations, facts)
    # an action of another name is the network's own, before the steps that make a command of it
    fed_back = facts.get(("action", action), next((f for (part, _), f in facts.items() if part == "action"), None))
    acting = contract.action
    if fed_back is not None:
        acting = _filled(acting or ActionContract(key=action), fed_back, "action")
    return replace(contract, recurrent=tuple(stated.values()) or None, observations=observations, action=acting)


def _check_histories(terms: Sequence[ObservationTerm], facts: Mapping[tuple[str, Key | None], Any]) -> None:
    """A history that a contract states is one that a node of the policy keeps, where nodes keep any."""
    kept = {key: said for (part, key), said in facts.items() if part == "observation"}
    for term in terms:
        if kept and normalize_key(term.key) not in kept and term.history_length is not None:
            found = [(said["history_length"], said["history_order"]) for said in kept.values()]
            if (term.history_length, term.history_order or found[0][1]) not in found:
                raise ContractError(f"observation {term.key!r}: the contract says length {term.history_length}, "
                                    f"order {term.history_order!r}; the policy's graph keeps {found}")  # fmt: skip


def _facts(nodes: list[Any]) -> dict[tuple[str, Key | None], dict[str, Any]]:
    """What all nodes say together; of two histories of one observation, only what both say."""
    merged: dict[tuple[str, Key | None], dict[str, Any]] = {}
    for node in nodes:
        for place, facts in node.contract_facts().items():
            before = merged.setdefault(place, dict(facts))
            for name, value in facts.items():
                if before[name] is None or value is None or _same(before[name], value):
                    before[name] = value if before[name] is None and place[0] != "observation" else before[name]
                elif place[0] == "observation":
                    before[name] = None
                else:
                    raise ContractError(f"two nodes of the policy differ in {name}: {before[name]!r} and {value!r}")
    return merged


def _filled(part: Part, facts: Mapping[str, Any], what: str) -> Part:
    """A part of a contract with ``facts`` in its empty fields; raises where it says otherwise.

    A rule for the reset is the author's own words, and may be any.
    """
    empty = {}
    for name, value in facts.items():
        said = getattr(part, name)
        if said is None:
            empty[name] = value
        elif name != "reset_rule" and value is not None and not _same(said, value):
            raise ContractError(f"{what}: the contract says {name} {said!r}, the policy's graph {value!r}: leave the "
                                "field out, or correct the one that is wrong")  # fmt: skip
    return replace(part, **empty) if empty else part  # type: ignore[type-var]


def _same(a: Any, b: Any) -> bool:
    """Whether two values agree: numbers to the accuracy of float32, one number standing for all."""
    if a == b:
        return True
    try:
        left, right = np.asarray(a, float), np.asarray(b, float)
    except (TypeError, ValueError):
        return False
    alike = left.shape == right.shape or not left.shape or not right.shape
    return alike and bool(np.allclose(left, right, rtol=1e-6, atol=0))
