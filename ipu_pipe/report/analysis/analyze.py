"""All figures of a trace as one record, which text, JSON, page and picture show. docs/traces.md says what each number means."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from ipu_pipe.report.analysis.bottleneck import BottleneckEvidence, find_bottleneck
from ipu_pipe.report.analysis.boundaries import find_best_move
from ipu_pipe.report.analysis.device_time import DeviceTime, find_span, measure_devices
from ipu_pipe.report.analysis.facts import RunFacts, read_run_facts
from ipu_pipe.report.analysis.links import LinkTraffic, measure_links
from ipu_pipe.report.analysis.memory import measure_memory
from ipu_pipe.report.analysis.stages import (
    StageTimes,
    infer_accumulate,
    infer_placement,
    measure_stages,
    measure_staleness,
    sum_busy_by_device,
)
from ipu_pipe.trace.events import Trace

Figures = Dict[str, Any]


def analyze(trace: Trace, source: str) -> Figures:
    """Return the figures of a trace that has events, as `tools/analyze.py --json` prints them; `source`: where it is from. Raise
    `BadInput` for metadata that no run writes."""
    facts, events = read_run_facts(source, trace.metadata), trace.events
    begin, end = find_span(events)
    devices = measure_devices(events, facts.devices, (begin, end))
    stages = measure_stages(events, begin)
    links = measure_links(events, facts.device_of_stage or infer_placement(stages), facts.gradients_cross is not False)
    accumulate = facts.accumulate or infer_accumulate(events)
    memory = measure_memory(trace.counters, events, begin)
    training_ns = sum(device.training_ns for device in devices)
    utilization = sum(device.busy_ns for device in devices) / training_ns if training_ns else None
    bubble, planned = None if utilization is None else 1 - utilization, facts.plan_bubble_fraction()
    loads = sum_busy_by_device(stages)
    move = find_best_move(facts, stages, links, accumulate)
    evidence = BottleneckEvidence(devices, stages, links, loads, move, facts, bubble, planned)
    messages_ns = sum(device.messages_ns for device in devices)
    hidden_ns = sum(device.hidden_ns for device in devices)
    overlap = {
        "communication_ns": messages_ns,
        "hidden_ns": hidden_ns,
        "share": hidden_ns / messages_ns if messages_ns else None,
    }
    return {
        "source": source,
        "method": facts.method,
        "backend": facts.backend,
        "modelled": bool(facts.modelled),
        "why_modelled": facts.why_modelled,
        "span_ns": end - begin,
        "begin_ns": begin,
        "devices": [_record_device(device) for device in devices],
        "utilization": utilization,
        "bubble_fraction": bubble,
        "planned_bubble_fraction": planned,
        "stages": _record_stages(stages, facts),
        "imbalance": 1 - sum(loads.values()) / len(loads) / max(loads.values()) if any(loads.values()) else None,
        "overlap": overlap,
        "bottleneck": find_bottleneck(evidence),
        "links": [_record_link(link) for link in links],
        "staleness": measure_staleness(events, accumulate),
        "memory": memory,
        "stragglers": [group for stage in stages for group in stage.stragglers],
        "notes": _list_notes(trace, facts, links, memory),
    }


def _record_device(device: DeviceTime) -> Figures:
    record = device._asdict()
    for key in ("device", "messages_ns", "hidden_ns"):
        del record[key]
    record["waits_for"] = {str(who) if who >= 0 else "unknown": ns for who, ns in device.waits_for.items()}
    utilization = device.busy_ns / device.training_ns if device.training_ns else None
    return {"index": device.device, **record, "stages": list(device.stages), "utilization": utilization}


def _record_stages(stages: Sequence[StageTimes], facts: RunFacts) -> List[Figures]:
    busy = [stage.busy_ns_per_microbatch for stage in stages]
    longest = None if None in busy else max((ns for ns in busy if ns is not None), default=None)
    flops = facts.sum_flops()
    return [_record_stage(stage, longest, flops.get(stage.stage)) for stage in stages]


def _record_stage(stage: StageTimes, longest: Optional[float], flops: Optional[float]) -> Figures:
    busy = stage.busy_ns_per_microbatch
    rate = flops * stage.microbatches / stage.passes_ns * 1e9 if flops is not None and stage.passes_ns else None
    return {
        "index": stage.stage,
        "devices": list(stage.devices),
        "microbatches": stage.microbatches or None,
        "forward_ns": stage.forward_ns,
        "backward_ns": stage.backward_ns,
        "update_ns": stage.update_ns,
        "busy_ns": stage.busy_ns,
        "busy_ns_per_microbatch": busy,
        "of_greatest": busy / longest if busy is not None and longest else None,
        "flops_per_microbatch": flops,
        "flops_per_second": rate if stage.microbatches else None,
    }


def _record_link(link: LinkTraffic) -> Figures:
    record = link._asdict()
    del record["busy_ns_per_microbatch"]
    return {**record, "latency_ns": link.latency_ns._asdict() if link.latency_ns else None}


def _list_notes(trace: Trace, facts: RunFacts, links: Sequence[LinkTraffic], memory: Sequence[Figures]) -> List[str]:
    notes = [*trace.notes]
    notes += [facts.why_no_method] if facts.why_no_method else []
    least = min((link.latency_ns.min for link in links if link.latency_ns), default=0)
    if least < 0:
        notes.append(f"the clocks of ranks disagree: a message arrived {-least} ns before it was sent")
    notes += [] if links else ["no message has a source and a target: no links"]
    notes += [] if memory else ["no counters of memory"]
    return notes
