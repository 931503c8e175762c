"""Compute all figures of a trace as one record, from which every output (text, JSON, web page,
picture) is made.

docs/traces.md explains each figure.
"""

from __future__ import annotations

from pathlib import Path

from ipu_pipe.files import parse_path
from ipu_pipe.report.analysis.bottleneck import find_best_move, find_bottleneck
from ipu_pipe.report.analysis.devices import (
    find_span,
    measure_devices,
    measure_links,
    measure_memory,
)
from ipu_pipe.report.analysis.metadata import RunMetadata, validate_metadata
from ipu_pipe.report.analysis.stages import measure_stages, measure_staleness, sum_busy_by_device
from ipu_pipe.report.analysis.text import ALL_IPUS, WHY_NOT_BY_IPU, Analysis
from ipu_pipe.trace.events import Trace
from ipu_pipe.trace.reading import read_trace


def analyze(trace: Trace, source: str) -> Analysis:
    """Return the figures of a trace that has events, as `tools/analyze.py --json` prints them.

    `source`: its path, for messages. Raise `BadInput` for damaged metadata.
    """
    run = validate_metadata(source, trace.metadata)
    events = trace.events
    begin, end = find_span(events)
    devices, overlap = measure_devices(events, run.devices, (begin, end))
    stages, stragglers = measure_stages(events, begin, run.sum_flops())
    links = measure_links(events)
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
    loads = sum_busy_by_device(stages)
    analysis: Analysis = {
        "source": source,
        "method": run.method,
        "backend": run.backend,
        "modelled": bool(run.modelled),
        "why_modelled": run.why_modelled,
        "span_ns": end - begin,
        "begin_ns": begin,
        "devices": devices,
        "utilization": utilization,
        "bubble_fraction": None if utilization is None else 1 - utilization,
        "planned_bubble_fraction": run.planned_bubble_fraction,
        "stages": stages,
        "imbalance": 1 - sum(loads.values()) / len(loads) / max(loads.values())
        if any(loads.values())
        else None,
        "overlap": overlap,
        "bottleneck": None,
        "links": links,
        "staleness": measure_staleness(events, run.accumulate),
        "memory": measure_memory(trace.counters, events, begin),
        "stragglers": stragglers,
        "notes": [*trace.notes],
    }
    analysis["bottleneck"] = find_bottleneck(
        analysis, loads, find_best_move(run, stages, links), run
    )
    analysis["notes"] += _list_notes(analysis, run)
    return analysis


def read_and_analyze(run: str | Path) -> tuple[Trace, Analysis]:
    """Return a run's trace and its figures; `run`: the run's folder, or a trace that
    `tools/analyze.py` reads.
    """
    trace = read_trace(parse_path(run, "analyze: run"))
    return trace, analyze(trace, str(run))


def analyze_run(run: str | Path) -> Analysis:
    """Return the figures of a run's trace, as `tools/analyze.py --json` prints them.

    `run`: the run's folder, or a trace. Raise `BadInput` if it cannot be read.
    """
    return read_and_analyze(run)[1]


def _list_notes(analysis: Analysis, run: RunMetadata) -> list[str]:
    least = min(
        (link["latency_ns"]["min"] for link in analysis["links"] if link["latency_ns"]), default=0
    )
    has_one_device = any("covers" in device for device in analysis["devices"])
    replicas = run.replicas or 1
    notes = (
        (has_one_device, WHY_NOT_BY_IPU),
        (
            run.modelled and replicas > 1,
            f"the simulation shows one of {replicas} replicas, which all do the same",
        ),
        (run.why_no_method, run.why_no_method),
        (
            least < 0,
            f"the clocks of ranks disagree: a message arrived {-least} ns before it was sent",
        ),
        (not analysis["links"], "no message has a source and a target: no links"),
        (not analysis["memory"], "no memory counters"),
    )
    return [note for applies, note in notes if applies]
