"""How each device spent the span of a trace: parts that add up to it, to the nanosecond."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, KINDS, OUTSIDE, WAIT, Events, group_places

HOST = "host"  # idle time of which no event tells
# A group for each kind's code: 0 compute, 1 communication, 2 wait, 3 and on OUTSIDE, of which an earlier one hides a later one
_GROUPS = (COMPUTE, COMMUNICATION, (WAIT,), *((kind,) for kind in OUTSIDE))
_GROUP_OF_KIND = np.array([next(i for i, kinds in enumerate(_GROUPS) if kind in kinds) for kind in KINDS], np.int8)

TimeColumn = NDArray[np.int64]


class DeviceTime(NamedTuple):
    """The parts of a device's span; docs/traces.md defines them. `waits_for`: by device, -1 where the trace does not say which.
    `hidden_ns`: of `messages_ns`, all time in communication, what lies under compute."""

    device: int
    stages: Tuple[int, ...]
    busy_ns: int
    wait_ns: int
    communication_ns: int
    ramp_up_ns: int
    ramp_down_ns: int
    idle_ns: int
    waits_for: Dict[int, int]
    idle_in: Dict[str, int]
    outside_ns: int
    messages_ns: int
    hidden_ns: int

    @property
    def span_ns(self) -> int:
        """Return the sum of the parts."""
        return self.busy_ns + self.wait_ns + self.communication_ns + self.ramp_up_ns + self.ramp_down_ns + self.idle_ns

    @property
    def training_ns(self) -> int:
        """Return the span without evaluation, checkpoints and pauses."""
        return self.span_ns - self.outside_ns


def find_span(events: Events) -> Tuple[int, int]:
    """Return the start of the first event and the end of the last one."""
    return int(events.start.min()), int(events.end.max())


def measure_devices(events: Events, devices: Sequence[int], span: Tuple[int, int]) -> List[DeviceTime]:
    """Divide the span of each device that has events, and of each of `devices`."""
    places = {**dict.fromkeys(devices, np.zeros(0, np.intp)), **dict(group_places(events.device))}
    return [_measure_device(device, events.select(places[device]), span) for device in sorted(places)]


def _measure_device(device: int, events: Events, span: Tuple[int, int]) -> DeviceTime:
    group = _GROUP_OF_KIND[events.kind]

    def find_intervals(which: int) -> Intervals:
        chosen = group == which
        return merge_intervals(events.start[chosen], events.end[chosen])

    is_pass = group == 0
    first, last = find_span(events.select(is_pass)) if is_pass.any() else span
    compute, messages = find_intervals(0), find_intervals(1)
    worked = unite_intervals(compute, messages)
    inside = worked.clip(first, last)
    waits_for, waited = _measure_waits(events.select(group == 2), inside, (first, last))
    # each further set counts where none of the earlier ones covers it
    covered, outside, idle_in = unite_intervals(inside, waited), NO_INTERVALS, {}
    for which, kind in enumerate(OUTSIDE, start=3):
        intervals = find_intervals(which)
        wider = unite_intervals(covered, intervals.clip(first, last))
        idle_in[kind] = wider.length - covered.length
        covered, outside = wider, unite_intervals(outside, intervals)
    wait_ns, outside_in_ramps = sum(waits_for.values()), outside.length - outside.clip(first, last).length
    idle_ns = last - first - inside.length - wait_ns
    outside_ns = outside_in_ramps + sum(idle_in.values())
    idle_in[HOST] = idle_ns - sum(idle_in.values())
    stages = np.unique(events.stage)
    return DeviceTime(
        device=device,
        stages=tuple(stages[stages >= 0].tolist()),
        busy_ns=compute.length,
        wait_ns=wait_ns,
        communication_ns=inside.length - compute.length,
        ramp_up_ns=first - span[0],
        ramp_down_ns=span[1] - last,
        idle_ns=idle_ns,
        waits_for=waits_for,
        idle_in=idle_in,
        outside_ns=outside_ns,
        messages_ns=messages.length,
        hidden_ns=messages.length - (worked.length - compute.length),
    )


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

    def measure_before(self, moments: Any) -> TimeColumn:
        """Return how much of the intervals lies before each of `moments`."""
        sums = np.concatenate([[0], np.cumsum(self.end - self.start)])
        place = np.searchsorted(self.start, moments, side="right")
        last_end = np.concatenate([[np.iinfo(np.int64).min], self.end])[place]
        return np.asarray(sums[place] - np.where(last_end > moments, last_end - moments, 0), np.int64)


NO_INTERVALS = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def merge_intervals(start: TimeColumn, end: TimeColumn) -> Intervals:
    """Return the union of intervals that may overlap, be empty, and be in any order."""
    longer = end > start
    if not longer.all():
        start, end = start[longer], end[longer]
    if not len(start):
        return NO_INTERVALS
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return Intervals(start[begins], reach[np.concatenate([begins[1:] - 1, [len(reach) - 1]])])


def unite_intervals(*sets: Intervals) -> Intervals:
    """Return the union of several sets."""
    parts = [intervals for intervals in sets if len(intervals.start)]
    if len(parts) < 2:
        return parts[0] if parts else NO_INTERVALS
    return merge_intervals(np.concatenate([p.start for p in parts]), np.concatenate([p.end for p in parts]))


def _share_overlaps(start: TimeColumn, end: TimeColumn) -> Tuple[TimeColumn, TimeColumn, NDArray[np.intp]]:
    """Cut intervals so that each moment belongs to the one that began first. Return starts, ends, and the indices of the
    originals."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    start = np.maximum(start, np.concatenate([start[:1], reach[:-1]]))
    left = end > start
    return start[left], end[left], order[left]
