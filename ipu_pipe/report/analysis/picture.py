"""The timeline as a picture: devices as rows, waits visible, and below it the memory over the whole span."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from ipu_pipe.files import atomic_file
from ipu_pipe.report.analysis.device_time import find_span, group_by_device
from ipu_pipe.report.analysis.text import describe_origin, format_percent, format_time
from ipu_pipe.report.plots import check_plots
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.text import escape_lines
from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, OUTSIDE, UNSPECIFIED, WAIT, Events, Trace

MOST, A_DEVICE = 3000, 150  # rectangles: of more, passes are not told apart
MOST_DEVICES = 64
NUMBERED = 160  # passes that have room for their microbatch's number
_BACKWARDS = (Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word, Kind.WEIGHT_GRADIENT.word)
# What is drawn alike: name, kinds, colour, and where in a row it lies (bottom, height).
LAYERS: Tuple[Tuple[str, Tuple[str, ...], str, Tuple[float, float]], ...] = (
    ("evaluation, checkpoint, pause", OUTSIDE, "#c8c8c8", (-0.4, 0.8)),
    ("wait", (WAIT,), "#f7d4cf", (-0.4, 0.8)),
    ("forward", (Kind.FORWARD.word, UNSPECIFIED), "#4c8ed9", (-0.4, 0.8)),
    ("recompute", (Kind.RECOMPUTE.word,), "#9dc3ee", (-0.4, 0.8)),
    ("backward", _BACKWARDS, "#3f9b62", (-0.4, 0.8)),
    ("update", (Kind.UPDATE.word,), "#e0a030", (-0.4, 0.8)),
    ("communication", COMMUNICATION, "#7d4fa8", (0.25, 0.15)),
)


def draw_timeline(file: Path, trace: Trace, found: Dict[str, Any]) -> None:
    """Write a PNG. Raises BadInput where nothing can be drawn, RunFault where the disk refuses."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    begin, end = choose_window(trace.events)
    inside = trace.events.select((trace.events.start < end) & (trace.events.end > begin))
    devices = [device["index"] for device in found["devices"]][:MOST_DEVICES]
    height = 1.3 + min(0.42 * len(devices), 8.0)
    memory = found["memory"][:MOST_DEVICES]
    drawn = Figure(figsize=(11, height + (2.0 if memory else 0.0)), layout="constrained")
    FigureCanvasAgg(drawn)
    ratios = [height, 2.0] if memory else [height]
    axes = drawn.subplots(len(ratios), 1, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    _timeline(axes[0], inside, devices, found, (begin, end))
    if memory:
        _memory(axes[1], memory, (begin - found["begin_ns"], end - found["begin_ns"]), found["span_ns"])
    drawn.suptitle(_title(found, begin, end), fontsize=10)
    with atomic_file(file) as temporary:
        drawn.savefig(temporary, dpi=100, format="png")


def choose_window(events: Events) -> Tuple[int, int]:
    """The span, or of many events the time around the middle one that has so many that they can be told apart."""
    most = min(MOST, A_DEVICE * len(np.unique(events.device)))
    if len(events.start) <= most:
        return find_span(events)
    starts = np.sort(events.start)
    middle, half = len(starts) // 2, most // 2
    return int(starts[middle - half]), int(starts[middle + half - 1]) + 1


def _title(found: Dict[str, Any], begin: int, end: int) -> str:
    stages = f" on {len(found['stages'])} stages" if found["stages"] else ""
    first, last = begin - found["begin_ns"], end - found["begin_ns"]
    whole = "all of" if (first, last) == (0, found["span_ns"]) else f"{format_time(first)} to {format_time(last)} of"
    bound = found["planned_bubble_fraction"]
    planned = "" if bound is None else f", schedule's own {format_percent(bound)} (planned)"
    name = Path(found["source"]).name or found["source"]
    title = (
        f"{name}: {found['method'] or 'a trace'}{stages}, {whole} {format_time(found['span_ns'])} ({describe_origin(found)})\n"
        f"devices busy {format_percent(found['utilization'])}, bubble {format_percent(found['bubble_fraction'])}{planned}"
    )
    return escape_lines(title).replace("$", r"\$")


def _timeline(axes: Any, events: Events, devices: Any, found: Dict[str, Any], when: Tuple[int, int]) -> None:
    row = {device: place for place, device in enumerate(devices)}
    scale, unit = _unit(when[1] - when[0])
    start, width = (events.start - found["begin_ns"]) / scale, (events.end - events.start) / scale
    seen = set()
    for device, places in group_by_device(events):
        if device not in row:
            continue
        for name, kinds, colour, (bottom, tall) in LAYERS:
            own = places[events.select(places).is_kind(*kinds)]
            if len(own):
                bars = list(zip(start[own].tolist(), width[own].tolist()))
                edge = {"hatch": "////", "edgecolor": "#e0a59c"} if name == "wait" else {"edgecolor": "white"}
                label = None if name in seen else name
                axes.broken_barh(
                    bars, (row[device] + bottom, tall), facecolor=colour, linewidth=0.3, label=label, **edge
                )
                seen.add(name)
    if len(events.start) <= NUMBERED:
        _numbers(axes, events.select(events.is_kind(*_NUMBERED)), row, found["begin_ns"], scale, when)
    axes.set_xlim((when[0] - found["begin_ns"]) / scale, max((when[1] - found["begin_ns"]) / scale, 1e-9))
    axes.set_ylim(len(devices) - 0.45, -0.55)
    of = {device["index"]: ", ".join(map(str, device["stages"])) for device in found["devices"]}
    step = -(-len(devices) // 24)
    axes.set_yticks(range(0, len(devices), step), [f"device {d} (stage {of[d]})" for d in devices[::step]], fontsize=8)
    axes.set_xlabel(f"{unit} from the trace's begin", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(LAYERS), fontsize=8, frameon=False)


_NUMBERED = tuple(kind for kind in COMPUTE if kind not in (UNSPECIFIED, Kind.UPDATE.word))


def _numbers(axes: Any, passes: Events, row: Dict[int, int], begin: int, scale: float, when: Tuple[int, int]) -> None:
    """Microbatches' numbers in passes wide enough."""
    for each in passes.rows():
        if each.device in row and each.end_ns - each.start_ns > (when[1] - when[0]) / 90 and each.microbatch >= 0:
            middle = ((each.start_ns + each.end_ns) / 2 - begin) / scale
            axes.text(
                middle,
                row[each.device],
                each.microbatch,
                ha="center",
                va="center",
                fontsize=7,
                color="white",
                clip_on=True,
            )


def _unit(span: int) -> Tuple[float, str]:
    return next(
        ((10.0**power, unit) for power, unit in ((9, "s"), (6, "ms"), (3, "us")) if span >= 10**power), (1.0, "ns")
    )


def _memory(axes: Any, memory: Any, when: Tuple[int, int], span: int) -> None:
    scale, unit = _unit(span)
    for each in memory:
        moments, held = zip(*each["over_time"])
        axes.step(
            [t / scale for t in (*moments, span)], [size / 2**20 for size in (*held, held[-1])], where="post",
            label=f"device {each['device']}", linewidth=1.2,
        )  # fmt: skip
    if when != (0, span):
        axes.axvspan(when[0] / scale, when[1] / scale, color="#999999", alpha=0.2, label="shown above")
    axes.set_xlim(0, max(span / scale, 1e-9))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB held", fontsize=8)
    axes.set_xlabel(f"{unit} from the trace's begin", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if len(memory) <= 12:
        axes.legend(fontsize=8, frameon=False, ncols=4)
