"""What can go wrong between training and a robot, a check a fault; any of them stops an export, with the reason."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphrl.compiler.bundle.action_check import check_action
from graphrl.compiler.bundle.c_bench import measure_c
from graphrl.compiler.bundle.contract import Contract, check_against
from graphrl.compiler.bundle.names import c_names
from graphrl.compiler.bundle.normalizer_check import check_normalizer
from graphrl.compiler.bundle.range_check import check_range
from graphrl.compiler.bundle.runtime import NON_FINITE_INPUT, NON_FINITE_OUTPUT, NON_FINITE_STATE, OUT_OF_RANGE, Policy
from graphrl.compiler.bundle.state_check import check_state
from graphrl.compiler.bundle.subject import Skipped, Subject, fingerprint, frozen
from graphrl.compiler.bundle.verify import verify
from graphrl.compiler.bundle.weights import check_rounding
from graphrl.errors import BundleError, ContractError, did_you_mean
from graphrl.keys import encode_key

__all__ = ["CHECKS", "Subject", "check_waivers", "fingerprint", "run_checks"]

CALLS = 1000
"""Steps of the C over which memory and threads are counted."""


def check_sampling(subject: Subject) -> None:
    """The policy and its program give the same bits twice."""
    row = subject.row()
    for name, run in (("policy", lambda: subject.eager([t.numpy() for t in row])),
                      ("program", lambda: [t.numpy() for t in subject.live.run(*row)])):  # fmt: skip
        first, second = run(), run()
        for port, a, b in zip(subject.live.outputs, first, second, strict=True):
            if not np.array_equal(a, b):
                raise BundleError(f"the {name} gives two values of {port.key!r} for one observation: training mode, "
                                  "dropout, sampling, or a Python variable that it changes")  # fmt: skip


def check_inputs(subject: Subject) -> None:
    """Every input is a declared sensor, and every declaration has the policy's size."""
    sizes = {p.key: int(torch.Size(p.shape).numel()) for p in subject.live.inputs}
    (size,) = (int(torch.Size(p.shape).numel()) for p in subject.live.outputs if p.key == subject.action)
    check_against(subject.contract, sizes, subject.action, size)


def check_rate(subject: Subject) -> None:
    """A contract that names its sensors says how often they are read."""
    if subject.contract.observations is None:
        raise Skipped("the contract declares no observations")
    if subject.contract.rate_hz is None:
        raise ContractError("the contract declares observations but no rate_hz: control steps a second, 1 / dt")


def check_weights(subject: Subject) -> None:
    """Rounding the weights moves no output far."""
    if subject.rounding is not None:
        check_rounding(subject.weights, subject.rounding)


def check_keys(subject: Subject) -> None:
    """Flattened names tell all keys apart."""
    for ports in (subject.live.inputs, subject.live.outputs):
        flat = [encode_key(p.key) for p in ports]
        if len(set(flat)) != len(flat):
            raise BundleError(f"two keys would share one name in {flat}: rename one of them")
        if "c99" in subject.targets:
            c_names([p.key for p in ports])


def _check_orders(contract: Contract) -> None:
    """No two of the contract's lists have the same names in two orders."""
    action = contract.action
    lists = [(repr(t.key), t.names) for t in contract.observations or ()]
    lists += [(f"the action's {n}", getattr(action, n, None)) for n in ("names", "joint_names")]
    for (a, first), (b, second) in itertools.combinations([(what, list(names)) for what, names in lists if names], 2):
        if first != second and sorted(first) == sorted(second):
            raise ContractError(f"{a} and {b} have the same names in two orders, {first} and {second}: one of them is "
                                "not the policy's. State both as the policy has them")  # fmt: skip


def check_order(subject: Subject) -> None:
    """The names are one order, and moving one named entry moves that entry in every runtime."""
    _check_orders(subject.contract)
    named = {i: t.names for i, t in subject.terms().items() if t.names}
    if not named:
        raise Skipped("the contract names no entries of an observation")
    port = encode_key(subject.action)
    position = list(subject.live.out_keys).index(subject.action)
    for i, names in named.items():
        for column, name in enumerate(names):
            value = subject.row()[i].clone()
            value.reshape(-1)[column] += 1.0
            row = subject.row({i: value})
            wanted, key = subject.command(row).numpy(), encode_key(subject.live.inputs[i].key)
            allowed = subject.tolerance * max(subject.golden.scales[position], float(np.abs(wanted).max()))
            by_name = dict(reversed(list(zip(names, value.reshape(-1).tolist(), strict=True))))
            for target, player in subject.players.items():
                forms: list[Any] = [value.numpy(), *([by_name] if isinstance(player, Policy) else [])]
                for form in forms:
                    player.reset()
                    found = np.asarray(player.step({**subject.seen(row), key: form})[port], np.float64).reshape(-1)
                    if not np.abs(found - wanted).max(initial=0.0) <= allowed:
                        raise BundleError(f"{target}: moving {name!r} of {key!r} alone does not move what it moves in "
                                          "the policy: entries in another order")  # fmt: skip


def check_types(subject: Subject) -> None:
    """Doubles and strided arrays are taken as what they are; another shape, or no numbers, is one clear error."""
    row = subject.seen(subject.row())
    for target, player in subject.typed.items():
        wanted = _once(player, row)
        for i in subject.observations:
            key = encode_key(subject.live.inputs[i].key)
            strided = np.repeat(row[key], 2, axis=-1)[..., ::2]
            for what, value in (("float64", row[key].astype(np.float64)), ("a strided array", strided)):
                found = _once(player, {**row, key: value})
                if any(not np.array_equal(found[k], wanted[k], equal_nan=True) for k in wanted):
                    raise BundleError(f"{target}: {key!r} as {what} gives another action")
            wrong = np.zeros((*row[key].shape, 2), np.float32)
            for what, value in ((f"shape {wrong.shape}", wrong), ("text", np.full(row[key].shape, "x"))):
                try:
                    player.step({**row, key: value})
                except ValueError:
                    continue
                raise BundleError(f"{target}: {key!r} with {what} is taken without an error")


def _once(player: Any, row: Mapping[str, Any]) -> dict[str, np.ndarray]:
    player.reset()
    return {key: np.array(value) for key, value in player.step(row).items()}


def check_allocation(subject: Subject) -> None:
    """The C takes no memory and starts no thread in a thousand steps, the first among them."""
    if "c99" not in subject.runs:
        raise Skipped("no C in this bundle, or no compiler here")
    found = measure_c(subject.folder, subject.manifest["c"]["prefix"], calls=CALLS, flags=("-O1",))
    if found.allocations is None:
        raise Skipped("this linker cannot count allocations (--wrap)")
    if found.allocations:
        raise BundleError(f"c99: {found.allocations} allocations in {CALLS} steps; expected none")
    if found.threads != found.threads_before:
        raise BundleError(f"c99: {found.threads_before} threads before {CALLS} steps, {found.threads} after")


def check_extremes(subject: Subject) -> None:
    """NaN, infinity, subnormal and huge numbers, in inputs and state: reported by the status, gone after a reset."""
    terms = {t.key: t for t in subject.contract.observations or ()}
    keys = list(subject.live.in_keys)
    for target, player in subject.typed.items():
        calm = _once(player, subject.seen(subject.row()))
        for i in subject.observations:
            key, value = subject.live.inputs[i].key, subject.row()[i]
            last = value.clone()
            last.reshape(-1)[-1] = float("nan")
            for number in (float("nan"), float("inf"), 1e30, 1e-40):
                found = _once(player, subject.seen(subject.row({i: torch.full_like(value, number)})))
                _check_status(f"{target}, {key!r} = {number}", player.status, np.isfinite(number), found)
            found = _once(player, subject.seen(subject.row({i: last})))
            _check_status(f"{target}, {key!r} = nan in its last entry", player.status, False, found)
            for bound, sign in (("low", -1), ("high", 1)):
                limits = getattr(terms[key], bound) if key in terms else None
                beyond = [0.0 if v is None else v + sign * (0.01 * abs(v) + 1) for v in limits or ()]
                if all(v is None for v in limits or ()):
                    continue
                _once(player, subject.seen(subject.row({i: torch.tensor(beyond).reshape(value.shape)})))
                if not player.status & OUT_OF_RANGE:
                    raise BundleError(f"{target}: {key!r} beyond its {bound}, and the status does not tell")
        ports = [subject.live.inputs[keys.index(s.key)] for s in subject.contract.recurrent or ()]
        for s, number in product((p for p in ports if p.dtype.is_floating_point), (np.nan, np.inf)):
            player.reset({encode_key(s.key): np.full(s.shape, number, np.float32)})
            player.step(subject.seen(subject.row()))
            if player.status & (NON_FINITE_INPUT | NON_FINITE_STATE) != NON_FINITE_STATE:
                raise BundleError(f"{target}: {number} in the state {s.key!r} alone, and the status is {player.status}")
        again = _once(player, subject.seen(subject.row()))
        if any(not np.array_equal(again[k], calm[k], equal_nan=True) for k in calm):
            raise BundleError(f"{target}: after NaN and a reset the action is another one")


def _check_status(what: str, status: int, finite: bool, found: Mapping[str, np.ndarray]) -> None:
    """Bit 1 exactly where the input was not finite; bit 2 where the output is not."""
    if bool(status & NON_FINITE_INPUT) == finite:
        raise BundleError(f"{what}: status {status}; expected bit {NON_FINITE_INPUT} {'off' if finite else 'on'}")
    lost = not all(np.isfinite(v).all() for v in found.values() if v.dtype.kind == "f")
    if lost and not status & NON_FINITE_OUTPUT:
        raise BundleError(f"{what}: the output is not finite and the status is {status}; expected {NON_FINITE_OUTPUT}")


def check_parity(subject: Subject) -> None:
    """Every runtime, and eager, is within the tolerance of float64."""
    for runtime, found in subject.parity.items():
        if not found.worst <= subject.tolerance:
            raise BundleError(
                f"{runtime} differs from the float64 reference by {found.worst:.2e} of the action's scale "
                f"({found.where}); {subject.tolerance:.0e} is allowed{frozen(subject)}"
            )


def check_files(subject: Subject) -> None:
    """The listed files alone, in an empty folder, are a bundle that verifies."""
    with tempfile.TemporaryDirectory() as temporary:
        empty = Path(temporary, "bundle")
        for name in ("manifest.json", *subject.manifest["files"]):
            (empty / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(subject.folder / name, empty / name)
        try:
            verify(empty)
        except BundleError as error:
            raise BundleError(str(error).replace(f"{empty}", "the bundle")) from error


PROGRAM_CHECKS: dict[str, Callable[[Subject], None]] = {
    "inputs": check_inputs, "keys": check_keys, "range": check_range, "normalizer": check_normalizer,
    "sampling": check_sampling, "action": check_action, "rate": check_rate, "weights": check_weights,
}  # fmt: skip
"""Of the traced program, before anything is written."""
RUNTIME_CHECKS: dict[str, Callable[[Subject], None]] = {
    "parity": check_parity, "order": check_order, "state": check_state, "types": check_types,
    "extremes": check_extremes, "allocation": check_allocation,
}  # fmt: skip
"""Of the written files, in every runtime that works here."""
FILE_CHECKS: dict[str, Callable[[Subject], None]] = {"files": check_files}
"""Of the finished folder."""
CHECKS = {**PROGRAM_CHECKS, **RUNTIME_CHECKS, **FILE_CHECKS}
UNWAIVABLE = ("inputs", "keys", "sampling", "parity", "files")
"""Without these there is no bundle: its files would contradict each other, and ``verify`` would refuse them."""


def check_waivers(names: Sequence[str]) -> None:
    """Refuse a waiver of an unknown check, or of one that a bundle cannot do without."""
    free = [name for name in CHECKS if name not in UNWAIVABLE]
    for name in names:
        if name in UNWAIVABLE:
            raise BundleError(f"check {name!r} cannot be waived; those that can are {free}")
        if name not in CHECKS:
            raise BundleError(f"no check {name!r} to waive; there are {free}.{did_you_mean(name, free)}")


def run_checks(subject: Subject, checks: Mapping[str, Callable[[Subject], None]], waive: Sequence[str]) -> None:
    """Run ``checks``, and write what each said into the manifest. Raises the first failure that is not waived."""
    said = subject.manifest.setdefault("checks", {})
    for name, check in checks.items():
        try:
            check(subject)
            said[name] = "passed"
        except Skipped as reason:
            said[name] = f"nothing to check: {reason}"
        except BundleError as error:
            if name not in waive:
                hint = "" if name in UNWAIVABLE else f" (to export all the same: waive=({name!r},))"
                raise type(error)(f"check {name!r}: {error}{hint}") from error
            said[name] = f"waived: {error}"
        else:
            said[name] += " (waived without need)" if name in waive else ""
