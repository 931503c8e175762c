"""All numbers of a trace, as `tools/analyze.py --json` prints them. docs/traces.md says what each means."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_pipe.report.analysis import bottleneck
from ipu_pipe.report.analysis.boundaries import BoundaryMove, find_best_move
from ipu_pipe.report.analysis.device_time import DeviceTime, find_span, measure_devices
from ipu_pipe.report.analysis.facts import RunFacts, read_run_facts
from ipu_pipe.report.analysis.links import LinkTraffic, measure_links
from ipu_pipe.report.analysis.memory import DeviceMemory, measure_memory
from ipu_pipe.report.analysis.stages import (
    StageStaleness,
    StageTimes,
    StragglerGroup,
    VersionLag,
    infer_accumulate,
    measure_stages,
    measure_staleness,
    sum_busy_by_device,
)
from ipu_pipe.trace.events import Trace

Figures = Dict[str, Any]


def analyze(trace: Trace, source: str) -> Figures:
    """The figures of a trace that has events; `source`: where it is from. Raises BadInput where its metadata cannot be."""
    facts, events = read_run_facts(source, trace.metadata), trace.events
    span = find_span(events)
    parts = measure_devices(events, facts.devices, span)
    stages = measure_stages(events)
    placed = facts.device_of_stage or _placed(stages)
    links = measure_links(events, placed, facts.gradients_cross)
    accumulate = facts.accumulate or infer_accumulate(events)
    stale = measure_staleness(events, accumulate)
    memory = measure_memory(trace.counters, events)
    own, busy = sum(part.own_ns for part in parts), sum(part.busy_ns for part in parts)
    used = busy / own if own else None
    bubble = None if used is None else 1 - used
    planned = facts.planned_bubble_fraction()
    loads = sum_busy_by_device(stages)
    imbalance = 1 - sum(loads.values()) / len(loads) / max(loads.values()) if any(loads.values()) else None
    move = find_best_move(facts, stages, links, accumulate)
    seen = bottleneck.BottleneckEvidence(parts, stages, links, loads, move, facts, bubble, planned)
    messages, hidden = sum(part.messages_ns for part in parts), sum(part.hidden_ns for part in parts)
    return {
        "source": source,
        "method": facts.name,
        "backend": facts.backend,
        "modelled": facts.modelled,
        "why_modelled": facts.why_modelled,
        "span_ns": span[1] - span[0],
        "begin_ns": span[0],
        "devices": [_device(part) for part in parts],
        "utilization": used,
        "bubble_fraction": bubble,
        "planned_bubble_fraction": planned,
        "stages": _stages(stages, facts),
        "imbalance": imbalance,
        "overlap": {
            "communication_ns": messages,
            "hidden_ns": hidden,
            "share": hidden / messages if messages else None,
        },
        "bottleneck": _bottleneck(bottleneck.find_bottleneck(seen), move),
        "links": [_link(link) for link in links],
        "staleness": [_staleness(each) for each in stale],
        "memory": [_memory(each, span[0]) for each in memory],
        "stragglers": [_stragglers(each, span[0]) for stage in stages for each in stage.stragglers],
        "notes": _notes(trace, facts, links, memory),
    }


def _placed(stages: Sequence[StageTimes]) -> Tuple[int, ...]:
    """Where stages are, where every one is seen on one device; else nothing."""
    ones = [stage.devices[0] for stage in stages if len(stage.devices) == 1]
    whole = len(ones) == len(stages) and [stage.stage for stage in stages] == list(range(len(stages)))
    return tuple(ones) if whole else ()


def _device(part: DeviceTime) -> Figures:
    told = {name: getattr(part, name) for name in DeviceTime._fields if name.endswith("_ns") or name == "idle_in"}
    for name in ("messages_ns", "hidden_ns"):
        del told[name]
    waits = {str(device) if device >= 0 else "unknown": ns for device, ns in part.waits_for.items()}
    used = part.busy_ns / part.own_ns if part.own_ns else None
    return {"index": part.device, "stages": list(part.stages), **told, "waits_for": waits, "utilization": used}


def _stages(stages: Sequence[StageTimes], facts: RunFacts) -> List[Figures]:
    busy = [stage.each_ns for stage in stages]
    longest = None if None in busy else max((ns for ns in busy if ns is not None), default=None)
    flops = facts.flops()
    return [_stage(stage, longest, flops.get(stage.stage)) for stage in stages]


def _stage(stage: StageTimes, longest: Optional[float], flops: Optional[float]) -> Figures:
    rate = flops * stage.microbatches / stage.passes_ns * 1e9 if flops is not None and stage.passes_ns else None
    return {
        "index": stage.stage,
        "devices": list(stage.devices),
        "microbatches": stage.microbatches or None,
        "forward_ns": stage.forward_ns,
        "backward_ns": stage.backward_ns,
        "update_ns": stage.update_ns,
        "busy_ns": stage.busy_ns,
        "busy_ns_per_microbatch": stage.each_ns,
        "of_greatest": stage.each_ns / longest if stage.each_ns is not None and longest else None,
        "flops_per_microbatch": flops,
        "flops_per_second": rate if stage.microbatches else None,
    }


def _bottleneck(found: Optional[bottleneck.Bottleneck], move: BoundaryMove) -> Optional[Figures]:
    if found is None:
        return None
    told = ("begins_now", "begins_then", "busy_now_ns", "busy_then_ns")
    return {
        **found._asdict(),
        "gain": move.gain,
        "why_no_gain": move.why_not or None,
        "gain_if_balanced": move.if_balanced,
        "move": {key: list(getattr(move, key)) for key in told} if move.gain is not None else None,
    }


def _link(link: LinkTraffic) -> Figures:
    took = link.latency
    return {
        "src": link.source,
        "dst": link.target,
        "carries": link.carries,
        "messages": link.messages,
        "bytes": link.bytes,
        "bytes_per_microbatch": link.bytes_per_microbatch,
        "busy_ns": link.busy_ns,
        "latency_ns": {"waited": took.waited, "min": took.min_ns, "median": took.median_ns} if took else None,
        "counted": link.counted,
    }


def _staleness(each: StageStaleness) -> Figures:
    def lag(found: Optional[VersionLag]) -> Optional[Figures]:
        return None if found is None else found._asdict()

    return {
        "stage": each.stage,
        "forward_versions": lag(each.forward),
        "backward_versions": lag(each.backward),
        "time_ns": None if each.time_ns is None else {"median": each.time_ns[0], "greatest": each.time_ns[1]},
    }


def _memory(each: DeviceMemory, begin: int) -> Figures:
    return {
        "device": each.device,
        "peak_bytes": each.peak_bytes,
        "at_ns": each.at_ns - begin,
        "categories": each.categories,
        "microbatches": list(each.microbatches),
        "over_time": [[at - begin, held] for at, held in each.over_time],
    }


def _stragglers(each: StragglerGroup, begin: int) -> Figures:
    longest = [
        {"microbatch": m if m >= 0 else None, "at_ns": at - begin, "duration_ns": took} for m, at, took in each.longest
    ]
    return {**vars(each), "longest": longest}


def _notes(trace: Trace, facts: RunFacts, links: Sequence[LinkTraffic], memory: Sequence[DeviceMemory]) -> List[str]:
    notes = list(trace.notes)
    if facts.why_no_method:
        notes.append(facts.why_no_method)
    if any(link.latency and link.latency.min_ns < 0 for link in links):
        least = -min(link.latency.min_ns for link in links if link.latency)
        notes.append(f"clocks of ranks disagree: a message came {least} ns before it was sent")
    if not links:
        notes.append("no message has a source and a target: no links")
    if not memory:
        notes.append("no counters of memory")
    return notes
