"""The events of a schedule whose actions went by the clock."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.schedule.actions import PASSES, Kind
from ipu_pipe.schedule.clock import Times
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.trace.events import Counter, Event


def modelled_events(
    times: Times,
    versions: Tuple[IntArray, IntArray],
    accumulate: int,
    unit_ns: float,
    device_of_stage: Sequence[int],
    boundary_bytes: Optional[Sequence[int]] = None,
    gradients_cross: bool = True,
) -> Tuple[List[Event], List[Counter]]:
    """Events and in-flight counters of a schedule whose actions went by `times`, a unit of which takes `unit_ns`.

    `versions`: of each forward and of each backward (P, M). `boundary_bytes[s]`: what goes from stage s to s + 1, None if not
    known; back the same unless `gradients_cross` is false. The counters tell, for each device, the microbatches in flight,
    summed over its stages.
    """
    start, end = (
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()} for column in times[:2]
    )
    events: List[Event] = []
    for s, device in enumerate(device_of_stage):
        onward = boundary_bytes[s] if boundary_bytes is not None and s < len(device_of_stage) - 1 else None
        back = boundary_bytes[s - 1] if boundary_bytes is not None and s and gradients_cross else None
        forwards, backwards, updates = (
            list(zip(start[kind][s].tolist(), end[kind][s].tolist())) for kind in (*PASSES, Kind.UPDATE)
        )
        for m, ((begin, done), version) in enumerate(zip(forwards, versions[0][s].tolist())):
            events.append(Event(s, device, Kind.FORWARD.word, m, begin, done, version, onward))
        for m, ((begin, done), version) in enumerate(zip(backwards, versions[1][s].tolist())):
            events.append(Event(s, device, Kind.BACKWARD.word, m, begin, done, version, back))
            if (m + 1) % accumulate == 0:
                k = m // accumulate
                events.append(Event(s, device, Kind.UPDATE.word, k, *updates[k], k + 1, None))
    counters: List[Counter] = []
    for device in dict.fromkeys(device_of_stage):
        stages = [s for s, place in enumerate(device_of_stage) if place == device]
        counters += _in_flight(device, end[Kind.FORWARD][stages].ravel(), end[Kind.BACKWARD][stages].ravel())
    return events, counters


def _in_flight(device: int, f_end: IntArray, b_end: IntArray) -> List[Counter]:
    """Microbatches whose activations a device holds: from the end of the forward to the end of the backward."""
    times = np.concatenate([f_end, b_end])
    steps = np.concatenate([np.ones(len(f_end), np.int64), -np.ones(len(b_end), np.int64)])
    order = np.argsort(times, kind="stable")
    values, times = np.cumsum(steps[order]), times[order]
    last = np.append(times[1:] != times[:-1], True)  # of those at one time, the last stands
    return [
        Counter(device, "microbatches in flight", t, v) for t, v in zip(times[last].tolist(), values[last].tolist())
    ]
