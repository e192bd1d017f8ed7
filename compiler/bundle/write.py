"""Writing a bundle: trace the policy as it will act, freeze it, check it, and put it on disk whole."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor

from graphrl._version import __version__
from graphrl.compiler.backends.aot import package_host, write_package
from graphrl.compiler.backends.executorch import write_pte
from graphrl.compiler.bundle.c_text import CFiles, write_c
from graphrl.compiler.bundle.checks import (
    FILE_CHECKS,
    PROGRAM_CHECKS,
    RUNTIME_CHECKS,
    Subject,
    check_waivers,
    fingerprint,
    run_checks,
)
from graphrl.compiler.bundle.closed_loop import Drive, play
from graphrl.compiler.bundle.closed_loop import closed_loop as run_closed_loop
from graphrl.compiler.bundle.contract import Contract, with_shapes
from graphrl.compiler.bundle.contract_text import contract_text
from graphrl.compiler.bundle.cpp_text import write_cpp
from graphrl.compiler.bundle.files import dump_json, dump_npz, hash_files, sealed, sha256, whole_folder
from graphrl.compiler.bundle.golden import make_golden
from graphrl.compiler.bundle.graph_json import program_to_json
from graphrl.compiler.bundle.load import SCHEMA_VERSION, Bundle, load
from graphrl.compiler.bundle.names import check_prefix
from graphrl.compiler.bundle.parity import Carried, Run, measure
from graphrl.compiler.bundle.ports import check_ports
from graphrl.compiler.bundle.recorded import Recording, read_recording, with_ranges
from graphrl.compiler.bundle.runners import RUNNERS, why_not_here
from graphrl.compiler.bundle.state import acting_graph
from graphrl.compiler.bundle.weights import LIMITS, check_format, round_weights, what_moved
from graphrl.compiler.passes.fold_normalizer import fold_normalizer
from graphrl.compiler.passes.pipeline import run_passes
from graphrl.compiler.program import Program
from graphrl.compiler.trace import as_example, trace
from graphrl.errors import BundleError, CompileError, ContractError, did_you_mean
from graphrl.graph import KeyedGraph
from graphrl.keys import Key, encode_key, normalize_key, normalize_keys

__all__ = ["ALL_TARGETS", "TARGETS", "TOLERANCE", "export"]

TARGETS = ("c99", "onnx", "numpy")
"""What a bundle holds unless told otherwise."""
ALL_TARGETS = ("c99", "onnx", "pt2", "executorch", "numpy")
"""``pt2``, an AOTInductor package, takes tens of seconds to compile, and runs with one torch on one kind of CPU;
``executorch`` needs its extra."""
TOLERANCE = 1e-5
"""Largest error a runtime may show against float64, as a part of the action's scale."""


def export(
    policy: TensorDictModuleBase,
    path: str | Path,
    example: TensorDictBase | dict[Key, Tensor],
    *,
    targets: Sequence[str] = TARGETS,
    contract: Contract | None = None,
    prefix: str = "policy",
    action_key: Key = "action",
    waive: Sequence[str] = (),
    weights: str = "float32",
    overwrite: bool = False,
    data: Any = None,
    closed_loop: Drive | None = None,
) -> Bundle:
    """Write ``policy`` as a bundle for a robot: C99, ONNX, numpy runtime, weights, contract, golden vectors, parity.

    The graph is cut down to ``action_key`` and its state, which its nodes tell, and traced in evaluation mode, acting
    deterministically, for one observation. The policy itself, its flags, buffers and random state, stays as it was.
    example: a batch of observations; its first row fixes the shapes, up to 16 rows become golden vectors.
    contract: what the robot must know; checked against the policy. Without one, all its fields are null.
    prefix: start of the C names. waive: names of checks (``checks.CHECKS``) whose failure the manifest records instead
    of stopping. weights: ``"float16"`` or ``"int8"`` rounds those of products in every runtime; the C stores them so,
    and the reports tell what it moved. data: recorded observations, by key [T, ...] or as a TensorDict [episodes, T]:
    golden rows and sequence, the size of a standard deviation, and bounds of declared observations without any.
    closed_loop: runs episodes with a player and gives their returns (``graphrl.envs.closed_loop``); what the policy
    sees there is the data where none are given. A folder or ``.zip`` appears whole or not at all; ``overwrite``
    replaces one once the new one is verified. Same input, same bytes (``pt2`` apart: torch numbers each package anew).

    Raises :class:`BundleError` with the reason; :class:`ContractError` where the contract contradicts the policy.
    """
    targets = _check_targets(targets)
    check_prefix(prefix)
    check_waivers(waive)
    graph, contract, starts = acting_graph(policy, normalize_key(action_key), _stated(contract))
    seen, rows = _seen(example, graph, starts)
    before = fingerprint(graph)
    with _acting(policy, graph):
        live = _traced(graph, rows[0])
        check_ports(live, contract, targets)
        run = _eager(graph, rows[0], live)
        recorded, returns = _recorded(data, closed_loop, run, live, contract)
        shaped = with_shapes(contract, {p.key: tuple(p.shape[1:]) for p in live.inputs})
        contract = shaped if recorded is None else with_ranges(shaped, recorded)
        inputs = [tuple(row.get(key) for key in live.in_keys) for row in rows]
        golden = make_golden(live, inputs, contract.recurrent or (), recorded)
        subject = Subject(contract, normalize_key(action_key), graph, before, live, golden, run, TOLERANCE, targets,
                          example=seen, recorded=recorded)  # fmt: skip
        subject.parity["eager"] = measure(golden.arrays(live), _ports(contract, live), run)
        if weights != "float32":
            _round(subject, weights, inputs)
        run_checks(subject, PROGRAM_CHECKS, waive)
    with whole_folder(Path(path), overwrite=overwrite) as folder:
        _write(folder, subject, prefix)
        run_checks(subject, RUNTIME_CHECKS, waive)
        if closed_loop is not None:
            subject.closed_loop = run_closed_loop(subject, closed_loop, returns)
        _finish(subject)
        run_checks(subject, FILE_CHECKS, waive)
    return load(path)


def _recorded(
    data: Any, drive: Drive | None, run: Run, live: Program, contract: Contract
) -> tuple[Recording | None, list[float]]:
    """What was recorded, or else what the eager policy sees in its environment; and its returns there."""
    ports = _ports(contract, live)
    returns: list[float] = []
    carried = {s.key for s in contract.recurrent or ()}
    if drive is not None:
        asked = [given for given, p in zip(ports["inputs"], live.inputs, strict=True) if p.key not in carried]
        seat, returns = play(drive, Carried(ports, run), asked, typed=False)
        data = seat.recording() if data is None else data
    reads = [p.key for p in live.inputs if p.key not in carried]
    return None if data is None else read_recording(data, reads), returns


def _check_targets(targets: Sequence[str]) -> list[str]:
    for name in targets:
        if name not in ALL_TARGETS:
            raise BundleError(f"no export target {name!r}; there are {ALL_TARGETS}.{did_you_mean(name, ALL_TARGETS)}")
    if not targets:
        raise BundleError(f"no targets given; there are {ALL_TARGETS}")
    for target, package in (("onnx", "onnx"), ("onnx", "onnxruntime"), ("executorch", "executorch")):
        if target in targets and importlib.util.find_spec(package) is None:
            raise BundleError(
                f"target {target!r} needs {package}: run  pip install 'graphrl[{target}]'  or leave it out"
            )
    return [t for t in ALL_TARGETS if t in targets]


def _stated(contract: Any) -> Contract:
    if not isinstance(contract, (Contract, type(None))):
        made = ": Contract.from_dict(...) makes one of a dictionary" if isinstance(contract, Mapping) else ""
        raise ContractError(f"contract is a {type(contract).__name__}; expected graphrl.Contract{made}")
    return contract or Contract()


def _seen(example: Any, graph: KeyedGraph, starts: Mapping[Key, Tensor]) -> tuple[TensorDictBase, list[TensorDictBase]]:
    """The example as a batch [N] and its first rows [1], or one without batch dims; state it lacks is a start's."""
    td = as_example(example)
    lacking = [key for key in starts if td.get(key, None) is None]
    if lacking:
        td = td.copy()
        for key in lacking:
            td.set(key, starts[key][0].expand(*td.batch_size, *starts[key].shape[1:]))
    missing = [key for key in normalize_keys(list(graph.in_keys)) if td.get(key, None) is None]
    if missing:
        present = list(td.keys(True, True))
        raise BundleError(
            f"the policy reads {missing}, but the example has {present}.{did_you_mean(missing[0], present)}"
        )
    td = td.select(*graph.in_keys).detach().cpu().clone()
    if not td.batch_size.numel():
        raise BundleError("the example is an empty batch: give at least one observation")
    td = td.reshape(-1) if td.batch_size else td
    for key, value in td.items(True, True):
        if value.is_floating_point() and not torch.isfinite(value).all():
            bad = (~torch.isfinite(value)).reshape(len(td) if td.batch_size else 1, -1).any(1).nonzero().reshape(-1)
            raise BundleError(f"{key!r} of the example has NaN or infinity in {len(bad)} row(s), the first is row "
                              f"{int(bad[0])}: a robot's status reports that as a fault. Leave such rows out, "
                              f"example[example[{key!r}].isfinite().flatten(1).all(1)]")  # fmt: skip
    return td, [td[i : i + 1] for i in range(min(len(td), 16))] if td.batch_size else [td]


def _traced(graph: KeyedGraph, row: TensorDictBase) -> Program:
    """The program, fit to act; the error says so where float64 in the example is what stops it."""
    try:
        program = run_passes(trace(graph, row))
    except Exception as error:
        wide = [key for key, value in row.items(True, True) if value.dtype == torch.float64]
        if wide and "dtype" in str(error):
            raise BundleError(f"{wide[0]!r} is float64 in the example, and the policy computes in another dtype: give "
                              f"example[{wide[0]!r}].float(). The policy said: {error}") from error  # fmt: skip
        raise
    _check_program(program)
    return program


@contextlib.contextmanager
def _acting(*modules: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and deterministic actions; training flags, buffers and the random state come back."""
    flags = [(m, m.training) for root in modules for m in root.modules()]
    buffers = [(m, name, b, b.detach().clone()) for m, _ in flags for name, b in m._buffers.items() if b is not None]
    rng = torch.get_rng_state()
    try:
        for module, _ in flags:
            module.training = False
        with set_interaction_type(InteractionType.DETERMINISTIC), torch.no_grad():
            yield
    finally:
        for module, flag in flags:
            module.training = flag
        for module, name, buffer, before in buffers:  # one that forward changed, or put another in the place of
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(before)
        torch.set_rng_state(rng)


def _check_program(program: Program) -> None:
    for slot in program.state:
        if slot.dtype.is_floating_point and not torch.isfinite(slot.read()).all():
            raise BundleError(f"weight {slot.name!r} is not finite: the training diverged, or the file is damaged")
        if slot.mutated:
            raise BundleError(
                f"check 'normalizer': the policy changes its own buffer {slot.name!r} when called: still learning?"
            )
        if slot.device.type != "cpu":
            raise BundleError(f"weight {slot.name!r} is on {slot.device}: move a copy of the policy to the CPU first")
    if program.noise:
        raise BundleError("check 'sampling': sampling left in: the policy draws random numbers although it was asked "
                          "to act deterministically; give its distribution a mode or mean")  # fmt: skip
    for node in program.graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise BundleError(
                f"check 'sampling': sampling or dropout left in: {node.target} at {node.name!r} draws random numbers"
            )


def _eager(graph: KeyedGraph, row: TensorDictBase, program: Program) -> Any:
    def run(inputs: Sequence[Any]) -> list[Any]:
        td = row.clone()
        for key, value in zip(program.in_keys, inputs, strict=True):
            td.set(key, torch.tensor(value))
        graph(td)
        return [td.get(key).numpy() for key in program.out_keys]

    return run


def _ports(contract: Contract, program: Program) -> dict[str, Any]:
    """What :func:`measure` reads of a manifest."""
    return {"contract": contract.as_dict(), **program_to_json(program)}


def _round(subject: Subject, form: str, inputs: Sequence[tuple[Tensor, ...]]) -> None:
    """From here on the program has rounded weights; what that moves is measured in float64."""
    check_format(form)
    exact, contract = subject.golden, subject.contract
    subject.weights, subject.live = form, round_weights(subject.live, form)
    subject.golden = make_golden(subject.live, inputs, contract.recurrent or (), subject.recorded)
    position = list(subject.live.out_keys).index(subject.action)
    subject.rounding = what_moved(exact, subject.golden, position, subject.action)


@dataclass(frozen=True)
class _Identity:
    contract: dict[str, Any]
    contract_hash: str
    program_hash: str
    weight_hash: str


def _write(folder: Path, subject: Subject, prefix: str) -> None:
    """All files but the reports, and a first manifest for the runtimes; then what each runtime makes of them."""
    live, contract, golden, targets = subject.live, subject.contract, subject.golden, subject.targets
    # a normaliser in the weights would make them others than the rounded ones, and spread the columns of int8
    deployed = run_passes(live, deploy=True, without=() if subject.rounding is None else (fold_normalizer,))
    contract_hash = contract.sha256()
    graph = {"schema_version": SCHEMA_VERSION, "contract_hash": contract_hash, **program_to_json(live)}
    graph_text = dump_json(graph)
    weights = {s.name: s.read().detach().cpu().contiguous().clone() for s in live.state}
    weight_bytes = save(weights, {"contract_hash": contract_hash})
    who = _Identity(contract.as_dict(), contract_hash, sha256(graph_text.encode()), sha256(weight_bytes))
    (folder / "graph.json").write_text(graph_text)
    (folder / "weights.safetensors").write_bytes(weight_bytes)
    arrays = {"contract_hash": _text_array(contract_hash), **golden.arrays(live)}
    (folder / "golden.npz").write_bytes(dump_npz(arrays))
    (folder / "c_policy.py").write_bytes((Path(__file__).parent / "c_policy.py").read_bytes())
    interface = None
    if "c99" in targets:
        files = write_c(deployed, contract, golden.rows(), TOLERANCE, golden.scales, prefix, subject.weights)
        (folder / "c").mkdir()
        for name, text in files.files.items():
            (folder / "c" / name).write_text(text)
        interface = _interface(files, prefix)
    if "onnx" in targets:
        from graphrl.compiler.bundle.onnx_file import write_onnx

        write_onnx(deployed, folder / "model.onnx", who.contract, contract_hash)
    try:
        if "pt2" in targets:
            write_package(deployed, folder / "model.pt2", {"contract_hash": contract_hash})
        if "executorch" in targets:
            write_pte(deployed, folder / "model.pte", contract_hash)
    except CompileError as error:
        raise BundleError(str(error)) from error
    if "numpy" in targets:
        (folder / "runtime.py").write_bytes((Path(__file__).parent / "runtime.py").read_bytes())
    said = {"weights": subject.weights, **subject.manifest}
    subject.folder, subject.manifest = folder, {**_manifest(live, who, targets, interface), **said}
    (folder / "manifest.json").write_text(dump_json(sealed(subject.manifest)))
    if "pt2" in targets:
        write_cpp(folder / "cpp", subject.manifest, arrays)
    here = [t for t in targets if why_not_here(t, subject.manifest) is None]
    subject.runs = {t: RUNNERS[t](folder, subject.manifest) for t in here}
    for target, (run, player) in subject.runs.items():
        subject.parity[target] = measure(arrays, subject.manifest, run, player)


def _finish(subject: Subject) -> None:
    """The reports, and the manifest that lists every file."""
    folder, manifest, parity = subject.folder, subject.manifest, subject.parity
    sequence = subject.golden.sequence
    summary = {
        "tolerance": TOLERANCE,
        "rows": len(subject.golden.kinds),
        "sequence_steps": len(sequence.resets) if sequence else 0,
        "scale": {encode_key(p.key): s for p, s in zip(subject.live.outputs, subject.golden.scales, strict=True)},
        "max_relative_error": {name: p.relative for name, p in parity.items()},
        "max_absolute_error": {name: p.absolute for name, p in parity.items()},
        "sequence_relative_error": {name: p.sequence for name, p in parity.items()},
        "closed_loop": subject.closed_loop,
    }
    if (moved := subject.rounding) is not None:
        summary["rounding"] = {"relative": moved.relative, "absolute": moved.absolute, "sequence": moved.sequence,
                               "allowed": LIMITS[subject.weights]}  # fmt: skip
    reference = "eager in float64" + (f", weights rounded to {subject.weights}" if moved is not None else "")
    report = {"contract_hash": manifest["contract_hash"], "reference": reference, **summary}
    manifest["reports"] = {"parity": summary}
    (folder / "reports").mkdir()
    (folder / "reports" / "parity.json").write_text(dump_json(report))
    (folder / "reports" / "contract.md").write_text(contract_text(manifest))
    manifest["checks"]["files"] = "passed"  # comes next; where it does not pass, there is no bundle
    manifest["files"] = hash_files(folder)
    (folder / "manifest.json").write_text(dump_json(sealed(manifest)))


def _text_array(text: str) -> Any:
    import numpy as np

    return np.array(text)


def _interface(files: CFiles, prefix: str) -> dict[str, Any]:
    sides = [
        [{"key": encode_key(m.key), "name": m.name, "c_type": m.c_type, "shape": list(m.shape), "size": m.size,
          "place": m.place} for m in members] for members in (files.inputs, files.outputs)
    ]  # fmt: skip
    scratch = [{"name": name, "c_type": kind, "size": size} for name, kind, size in files.scratch]
    return {"prefix": prefix, "weight_bytes": files.weight_bytes, "scratch": scratch, "inputs": sides[0],
            "outputs": sides[1]}  # fmt: skip


def _manifest(
    program: Program, who: _Identity, targets: Sequence[str], interface: dict[str, Any] | None
) -> dict[str, Any]:
    tools = {"graphrl": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if "onnx" in targets:
        import onnx

        tools["onnx"] = onnx.__version__
    if "executorch" in targets:
        tools["executorch"] = importlib.metadata.version("executorch")
    data = program_to_json(program)
    return {
        "schema_version": SCHEMA_VERSION,
        "contract": who.contract,
        "contract_hash": who.contract_hash,
        "program_hash": who.program_hash,
        "weight_hash": who.weight_hash,
        "inputs": data["inputs"],
        "outputs": data["outputs"],
        "targets": list(targets),
        "tolerance": TOLERANCE,
        "tools": tools,
        "c": interface,
        "pt2": _package_host() if "pt2" in targets else None,
        "reports": {},
        "files": {},
    }


def _package_host() -> dict[str, str]:
    """What the AOTInductor package is bound to."""
    return {
        **package_host(),
        "bytes": "differ from one export to the next: torch gives each package a new serial number",
    }
