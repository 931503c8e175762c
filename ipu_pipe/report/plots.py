"""Draw figures as PNG files with matplotlib, which is imported when a figure is drawn.

A figure has a title, and below it a note with sizes and seeds.
"""

from __future__ import annotations

import contextlib
import textwrap
from importlib import util
from pathlib import Path
from typing import Any, Iterator

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
    file: Path,
    size: tuple[float, float],
    panels: int = 1,
    rows: int = 1,
    *,
    title: str,
    note: str,
) -> Iterator[list[Any]]:
    """Yield the axes of `panels` panels in `rows` rows, each of `size` inches, under one title;
    write the figure to `file` at the end."""
    check_plots()
    # not pyplot, which keeps every figure alive and may choose a backend that needs a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = -(-panels // rows)
    drawing = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    drawing.suptitle(title, fontsize="medium")
    drawing.supxlabel(
        textwrap.fill(note, int(size[0] * columns * LETTERS_PER_INCH)),
        fontsize="small",
        color="dimgray",
    )
    yield axes
    for panel in axes:
        panel.grid(alpha=0.3)
    with atomic_file(file) as temporary:
        drawing.savefig(temporary, dpi=100, format="png")
