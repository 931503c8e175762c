"""The trace of a run whose devices have clocks: what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.record import Job
from ipu_pipe.job.tracing import make_trace_metadata
from ipu_pipe.trace import chrome as trace
from ipu_pipe.trace.events import Counters, Events


def write_trace(job: Job, path: Path, measured: Report) -> None:
    """Write what the devices did, in the updates that `log.trace` names (the metadata say which)."""
    assert measured.events is not None
    _write_measured(job, path, measured.events, measured.counters)


def _write_measured(job: Job, path: Path, events: Events, counters: Optional[Counters]) -> None:
    """The events of all devices, from the first one on."""
    begin = int(events.start.min()) if len(events.start) else 0
    events = events._replace(start=events.start - begin, end=events.end - begin)
    events = events.where(np.argsort(events.start, kind="stable"))
    values = counters._replace(time=counters.time - begin) if counters is not None else Counters.of([])
    metadata: Dict[str, Any] = {**make_trace_metadata(job), "modelled": False}
    trace.write_chrome(path, events, values, metadata)
