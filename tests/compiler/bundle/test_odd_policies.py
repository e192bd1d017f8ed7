"""Policies, keys and examples at the edge: exported right, or refused with the reason."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from graphrl import KeyedGraph
from graphrl.compiler.bundle import Contract, ObservationTerm, RecurrentState, export
from graphrl.compiler.bundle.names import c_name
from graphrl.compiler.bundle.runtime import Policy
from graphrl.errors import BundleError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Node = Callable[..., Any]


def _export(
    path: Path, node: Node, example: dict[Any, Any], state: RecurrentState | None = None, **options: Any
) -> Any:
    ins = list(example)
    outs = ["action", *([state.next_key] if state else [])]
    data = TensorDict(batch_size=[len(example[ins[0]])])
    for key, value in example.items():
        data.set(key, value)
    contract = Contract(recurrent=(state,)) if state else None
    options.setdefault("targets", ("c99", "numpy"))
    return export(KeyedGraph((node, ins, outs)), path / "b", data, contract=contract, **options)


@pytest.mark.parametrize("name", ["NAN", "INFINITY", "_Bool", "class", "steps", "new"])
def test_macros_and_words_of_cpp_are_no_member_names(name: str) -> None:
    assert c_name(name) == f"{name}_"


def test_a_key_cannot_close_its_comment_in_the_header(tmp_path: Path) -> None:
    _export(tmp_path, lambda x: x + 1, {("a*", "b; int stray; /*"): X})
    assert "*/b; int" not in (tmp_path / "b" / "c" / "policy.h").read_text()


def test_a_flag_as_action_and_an_integer_as_state_pass(tmp_path: Path) -> None:
    state = RecurrentState("count", ("next", "count"), initial=2)
    bundle = _export(
        tmp_path, lambda x, n: (x * n > 1, n + 1), {"x": X, "count": torch.zeros(4, 1, dtype=torch.int64)}, state
    )
    policy = bundle.policy()
    x = np.array([0.45, 0.3, -1.0], np.float32)
    assert [policy(x).tolist() for _ in range(3)] == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


STATE = RecurrentState("h", ("next", "h"))
H = torch.zeros(4, 2)
REFUSED: dict[str, tuple[Node, dict[Any, Any], RecurrentState | None, str]] = {
    "writes into its input": (lambda x: x.mul_(2), {"x": X}, None, r"writes into its own input 'x'"),
    "half": (lambda x: x.float(), {"x": X.bfloat16()}, None, "'x' is bfloat16 in the example"),
    "double action": (lambda x: x.double(), {"x": X}, None, "'action' is float64 as the policy writes it"),
    "no row": (lambda x: x, {"x": X[:0]}, None, "the example is an empty batch"),
    "NaN": (lambda x: x, {"x": X * torch.nan}, None, "'x' of the example has NaN or infinity"),
    "key": (lambda x: x, {"a\0b": X}, None, "a character that cannot be printed"),
    "initial": (lambda x, h: (x + h.sum(), h + 1), {"x": X, "h": H}, RecurrentState("h", ("next", "h"), 1e39), "1e.39"),
    "initial of an integer": (lambda x, h: (x + h.sum(), h + 1), {"x": X, "h": H.long()},
                              RecurrentState("h", ("next", "h"), 1.5), "initial is 1.5; expected a finite number that"),
    "unread state": (lambda x: (x, x + 1), {"x": X}, STATE, r"carries 'h', but the policy reads \['x'\]"),
    "state of another size": (lambda x, h: (x + h.sum(), h.repeat(1, 2)), {"x": X, "h": H}, STATE, "1, 2.*1, 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_bundle_cannot_keep_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    node, example, state, said = REFUSED[name]
    with pytest.raises(BundleError, match=said):
        _export(tmp_path, node, example, state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prefix", ["selftest", "bench", "x" * 65, "9", 3])
def test_a_prefix_that_cannot_name_files_is_refused(prefix: Any, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="prefix"):
        _export(tmp_path, lambda x: x, {"x": X}, prefix=prefix)


def test_numbers_that_an_integer_or_a_flag_cannot_hold_are_refused_by_both_runtimes(tmp_path: Path) -> None:
    example = {"x": X, "n": torch.zeros(4, 1, dtype=torch.int32), "flag": torch.ones(4, 1, dtype=torch.bool)}
    bundle = _export(tmp_path, lambda x, n, flag: torch.where(flag & (n >= 0), x, -x), example)
    good = {"x": [1e300, 2, 3], "n": [7], "flag": [1]}
    for step in (bundle.policy(), Policy.load(bundle.path).step):
        step(good)
        for bad, said in (({"n": [2**40]}, "more than a int32"), ({"flag": [2]}, "more than a bool"),
                          ({"n": [1.5]}, "float64, expected int32"), ({"y": [1]}, "no observation 'y'")):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                step({**good, **bad})


def test_a_bound_may_be_absent_and_a_byte_may_have_one(tmp_path: Path) -> None:
    low, high = (None, -1.0, 0.0), (None, 1.0, None)
    terms = (ObservationTerm("x", low=low, high=high), ObservationTerm("n", low=(0.0,), high=(9.0,)))
    data = TensorDict(x=X, n=torch.ones(4, 1, dtype=torch.uint8), batch_size=[4])
    graph = KeyedGraph((lambda x, n: x * n.float(), ["x", "n"], ["action"]))
    contract = Contract(rate_hz=1.0, observations=terms)
    options: Any = {"targets": ("c99", "numpy"), "contract": contract, "waive": ("normalizer", "range")}
    bundle = export(graph, tmp_path / "b", data, **options)
    compiled, numpy = bundle.policy(), Policy.load(bundle.path)
    for x, status in (([1e30, 0, 1e30], 0), ([0, 2, 0], 4), ([0, 0, -1], 4)):
        row = {"x": np.array(x, np.float32), "n": np.array([3], np.uint8)}
        compiled(row), numpy.step(row)
        assert compiled.status == numpy.status == status


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("graphrl.compiler.bundle.write.dump_npz", full)
    with pytest.raises(BundleError, match=r"writing .*b failed, and nothing is left of it: .*No space left"):
        _export(tmp_path, lambda x: x + 1, {"x": X})
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_nan_gives_nan_and_a_status_in_c_and_numpy(tmp_path: Path) -> None:
    table = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))

    def looked_up(x: torch.Tensor) -> torch.Tensor:
        place = x[:, 0].round().clamp(0, 4).long()
        by_hand = table.expand(len(x), 5, 3).gather(1, place[:, None, None].expand(-1, 1, 3)).squeeze(1)
        return torch.nn.functional.embedding(place, table) + table[place] + table.index_select(0, place) + by_hand

    bundle = _export(tmp_path, looked_up, {"x": X})
    c, py = bundle.policy(), Policy.load(bundle.path)
    for policy, act in ((c, c), (py, lambda x: py.step({"x": x})["action"])):
        for x, well in (([np.nan, 0, 0], False), ([1.2, 0, 0], True)):
            action = act(np.array(x, np.float32))
            np.testing.assert_allclose(action, 4 * table[1].numpy() if well else np.full(3, np.nan), rtol=1e-6)
            assert policy.status == (0 if well else 3)


def test_an_operation_is_refused_by_name_though_a_golden_row_has_no_inverse(tmp_path: Path) -> None:
    example = torch.tensor([[2.0, 1.0, 0.0, 3.0], [1.0, 0.0, 1.0, 4.0]])
    graph = lambda x: torch.linalg.inv(x.reshape(-1, 2, 2)).reshape(-1, 4)  # noqa: E731
    with pytest.raises(BundleError, match="linalg_inv"):
        _export(tmp_path, graph, {"x": example})
