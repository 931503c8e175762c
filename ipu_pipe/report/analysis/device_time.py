"""Sets of moments as disjoint intervals in order, so that lengths of unions and differences are a few array operations."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, KINDS, OUTSIDE, WAIT, Events

Times = NDArray[np.int64]


class Intervals(NamedTuple):
    """Disjoint, in order, none empty: the moments from each `start` up to, not including, its `end`."""

    start: Times
    end: Times

    @property
    def length(self) -> int:
        """Of all together, in nanoseconds."""
        return int((self.end - self.start).sum())

    def within(self, begin: int, end: int) -> "Intervals":
        """What of them lies between two moments."""
        first, last = np.searchsorted(self.end, begin, side="right"), np.searchsorted(self.start, end, side="left")
        if last <= first or end <= begin:
            return NONE
        start, stop = self.start[first:last].copy(), self.end[first:last].copy()
        start[0], stop[-1] = max(int(start[0]), begin), min(int(stop[-1]), end)
        return Intervals(start, stop)

    def before(self, moments: Any) -> Times:
        """How much of them lies before each of `moments`."""
        sums = np.concatenate([[0], np.cumsum(self.end - self.start)])
        place = np.searchsorted(self.start, moments, side="right")
        last_end = np.concatenate([[np.iinfo(np.int64).min], self.end])[place]
        return np.asarray(sums[place] - np.where(last_end > moments, last_end - moments, 0), np.int64)


NONE = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def merge_intervals(start: Times, end: Times) -> Intervals:
    """The union of any intervals."""
    longer = end > start
    if not longer.all():
        start, end = start[longer], end[longer]
    if not len(start):
        return NONE
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return Intervals(start[begins], reach[np.concatenate([begins[1:] - 1, [len(reach) - 1]])])


def unite_intervals(*sets: Intervals) -> Intervals:
    """Of several."""
    held = [each for each in sets if len(each.start)]
    if len(held) < 2:
        return held[0] if held else NONE
    return merge_intervals(np.concatenate([each.start for each in held]), np.concatenate([each.end for each in held]))


def share_out(start: Times, end: Times) -> Tuple[Times, Times, NDArray[np.intp]]:
    """Intervals that overlap, cut so that every moment belongs to the one that began first: starts, ends, and whose each is."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    if not len(start):
        return start, end, order
    reach = np.maximum.accumulate(end)
    start = np.maximum(start, np.concatenate([start[:1], reach[:-1]]))
    left = end > start
    return start[left], end[left], order[left]


OWN_TIME = "host"  # of an idle device: what no event tells of
# By a kind's code: 0 compute, 1 communication, 2 wait, 3 and on: outside, in the order in which one hides the others
_GROUPS = ((*COMPUTE,), (*COMMUNICATION,), (WAIT,), *((kind,) for kind in OUTSIDE))
_GROUP_OF = np.array([next(i for i, kinds in enumerate(_GROUPS) if kind in kinds) for kind in KINDS], np.int8)


class DeviceTime(NamedTuple):
    """A device's span in nanoseconds; see docs/traces.md. `waits_for`: -1 where the trace does not say for whom; `hidden_ns`, of
    `messages_ns`, all communication: under compute."""

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
        """The whole."""
        return self.busy_ns + self.wait_ns + self.communication_ns + self.ramp_up_ns + self.ramp_down_ns + self.idle_ns

    @property
    def own_ns(self) -> int:
        """What training had of it."""
        return self.span_ns - self.outside_ns


def find_span(events: Events) -> Tuple[int, int]:
    """From the first event to the end of the last."""
    return int(events.start.min()), int(events.end.max())


def group_by_device(events: Events) -> Iterator[Tuple[int, NDArray[np.intp]]]:
    """Each device with the places of its events, in their order."""
    yield from group_places(events.device)


def group_places(column: NDArray[Any]) -> Iterator[Tuple[int, NDArray[np.intp]]]:
    """Each value of a column with the places where it stands, in their order."""
    if not len(column):
        return
    low, high = int(column.min()), int(column.max())
    if low == high:
        yield low, np.arange(len(column))
        return
    small = (
        column - low if high - low > 1 << 15 else (column - low).astype(np.int16)
    )  # sorted by counting, without comparing
    order = np.argsort(small, kind="stable")
    held = column[order]
    edges = np.concatenate([[0], np.flatnonzero(held[1:] != held[:-1]) + 1, [len(held)]])
    for a, b in zip(edges.tolist(), edges[1:].tolist()):
        yield int(held[a]), order[a:b]


def measure_devices(events: Events, devices: Sequence[int], span: Tuple[int, int]) -> List[DeviceTime]:
    """Of all devices that have events, and of those of `devices`."""
    found = {device: _parts(device, events, places, span) for device, places in group_by_device(events)}
    nothing = np.zeros(0, np.intp)
    found.update((device, _parts(device, events, nothing, span)) for device in devices if device not in found)
    return [found[device] for device in sorted(found)]


def _parts(device: int, events: Events, places: NDArray[np.intp], span: Tuple[int, int]) -> DeviceTime:
    group = _GROUP_OF[events.kind[places]]
    start, end = events.start[places], events.end[places]

    def moments(which: int) -> Intervals:
        chosen = group == which
        return merge_intervals(start[chosen], end[chosen]) if chosen.any() else NONE

    begin, last = span
    passes = group == 0
    if passes.any():
        begin, last = int(start[passes].min()), int(end[passes].max())
    compute, messages = moments(0), moments(1)
    worked = unite_intervals(compute, messages)
    inside = worked.within(begin, last)
    waits_for, waited = _waits(start, end, events.peer[places], group == 2, inside, (begin, last))
    covered = unite_intervals(inside, waited)
    wait_ns = sum(waits_for.values())
    assert covered.length == inside.length + wait_ns
    busy_ns, idle_in, outside = compute.length, {}, NONE
    for which, kind in enumerate(OUTSIDE, start=3):
        of_kind = moments(which)
        wider = unite_intervals(covered, of_kind.within(begin, last))
        idle_in[kind] = wider.length - covered.length
        covered, outside = wider, unite_intervals(outside, of_kind)
    ramps = outside.length - outside.within(begin, last).length
    idle_ns = last - begin - inside.length - wait_ns
    idle_in[OWN_TIME] = idle_ns - sum(idle_in.values())
    stages = np.unique(events.stage[places])
    return DeviceTime(
        device,
        tuple(stages[stages >= 0].tolist()),
        busy_ns,
        wait_ns,
        inside.length - busy_ns,
        begin - span[0],
        span[1] - last,
        idle_ns,
        waits_for,
        idle_in,
        ramps + sum(idle_in[kind] for kind in OUTSIDE),
        messages.length,
        messages.length - (worked.length - busy_ns),
    )


def _waits(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    peer: NDArray[np.int32],
    waits: NDArray[np.bool_],
    worked: Intervals,
    window: Tuple[int, int],
) -> Tuple[Dict[int, int], Intervals]:
    """By the device waited for, time within the window in which nothing was done; and these moments, with what they overlap."""
    own_start, own_end, whose = share_out(start[waits], end[waits])
    own_start, own_end = np.maximum(own_start, window[0]), np.minimum(own_end, window[1])
    inside = own_end > own_start
    own_start, own_end, peers = own_start[inside], own_end[inside], peer[waits][whose[inside]]
    if not len(own_start):
        return {}, NONE
    lengths = own_end - own_start - (worked.before(own_end) - worked.before(own_start))
    sums = {who: int(lengths[peers == who].sum()) for who in np.unique(peers).tolist()}
    return {who: ns for who, ns in sums.items() if ns}, Intervals(own_start, own_end)
