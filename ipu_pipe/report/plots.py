"""Figures as PNG files, by matplotlib, which is loaded when something is drawn."""

from __future__ import annotations

import contextlib
import statistics
from importlib import util
from pathlib import Path
from typing import Any, Iterator, List, Sequence, Tuple

from ipu_pipe.errors import BadInput, writing


def check_plots() -> None:
    """Refuse (BadInput) where nothing can be drawn."""
    if util.find_spec("matplotlib") is None:
        raise BadInput("plots need matplotlib, which is not installed: pip install matplotlib")


@contextlib.contextmanager
def figure(file: Path, size: Tuple[float, float], panels: int = 1, rows: int = 1) -> Iterator[List[Any]]:
    """The axes of so many panels side by side, in so many rows, each of `size` inches; written to `file` at the end."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = -(-panels // rows)
    drawn = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    yield axes
    for each in axes:
        each.grid(alpha=0.3)
    with writing(file):
        drawn.savefig(file, dpi=100)


def mean_with_range(axes: Any, x: Sequence[float], groups: Sequence[Sequence[float]], **how: Any) -> None:
    """A line through the mean of each group of values, their range shaded."""
    (line,) = axes.plot(x, [statistics.mean(group) for group in groups], marker="o", **how)
    low, high = [min(group) for group in groups], [max(group) for group in groups]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
