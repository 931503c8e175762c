"""The trace of a run whose devices have clocks: what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.record import Job
from ipu_pipe.trace import chrome as trace


def write_trace(job: Job, path: Path, measured: Report) -> None:
    """Write what the devices did, in the updates that `log.trace` names (the metadata say which)."""
    assert measured.events is not None
    schedule = job.schedule
    metadata: Dict[str, Any] = {
        "method": job.method.name,
        "stages": len(job.part),
        "microbatches": schedule.microbatches,
        "traced_microbatches": min(schedule.microbatches, job.traced.stop * schedule.accumulate),
        "gradients_cross": job.method.structure is None,
    }
    begin = min((event.start_ns for event in measured.events), default=0)
    events = [e._replace(start_ns=e.start_ns - begin, end_ns=e.end_ns - begin) for e in measured.events]
    values = [c._replace(time_ns=c.time_ns - begin) for c in measured.counters]
    trace.write_chrome(path, sorted(events, key=lambda e: e.start_ns), values, {**metadata, "modelled": False})
