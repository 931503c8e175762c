"""The timeline of a trace as a picture: devices as rows with their waits, and below it the memory
over the whole span.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence, Tuple

import numpy as np

from ipu_pipe.files import atomic_file
from ipu_pipe.report.analysis.devices import find_span
from ipu_pipe.report.analysis.text import describe_busy, describe_origin, format_time, name_device
from ipu_pipe.report.plots import check_plots
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.colours import COLOURS, choose_ink
from ipu_pipe.text import escape_lines
from ipu_pipe.trace.events import (
    COMMUNICATION,
    COMPUTE,
    OUTSIDE,
    UNSPECIFIED,
    WAIT,
    Events,
    Trace,
    group_indices,
)

# passes of more events could not be distinguished
MOST_EVENTS = 3000
MOST_EVENTS_PER_DEVICE = 150
MOST_DEVICES = 64
# up to this number of events passes show the number of their microbatch
MOST_NUMBERED = 160
MOST_IN_LEGEND_ROW = 8
# (bottom, height) within a row
_FULL = (-0.4, 0.8)
_THIN = (0.25, 0.15)
# the events of later kinds are drawn over those of earlier ones: (kind, place)
LAYERS: tuple[tuple[str, tuple[float, float]], ...] = (
    *((kind, _FULL) for kind in (*OUTSIDE, WAIT, *COMPUTE)),
    *((kind, _THIN) for kind in COMMUNICATION),
)
_NUMBERED = tuple(kind for kind in COMPUTE if kind not in (UNSPECIFIED, Kind.UPDATE.word))
Window = Tuple[int, int]


def draw_timeline(file: Path, trace: Trace, analysis: dict[str, Any]) -> None:
    """Write a PNG. Raise `BadInput` if matplotlib is missing, `RunFault` if the disk refuses."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    begin, end = choose_window(trace.events)
    # times count from the span's begin
    start_ns = analysis["begin_ns"]
    shown = trace.events.select((trace.events.start < end) & (trace.events.end > begin))
    shown = shown._replace(start=shown.start - start_ns, end=shown.end - start_ns)
    window = begin - start_ns, end - start_ns
    devices = analysis["devices"][:MOST_DEVICES]
    memory = analysis["memory"][:MOST_DEVICES]
    heights = [1.3 + min(0.42 * len(devices), 8.0), *([2.0] if memory else [])]
    drawing = Figure(figsize=(11, sum(heights)), layout="constrained")
    # without pyplot, as in `report.plots`
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    _draw_devices(axes[0], shown, devices, window)
    if memory:
        _draw_memory(axes[1], memory, window, analysis["span_ns"])
    for panel in axes:
        panel.tick_params(labelsize=8)
    drawing.suptitle(_format_title(analysis, window), fontsize=10)
    with atomic_file(file) as temporary:
        drawing.savefig(temporary, dpi=100, format="png")


def choose_window(events: Events) -> Window:
    """Return the whole span, or for many events the time around the middle one in which events can
    be distinguished.
    """
    most = min(MOST_EVENTS, MOST_EVENTS_PER_DEVICE * len(np.unique(events.device)))
    if len(events.start) <= most:
        return find_span(events)
    starts = np.sort(events.start)
    middle = len(starts) // 2
    half = most // 2
    # past the begin of the last one, which would not be drawn otherwise
    return int(starts[middle - half]), int(starts[middle + half - 1]) + 1


def _format_title(analysis: dict[str, Any], window: Window) -> str:
    is_whole = window == (0, analysis["span_ns"])
    part = "all of" if is_whole else f"{format_time(window[0])} to {format_time(window[1])} of"
    stages = f" on {len(analysis['stages'])} stages" if analysis["stages"] else ""
    name = Path(analysis["source"]).name or analysis["source"]
    method = analysis["method"] or "a trace"
    title = (
        f"{name}: {method}{stages}, {part} {format_time(analysis['span_ns'])} "
        f"({describe_origin(analysis)})\n"
        f"{describe_busy(analysis)}"
    )
    # matplotlib takes text between dollars for mathematics
    return escape_lines(title).replace("$", r"\$")


def _draw_devices(
    axes: Any, events: Events, devices: Sequence[dict[str, Any]], window: Window
) -> None:
    rows = {device["index"]: row for row, device in enumerate(devices)}
    shared = {device["index"] for device in devices if len(device["stages"]) > 1}
    scale, unit = _choose_unit(window[1] - window[0])
    labelled = set()
    for device, places in group_indices(events.device):
        of_device = events.select(places)
        for kind, (bottom, height) in LAYERS if device in rows else ():
            bars = of_device.select(of_device.is_kind(kind))
            if len(bars.start):
                ranges = list(
                    zip((bars.start / scale).tolist(), ((bars.end - bars.start) / scale).tolist())
                )
                style = {"facecolor": COLOURS[kind][0], "edgecolor": "white"}
                if kind == WAIT:
                    style.update(hatch="////", edgecolor=COLOURS["wait line"][0])
                # a second label would be a second entry in the legend
                label = None if kind in labelled else kind
                axes.broken_barh(
                    ranges, (rows[device] + bottom, height), linewidth=0.3, label=label, **style
                )
                labelled.add(kind)
    if len(events.start) <= MOST_NUMBERED:
        text_style: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": 7,
            "clip_on": True,
        }
        for event in events.select(events.is_kind(*_NUMBERED)).rows():
            # a narrower bar cannot hold its number
            is_wide = event.end_ns - event.start_ns > (window[1] - window[0]) / 90
            if is_wide and event.device in rows and event.microbatch >= 0:
                number = f"{event.microbatch}" + f"@{event.stage}" * (event.device in shared)
                ink = choose_ink(COLOURS[event.kind][0])
                axes.text(
                    (event.start_ns + event.end_ns) / 2 / scale,
                    rows[event.device],
                    number,
                    color=ink,
                    **text_style,
                )
    # matplotlib warns of equal limits, which a trace of no length would have
    axes.set_xlim(window[0] / scale, max(window[1] / scale, 1e-9))
    # downwards: device 0 is on top
    axes.set_ylim(len(devices) - 0.45, -0.55)
    # more names would overlap
    step = -(-len(devices) // 24)
    names = [_label_device(device) for device in devices[::step]]
    axes.set_yticks(range(0, len(devices), step), names, fontsize=8)
    axes.set_xlabel(f"{unit} from the trace's begin", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=MOST_IN_LEGEND_ROW,
        fontsize=8,
        frameon=False,
    )


def _label_device(device: dict[str, Any]) -> str:
    stages = f" (stage {', '.join(map(str, device['stages']))})" if device["stages"] else ""
    return f"device {name_device(device)}{stages}"


def _draw_memory(
    axes: Any,
    memory: Sequence[dict[str, Any]],
    window: Window,
    span: int,
) -> None:
    scale, unit = _choose_unit(span)
    for row in memory:
        times, sizes = zip(*row["over_time"])
        x = [t / scale for t in (*times, span)]
        # the last value lasts to the end of the span
        y = [size / 2**20 for size in (*sizes, sizes[-1])]
        axes.step(x, y, where="post", label=f"device {row['device']}", linewidth=1.2)
    if window != (0, span):
        axes.axvspan(
            window[0] / scale, window[1] / scale, color="#999999", alpha=0.2, label="shown above"
        )
    axes.set_xlim(0, max(span / scale, 1e-9))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB held", fontsize=8)
    axes.set_xlabel(f"{unit} from the trace's begin", fontsize=8)
    axes.grid(alpha=0.3)
    # a longer legend would cover the curves
    if len(memory) <= 12:
        axes.legend(fontsize=8, frameon=False, ncols=4)


def _choose_unit(span: int) -> tuple[float, str]:
    units = ((9, "s"), (6, "ms"), (3, "us"))
    return next(((10.0**power, unit) for power, unit in units if span >= 10**power), (1.0, "ns"))
