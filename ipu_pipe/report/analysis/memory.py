"""The memory of devices over time, from the counters: bytes by category, and what made up the greatest sum."""

from __future__ import annotations

from typing import Any, Dict, List

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import MEMORY, Counters, Events, group_places

IMPLAUSIBLE = 2.0**60  # bytes; NaN is ignored too
MOST_POINTS = 400
MOST_MICROBATCHES = 64
_COMPLETING = (Kind.BACKWARD.word, Kind.WEIGHT_GRADIENT.word)


def measure_memory(counters: Counters, events: Events, begin_ns: int) -> List[Dict[str, Any]]:
    """Return a row for each device that has counters of memory; times count from `begin_ns`."""
    codes = [code for code, name in enumerate(counters.names) if name in MEMORY.values()]
    chosen = np.flatnonzero(np.isin(counters.name, codes) & (np.abs(counters.value) < IMPLAUSIBLE))
    events_of_device = dict(group_places(events.device))
    nothing = np.zeros(0, np.intp)
    return [
        _measure_device(device, counters.select(chosen[places]), events.select(events_of_device.get(device, nothing)), begin_ns)
        for device, places in group_places(counters.device[chosen])
    ]  # fmt: skip


def _measure_device(device: int, counters: Counters, events: Events, begin_ns: int) -> Dict[str, Any]:
    counters = counters.select(np.argsort(counters.time, kind="stable"))
    change = np.zeros(len(counters.value))
    for _, places in group_places(counters.name):
        change[places] = np.diff(counters.value[places], prepend=0.0)
    # of several changes at one time all together
    is_last = np.append(counters.time[1:] != counters.time[:-1], True)
    times, total = counters.time[is_last], np.rint(np.cumsum(change)[is_last]).astype(np.int64)
    peak = int(total.argmax())
    at = int(times[peak])
    bytes_by_name: Dict[str, int] = {}
    for code, places in group_places(counters.name):
        before = places[counters.time[places] <= at]
        bytes_by_name[counters.names[code]] = int(counters.value[before[-1]]) if len(before) else 0
    return {
        "device": device,
        "peak_bytes": int(total[peak]),
        "at_ns": at - begin_ns,
        "categories": {category: bytes_by_name[name] for category, name in MEMORY.items() if name in bytes_by_name},
        "microbatches": _list_in_flight(events, at),
        "over_time": _thin(times - begin_ns, total),
    }


def _list_in_flight(events: Events, at: int) -> List[int]:
    """Return the microbatches of which a device's events began a forward, and did not complete the backward, by a moment."""
    keys = (events.stage.astype(np.int64) << 32) + events.microbatch
    known = events.microbatch >= 0
    begun = known & (events.start <= at) & events.is_kind(Kind.FORWARD.word)
    completed = known & (events.end <= at) & events.is_kind(*_COMPLETING)
    in_flight = np.unique(np.setdiff1d(keys[begun], keys[completed]) & 0xFFFFFFFF)
    return [int(microbatch) for microbatch in in_flight[:MOST_MICROBATCHES]]


def _thin(times: NDArray[np.int64], total: NDArray[np.int64]) -> List[List[int]]:
    """Return points (time, bytes), of many the greatest bytes of each interval."""
    if len(times) > MOST_POINTS:
        edges = np.linspace(0, len(times), MOST_POINTS + 1).astype(np.int64)[:-1]
        times, total = times[edges], np.maximum.reduceat(total, edges)
    return [list(point) for point in zip(times.tolist(), total.tolist())]
