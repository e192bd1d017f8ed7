"""Where the numbers of a run go: a CSV file, TensorBoard, or anything with ``log`` and ``close``."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any, Protocol

from graphrl.errors import require_extra

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


class Logger(Protocol):
    """What a trainer asks of a logger."""

    def log(self, row: dict[str, float]) -> None:
        """Take one row; ``row["frames"]`` is its place on the time axis."""

    def close(self) -> None:
        """Write what is pending. Calling it twice is harmless."""


class CSVLogger:
    """One line a batch in a CSV file, flushed at once; a new column never breaks the file, it is left out.

    resume_at: keep the lines of an earlier run up to this number of frames, drop later ones, and go on.
    """

    def __init__(self, path: Path | str, resume_at: int | None = None) -> None:
        self.path = Path(path)
        kept = [] if resume_at is None else [r for r in read_csv(self.path) if r.get("frames", math.inf) <= resume_at]
        self._file = self.path.open("w", newline="")
        self._writer: Any = None
        for row in kept:
            self.log(row)

    def log(self, row: dict[str, float]) -> None:
        """Append one line."""
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), extrasaction="ignore")
            self._writer.writeheader()
        self._writer.writerow({name: f"{value:.8g}" for name, value in row.items()})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_csv(path: Path | str) -> list[dict[str, float]]:
    """The rows a :class:`CSVLogger` wrote; empty fields are left out, a missing file has no rows."""
    try:
        with Path(path).open(newline="") as file:
            return [{k: float(v) for k, v in row.items() if k and v} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


class TensorBoardLogger:
    """Scalars as TensorBoard events. Raises :class:`MissingExtraError` without the ``tensorboard`` package."""

    def __init__(self, folder: Path | str) -> None:
        require_extra("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, row: dict[str, float]) -> None:
        """Write each finite value of the row at step ``row["frames"]``."""
        for name, value in row.items():
            if name != "frames" and math.isfinite(value):
                self._writer.add_scalar(name, value, int(row["frames"]))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
