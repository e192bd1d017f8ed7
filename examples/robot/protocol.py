"""How the robot and whoever drives it talk: UDP packets, little-endian, a header of 40 bytes before the payload.

    byte  type     what
    0     4 bytes  magic "GRLR"
    4     uint8    version, 1
    5     uint8    kind
    6     uint16   flags: of OBSERVATION 1 = an episode starts here; of ACTION the policy's status bits
    8     8 bytes  start of the contract's SHA-256
    16    uint32   sequence number of the observation; an action carries that of the observation it answers
    20    uint32   payload bytes
    24    uint64   CLOCK_MONOTONIC of the sender in ns, when it sent
    32    uint64   of ACTION: the stamp of the observation it answers; else 0
    40             payload

The driver sends HELLO until the robot answers WELCOME, with the text "rate_hz sensors actuators" and then one name a
line, sensors first, in the robot's order; or REFUSE, with the reason as text. Then the robot sends OBSERVATION, one
float32 a sensor, and the driver ACTION, one float32 an actuator, until BYE. `protocol.h` is the same in C.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC, VERSION = b"GRLR", 1
HELLO, WELCOME, REFUSE, OBSERVATION, ACTION, BYE = range(1, 7)
START = 1
HEADER = struct.Struct("<4sBBH8sIIQQ")
LARGEST = 65507


@dataclass(frozen=True)
class Packet:
    """One packet; ``contract`` is the first 16 hexadecimal digits of the hash."""

    kind: int
    contract: str
    sequence: int = 0
    payload: bytes = b""
    flags: int = 0
    stamp_ns: int = 0
    answers_ns: int = 0

    def pack(self) -> bytes:
        """The bytes to send, stamped now."""
        return HEADER.pack(
            MAGIC, VERSION, self.kind, self.flags, bytes.fromhex(self.contract), self.sequence, len(self.payload),
            time.monotonic_ns(), self.answers_ns,
        ) + self.payload  # fmt: skip

    @property
    def floats(self) -> tuple[float, ...]:
        """The payload as numbers. Raises ``ValueError`` where it is not whole float32 numbers."""
        if len(self.payload) % 4:
            raise ValueError(f"a payload of {len(self.payload)} bytes is not float32 numbers")
        return struct.unpack(f"<{len(self.payload) // 4}f", self.payload)


def unpack(data: bytes) -> Packet:
    """A received packet. Raises ``ValueError``: not of this protocol, of another version, or cut short."""
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise ValueError(f"{len(data)} bytes that are not a packet of this protocol")
    _, version, kind, flags, contract, sequence, size, stamp_ns, answers_ns = HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"protocol version {version}; expected {VERSION}: use the same files on both sides")
    if len(data) != HEADER.size + size:
        raise ValueError(f"a packet of {len(data)} bytes whose header says {HEADER.size + size}")
    return Packet(kind, contract.hex(), sequence, data[HEADER.size :], flags, stamp_ns, answers_ns)


def pack_floats(values: Sequence[float]) -> bytes:
    """Numbers as float32."""
    return struct.pack(f"<{len(values)}f", *values)


def pack_welcome(rate_hz: float, sensors: Sequence[str], actuators: Sequence[str]) -> bytes:
    """The payload of WELCOME."""
    return "\n".join([f"{rate_hz:.9g} {len(sensors)} {len(actuators)}", *sensors, *actuators]).encode()


def unpack_welcome(payload: bytes) -> tuple[float, list[str], list[str]]:
    """Rate, names of the sensors and of the actuators."""
    first, *names = payload.decode().split("\n")
    rate_hz, sensors, actuators = first.split()
    if len(names) != int(sensors) + int(actuators):
        raise ValueError(f"the welcome says {sensors} sensors and {actuators} actuators, and has {len(names)} names")
    return float(rate_hz), names[: int(sensors)], names[int(sensors) :]
