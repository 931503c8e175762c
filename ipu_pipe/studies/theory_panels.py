"""A figure of theory as data, which is its JSON, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ipu_pipe.report.plots import open_figure

Panel = Dict[str, Any]  # as `make_panel` returns it


class TheoryFigure(NamedTuple):
    """Panels in `rows` rows; `seen` says in a sentence what the data say on the paper's statement, `note` how they were
    computed."""

    source: str
    title: str
    panels: List[Panel]
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
    **more: Any,
) -> Panel:
    """Return one picture of a figure, with a line for each label in matplotlib's `style`.

    `more`: its colours, x_scale and y_scale ("linear" or "log"), and the y_range that is shown.
    """
    scales = {"colours": None, "x_scale": "linear", "y_scale": "linear", "y_range": None, **more}
    panel = {"title": title, "x_label": x_label, "y_label": y_label, "lines": [], **scales}
    for label, y in lines.items():
        add_line(panel, label, x, y, style)
    return panel


def add_line(panel: Panel, label: str, x: ArrayLike, y: ArrayLike, style: str) -> None:
    """Add a line, with a gap where a value is not finite."""
    panel["lines"].append({"label": label, "x": round_values(x), "y": round_values(y), "style": style})


def make_colours(
    x: ArrayLike, y: ArrayLike, values: ArrayLike, label: str, most: float, beyond: str = "black"
) -> Dict[str, Any]:
    """Return values by row (y), then column (x); those that are not finite or above `most` are drawn in the colour `beyond`."""
    rows = np.asarray(values).tolist()
    return {"x": round_values(x), "y": round_values(y), "values": rows, "label": label, "most": most, "beyond": beyond}


def round_values(values: ArrayLike) -> List[float]:
    """Return values rounded to four digits, as pictures show."""
    return [float(f"{value:.4g}") for value in np.asarray(values, np.float64).tolist()]


def draw(figure: TheoryFigure, file: Path) -> None:
    """Draw a figure into a PNG file."""
    count = len(figure.panels)
    size = (6.5, 4.5) if count == 1 else (5.2, 4.0) if figure.rows == 1 else (4.4, 3.5)
    with open_figure(file, size, count, figure.rows, title=figure.title, note=figure.note) as all_axes:
        for axes, panel in zip(all_axes, figure.panels):
            axes.set(**{f"{name}{end}": panel[f"{name}_{end}"] for name in "xy" for end in ("scale", "label")})
            axes.set_title(panel["title"], fontsize="medium")
            if panel["colours"] is not None:
                _draw_colours(axes, **panel["colours"])
            for line in panel["lines"]:
                axes.plot(line["x"], line["y"], line["style"], label=line["label"], markersize=3)
            if panel["y_range"] is not None:
                axes.set_ylim(*panel["y_range"])
            if panel["lines"]:
                axes.legend(fontsize="x-small")


def _draw_colours(
    axes: Any, x: List[float], y: List[float], values: List[List[float]], label: str, most: float, beyond: str
) -> None:
    array = np.array(values, np.float64)
    masked = np.ma.masked_invalid(np.where(array <= most, array, np.nan))
    axes.set_facecolor(beyond)
    mesh = axes.pcolormesh(x, y, masked, shading="nearest", cmap="viridis", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, label=label)
    if y[0] > y[-1]:
        axes.invert_yaxis()
