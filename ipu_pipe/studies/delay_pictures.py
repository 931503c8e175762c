"""Figures of delayed updates drawn from their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import numpy as np

from ipu_pipe.report.plots import open_figure
from ipu_pipe.stability.recurrences import Floats
from ipu_pipe.studies.delay_figures import Colours, Figure, Panel


def draw(wanted: Figure, file: Path) -> None:
    """Into a PNG file; each panel's title says what stays the same in it."""
    count = len(wanted.panels)
    size = (6.5, 4.5) if count == 1 else (5.2, 4.0) if wanted.rows == 1 else (4.4, 3.5)
    with open_figure(file, size, count, wanted.rows, title=wanted.title, note=wanted.note) as axes:
        for own, panel in zip(axes, wanted.panels):
            _draw(own, panel)


def _draw(axes: Any, panel: Panel) -> None:
    axes.set(xscale=panel.x_scale, yscale=panel.y_scale, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize="medium")
    if panel.colours is not None:
        _colour(axes, panel.colours, panel.x_scale == "log", panel.y_scale == "log")
    for one in panel.lines:
        axes.plot(one.x, one.y, one.style, label=one.label, markersize=3)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if panel.lines:
        axes.legend(fontsize="x-small")


def _colour(axes: Any, colours: Colours, log_x: bool, log_y: bool) -> None:
    values = np.array(colours.values, np.float64)
    shown = np.ma.masked_invalid(np.where(values <= colours.most, values, np.nan))
    axes.set_facecolor(colours.beyond)
    edges = _edges(colours.x, log_x), _edges(colours.y, log_y)
    drawn = axes.pcolormesh(*edges, shown, shading="flat", cmap="viridis", rasterized=True)
    axes.figure.colorbar(drawn, ax=axes, label=colours.label)
    if colours.y[0] > colours.y[-1]:
        axes.invert_yaxis()


def _edges(middles: Sequence[float], log: bool) -> Floats:
    """Where the cells of such middles end, as the scale shows them."""
    at = np.log(middles) if log else np.array(middles)
    between = (at[1:] + at[:-1]) / 2
    edges = np.concatenate([[2 * at[0] - between[0]], between, [2 * at[-1] - between[-1]]])
    return np.exp(edges) if log else edges
