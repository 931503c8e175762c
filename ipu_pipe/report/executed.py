"""The trace of a run: what the devices did, or, where they have no clocks of their own, the schedule as executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.position import Position
from ipu_pipe.job.record import Job
from ipu_pipe.job.tracing import trace_metadata
from ipu_pipe.schedule import clock
from ipu_pipe.trace import chrome as trace
from ipu_pipe.trace.events import Counters, Events
from ipu_pipe.trace.modelled import modelled_events


def _slot_ns(job: Job, position: Position) -> float:
    """Measured mean time of a slot: the emulator does all stages' work in turn, so a slot stands for P stages' share."""
    if not position.timed_updates:
        return 1e6
    seconds = position.seconds / position.timed_updates * job.updates
    return 1e9 * seconds / job.schedule.slot_count


def _write_measured(job: Job, path: Path, events: Events, counters: Optional[Counters]) -> None:
    """The events of all devices, from the first one on."""
    begin = int(events.start.min()) if len(events.start) else 0
    events = events._replace(start=events.start - begin, end=events.end - begin)
    events = events.where(np.argsort(events.start, kind="stable"))
    values = counters._replace(time=counters.time - begin) if counters is not None else Counters.of([])
    metadata: Dict[str, Any] = {**trace_metadata(job), "modelled": False}
    trace.write_chrome(path, events, values, metadata)


def write_trace(job: Job, path: Path, position: Position, measured: Report) -> None:
    """Write what the devices did, or, where they have no clocks of their own, the schedule as executed; of long runs the first
    microbatches (the metadata say which). Nothing where `log.trace` is off."""
    if not job.traced:
        return
    schedule, table = job.schedule, job.table
    batch = schedule.accumulate
    count = min(schedule.microbatches, job.traced.stop * batch)
    metadata: Dict[str, Any] = {
        "method": job.method.name,
        "stages": len(job.part),
        "microbatches": schedule.microbatches,
        "traced_microbatches": count,
        "gradients_cross": job.method.structure is None,
    }
    if measured.events is not None:
        _write_measured(job, path, measured.events, measured.counters)
        return
    slot_ns = _slot_ns(job, position)
    events, counters = modelled_events(
        clock.clock(schedule, clock.slot_costs(schedule), count),
        (table.forward(0, count), table.backward(0, count)),
        accumulate=batch,
        unit_ns=slot_ns,
        device_of_stage=schedule.device_of_stage,
        boundary_bytes=job.footprint.boundary_bytes,
        gradients_cross=job.method.structure is None,
    )
    why = "the emulator runs all stages in one process: times are slots times the measured mean slot"
    trace.write_chrome(path, events, counters, {**metadata, "modelled": True, "why_modelled": why, "slot_ns": slot_ns})
