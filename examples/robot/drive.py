"""Drives the robot from a bundle alone: this file, `protocol.py` beside it, numpy, and the bundle's own runtime.py.

python examples/robot/drive.py policy_bundle 127.0.0.1:5555

The robot says its names in its order; the contract says the policy's. Entries are matched by name, never by place.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import numpy as np
import protocol
from protocol import ACTION, BYE, HELLO, OBSERVATION, REFUSE, START, WELCOME, Packet

PATIENCE_S = 10.0


def main(bundle: str, address: str) -> int:
    """Drive until the robot says BYE; the exit status, 1 where it refuses, falls silent, or lacks a sensor."""
    sys.path.insert(0, bundle)
    try:
        from runtime import Policy
    except ImportError as error:
        print(f"error: {bundle} has no runtime.py ({error}): expected a bundle's folder", file=sys.stderr)
        return 1
    host, _, port = address.partition(":")
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"address {address!r}: expected HOST:PORT, such as 127.0.0.1:5555")
        wire.connect((host, int(port)))
        policy = Policy.load(bundle)
        contract = policy.manifest["contract_hash"][:16]
        rate_hz, sensors, actuators = meet(wire, contract)
        if policy.contract["rate_hz"] is not None and abs(policy.contract["rate_hz"] - rate_hz) > 1e-6 * rate_hz:
            raise ValueError(f"the robot runs at {rate_hz:g} Hz, the policy at {policy.contract['rate_hz']:g} Hz")
        print(drive(wire, policy, contract, columns(policy, sensors), outlets(policy, actuators)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def meet(wire: socket.socket, contract: str) -> tuple[float, list[str], list[str]]:
    """Say HELLO until the robot answers: its rate, sensors and actuators. Raises ``ValueError`` with its refusal."""
    wire.settimeout(0.2)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            wire.send(Packet(HELLO, contract).pack())
            answer = protocol.unpack(wire.recv(protocol.LARGEST))
        except OSError:  # not up yet
            time.sleep(0.05)
            continue
        if answer.kind == REFUSE:
            raise ValueError(f"the robot refuses: {answer.payload.decode()}")
        if answer.kind == WELCOME and answer.contract == contract:
            return protocol.unpack_welcome(answer.payload)
    raise TimeoutError(f"no robot answered within {PATIENCE_S:g} s")


def columns(policy: Any, sensors: list[str]) -> dict[str, np.ndarray]:
    """For each observation, which sensors it is made of: ``key/name`` by the contract's names, else ``key[i]``."""
    names = {term["key"]: term["names"] for term in policy.contract["observations"] or ()}
    shapes = {port["key"]: port["shape"] for port in policy.manifest["inputs"]}
    found = {}
    for key in policy.observations:
        size = int(np.prod(shapes[key]))
        wanted = [f"{key}/{n}" for n in names[key]] if names.get(key) else [f"{key}[{i}]" for i in range(size)]
        missing = [n for n in wanted if n not in sensors]
        if missing:
            raise ValueError(f"the policy reads {missing}, the robot has {sensors}")
        found[key] = np.array([sensors.index(n) for n in wanted])
    return found


def outlets(policy: Any, actuators: list[str]) -> np.ndarray:
    """For each of the robot's actuators, which entry of the action it takes."""
    action = policy.contract["action"] or {}
    (shape,) = [p["shape"] for p in policy.manifest["outputs"] if p["key"] == action.get("key", "action")]
    names = action.get("names") or action.get("joint_names") or [f"action_{i}" for i in range(int(np.prod(shape)))]
    if sorted(names) != sorted(actuators):
        raise ValueError(f"the policy moves {names}, the robot has {actuators}")
    return np.array([names.index(n) for n in actuators])


def drive(wire: socket.socket, policy: Any, contract: str, into: dict[str, np.ndarray], out: np.ndarray) -> str:
    """Answer every observation; what happened, as text. A repeated one gets its answer again, without a step."""
    shapes = {port["key"]: port["shape"] for port in policy.manifest["inputs"]}
    key = (policy.contract["action"] or {}).get("key", "action")
    wire.settimeout(PATIENCE_S)
    last, steps, status, times = b"", 0, 0, []
    sequence = -1
    while True:
        packet = protocol.unpack(wire.recv(protocol.LARGEST))
        begin = time.perf_counter()
        if packet.kind == BYE:
            break
        if packet.kind != OBSERVATION or packet.contract != contract:
            continue
        if packet.sequence != sequence:
            if packet.flags & START:
                policy.reset()
            values = np.array(packet.floats, np.float32)
            result = policy.step({k: values[index].reshape(shapes[k]) for k, index in into.items()})
            last = protocol.pack_floats(np.asarray(result[key]).reshape(-1)[out].tolist())
            sequence, steps, status = packet.sequence, steps + 1, status | policy.status
        answer = Packet(ACTION, contract, sequence, last, policy.status, answers_ns=packet.stamp_ns)
        wire.send(answer.pack())
        times.append(1e6 * (time.perf_counter() - begin))
    p50, p99, most = np.percentile(times or [0.0], [50, 99, 100])
    return f"driver: {steps} steps, status {status}, p50 {p50:.0f} us, p99 {p99:.0f} us, max {most:.0f} us"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: drive.py BUNDLE HOST:PORT")
    sys.exit(main(sys.argv[1], sys.argv[2]))
