"""The robot's end of the wire: it answers HELLO, sends observations, and keeps the newest action."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

import numpy as np
import protocol
from protocol import ACTION, BYE, HELLO, OBSERVATION, REFUSE, START, WELCOME, Packet


class Link:
    """One driver at a time; packets with another contract's hash are refused, and counted in ``refused``."""

    def __init__(
        self, port: int, contract: str, rate_hz: float, sensors: Sequence[str], actuators: Sequence[str]
    ) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.port = int(self.socket.getsockname()[1])
        self.refused, self.late, self.status, self.not_finite = 0, 0, 0, 0
        self.answered: set[int] = set()
        self.response_ns: list[int] = []
        self._contract, self._welcome = contract[:16], protocol.pack_welcome(rate_hz, sensors, actuators)
        self._peer, self._last = None, np.zeros(len(actuators), np.float32)

    def wait_for_driver(self, timeout_s: float) -> None:
        """Block until a driver with the right contract has said HELLO. Raises ``TimeoutError``."""
        deadline = time.monotonic() + timeout_s
        while self._peer is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no driver with contract {self._contract} came within {timeout_s:g} s")
            self._wait(0.1)
            self.take(-1)

    def send(self, sequence: int, values: np.ndarray, starts: bool) -> None:
        """One observation; where an episode starts, the action before it is zero."""
        self._last = self._last * (not starts)
        self._send(Packet(OBSERVATION, self._contract, sequence, protocol.pack_floats(values.tolist()), START * starts))

    def take(self, awaited: int) -> np.ndarray | None:
        """Read everything that has come; the action that answers observation ``awaited``, if it is there."""
        found = None
        while True:
            try:
                data, sender = self.socket.recvfrom(protocol.LARGEST)
            except (BlockingIOError, ConnectionRefusedError):
                return found
            try:
                packet = protocol.unpack(data)
                action = self._receive(packet, sender, awaited)
            except ValueError as error:
                self._refuse(sender, str(error))
                continue
            found = found if action is None else action

    def wait_for_action(self, sequence: int, values: np.ndarray, starts: bool, timeout_s: float) -> np.ndarray:
        """Lock-step: send an observation, again where a packet was lost, until it is answered. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.send(sequence, values, starts)
            again = time.monotonic() + 0.5
            while time.monotonic() < again:
                self._wait(0.1)
                action = self.take(sequence)
                if action is not None:
                    return action
        raise TimeoutError(f"the driver has not answered observation {sequence} for {timeout_s:g} s")

    def close(self) -> None:
        """Say BYE, three times because a packet may be lost."""
        for _ in range(3 if self._peer else 0):
            self._send(Packet(BYE, self._contract))
        self.socket.close()

    def _receive(self, packet: Packet, sender: tuple[str, int], awaited: int) -> np.ndarray | None:
        if packet.kind not in (HELLO, ACTION):  # another robot's: an answer to it would be answered for ever
            return None
        if packet.contract != self._contract:
            raise ValueError(f"contract {packet.contract}..., but this robot runs {self._contract}...: another bundle")
        if packet.kind == HELLO:
            if self._peer not in (None, sender):
                raise ValueError("another driver is at work")
            self._peer = sender
            self._send(Packet(WELCOME, self._contract, payload=self._welcome))
        if packet.kind != ACTION or sender != self._peer or packet.sequence in self.answered:
            return None
        if len(packet.floats) != self._last.size:
            raise ValueError(f"an action of {len(packet.floats)} numbers; this robot has {self._last.size} actuators")
        self.answered.add(packet.sequence)
        self.status |= packet.flags
        self.response_ns.append(packet.stamp_ns - packet.answers_ns)
        if packet.sequence == awaited:
            self._last = self._finite(np.array(packet.floats, np.float32))
            return self._last
        self.late += 1
        return None

    def _finite(self, action: np.ndarray) -> np.ndarray:
        """An action, or where it has NaN or infinity the one before it."""
        lost = not bool(np.isfinite(action).all())
        self.not_finite += lost
        return self._last if lost else action

    def _refuse(self, sender: tuple[str, int], why: str) -> None:
        self.refused += 1
        self.socket.sendto(Packet(REFUSE, self._contract, payload=why.encode()).pack(), sender)

    def _send(self, packet: Packet) -> None:
        if self._peer is not None:
            self.socket.sendto(packet.pack(), self._peer)

    def _wait(self, seconds: float) -> None:
        select.select([self.socket], [], [], seconds)
