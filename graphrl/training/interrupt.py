"""Ctrl-C that never lands inside an update."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["InterruptGuard"]


class InterruptGuard:
    """Within ``with InterruptGuard() as guard``, ``with guard.held():`` puts a Ctrl-C off until the block ends.

    Outside ``held`` it raises KeyboardInterrupt as ever; a second Ctrl-C while one is put off raises at once.
    In a thread other than the main one signals are left alone.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False
        self._before: Any = None

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _handle(self, number: int, frame: Any) -> None:
        if self._depth and not self._pending:
            self._pending = True
            return
        self._pending = False
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put a Ctrl-C off until the end of the block; not raised then when the block itself fails."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            self._pending = False
            raise KeyboardInterrupt
