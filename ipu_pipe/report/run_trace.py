"""Where no device has a clock: the schedule, laid out in time by the clock with each stage's measured passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

import numpy as np

from ipu_pipe.backends.interface import Report
from ipu_pipe.hardware.profiling import StageSeconds
from ipu_pipe.job.evaluation import Position
from ipu_pipe.job.record import Job, make_trace_metadata
from ipu_pipe.model.flops import BACKWARD
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, Times, clock
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.trace import chrome
from ipu_pipe.trace import chrome as trace
from ipu_pipe.trace.events import Counters, Events, TraceMetadata
from ipu_pipe.trace.modelled import build_modelled_events
from ipu_pipe.trace.store import SUFFIX, TraceWriter

PLAYED = (
    40_000  # passes of a stage's forwards by which a run's time is known; the rest follows on the line through them
)


class CostsOfStages(NamedTuple):
    """What the clock is given, in seconds, and how that was come by; whether it was measured."""

    costs: Costs
    why: str
    measured: bool


def choose_stage_costs(job: Job, seconds: Optional[StageSeconds], position: Position) -> CostsOfStages:
    """Of the stages as measured; else as their FLOPs divide what a microbatch took."""
    why = "the emulator runs all stages in one process, where no device has a clock: times are the schedule's by the clock, with"
    if seconds is not None and seconds.forward and any(seconds.forward + seconds.backward):
        costs = Costs(seconds.forward, seconds.backward, seconds.update)
        return CostsOfStages(costs, f"{why} each stage's passes measured here ({seconds.how})", True)
    said = f", since {seconds.how}" if seconds is not None and not seconds.forward else ""
    found = job.footprint
    forward = list(found.forward_flops)
    backward = list(found.backward_flops or [BACKWARD * each for each in forward])
    whole = sum(forward) + sum(backward)
    if not whole:
        forward, backward, whole = [1.0] * len(job.part), [1.0] * len(job.part), 2.0 * len(job.part)
    took = position.seconds / position.timed_updates if position.timed_updates else 1.0
    scale = took / (job.schedule.accumulate * job.config.replicas) / whole
    costs = Costs([scale * f for f in forward], [scale * b for b in backward], [0.0] * len(job.part))
    return CostsOfStages(costs, f"{why} each stage's FLOPs as its share of what a microbatch took{said}", False)


# ---- busy share


class ModelledRates(NamedTuple):
    """Over a whole run, by the clock: the share of the devices' time in passes and updates, and the samples of a second."""

    utilization: float
    samples_per_second: float


def compute_modelled_rates(job: Job, costs: Costs) -> ModelledRates:
    """busy / (devices x span), and samples / span. A warm-up by GPipe and what follows are played each for itself."""
    busy = span = 0.0
    for _, updates, schedule in job.list_phases():
        microbatches = updates * schedule.accumulate
        busy += microbatches * (sum(costs.forward) + sum(costs.backward)) + updates * sum(costs.update)
        span += compute_played_seconds(schedule, costs, microbatches)
    devices = len(set(job.schedule.device_of_stage))
    return ModelledRates(busy / (span * devices), job.updates * job.batch / span)


def compute_played_seconds(schedule: Schedule, costs: Costs, microbatches: int) -> float:
    """How long so many microbatches take: as played, of many the first and last ones by the clock, those between on the line."""
    batch = schedule.accumulate
    known = min(schedule.microbatches, microbatches)
    most = max(PLAYED // schedule.stages, 8 * schedule.stages, 4 * batch) // (2 * batch) * 2 * batch
    if known <= most:
        seconds = clock(schedule, costs, known).finish
        return seconds * (microbatches / known)  # a schedule of one batch that is repeated
    times = clock(schedule, costs, most)
    half, whole = _finish(times, most // 2, batch), times.finish
    return whole + (microbatches - most) * (whole - half) / (most - most // 2)


def _finish(times: Times, count: int, batch: int) -> float:
    """When the first `count` microbatches are through."""
    ends = [end[:, : count // batch if kind is Kind.UPDATE else count] for kind, end in times.end.items()]
    return max(float(end.max()) for end in ends if end.size)


# ---- the trace


def write_modelled_trace(job: Job, folder: Path, found: CostsOfStages) -> None:
    """Write the trace of the updates that `log.trace` names into a run's folder, as columns and for Chrome."""
    schedule, batch = job.schedule, job.schedule.accumulate
    count = min(schedule.microbatches, job.traced.stop * batch)
    told: TraceMetadata = {**make_trace_metadata(job), "modelled": True, "why_modelled": found.why}
    events, counters = build_modelled_events(
        clock(schedule, found.costs, count),
        (job.table.forward(0, count), job.table.backward(0, count)),
        accumulate=batch,
        unit_ns=1e9,
        device_of_stage=schedule.device_of_stage,
        boundary_bytes=job.footprint.boundary_bytes,
        gradients_cross=told["gradients_cross"],
        updates=job.traced,
    )
    store = TraceWriter(folder / "trace" / f"modelled{SUFFIX}", dict(told))
    store.write_events(events)
    store.write_counters(counters)
    store.close()
    chrome.write_chrome(folder / "trace.json.gz", events, counters, dict(told))


def write_measured_trace(job: Job, path: Path, measured: Report) -> None:
    """Write what the devices did, in the updates that `log.trace` names (the metadata say which)."""
    assert measured.events is not None
    _write_measured(job, path, measured.events, measured.counters)


def _write_measured(job: Job, path: Path, events: Events, counters: Optional[Counters]) -> None:
    """The events of all devices, from the first one on."""
    begin = int(events.start.min()) if len(events.start) else 0
    events = events._replace(start=events.start - begin, end=events.end - begin)
    events = events.select(np.argsort(events.start, kind="stable"))
    values = counters._replace(time=counters.time - begin) if counters is not None else Counters.from_rows([])
    metadata: Dict[str, Any] = {**make_trace_metadata(job), "modelled": False}
    trace.write_chrome(path, events, values, metadata)
