"""What a program may read and write to become a bundle: dtypes, recurrent values that fit, no input written to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from graphrl.compiler.bundle.contract import Contract, RecurrentState
from graphrl.compiler.program import Port, Program
from graphrl.errors import BundleError, ContractError, did_you_mean
from graphrl.keys import encode_key

__all__ = ["check_ports"]

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def check_ports(program: Program, contract: Contract, targets: Sequence[str]) -> None:
    """Refuse keys, dtypes, recurrent values and writes into inputs that some runtime could not keep.

    Raises :class:`BundleError`; :class:`ContractError` where the contract's recurrent values are not the program's.
    """
    for side, ports in (("in the example", program.inputs), ("as the policy writes it", program.outputs)):
        for port in ports:
            _check_port(port, side, targets)
    for state in contract.recurrent or ():
        _check_state(state, program)
    nodes = program.graph_module.graph.nodes
    places = [n for n in nodes if n.op == "placeholder"][: len(program.inputs)]
    for node in nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in places:
            key = program.inputs[places.index(node.args[0])].key
            raise BundleError(f"the policy writes into its own input {key!r} (an operation like add_ or relu_): on a "
                              "robot an observation is read only; use the form without _, or a clone")  # fmt: skip


def _check_port(port: Port, side: str, targets: Sequence[str]) -> None:
    if not encode_key(port.key).isprintable():
        raise BundleError(f"key {port.key!r} has a character that cannot be printed: rename it")
    name = str(port.dtype).removeprefix("torch.")
    if port.dtype not in DTYPES:
        raise BundleError(f"{port.key!r} is {name} {side}; a bundle has float32, float64, integers and bool: "
                          "convert it")  # fmt: skip
    if port.dtype == torch.float64 and "c99" in targets:
        raise BundleError(f"{port.key!r} is float64 {side}, and generated C takes and gives float32: convert it")


def _check_state(state: RecurrentState, program: Program) -> None:
    reads, writes = ({p.key: p for p in ports} for ports in (program.inputs, program.outputs))
    if state.key not in reads:
        raise ContractError(f"the contract carries {state.key!r}, but the policy reads {list(reads)}."
                            f"{did_you_mean(state.key, reads)}")  # fmt: skip
    a, b = reads[state.key], writes[state.next_key]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ContractError(f"the policy reads {a.key!r} as {list(a.shape)} {a.dtype} and writes its next value "
                            f"{b.key!r} as {list(b.shape)} {b.dtype}: a carried value keeps both")  # fmt: skip
    with np.errstate(all="ignore"):
        held = np.asarray(state.initial).astype(str(a.dtype).removeprefix("torch."))
    if not np.isfinite(held).all() or (np.any(held != state.initial) and not a.dtype.is_floating_point):
        raise ContractError(f"RecurrentState {state.key!r}: initial is {state.initial!r}; expected a finite number "
                            f"that {a.dtype} can hold")  # fmt: skip
