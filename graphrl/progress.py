"""Lines that say what a slow step does and how long it took: on a terminal, else to the log ``graphrl``."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

__all__ = ["step_line"]


@contextlib.contextmanager
def step_line(what: str) -> Iterator[None]:
    """Show ``what`` with a spinner on an interactive stderr while the block runs, then its time if over a second.

    Where stderr is no terminal (a notebook, a job) the same goes to ``logging.getLogger("graphrl")`` at level INFO.
    """
    start = time.perf_counter()
    if not sys.stderr.isatty():
        log = logging.getLogger("graphrl")
        log.info(what)
        yield
        log.info("%s: %.1f s", what, time.perf_counter() - start)
        return
    from rich.console import Console
    from rich.errors import LiveError

    console = Console(stderr=True)
    status = console.status(f"[dim]{what}")
    with contextlib.ExitStack() as shown:
        with contextlib.suppress(LiveError):  # inside a progress bar: no spinner of its own
            shown.enter_context(status)
        yield
    if (seconds := time.perf_counter() - start) > 1:
        console.print(f"[dim]{what}: {seconds:.1f} s")
