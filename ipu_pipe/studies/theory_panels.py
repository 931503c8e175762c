"""A figure as data, its JSON, and its picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import ArrayLike

from ipu_pipe.report.plots import open_figure


class Line(NamedTuple):
    """A line in matplotlib's `style`, with a gap where a value is not finite."""

    label: str
    x: List[float]
    y: List[float]
    style: str = "-"


class ColourMap(NamedTuple):
    """Values by row (y), then column (x); those that are not finite or above `most` are drawn in the colour `beyond`."""

    x: List[float]
    y: List[float]
    values: List[List[float]]
    label: str
    most: float
    beyond: str = "black"


class Panel(NamedTuple):
    """One picture of a figure; scales are "linear" or "log", `y_range` is the part that is shown."""

    title: str
    x_label: str
    y_label: str
    lines: Tuple[Line, ...] = ()
    colours: Optional[ColourMap] = None
    x_scale: str = "linear"
    y_scale: str = "linear"
    y_range: Optional[Sequence[float]] = None


class TheoryFigure(NamedTuple):
    """Panels in `rows` rows; `seen` says in a sentence what the data say on the paper's statement, `note` how they were
    computed."""

    source: str
    title: str
    panels: Tuple[Panel, ...]
    seen: str
    rows: int = 1
    note: str = "from the characteristic polynomials: nothing is trained, nothing drawn at random"


def make_panel(
    x_label: str,
    y_label: str,
    x: ArrayLike,
    lines: Mapping[str, ArrayLike],
    title: str = "",
    style: str = "-",
    **scales: Any,
) -> Panel:
    """Return a panel with a line for each label, rounded to four digits, as pictures show."""
    rounded = tuple(Line(label, round_values(x), round_values(y), style) for label, y in lines.items())
    return Panel(title, x_label, y_label, rounded, **scales)


def round_values(values: ArrayLike) -> List[float]:
    """Return values rounded to four digits."""
    return [float(f"{value:.4g}") for value in np.asarray(values, np.float64).tolist()]


def convert_to_json(figure: TheoryFigure) -> Dict[str, Any]:
    """Return a figure as plain data; what is not finite is None."""

    def convert(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {key: convert(item) for key, item in value._asdict().items()}
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return dict(convert(figure))


def draw(wanted: TheoryFigure, file: Path) -> None:
    """Draw a figure into a PNG file."""
    count = len(wanted.panels)
    size = (6.5, 4.5) if count == 1 else (5.2, 4.0) if wanted.rows == 1 else (4.4, 3.5)
    with open_figure(file, size, count, wanted.rows, title=wanted.title, note=wanted.note) as all_axes:
        for axes, panel in zip(all_axes, wanted.panels):
            _draw_panel(axes, panel)


def _draw_panel(axes: Any, panel: Panel) -> None:
    axes.set(xscale=panel.x_scale, yscale=panel.y_scale, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize="medium")
    if panel.colours is not None:
        _draw_colours(axes, panel.colours)
    for line in panel.lines:
        axes.plot(line.x, line.y, line.style, label=line.label, markersize=3)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if panel.lines:
        axes.legend(fontsize="x-small")


def _draw_colours(axes: Any, colours: ColourMap) -> None:
    values = np.array(colours.values, np.float64)
    masked = np.ma.masked_invalid(np.where(values <= colours.most, values, np.nan))
    axes.set_facecolor(colours.beyond)
    mesh = axes.pcolormesh(colours.x, colours.y, masked, shading="nearest", cmap="viridis", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, label=colours.label)
    if colours.y[0] > colours.y[-1]:
        axes.invert_yaxis()
