"""Compute all figures of a trace as one record, from which every output (text, JSON, web page,
picture) is made.

docs/reference/analysis.md explains each figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Sequence

from ipu_pipe.files import parse_path
from ipu_pipe.model.timing import combine_spreads
from ipu_pipe.report.analysis.bottleneck import find_best_move, find_bottleneck
from ipu_pipe.report.analysis.critical_path import MOST_WALKED, measure_critical_path
from ipu_pipe.report.analysis.devices import (
    find_span,
    measure_devices,
    measure_links,
    measure_memory,
)
from ipu_pipe.report.analysis.metadata import RunMetadata, validate_metadata
from ipu_pipe.report.analysis.stages import (
    measure_device_spreads,
    measure_stages,
    measure_staleness,
    measure_update_noise,
    sum_busy_by_device,
)
from ipu_pipe.report.analysis.text import ALL_IPUS, WHY_NOT_BY_IPU, Analysis
from ipu_pipe.trace.events import Trace
from ipu_pipe.trace.json_records import Report
from ipu_pipe.trace.reading import read_trace
from ipu_pipe.trace.tables import make_counter_frame, make_event_frame, make_frame


def analyze(trace: Trace, source: str) -> Analysis:
    """Return the figures of a trace that has events, as `tools/analyze.py --json` prints them.

    `source`: its path, for messages. Raise `BadInput` for damaged metadata.
    """
    run = validate_metadata(source, trace.metadata)
    events = trace.events
    begin, end = find_span(events)
    # also devices without an event, which were idle from begin to end
    devices, overlap = measure_devices(events, run.devices, (begin, end))
    stages, stragglers = measure_stages(events, begin, run.sum_flops())
    if run.modelled:
        # all passes of a stage take its one time: that they are equal says nothing of its spread
        spreads = dict(enumerate(run.spread or ()))
        for row in stages:
            row.update(noise=None, spread=spreads.get(row["index"]))
    # only our own traces say when a message has arrived
    links = measure_links(events, has_latencies=run.messages_end_late is None)
    # an evaluation or a checkpoint would count as a bubble
    training_ns = sum(end - begin - device["outside_ns"] for device in devices)
    utilization = (
        sum(device["busy_ns"] for device in devices) / training_ns if training_ns else None
    )
    has_one_device = run.has_one_device(events)
    if has_one_device:
        # a call of all IPUs holds their waits for one another, and the copies under their compute
        utilization = None
        overlap.update(hidden_ns=None, share=None)
        for device in devices:
            device.update(covers=ALL_IPUS, utilization=None)
    if run.messages_end_late:
        # a message under compute is in the trace until it is waited for, however early it arrived
        overlap.update(hidden_ns=None, share=None)
    loads = sum_busy_by_device(stages)
    spreads_of_devices = measure_device_spreads(stages)
    analysis: Analysis = {
        "source": source,
        "method": run.method,
        "backend": run.backend,
        "modelled": bool(run.modelled),
        "why_modelled": run.why_modelled,
        "span_ns": end - begin,
        "begin_ns": begin,
        # simulated updates repeat one another, and have no noise
        "noise": None if run.modelled else measure_update_noise(events, run.accumulate),
        "spread": combine_spreads(list(loads.values()), list(spreads_of_devices.values()))
        if spreads_of_devices
        else None,
        "devices": devices,
        "utilization": utilization,
        "bubble_fraction": None if utilization is None else 1 - utilization,
        "planned_bubble_fraction": run.planned_bubble_fraction,
        "stages": stages,
        # 0 where all devices compute equally long
        "imbalance": 1 - sum(loads.values()) / len(loads) / max(loads.values())
        if any(loads.values())
        else None,
        "overlap": overlap,
        "bottleneck": None,
        "links": links,
        "staleness": measure_staleness(events, run.accumulate),
        "memory": measure_memory(trace.counters, events, begin),
        "stragglers": stragglers,
        # one device that stands for all hides the path between them
        "critical_path": None if has_one_device else measure_critical_path(events, trace.metadata),
        # of PopVision's system traces
        "tracepoints": trace.metadata.get("tracepoints", []),
        "notes": [*trace.notes],
    }
    # last, because it weighs all other figures
    analysis["bottleneck"] = find_bottleneck(
        analysis, loads, find_best_move(run, stages, links), run
    )
    analysis["notes"] += _list_notes(analysis, run)
    return analysis


def read_and_analyze(
    run: str | Path, passes: str | Sequence[str] = (), report: Report = None
) -> tuple[Trace, Analysis]:
    """Return a run's trace and its figures; `run`: the run's folder, or a trace that
    `tools/analyze.py` reads; `passes`: patterns for the names of a profiler's ranges; `report`: takes
    lines about progress.
    """
    trace = read_trace(parse_path(run, "analyze: run"), passes, report)
    return trace, analyze(trace, str(run))


class RunAnalysis(Dict[str, Any]):
    """The figures of a run's trace, as `tools/analyze.py --json` prints them, and its events."""

    def __init__(self, figures: Analysis, trace: Trace) -> None:
        super().__init__(figures)
        self._trace = trace

    def make_frames(self) -> dict[str, Any]:
        """Return pandas' data frames: `events` and `counters` with a row for each, and each list of
        the figures (`devices`, `stages`, `links`, ...). Raise `BadInput` if pandas is missing.
        """
        frames = {
            "events": make_event_frame(self._trace.events),
            "counters": make_counter_frame(self._trace.counters),
        }
        tables = {name: rows for name, rows in self.items() if isinstance(rows, list)}
        tables["critical_path"] = (self["critical_path"] or {}).get("pieces", [])
        for name, rows in tables.items():
            # sentences, not rows
            if name != "notes":
                frames[name] = make_frame(rows)
        return frames


def analyze_run(run: str | Path, passes: str | Sequence[str] = ()) -> RunAnalysis:
    """Return the figures of a run's trace, as `tools/analyze.py --json` prints them; their method
    `make_frames` returns data frames.

    `run`: the run's folder, or a trace; `passes`: one or several patterns for the names of a
    profiler's ranges and functions. Raise `BadInput` if it cannot be read.
    """
    trace, figures = read_and_analyze(run, passes)
    return RunAnalysis(figures, trace)


def _list_notes(analysis: Analysis, run: RunMetadata) -> list[str]:
    least = min(
        (link["latency_ns"]["min"] for link in analysis["links"] if link["latency_ns"]), default=0
    )
    has_one_device = any("covers" in device for device in analysis["devices"])
    replicas = run.replicas or 1
    notes = (
        (has_one_device, WHY_NOT_BY_IPU),
        (
            run.waits_for_actions,
            f"{run.backend}: in updates that are traced the host waits for each action, so that no "
            "two run at once: bubble, bottleneck and speed are the trace's, not the run's; an "
            "action's first time includes its compilation",
        ),
        (
            run.modelled and replicas > 1,
            f"the simulation shows one of {replicas} replicas, which all do the same",
        ),
        (run.why_no_method, run.why_no_method),
        (
            least < 0,
            f"the clocks of ranks disagree: a message arrived {-least} ns before it was sent",
        ),
        (
            analysis["critical_path"] is None and not has_one_device,
            f"no critical path: the trace has more than {MOST_WALKED:,} events",
        ),
        (
            run.modelled and analysis["spread"] is None,
            "the trace has no spread of its modelled times: stages may differ by chance",
        ),
        (not analysis["links"], "no message has a source and a target: no links"),
        (not analysis["memory"], "no memory counters"),
    )
    return [note for applies, note in notes if applies]
