"""Write one self-contained HTML page with a trace and its figures.

Large traces are cut to a window plus an overview.

    page.html, page.css   the frame of the page and its style
    data.js               reads the data, and formats numbers and elements
    timeline.js           a row for each device, with passes and waits
    figures.js            the figures of the analysis
    page.js               draws each part in turn
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.files import replace_nonfinite, write_text
from ipu_pipe.report.analysis.text import format_comparison
from ipu_pipe.schedule.colours import COLOURS
from ipu_pipe.trace.events import (
    COMMUNICATION,
    KINDS,
    PAYLOADS,
    Counters,
    Events,
    Trace,
    build_counter_series,
    concatenate_counters,
    concatenate_events,
    group_indices,
)

# of a longer trace only the middle is embedded
MOST_EVENTS = 1_000_000
OVERVIEW_BINS = 2048
MOST_CURVES = 256
MOST_CURVE_POINTS = 1000
# little-endian types; a column gets the first that fits, else f8
_TYPES = ("u1", "i2", "i4", "u4")


def embed_trace(trace: Trace, analysis: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON that data.js reads. Times are nanoseconds from the span's begin."""
    events = trace.events.select(np.lexsort((trace.events.end, trace.events.start)))
    # a counter may come before the first event
    moments = [int(column.min()) for column in (events.start, trace.counters.time) if len(column)]
    begin = analysis.get("begin_ns")
    begin = min(moments, default=0) if begin is None else int(begin)
    events = events._replace(start=events.start - begin, end=events.end - begin)
    count = len(events.start)
    span = int(events.end.max(initial=0))
    data: dict[str, Any] = {
        "metadata": trace.metadata,
        "notes": trace.notes,
        "kinds": KINDS,
        "carried": PAYLOADS,
        "span_ns": span,
        "communication": COMMUNICATION,
        "count": count,
        "devices": np.unique(events.device).tolist(),
        "curves": _thin_curves(trace.counters, begin),
    }
    if count > MOST_EVENTS:
        data["overview"] = _build_overview(events, span)
        first = (count - MOST_EVENTS) // 2
        events = events.select(slice(first, first + MOST_EVENTS))
        data["window_ns"] = [int(events.start[0]), int(events.start[-1])]
    columns = {
        **events._asdict(),
        # differences of sorted times fit narrower types and compress better
        "start": np.diff(events.start, prepend=0),
        "end": events.end - events.start,
    }
    return {**data, "columns": {name: _pack(column) for name, column in columns.items()}}


def join_traces(trace: Trace, other: Trace) -> tuple[Trace, dict[int, str]]:
    """Return one trace of two, both from time 0 on, and the names of its devices: those of `other`
    follow the first one's.
    """
    parts = []
    counters = []
    names = {}
    shift = 0
    for label, of_run in (("this", trace), ("other", other)):
        begin = int(of_run.events.start.min(initial=1 << 60))
        events = of_run.events
        # -1 means no peer, whatever the shift
        peer = np.where(events.peer < 0, -1, events.peer + shift).astype(np.int32)
        parts.append(
            events._replace(
                device=events.device + shift,
                peer=peer,
                start=events.start - begin,
                end=events.end - begin,
            )
        )
        counters.append(
            of_run.counters._replace(
                device=of_run.counters.device + shift, time=of_run.counters.time - begin
            )
        )
        devices = np.unique(of_run.events.device).tolist()
        names.update({device + shift: f"{label}: {device}" for device in devices})
        shift += max(devices, default=-1) + 1
    joined = Trace(
        concatenate_events(parts), concatenate_counters(counters), trace.metadata, trace.notes
    )
    return joined, names


def _pack(column: NDArray[Any]) -> dict[str, str]:
    """Return a column as the bytes of the narrowest type, compressed by zlib, in base64."""
    low, high = (
        (int(column.min()), int(column.max()))
        if len(column) and column.dtype.kind in "iu"
        else (0, 0)
    )
    # wider integers would be read as float64 anyway, the one type of JavaScript's numbers
    fitting = (name for name in _TYPES if np.iinfo(name).min <= low and high <= np.iinfo(name).max)
    name = "f8" if column.dtype.kind == "f" else next(fitting, "f8")
    return {
        "type": name,
        "base64": base64.b64encode(zlib.compress(column.astype("<" + name).tobytes(), 6)).decode(),
    }


def _build_overview(events: Events, span: int) -> list[dict[str, Any]]:
    """Return for each device and kind its share of each of OVERVIEW_BINS equal parts of the span,
    in 255ths.
    """
    edges = np.linspace(0, span, OVERVIEW_BINS + 1)
    kinds = np.unique(events.kind).tolist()
    overview = []
    for device, places in group_indices(events.device):
        of_device = events.select(places)
        shares = {}
        for code in kinds:
            chosen = of_device.kind == code
            start = of_device.start[chosen]
            end = np.sort(of_device.end[chosen])
            # the integral of the events begun minus those ended, without a loop over events
            share = np.diff(_sum_distances(edges, start) - _sum_distances(edges, end)) / max(
                span / OVERVIEW_BINS, 1
            )
            shares[KINDS[code]] = _pack(np.rint(255 * share.clip(0, 1)).astype(np.int64))
        overview.append({"device": device, "shares": shares})
    return overview


def _sum_distances(edges: NDArray[np.float64], moments: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each edge the sum of its distances to all moments before it."""
    before = np.searchsorted(moments, edges)
    # a sum of very many late times would overflow an int64
    return before * edges - np.concatenate([[0.0], np.cumsum(moments, dtype=np.float64)])[before]


def _thin_curves(counters: Counters, begin: int) -> list[dict[str, Any]]:
    """Return memory and other counters; of a long curve the greatest value of each of
    MOST_CURVE_POINTS parts.
    """
    curves = []
    for name, device, times, values in build_counter_series(counters):
        # (times,): the parts of a moment together
        total = np.nansum(np.stack([*values.values()]), axis=0)
        chosen = np.arange(len(times))
        if len(times) > MOST_CURVE_POINTS:
            parts = np.linspace(0, len(times), MOST_CURVE_POINTS + 1).astype(int)
            edges = zip(parts[:-1], parts[1:])
            chosen = np.array([low + int(total[low:high].argmax()) for low, high in edges])
        finite = {
            # JSON has no NaN, which is the one value that differs from itself
            key: [None if v != v else v for v in column[chosen].tolist()]
            for key, column in values.items()
        }
        curves.append(
            {
                "name": name,
                "device": device,
                "times": (times[chosen] - begin).tolist(),
                "values": finite,
            }
        )
    return curves[:MOST_CURVES]


# the page's scripts, in this order
_SCRIPTS = ("data.js", "timeline.js", "figures.js", "page.js")


def read_style() -> str:
    """Return the style sheet of pages, with the colours on a light and on a dark ground."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    for number, ground in enumerate(("light", "dark")):
        colours = [f"--{kind.replace(' ', '-')}: {pair[number]};" for kind, pair in COLOURS.items()]
        style = style.replace(f"/* colours on {ground} */", " ".join(colours), 1)
    return style


def write_page(
    path: Path,
    trace: Trace,
    analysis: dict[str, Any],
    other: tuple[Trace, dict[str, Any]] | None = None,
) -> None:
    """Write the page atomically. `other`: another run, whose timeline is drawn below the first.

    `analysis`: as `tools/analyze.py --json` prints it; missing or null figures are shown as
    unknown. Raise `RunFault` if writing fails.
    """
    names: dict[int, str] = {}
    if other is not None:
        trace, names = join_traces(trace, other[0])
        compared = format_comparison(analysis, other[1])
        analysis = {**analysis, "begin_ns": 0, "comparison": compared}
    embedded = {**embed_trace(trace, analysis), "device_names": names}
    # Python would write NaN, which no browser parses
    data = json.dumps(replace_nonfinite({"analysis": analysis, "trace": embedded}), allow_nan=False)
    # names of runs are not trusted: nothing within a script's element may begin a tag
    data = data.replace("<", "\\u003c")
    here = Path(__file__).parent
    text = (here / "page.html").read_text(encoding="utf-8")
    text = text.replace("/* page.css */", read_style(), 1)
    for part in _SCRIPTS:
        text = text.replace(f"/* {part} */", (here / part).read_text(encoding="utf-8"), 1)
    # the browser runs and applies only what has these hashes, so nothing that a fault of ours would
    # let into the page
    for tag in ("script", "style"):
        text = text.replace(f"/* hash of {tag} */", hash_element(text, tag), 1)
    # last, because a name in the data may look like one of the marks above
    before, after = text.split("/* data */")
    write_text(path, before + data + after)


def hash_element(page: str, tag: str) -> str:
    """Return the hash of the one inline element of this tag, as a content security policy has
    it.
    """
    content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
