"""What can go wrong between training and a robot, a check a fault; any of them stops an export, with the reason."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from graphrl.compiler.bundle.c_bench import measure_c
from graphrl.compiler.bundle.contract import ActionContract, Contract, ObservationTerm, check_against
from graphrl.compiler.bundle.golden import Golden
from graphrl.compiler.bundle.names import c_names
from graphrl.compiler.bundle.parity import Carried, Parity, Player, Run
from graphrl.compiler.bundle.runners import CPlayer
from graphrl.compiler.bundle.runtime import NON_FINITE_INPUT, NON_FINITE_OUTPUT, OUT_OF_RANGE, Policy
from graphrl.compiler.bundle.tail import reach, squashes
from graphrl.compiler.bundle.verify import verify
from graphrl.compiler.bundle.weights import check_rounding
from graphrl.compiler.program import Program
from graphrl.compiler.verify import float64_reference
from graphrl.errors import BundleError, ContractError, did_you_mean
from graphrl.keys import Key, encode_key

__all__ = ["CHECKS", "Subject", "check_waivers", "fingerprint", "run_checks"]

CALLS = 1000
"""Steps of the C over which memory and threads are counted."""


class Skipped(Exception):
    """A check that has nothing to look at, with the reason."""


@dataclass
class Subject:
    """An export on its way: what was traced, and, once the files are written, its folder and runtimes by target."""

    contract: Contract
    action: Key
    policy: nn.Module
    state: str  # fingerprint of the policy before anything was run
    live: Program
    golden: Golden
    eager: Run
    tolerance: float
    targets: Sequence[str]
    folder: Path = field(default_factory=Path)
    manifest: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, tuple[Run, Player | None]] = field(default_factory=dict)
    parity: dict[str, Parity] = field(default_factory=dict)
    weights: str = "float32"
    rounding: Parity | None = None  # what rounded weights move

    @property
    def initial(self) -> dict[Key, float]:
        """Recurrent values as an episode starts with them, by key."""
        return {s.key: s.initial for s in self.contract.recurrent or ()}

    @property
    def observations(self) -> list[int]:
        """Positions of the inputs that are floats and no recurrent values."""
        ports = enumerate(self.live.inputs)
        return [i for i, p in ports if p.dtype.is_floating_point and p.key not in self.initial and np.prod(p.shape)]

    @property
    def players(self) -> dict[str, Any]:
        """Each runtime at hand, with a state of its own."""
        return {name: player or Carried(self.manifest, run) for name, (run, player) in self.runs.items()}

    @property
    def typed(self) -> dict[str, CPlayer | Policy]:
        """The runtimes of graphrl's own: those that check what they are given, and report a status."""
        return {name: p for name, (_, p) in self.runs.items() if isinstance(p, (CPlayer, Policy))}

    def terms(self) -> dict[int, ObservationTerm]:
        """The contract's statement on each observation, by the position of the input."""
        if self.contract.observations is None:
            raise Skipped("the contract declares no observations")
        stated = {t.key: t for t in self.contract.observations}
        return {i: stated[self.live.inputs[i].key] for i in self.observations if self.live.inputs[i].key in stated}

    def row(self, changed: Mapping[int, Tensor] | None = None, at: int = 0) -> list[Tensor]:
        """A golden row, recurrent values at their start, and ``changed`` at these positions."""
        row = [torch.full_like(v, self.initial[p.key]) if p.key in self.initial else v.clone()
               for v, p in zip(self.golden.inputs[at], self.live.inputs, strict=True)]  # fmt: skip
        for i, value in (changed or {}).items():
            row[i] = value.to(row[i].dtype)
        return row

    def command(self, row: Sequence[Tensor]) -> Tensor:
        """The action of one row, in float64."""
        position = list(self.live.out_keys).index(self.action)
        return float64_reference(self.live, row)[position].double().reshape(-1)

    def seen(self, row: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """A row as a runtime with its own state reads it."""
        ports = zip(self.live.inputs, row, strict=True)
        return {encode_key(p.key): value.numpy() for p, value in ports if p.key not in self.initial}


def check_normalizer(subject: Subject) -> None:
    """Each observation has a normaliser or an explicit "none", where and what the contract says; none still learns."""
    if fingerprint(subject.policy) != subject.state:
        raise BundleError("a weight or buffer of the policy changed while it was run: a normaliser still learning?")
    terms, constants = subject.terms(), _constants(subject.live)
    for i, term in terms.items():
        norm, name = term.normalizer, term.key
        if norm is None:
            raise ContractError(f"nothing is said of how {name!r} is normalised: give its ObservationTerm a "
                                "Normalizer, Normalizer('none') where there is none")  # fmt: skip
        found = _subtracted(subject.live, i, constants)
        if norm.where != "inside" and found:
            raise ContractError(f"the contract says that {name!r} is normalised {norm.where!r}, and the program "
                                f"normalises it by {found!r}: twice on the robot?")  # fmt: skip
        if norm.where == "inside":
            if norm.mean is None or norm.std is None:
                raise ContractError(f"the normaliser of {name!r} is inside, but its mean and std are not stated")
            for what, numbers in (("mean", [norm.mean]), ("std", [norm.std, 1 / np.array(norm.std)])):
                if not any(_holds(value, np.array(n)) for value in constants.values() for n in numbers):
                    raise ContractError(f"the normaliser of {name!r} is stated as inside, but the program has no such "
                                        f"{what}: missing, or of another training")  # fmt: skip
        _check_shift(subject, i, term)


def _check_shift(subject: Subject, i: int, term: ObservationTerm) -> None:
    """One standard deviation more must change the action in an example row: a saturated network sees nothing."""
    norm, position = term.normalizer, list(subject.live.out_keys).index(subject.action)
    kinds = subject.golden.kinds  # extreme and random rows may leave the range that the sensors have
    rows = [at for at, kind in enumerate(kinds) if kind == "example"] or [0]
    bases, spread = [subject.golden.inputs[at][i] for at in rows], torch.ones(())
    if norm is not None and norm.where == "inside" and norm.mean is not None and norm.std is not None:
        bases = [torch.tensor(norm.mean).reshape(bases[0].shape)] * len(bases)
        spread = torch.tensor(norm.std).reshape(bases[0].shape)

    def moves(at: int, base: Tensor) -> bool:
        still, *moved = (subject.command(subject.row({i: base + sign * spread}, at)) for sign in (0, 1, -1))
        return max(float((still - x).abs().max()) for x in moved) > 1e-6 * subject.golden.scales[position]

    if subject.live.outputs[position].dtype.is_floating_point:  # a choice may well stay the same
        if not any(map(moves, rows, bases)):
            raise BundleError(f"the action does not change when {term.key!r} moves by one standard deviation: "
                              "normaliser missing or wrong, or the network saturated or blind to it")  # fmt: skip


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


def check_action(subject: Subject) -> None:
    """Squash, scale and clip are where the contract says, once."""
    action = subject.contract.action
    if action is None:
        raise Skipped("the contract does not state the action")
    stated = [n for n in ("low", "high", "squash", "scale", "offset", "clip") if getattr(action, n) is not None]
    if not stated:
        raise Skipped("the contract states neither bounds nor scaling of the action")
    if action.inside is None:
        raise ContractError(f"the contract states the action's {stated}, but not which of squash, scale, offset and "
                            "clip the program performs: say inside=(...), () for none")  # fmt: skip
    found = squashes(subject.live, subject.action)
    twice = f"the action ends in {' and '.join(found)}"
    if len(found) > 1 and "squash" in action.inside:
        raise BundleError(f"{twice}: a squash doubled")
    if action.squash in found and "squash" not in action.inside:
        raise BundleError(f"{twice}, and the contract leaves the {action.squash} to the caller: a squash doubled?")
    if not {"squash", "clip"} & set(action.inside):
        return
    _check_bounds(subject, action)
    scaled = action.scale is None or "scale" in action.inside
    if found and "squash" in action.inside and scaled and action.low is not None and action.high is not None:
        low, high = (np.array(v, np.float64) for v in (action.low, action.high))
        for wanted, got in zip((low, high), reach(subject.live, subject.action), strict=True):
            if not np.allclose(got, wanted, rtol=0, atol=1e-3 * float((high - low).max())):
                raise BundleError(f"the action can reach {got.tolist()}, and its bound is {wanted.tolist()}: a squash "
                                  "or scale missing, or doubled?")  # fmt: skip


def _check_bounds(subject: Subject, action: ActionContract) -> None:
    """Golden rows, among them some of three standard deviations, stay within the bounds."""
    position = list(subject.live.out_keys).index(subject.action)
    for bound, sign in (("low", 1), ("high", -1)):
        values = getattr(action, bound)
        if values is None:
            continue
        limit = torch.tensor(values, dtype=torch.float64)
        for row in subject.golden.outputs:
            if bool((sign * (row[position].double().reshape(-1) - limit) < -1e-5).any()):
                raise BundleError(
                    f"the action leaves its bounds ({bound} {list(values)}) although the contract says that "
                    f"{list(action.inside or ())} happen inside the program: a squash or scale missing, or doubled?"
                )


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
    if subject.rounding is None:
        raise Skipped("weights are float32")
    check_rounding(subject.weights, subject.rounding)


def check_keys(subject: Subject) -> None:
    """Flattened names tell all keys apart."""
    for ports in (subject.live.inputs, subject.live.outputs):
        flat = [encode_key(p.key) for p in ports]
        if len(set(flat)) != len(flat):
            raise BundleError(f"two keys would share one name in {flat}: rename one of them")
        if "c99" in subject.targets:
            c_names([p.key for p in ports])


def check_order(subject: Subject) -> None:
    """The names are one order, and moving one named entry moves that entry in every runtime."""
    action = subject.contract.action
    if action is not None and action.names and action.joint_names and action.names != action.joint_names:
        if sorted(action.names) == sorted(action.joint_names):
            raise ContractError(f"the action's names {list(action.names)} and joint_names {list(action.joint_names)} "
                                "are the same in two orders: one of them is not the policy's")  # fmt: skip
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


def check_state(subject: Subject) -> None:
    """A reset starts afresh in every runtime; the state starts where training's does, and matters."""
    rows = [subject.row()] + [list(r) for r in subject.golden.inputs[1:4]]
    for target, player in subject.players.items():
        first, second = (_episode(subject, player, rows) for _ in range(2))
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
            raise BundleError(f"{target}: the same observations after a reset give another action: stale state")
    recurrent = subject.contract.recurrent or ()
    if not recurrent:
        return
    keys, outputs = list(subject.live.in_keys), list(subject.live.out_keys)
    starts = [i for i, key in enumerate(keys) if (key if isinstance(key, str) else key[-1]) == "is_init"]
    quiet = {i: torch.zeros_like(subject.row()[i]) for i in starts}
    fresh = subject.row(quiet)
    if starts:
        other = {i: torch.ones_like(fresh[i]) for i in starts}
        other |= {keys.index(s.key): fresh[keys.index(s.key)] + 0.5 for s in recurrent}
        if not torch.allclose(subject.command(fresh), subject.command(subject.row(other)), rtol=1e-6, atol=1e-9):
            raise ContractError("an episode's first step as the policy itself starts it (is_init) differs from one "
                                "with the contract's initial state: is RecurrentState.initial training's?")  # fmt: skip
    after = float64_reference(subject.live, fresh)
    carried = {keys.index(s.key): after[outputs.index(s.next_key)] for s in recurrent}
    if torch.equal(subject.command(subject.row({**quiet, **carried})), subject.command(fresh)):
        raise BundleError(f"the second step's action is the same with and without {[s.key for s in recurrent]}: it is "
                          "not fed back, or has no effect")  # fmt: skip


def _episode(subject: Subject, player: Any, rows: Sequence[Sequence[Tensor]]) -> list[np.ndarray]:
    player.reset()
    return [np.array(player.step(subject.seen(row))[encode_key(subject.action)]) for row in rows]


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
            for number in (float("nan"), float("inf"), 1e30, 1e-40):
                found = _once(player, subject.seen(subject.row({i: torch.full_like(value, number)})))
                _check_status(f"{target}, {key!r} = {number}", player.status, np.isfinite(number), found)
            high = terms[key].high if key in terms else None
            if high is not None:
                beyond = torch.tensor(high).reshape(value.shape) * 1.01 + 1
                _once(player, subject.seen(subject.row({i: beyond})))
                if not player.status & OUT_OF_RANGE:
                    raise BundleError(f"{target}: {key!r} beyond its high, and the status does not tell")
        for s in subject.contract.recurrent or ():
            poison = np.full(subject.live.inputs[keys.index(s.key)].shape, np.nan, np.float32)
            player.reset({encode_key(s.key): poison})
            player.step(subject.seen(subject.row()))
            if not player.status & NON_FINITE_INPUT:
                raise BundleError(f"{target}: NaN in the state {s.key!r}, and the status does not tell")
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
                f"({found.where}); {subject.tolerance:.0e} is allowed"
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
    "inputs": check_inputs, "keys": check_keys, "normalizer": check_normalizer, "sampling": check_sampling,
    "action": check_action, "rate": check_rate, "weights": check_weights,
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


def fingerprint(policy: nn.Module) -> str:
    """Hash of every parameter and buffer of a policy."""
    digest = hashlib.sha256()
    for name, tensor in (*policy.named_parameters(), *policy.named_buffers()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _constants(program: Program) -> dict[fx.Node, Tensor]:
    """The value of every node that depends on weights and buffers alone."""
    nodes = list(program.graph_module.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    first = len(program.inputs)
    values: dict[fx.Node, Any] = dict(
        zip(places[first : first + len(program.state)], (s.read().detach() for s in program.state), strict=True)
    )
    for node in nodes:
        read = node.all_input_nodes
        if node.op == "call_function" and read and all(n in values for n in read):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


def _subtracted(program: Program, i: int, constants: Mapping[fx.Node, Tensor]) -> str | None:
    """The weight or buffer that is subtracted from an input before another divides it, if there is one."""
    aten = torch.ops.aten
    passed = ("view", "_to_copy", "cat", "clamp", "unsqueeze", "squeeze", "slice", "reshape", "permute")
    front, seen = [[n for n in program.graph_module.graph.nodes if n.op == "placeholder"][i]], set()
    while front:
        node = front.pop()
        for user in (u for u in node.users if u not in seen):
            seen.add(user)
            if user.target is aten.sub.Tensor and user.args[1] in constants:
                for after in user.users:
                    if after.target in (aten.div.Tensor, aten.mul.Tensor) and after.args[1] in constants:
                        return str(user.args[1])
            if str(user.target).removeprefix("aten.").split(".")[0] in passed:
                front.append(user)
    return None


def _holds(value: Tensor, numbers: np.ndarray) -> bool:
    """Whether ``numbers`` stand in a tensor, one after another."""
    flat, n = value.double().cpu().reshape(-1).numpy(), numbers.size
    if not value.is_floating_point() or not 0 < n <= flat.size or flat.size > 1_000_000:
        return False
    starts = np.flatnonzero(np.isclose(flat[: flat.size - n + 1], numbers[0], rtol=1e-4, atol=1e-7))
    return any(np.allclose(flat[s : s + n], numbers, rtol=1e-4, atol=1e-7) for s in starts)
