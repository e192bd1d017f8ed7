"""Benchmark tables as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from graphrl.compiler.benchmark import BenchmarkTable
from graphrl.errors import require_extra

__all__ = ["plot_tables"]


def plot_tables(tables: Sequence[BenchmarkTable], path: str | Path) -> Path:
    """Draw one panel a table: a bar from the median, its quartiles, the ratio to the first row. Logarithmic times.

    graphrl's own rows have a colour of their own; competitors that did not run are left out. Raises
    :class:`MissingExtraError` without matplotlib.
    """
    require_extra("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [[row for row in table.rows if not math.isnan(row.median_us)] for table in tables]
    heights = [0.36 * len(rows) + 1.1 for rows in shown]
    figure = Figure(figsize=(10, sum(heights) + 0.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, table, rows in zip(panels, tables, shown, strict=True):
        places = range(len(rows))
        medians = [row.median_us for row in rows]
        low = [row.median_us - row.quartile_1_us for row in rows]
        high = [row.quartile_3_us - row.median_us for row in rows]
        colors = ["#3b78b5" if _own(row.name) else "#b9c2cc" for row in rows]
        axes.barh(places, medians, xerr=[low, high], color=colors, error_kw={"ecolor": "#333", "capsize": 2})
        axes.set_yticks(list(places), [row.name for row in rows], fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(0.5 * min(medians), 4 * max(medians))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("microseconds, median and quartiles; times faster than the first row", fontsize=8)
        axes.set_title(f"{table.title}, {table.machine['threads']} thread(s)", fontsize=10, loc="left")
        for i, row in enumerate(rows):
            axes.annotate(
                f" x {row.ratio:.2g}", (row.quartile_3_us, i), va="center", fontsize=8, xytext=(4, 0),
                textcoords="offset points",
            )  # fmt: skip
    target = Path(path)
    figure.savefig(target, dpi=110, format="png")
    return target


def _own(name: str) -> bool:
    """Whether a row is something that graphrl compiled."""
    return name.startswith(("inductor", "native", "aot", "onnx,", "generated C", "graphrl", "SyncCollector"))
