"""How each device spent the span of a trace, in parts that add up to it, to the nanosecond, and what filled its memory."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, KINDS, MEMORY, OUTSIDE, WAIT, Counters, Events, group_places

HOST = "host"  # idle time of which no event tells
# A group for each kind's code: 0 compute, 1 communication, 2 wait, 3 and on OUTSIDE, of which an earlier one hides a later one
_GROUPS = (COMPUTE, COMMUNICATION, (WAIT,), *((kind,) for kind in OUTSIDE))
_GROUP_OF_KIND = np.array([next(i for i, kinds in enumerate(_GROUPS) if kind in kinds) for kind in KINDS], np.int8)

TimeColumn = NDArray[np.int64]


def find_span(events: Events) -> Tuple[int, int]:
    """Return the start of the first event and the end of the last one."""
    return int(events.start.min()), int(events.end.max())


def measure_devices(
    events: Events, devices: Sequence[int], span: Tuple[int, int]
) -> Tuple[List[Dict[str, Any]], Dict[str, Any]]:
    """Divide the span of each device that has events, and of each of `devices`, into parts that docs/traces.md defines.

    Return the analysis's rows of devices, and of the communication of all what lies under compute.
    """
    places = {**dict.fromkeys(devices, np.zeros(0, np.intp)), **dict(group_places(events.device))}
    rows, messages = zip(*(_measure_device(device, events.select(places[device]), span) for device in sorted(places)))
    messages_ns, hidden_ns = (sum(column) for column in zip(*messages))
    share = hidden_ns / messages_ns if messages_ns else None
    return list(rows), {"communication_ns": messages_ns, "hidden_ns": hidden_ns, "share": share}


def _measure_device(device: int, events: Events, span: Tuple[int, int]) -> Tuple[Dict[str, Any], Tuple[int, int]]:
    """Return the row of a device, all its time in communication, and the part of that which lies under compute."""
    group = _GROUP_OF_KIND[events.kind]

    def find_intervals(which: int) -> Intervals:
        chosen = group == which
        return merge_intervals(events.start[chosen], events.end[chosen])

    is_pass = group == 0
    first, last = find_span(events.select(is_pass)) if is_pass.any() else span
    compute, messages = find_intervals(0), find_intervals(1)
    worked = compute.unite(messages)
    inside = worked.clip(first, last)
    waits_for, waited = _measure_waits(events.select(group == 2), inside, (first, last))
    # each further set counts where none of the earlier ones covers it
    covered, outside, idle_in = inside.unite(waited), Intervals(*np.zeros((2, 0), np.int64)), {}
    for which, kind in enumerate(OUTSIDE, start=3):
        intervals = find_intervals(which)
        wider = covered.unite(intervals.clip(first, last))
        idle_in[kind] = wider.length - covered.length
        covered, outside = wider, outside.unite(intervals)
    wait_ns, outside_in_ramps = sum(waits_for.values()), outside.length - outside.clip(first, last).length
    idle_ns = last - first - inside.length - wait_ns
    outside_ns = outside_in_ramps + sum(idle_in.values())
    idle_in[HOST] = idle_ns - sum(idle_in.values())
    training_ns = span[1] - span[0] - outside_ns
    row = {
        "index": device,
        "stages": np.unique(events.stage[events.stage >= 0]).tolist(),
        "busy_ns": compute.length,
        "busy_ns_by_stage": _measure_busy_by_stage(events.select(is_pass & (events.stage >= 0))),
        "wait_ns": wait_ns,
        "communication_ns": inside.length - compute.length,
        "ramp_up_ns": first - span[0],
        "ramp_down_ns": span[1] - last,
        "idle_ns": idle_ns,
        "waits_for": {str(who) if who >= 0 else "unknown": ns for who, ns in waits_for.items()},
        "idle_in": idle_in,
        "outside_ns": outside_ns,
        "utilization": compute.length / training_ns if training_ns else None,
    }
    return row, (messages.length, messages.length - (worked.length - compute.length))


def _measure_busy_by_stage(passes: Events) -> Dict[str, int]:
    times = ((stage, passes.select(places)) for stage, places in group_places(passes.stage))
    return {str(stage): merge_intervals(of_stage.start, of_stage.end).length for stage, of_stage in times}


def _measure_waits(waits: Events, worked: Intervals, window: Tuple[int, int]) -> Tuple[Dict[int, int], Intervals]:
    """Return the time within the window in which a device waited and did nothing else, by the device waited for; and the waits
    themselves. Where waits overlap, the time is that of the one that began first."""
    start, end, order = _share_overlaps(waits.start, waits.end)
    start, end = np.maximum(start, window[0]), np.minimum(end, window[1])
    inside = end > start
    start, end, peer = start[inside], end[inside], waits.peer[order[inside]]
    lengths = end - start - (worked.measure_before(end) - worked.measure_before(start))
    sums = {device: int(lengths[places].sum()) for device, places in group_places(peer)}
    return {device: ns for device, ns in sums.items() if ns}, Intervals(start, end)


# ---- sets of moments as disjoint intervals, so that unions and differences are a few array operations


class Intervals(NamedTuple):
    """Disjoint intervals in order, none empty: from each `start` up to, not including, its `end`."""

    start: TimeColumn
    end: TimeColumn

    @property
    def length(self) -> int:
        """Return the sum of the lengths."""
        return int((self.end - self.start).sum())

    def clip(self, begin: int, end: int) -> Intervals:
        """Return what lies between two moments."""
        start, stop = np.maximum(self.start, begin), np.minimum(self.end, end)
        inside = stop > start
        return Intervals(start[inside], stop[inside])

    def unite(self, other: Intervals) -> Intervals:
        """Return the union of two sets."""
        return merge_intervals(np.concatenate([self.start, other.start]), np.concatenate([self.end, other.end]))

    def measure_before(self, moments: Any) -> TimeColumn:
        """Return how much of the intervals lies before each of `moments`."""
        sums = np.concatenate([[0], np.cumsum(self.end - self.start)])
        place = np.searchsorted(self.start, moments, side="right")
        last_end = np.concatenate([[np.iinfo(np.int64).min], self.end])[place]
        return np.asarray(sums[place] - np.where(last_end > moments, last_end - moments, 0), np.int64)


def merge_intervals(start: TimeColumn, end: TimeColumn) -> Intervals:
    """Return the union of intervals that may overlap, be empty, and be in any order."""
    longer = end > start
    start, end = start[longer], end[longer]
    if not len(start):
        return Intervals(start, end)
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return Intervals(start[begins], reach[np.concatenate([begins[1:] - 1, [len(reach) - 1]])])


def _share_overlaps(start: TimeColumn, end: TimeColumn) -> Tuple[TimeColumn, TimeColumn, NDArray[np.intp]]:
    """Cut intervals so that each moment belongs to the one that began first. Return starts, ends, and the indices of the
    originals."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    start = np.maximum(start, np.concatenate([start[:1], reach[:-1]]))
    left = end > start
    return start[left], end[left], order[left]


# ---- memory, from the counters: bytes by category, and what made up the greatest sum

IMPLAUSIBLE = 2.0**60  # bytes; NaN is ignored too
MOST_POINTS = 400
MOST_MICROBATCHES = 64
_COMPLETING = (Kind.BACKWARD.word, Kind.WEIGHT_GRADIENT.word)


def measure_memory(counters: Counters, events: Events, begin_ns: int) -> List[Dict[str, Any]]:
    """Return a row for each device that has counters of memory; times count from `begin_ns`."""
    chosen = np.flatnonzero(np.isin(counters.name, [*MEMORY.values()]) & (np.abs(counters.value) < IMPLAUSIBLE))
    by_device = {device: events.select(places) for device, places in group_places(events.device)}
    nothing = events.select(slice(0))
    return [
        _measure_device_memory(device, counters.select(chosen[places]), by_device.get(device, nothing), begin_ns)
        for device, places in group_places(counters.device[chosen])
    ]


def _measure_device_memory(device: int, counters: Counters, events: Events, begin_ns: int) -> Dict[str, Any]:
    counters = counters.select(np.argsort(counters.time, kind="stable"))
    change, places_of = np.zeros(len(counters.value)), {}
    for category, name in MEMORY.items():
        places_of[category] = places = np.flatnonzero(counters.name == name)
        change[places] = np.diff(counters.value[places], prepend=0.0)
    # of several changes at one time all together
    is_last = np.append(counters.time[1:] != counters.time[:-1], True)
    times, total = counters.time[is_last], np.rint(np.cumsum(change)[is_last]).astype(np.int64)
    peak = int(total.argmax())
    at = int(times[peak])
    categories: Dict[str, int] = {}
    for category, places in places_of.items():
        before = places[counters.time[places] <= at]
        if len(places):
            categories[category] = int(counters.value[before[-1]]) if len(before) else 0
    return {
        "device": device,
        "peak_bytes": int(total[peak]),
        "at_ns": at - begin_ns,
        "categories": categories,
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
