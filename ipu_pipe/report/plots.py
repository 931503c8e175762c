"""Draw figures of studies as PNG files with matplotlib, which is imported when a figure is drawn.

A figure has a title, and below it a note with sizes and seeds.
"""

from __future__ import annotations

import contextlib
import statistics
import textwrap
from importlib import util
from pathlib import Path
from typing import Any, Iterator, List, Sequence, Tuple

from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.files import atomic_file

# letters of the note per inch
LETTERS_PER_INCH = 13


def check_plots() -> None:
    """Raise `BadInput` if matplotlib is not installed."""
    if util.find_spec("matplotlib") is None:
        raise BadInput("plots need matplotlib, which is not installed: pip install matplotlib")


@contextlib.contextmanager
def open_figure(
    file: Path, size: Tuple[float, float], panels: int = 1, rows: int = 1, *, title: str, note: str
) -> Iterator[List[Any]]:
    """Yield the axes of `panels` panels in `rows` rows, each of `size` inches, under one title; write the figure to `file` at the
    end."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = -(-panels // rows)
    drawing = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    drawing.suptitle(title, fontsize="medium")
    drawing.supxlabel(textwrap.fill(note, int(size[0] * columns * LETTERS_PER_INCH)), fontsize="small", color="dimgray")
    yield axes
    for panel in axes:
        panel.grid(alpha=0.3)
    with atomic_file(file) as temporary:
        drawing.savefig(temporary, dpi=100, format="png")


def describe_sizes(config: Config) -> str:
    """Describe the data and the length of a run for the note of its figure."""
    data, batch = config.data.options(), config.micro_batch_size * config.gradient_accumulation * config.replicas
    parts = [f"{data['size']}x{data['size']}"] if "size" in data else []
    parts += [
        f"{data[key]:,} {what} samples"
        for key, what in (("subset", "training"), ("test_subset", "test"))
        if key in data
    ]
    length = f"{config.epochs} epochs" if config.steps is None else f"{config.steps:,} updates"
    of_data = f"{config.data.name} ({', '.join(parts)})" if parts else config.data.name
    return f"{of_data}, {length}, {batch:,} {'sample' if batch == 1 else 'samples'} an update"


def describe_seeds(seeds: Sequence[int]) -> str:
    """Describe the lines and bands of `plot_mean_with_range` for runs with these seeds."""
    if len(set(seeds)) == 1:
        return f"seed {seeds[0]} alone"
    return f"lines: means over seeds {', '.join(map(str, sorted(set(seeds))))}; bands: from the least to the greatest of them"


def plot_mean_with_range(axes: Any, x: Sequence[float], groups: Sequence[Sequence[float]], **how: Any) -> None:
    """Draw a line through the mean of each group of values, and shade their range.

    Up to 30 lines differ in color or style.
    """
    if "color" not in how:  # matplotlib has ten
        how["linestyle"] = ("-", "--", ":")[len(axes.lines) // 10 % 3]
    (line,) = axes.plot(x, [statistics.mean(group) for group in groups], marker="o", **how)
    low, high = [min(group) for group in groups], [max(group) for group in groups]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
