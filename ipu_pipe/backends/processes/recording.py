"""The file of what a rank did: begun anew, or taken up by a run that goes on.

    rank-0.trace    events of updates 0 .. 7 | pause | events of updates 8 ...        resumed from the checkpoint of update 8

What an earlier start recorded after the checkpoint is left out; what it recorded before is moved to end where this one begins, as
its clock may be another one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, Optional

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes.layout import Layout
from ipu_pipe.backends.processes.timeline import Timeline
from ipu_pipe.errors import BadInput
from ipu_pipe.job.record import Job
from ipu_pipe.job.tracing import make_trace_metadata
from ipu_pipe.trace.events import Trace, find_updates
from ipu_pipe.trace.store import SUFFIX, TraceWriter, find_store_files, read_store


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank of the run in `folder` writes."""
    return folder / "trace" / f"rank-{rank}{SUFFIX}"


def record(job: Job, layout: Layout, timeline: Timeline, first_update: int, offset_ns: int) -> None:
    """Write what `timeline` holds and will hold, if the run has a folder and its config asks for it. All ranks call it at once;
    `offset_ns`: what to add to this one's clock to get rank 0's."""
    if job.folder is None or not job.traced:
        return
    path, metadata = path_of(job.folder, layout.rank), make_trace_metadata(job)
    earlier = _earlier(path, dict(metadata), first_update) if first_update else None
    _forget_others(job.folder, layout)
    end = -1 if earlier is None or not len(earlier.events.end) else int(earlier.events.end.max())
    last = torch.tensor([end, time.perf_counter_ns() if layout.rank == 0 else -1])
    dist.all_reduce(
        last, op=dist.ReduceOp.MAX
    )  # the end of the earlier start, and now: by rank 0's clocks of then and now
    timeline.write_to(TraceWriter(path, dict(metadata)), offset_ns)
    if earlier is not None and end >= 0:
        timeline.take_up(earlier, int(last[1] - last[0]) - offset_ns, first_update)


def _earlier(path: Path, metadata: Dict[str, Any], first_update: int) -> Optional[Trace]:
    """What a start before this one recorded of the updates before `first_update`, if it was cut into the same stages."""
    try:
        held = read_store(path)
    except BadInput:  # none, or damaged
        return None
    same = ("stages", "replicas", "accumulate")
    if any(held.metadata.get(key) != metadata[key] for key in same):
        return None
    chosen = find_updates(held.events, metadata["accumulate"]) < first_update
    events = held.events.select(chosen)
    until = int(events.end.max()) if len(events.end) else 0
    values = held.counters
    kept = values.time <= until
    counters = values._replace(
        device=values.device[kept], name=values.name[kept], time=values.time[kept], value=values.value[kept]
    )
    return Trace(events, counters, held.metadata)


def finished(job: Job, layout: Layout, timeline: Timeline) -> Optional[Trace]:
    """All that this rank recorded, by rank 0's clock; None where it wrote nothing."""
    timeline.close()
    return read_store(path_of(job.folder, layout.rank)) if job.folder is not None and job.traced else None


def _forget_others(folder: Path, layout: Layout) -> None:
    """Delete what ranks wrote that are no more."""
    if layout.rank == 0:
        own = {path_of(folder, rank) for rank in range(dist.get_world_size())}
        for path in find_store_files(folder):
            if path not in own:
                path.unlink()
