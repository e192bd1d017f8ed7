"""Lines that say what a slow step does and how long it took. Shown on a terminal, silent elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

__all__ = ["step_line"]


@contextlib.contextmanager
def step_line(what: str) -> Iterator[None]:
    """Show ``what`` with a spinner on an interactive stderr while the block runs, then its time if over a second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    start = time.perf_counter()
    try:
        with console.status(f"[dim]{what}"):
            yield
    except ValueError as error:
        if "Only one live display" not in str(error):  # inside a progress bar: stay quiet
            raise
    else:
        seconds = time.perf_counter() - start
        if seconds > 1:
            console.print(f"[dim]{what}: {seconds:.1f} s")
