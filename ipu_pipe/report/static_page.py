"""Write a page of text, tables and curves in the style of the analysis page: one file without
scripts, which needs no network.

    heading
    text, a table by `write_table`, or `draw_curves`: lines with a band over seeds
"""

from __future__ import annotations

import math
from html import escape
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ipu_pipe.model.timing import FloatArray
from ipu_pipe.report.page import hash_element, read_style

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '/* hash */'; img-src data:">
<title>/* title */</title>
<link rel="icon" href="data:,">
<style>
/* page.css */
</style>
</head>
<body>
<header><h1>/* title */</h1><p id="subtitle">/* subtitle */</p></header>
<main>
/* sections */
</main>
</body>
</html>
"""
# kinds of passes whose colours also those tell apart who are colour-blind
INKS = ("forward", "input-gradient", "send", "update", "backward", "recompute", "evaluate")
# of a longer curve so many points are drawn
MOST_POINTS = 300
# the edges of the curves, in units of the drawing
LEFT = 54
WIDTH = 600
TOP = 8
BOTTOM = 280


class Curve(NamedTuple):
    """A line with a band: four arrays of the same length. It ends where a value is not finite."""

    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def write_static_page(title: str, subtitle: str, sections: Mapping[str, str]) -> str:
    """Return the page as HTML. `sections`: the HTML under each heading."""
    body = "\n".join(
        f"<section><h2>{escape(heading)}</h2>{content}</section>"
        for heading, content in sections.items()
    )
    page = PAGE.replace("/* page.css */", read_style(), 1)
    # only now the style is in the page that is hashed
    page = page.replace("/* hash */", hash_element(page, "style"), 1)
    page = page.replace("/* title */", escape(title))
    # the sections come last, because their text may look like a mark
    return page.replace("/* subtitle */", escape(subtitle), 1).replace("/* sections */", body, 1)


def write_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML; the first column is text, the others are figures."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        f'<tr><td class="text">{escape(row[0])}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    ]
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><tr>{titles}</tr>'
        f"{''.join(lines)}</table></div>"
    )


def write_list(sentences: Sequence[str]) -> str:
    """Return sentences as a list in HTML."""
    return f'<ul class="notes">{"".join(f"<li>{escape(one)}</li>" for one in sentences)}</ul>'


def write_legend(labels: Sequence[str]) -> str:
    """Return the key of the colours of curves with these labels, in order."""
    keys = [
        f'<span class="key"><svg class="swatch" viewBox="0 0 12 12"><rect width="12" height="12" '
        f'fill="{_choose_colour(number)}"/></svg>{escape(label)}</span>'
        for number, label in enumerate(labels)
    ]
    return f'<div class="legend">{"".join(keys)}</div>'


def draw_curves(curves: Sequence[Curve], x_name: str, y_name: str, y_top: float) -> str:
    """Return a figure of curves as SVG, from 0, or their least value, to `y_top`, above which they
    are cut.
    """
    thinned = [_thin(curve) for curve in curves]
    # of curves without a point, or with one at 0
    x_end = max((float(curve.x[-1]) for curve in thinned if len(curve.x)), default=0.0) or 1.0
    y_low = min((float(curve.low.min(initial=0.0)) for curve in thinned), default=0.0)
    # losses may be negative, those of a problem that is solved at the start 0, and all not finite
    least = y_low + max(1e-12, -1e-9 * y_low)
    y_top = max(y_top, least) if math.isfinite(y_top) else max(1.0, least)

    def place(x: Any, y: Any) -> list[str]:
        across = LEFT + (WIDTH - LEFT) * np.asarray(x) / x_end
        down = TOP + (BOTTOM - TOP) * (y_top - np.clip(y, y_low, y_top)) / (y_top - y_low)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(across, down)]

    shapes = [_draw_tick(place([x], [0])[0], x, "middle") for x in _choose_ticks(0.0, x_end)]
    shapes += [_draw_tick(place([0], [y])[0], y, "end") for y in _choose_ticks(y_low, y_top)]
    for number, curve in enumerate(thinned):
        colour = _choose_colour(number)
        # a closed outline: on along the upper edge, back along the lower one
        band = " ".join(place(curve.x, curve.high) + place(curve.x, curve.low)[::-1])
        line = " ".join(place(curve.x, curve.mean))
        shapes += [
            f'<polygon points="{band}" fill="{colour}" fill-opacity="0.18"/>',
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
        ]
    text = escape(f"{y_name} against {x_name}")
    return (
        f'<figure><figcaption>{text}</figcaption><svg viewBox="0 0 {WIDTH + 20} {BOTTOM + 24}" '
        f'role="img" aria-label="{text}">{"".join(shapes)}</svg></figure>'
    )


def _choose_colour(number: int) -> str:
    # more curves than colours share them
    return f"var(--{INKS[number % len(INKS)]})"


def _thin(curve: Curve) -> Curve:
    """Return the finite points of a curve, at most MOST_POINTS of them."""
    # (4, points): a point is drawn if all four of its numbers are finite
    finite = np.flatnonzero(np.isfinite(np.stack(curve)).all(axis=0))
    # with the first and the last point
    spaced = np.linspace(0, len(finite) - 1, min(len(finite), MOST_POINTS)).round().astype(int)
    return Curve(*(column[finite[spaced]] for column in curve))


def _choose_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def _draw_tick(point: str, value: float, anchor: str) -> str:
    """Return a number beside the axis of x ("middle") or, with a line, of y ("end")."""
    across, _, down = point.partition(",")
    if anchor == "middle":
        return f'<text x="{across}" y="{BOTTOM + 18}" text-anchor="middle">{value:.6g}</text>'
    return (
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{down}" y2="{down}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 6}" y="{down}" dy="4" text-anchor="end">{value:.6g}</text>'
    )
