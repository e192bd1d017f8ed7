"""What a run shows while it goes: a progress bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

__all__ = ["Report"]

LINE_EVERY_S = 5.0


class Report:
    """A context manager; ``update(row)`` after each batch with its frames, mean return, speed and losses.

    quiet: show nothing. stream: where to (stderr). A file or a pipe gets a line at the start, at the first
    and last batch, and every five seconds between.
    """

    def __init__(self, total: int, title: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.total, self.title, self.quiet = total, title, quiet
        self.stream = sys.stderr if stream is None else stream
        self._bar: Any = None
        self._task: Any = None
        self._spoke = float("-inf")

    def __enter__(self) -> Report:
        if self.quiet:
            return self
        if not self.stream.isatty():
            print(f"{self.title}: compiling, and collecting the first batch ...", file=self.stream, flush=True)
        else:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
            console = Console(file=self.stream)
            self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=console)
            self._task = self._bar.add_task(self.title, total=self.total, figures="compiling")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, row: dict[str, float]) -> None:
        """Show the state of the run after a batch."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=row["frames"], figures=figures(row))
            return
        now = time.monotonic()
        if now - self._spoke >= LINE_EVERY_S or row["frames"] >= self.total:
            self._spoke = now
            done = f"{row['frames']:.0f}/{self.total} frames"
            print(f"{self.title}: {done}, {figures(row)}", file=self.stream, flush=True)


def figures(row: dict[str, float]) -> str:
    """Return, speed and losses of a row in a few words."""
    words = [f"return {row['mean_return']:.1f}", f"{row['frames_per_s']:.0f} frames/s"]
    words += [f"{name.removeprefix('loss_')} {value:.3g}" for name, value in row.items() if name.startswith("loss_")]
    return ", ".join(words)
