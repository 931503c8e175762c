"""The trace of a run: what the devices did, or, where they have no clocks of their own, the schedule as executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.position import Position
from ipu_pipe.job.record import Job
from ipu_pipe.schedule import clock
from ipu_pipe.trace import chrome as trace
from ipu_pipe.trace.modelled import modelled_events


def _slot_ns(job: Job, position: Position) -> float:
    """Measured mean time of a slot: the emulator does all stages' work in turn, so a slot stands for P stages' share."""
    if not position.timed_updates:
        return 1e6
    seconds = position.seconds / position.timed_updates * job.updates
    return 1e9 * seconds / job.schedule.slot_count


def write_trace(job: Job, path: Path, position: Position, measured: Report) -> None:
    """Write what the devices did, or, where they have no clocks of their own, the schedule as executed; of long runs the first
    microbatches (the metadata say which)."""
    schedule, table = job.schedule, job.table
    count = min(schedule.microbatches, job.config.log.trace_microbatches)
    batch = schedule.accumulate
    if count < schedule.microbatches:
        count = max(batch, count // batch * batch)
    metadata: Dict[str, Any] = {
        "method": job.method.name,
        "stages": len(job.part),
        "microbatches": schedule.microbatches,
        "traced_microbatches": count,
        "gradients_cross": job.method.structure is None,
    }
    if measured.events is not None:
        begin = min((event.start_ns for event in measured.events), default=0)
        events = [e._replace(start_ns=e.start_ns - begin, end_ns=e.end_ns - begin) for e in measured.events]
        values = [c._replace(time_ns=c.time_ns - begin) for c in measured.counters]
        trace.write_chrome(path, sorted(events, key=lambda e: e.start_ns), values, {**metadata, "modelled": False})
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
