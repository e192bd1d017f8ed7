"""The contract as data: its values, its JSON Schema, and contracts read from files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrl.compiler.bundle import ActionContract, Contract, Normalizer, ObservationTerm, RecurrentState
from graphrl.compiler.bundle.contract_file import merge_contract, read_contract_file
from graphrl.compiler.bundle.contract_schema import ABOUT
from graphrl.errors import ContractError

SCHEMA = Path(__file__).parents[3] / "docs" / "contract.schema.json"
FULL = Contract(
    rate_hz=50,
    decimation=4,
    observations=(
        ObservationTerm(
            ("robot", "joints"), names=("hip", "knee"), shape=(2,), unit=("rad", None), frame="base", scale=(1.0, 0.5),
            clip=(-5.0, 5.0), low=(None, -1.0), high=(2.0, None), bounds_from="stated",
            normalizer=Normalizer("inside", (0.0, 1.0), (1.0, 2.0), 1e-8, 10.0), history_length=5,
            history_order="oldest_first", history_reset_fill="constant 0",
        ),
    ),
    action=ActionContract(
        names=("hip", "knee"), unit="rad", low=(-1.0, -1.0), high=(1.0, 1.0), squash="tanh", scale=0.25,
        offset=(0.1, 0.2), clip=(-1.0, 1.0), inside=("squash", "scale"), joint_names=("hip", "knee"),
        default_pose=(0.1, 0.2), kp=(20.0, 20.0), kd=(0.5, 0.5), previous_action="raw", previous_action_initial=0.0,
    ),
    recurrent=(RecurrentState("h", ("next", "h"), (0.0, 1.0), "initial value", (2,)),),
    quaternion_order="wxyz",
    command_ranges={"speed": (-1.0, 1.0)},
    notes="all of it",
)  # fmt: skip
"""Every field filled."""


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is valid: the words of JSON Schema that this schema uses, any other is an error."""
    kinds = {"number": (int, float), "integer": int, "string": str, "null": type(None), "array": list, "object": dict}
    known = {"$schema", "title", "description", "type", "enum", "anyOf", "items", "prefixItems", "minItems", "maxItems",
             "properties", "required", "additionalProperties"}  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    if "anyOf" in schema:
        return any(accepts(option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool):
        return False
    if isinstance(value, list):
        parts = schema.get("prefixItems") or [schema["items"]] * len(value)
        return len(parts) == len(value) and all(map(accepts, parts, value))
    if not isinstance(value, dict):
        return True
    fields, others = schema.get("properties", {}), schema["additionalProperties"]
    if not set(schema.get("required", ())) <= set(value):
        return False
    of = {name: fields.get(name, others) for name in value}
    return all(kind is not False and accepts(kind, value[name]) for name, kind in of.items())


def test_the_published_schema_is_the_one_of_the_dataclasses() -> None:
    assert json.loads(SCHEMA.read_text()) == Contract.json_schema()
    assert Contract.json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert all(text.strip() for fields in ABOUT.values() for text in fields.values())


@pytest.mark.parametrize("contract", [Contract(), FULL])
def test_contracts_are_valid(contract: Contract) -> None:
    assert accepts(Contract.json_schema(), contract.as_dict())
    assert Contract.from_dict(contract.as_dict()) == contract
    assert Contract.from_dict(json.loads(json.dumps(contract.as_dict()))).sha256() == contract.sha256()


def test_every_field_can_be_filled() -> None:
    def empty(place: str, value: Any) -> list[str]:
        if isinstance(value, dict):
            return [name for key, inner in value.items() for name in empty(f"{place}.{key}", inner)]
        return [place] if value is None else []

    data = FULL.as_dict()
    assert empty("", {**data, **data["observations"][0], **data["recurrent"][0]}) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(rate="50"),
        lambda d: d.update(rate_hz="50"),
        lambda d: d.pop("notes"),
        lambda d: d.update(quaternion_order="wzyx"),
        lambda d: d["action"].update(inside=["squash", "turn"]),
        lambda d: d["action"].update(clip=[0.0]),
        lambda d: d["observations"][0]["normalizer"].update(where="maybe"),
        lambda d: d["observations"][0].update(key=["a", "b"]),
        lambda d: d.update(command_ranges={"speed": [0.0, 1.0, 2.0]}),
    ],
)
def test_what_is_no_contract_is_not_valid(spoil: Callable[[dict[str, Any]], Any]) -> None:
    data = FULL.as_dict()
    spoil(data)
    assert not accepts(Contract.json_schema(), data)
    if "notes" in data:  # a field left out is null
        with pytest.raises(ContractError):
            Contract.from_dict(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Contract(rate_hz=math.nan), "rate_hz is nan; expected finite"),
        (lambda: Contract(rate_hz=0), "rate_hz is 0; expected more than 0"),
        (lambda: Contract(decimation=0), "decimation is 0; expected at least 1"),
        (lambda: Contract(command_ranges={"v": (1.0, -1.0)}), "command_ranges: 'v'.*low < high"),
        (lambda: Contract(recurrent=(RecurrentState("h", "g"),) * 2), "'h' stands twice"),
        (lambda: ObservationTerm("x", low=(0.0, 2.0), high=(1.0, 1.0)), "entry 1 is 2.0 to 1.0; expected low <= high"),
        (lambda: ObservationTerm("x", low=(0.0,), high=(1.0, 1.0)), "have 1 and 2 entries"),
        (lambda: ObservationTerm("x", high=(math.inf,)), "high is .*inf.*None where there is none"),
        (lambda: ObservationTerm("x", clip=(1.0, 1.0)), "clip is .*low < high"),
        (lambda: ObservationTerm("x", history_length=0), "history_length is 0"),
        (lambda: ObservationTerm("x", history_order="newest"), "'oldest_first' or 'newest_first'"),
        (lambda: ObservationTerm("x", history_reset_fill="zero"), "'first observation' or 'constant 0'"),
        (lambda: Normalizer("inside", (0.0,), (0.0,)), "std is .*more than 0"),
        (lambda: Normalizer("inside", (0.0,), (1.0,), -1.0), "epsilon is -1.0"),
        (lambda: Normalizer(clip=0.0), "clip is 0.0"),
        (lambda: ActionContract(kp=(-1.0,)), "kp is .*at least 0"),
        (lambda: ActionContract(kd=(math.nan,)), "kd is .*finite"),
        (lambda: ActionContract(squash="tahn"), "squash is 'tahn'; expected 'tanh'"),
        (lambda: ActionContract(previous_action="last"), "'raw' or 'clipped'"),
        (lambda: ActionContract(joint_names=("a", "a")), "'a' stands twice"),
    ],
)
def test_values_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        make()


def test_a_file_fills_fields_and_replaces_them(tmp_path: Path) -> None:
    data = {
        "decimation": None,
        "command_ranges": {"turn": [0.0, 1.0]},
        "action": {"kp": [30.0, 30.0]},
        "observations": [{"key": "robot/joints", "frame": ["base", "hip"]}, {"key": "clock", "unit": "s"}],
    }
    (tmp_path / "more.json").write_text(json.dumps(data))
    merged = merge_contract(FULL, read_contract_file(tmp_path / "more.json"))
    assert merged.decimation is None and merged.rate_hz == 50
    assert merged.command_ranges == {"speed": (-1.0, 1.0), "turn": (0.0, 1.0)}
    assert merged.action is not None and (merged.action.kp, merged.action.kd) == ((30.0, 30.0), (0.5, 0.5))
    assert [t.key for t in merged.observations or ()] == [("robot", "joints"), "clock"]
    assert merged.observations is not None and merged.observations[0].frame == ("base", "hip")
    assert merged.observations[0].normalizer == FULL.observations[0].normalizer  # type: ignore[index]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML from 3.11 on")
def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text(
        'rate_hz = 100\n[action]\nunit = "N m"\n[[observations]]\nkey = "robot/joints"\nframe = "world"\n'
    )
    merged = merge_contract(FULL, read_contract_file(tmp_path / "more.toml"))
    assert merged.rate_hz == 100 and merged.action is not None and merged.action.unit == "N m"
    assert merged.observations is not None and merged.observations[0].frame == "world"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"rate": 1}', "no field 'rate'.*Did you mean 'rate_hz'"),
        ("a.json", '{"action": {"Kp": [1]}}', "action has no field 'Kp'.*Did you mean 'kp'"),
        ("a.json", '{"observations": [{"key": "x", "names": "ab"}]}', "names is 'ab'; expected"),
        ("a.json", '{"observations": [{"unit": "m"}]}', "observations has no key"),
        ("a.json", '{"recurrent": [{"key": "z"}]}', r"recurrent\[1\] lacks \['next_key'\]"),
        ("a.json", '{"action": 3}', "action is a int; expected fields by name"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "rate_hz: 1", "ends in .json or .toml"),
    ],
)
def test_a_file_that_says_nothing_known_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ContractError, match=message):
        merge_contract(FULL, read_contract_file(tmp_path / name))
    with pytest.raises(ContractError, match="nothing.json cannot be read"):
        read_contract_file(tmp_path / "nothing.json")
