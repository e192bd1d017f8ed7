"""The learning curve of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from graphrl.errors import SpecError, require_extra
from graphrl.training.loggers import read_csv

__all__ = ["plot_curve"]


def plot_curve(csv_path: Path | str, png_path: Path | str, title: str = "") -> Path:
    """Draw mean episode return over frames from a run's ``progress.csv``; no display is needed.

    Raises :class:`MissingExtraError` without matplotlib, :class:`SpecError` for a file without returns.
    """
    require_extra("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [(row["frames"], row["mean_return"]) for row in read_csv(csv_path) if "mean_return" in row]
    if not points:
        raise SpecError(f"{csv_path} holds no 'frames' and 'mean_return': expected the progress.csv of a run")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True))
    axes.set(xlabel="frames", ylabel="mean return of the last 100 episodes", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(png_path, dpi=120)
    return Path(png_path)
