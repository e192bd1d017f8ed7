"""Running what a bundle holds, one golden row at a time: its C, ONNX, AOTInductor, ExecuTorch, and numpy runtime."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphrl.compiler.bundle.c_policy import CPolicy, find_compiler
from graphrl.compiler.bundle.parity import Carried, Player, Row, Run
from graphrl.compiler.bundle.runtime import Policy, first_step_flags
from graphrl.errors import BundleError

__all__ = ["RUNNERS", "CPlayer", "first_row", "make_player", "onnx_session", "run_c_row", "why_not_here"]


def why_not_here(target: str, manifest: Mapping[str, Any]) -> str | None:
    """Why a target of a bundle cannot be run on this machine, or ``None`` where it can."""
    if target == "c99":
        try:
            return "no C compiler here" if find_compiler() is None else None
        except OSError as error:
            raise BundleError(str(error)) from error
    package = {"onnx": "onnxruntime", "pt2": "torch", "executorch": "executorch"}.get(target)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if target == "pt2":
        from graphrl.compiler.backends.aot import why_not_on_host

        return why_not_on_host(manifest["pt2"])
    return None


def _c99(folder: Path, manifest: Mapping[str, Any]) -> tuple[Run, Player]:
    try:
        policy = CPolicy(folder)
    except (RuntimeError, ValueError, OSError) as error:
        raise BundleError(f"{folder / 'c'} does not compile here: {error}") from error
    return lambda inputs: run_c_row(policy, inputs), CPlayer(policy)


class CPlayer:
    """The C policy with its own state, outputs by key."""

    def __init__(self, policy: CPolicy) -> None:
        self._policy, self.failures = policy, policy.selftest
        self._keys = [m["key"] for m in policy.outputs]
        self._state_names = {m["key"]: m["name"] for m in policy.manifest["c"]["inputs"] if m["place"] == "state"}

    @property
    def status(self) -> int:
        """Of the last step."""
        return self._policy.status

    def reset(self, state: Mapping[str, np.ndarray] | None = None) -> None:
        """Start an episode: recurrent values as the contract puts them, or as given in ``state``."""
        self._policy.reset()
        given: dict[str, Any] = dict.fromkeys(first_step_flags(self._policy.manifest["contract"]), 0) if state else {}
        for key, value in {**given, **(state or {})}.items():
            self._policy.state_arrays()[self._state_names[key]][...] = np.asarray(value).reshape(-1)

    def step(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        result = self._policy(observation)
        return result if len(self._keys) != 1 else {self._keys[0]: result}  # type: ignore[no-any-return]


def run_c_row(policy: CPolicy, inputs: Sequence[np.ndarray]) -> Row:
    """One golden row through the compiled C: recurrent values are put into, and taken from, the state struct."""
    interface = policy.manifest["c"]
    state = policy.state_arrays()
    policy.reset()
    observation: dict[str, Any] = {}
    for member, value in zip(interface["inputs"], inputs, strict=True):
        if member["place"] == "state":
            state[member["name"]][...] = np.asarray(value).reshape(-1)
        else:
            observation[member["key"]] = value
    result = policy(observation)
    commands = [m for m in interface["outputs"] if m["place"] == "command"]
    named = result if len(commands) > 1 else {commands[0]["key"]: result} if commands else {}
    return [
        np.array(state[m["name"]] if m["place"] == "state" else named[m["key"]]).reshape(m["shape"])
        for m in interface["outputs"]
    ]


def onnx_session(folder: Path) -> Any:
    """A bundle's ``model.onnx`` in ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])


def _onnx(folder: Path, manifest: Mapping[str, Any]) -> tuple[Run, None]:
    session = onnx_session(folder)
    if session.get_modelmeta().custom_metadata_map.get("contract_hash") != manifest["contract_hash"]:
        raise BundleError(f"{folder / 'model.onnx'} belongs to another contract")
    kept = {i.name for i in session.get_inputs()}
    names = [p["key"] for p in manifest["inputs"]]
    outputs = [o.name for o in session.get_outputs()]
    return lambda row: session.run(outputs, {n: v for n, v in zip(names, row, strict=True) if n in kept}), None


def _pt2(folder: Path, manifest: Mapping[str, Any]) -> tuple[Run, None]:
    import torch

    from graphrl.compiler.backends.threads import on_threads

    run = on_threads(torch._inductor.aoti_load_package(str(folder / "model.pt2")).loader.run, 1)
    return lambda row: [t.numpy() for t in run([torch.from_numpy(np.array(a)) for a in row])], None


def _executorch(folder: Path, manifest: Mapping[str, Any]) -> tuple[Run, None]:
    import torch

    from graphrl.compiler.backends.executorch import load_pte

    run = load_pte(folder / "model.pte")
    return lambda row: [t.numpy() for t in run([torch.from_numpy(np.array(a)) for a in row])], None


def _numpy(folder: Path, manifest: Mapping[str, Any]) -> tuple[Run, Player]:
    try:
        policy = Policy.load(folder)
    except ValueError as error:
        raise BundleError(f"numpy: {error}") from error
    return policy.run_row, policy


RUNNERS: dict[str, Callable[[Path, Mapping[str, Any]], tuple[Run, Player | None]]] = {
    "c99": _c99, "onnx": _onnx, "pt2": _pt2, "executorch": _executorch, "numpy": _numpy,
}  # fmt: skip
"""Each target's way to run: a function of a row of inputs, and the runtime with its own state where it keeps one."""


def make_player(target: str, folder: Path, manifest: Mapping[str, Any]) -> Player:
    """A target with its own recurrent state, at the start of an episode."""
    run, player = RUNNERS[target](folder, manifest)
    player = player or Carried(manifest, run)
    player.reset()
    return player


def first_row(folder: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The observations of the first golden row, by key."""
    carried = {s["key"] for s in manifest["contract"]["recurrent"] or ()}
    with np.load(folder / "golden.npz", allow_pickle=False) as golden:
        return {p["key"]: golden[f"in/{p['key']}"][0] for p in manifest["inputs"] if p["key"] not in carried}
