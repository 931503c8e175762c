"""How each device spent the span: parts that add up to it to the nanosecond."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.intervals import NONE, Intervals, merged, shared_out, union
from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, KINDS, OUTSIDE, WAIT, Events

OWN_TIME = "host"  # of an idle device: what no event tells of
# By a kind's code: 0 compute, 1 communication, 2 wait, 3 and on: outside, in the order in which one hides the others
_GROUPS = ((*COMPUTE,), (*COMMUNICATION,), (WAIT,), *((kind,) for kind in OUTSIDE))
_GROUP_OF = np.array([next(i for i, kinds in enumerate(_GROUPS) if kind in kinds) for kind in KINDS], np.int8)


class Parts(NamedTuple):
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


def span_of(events: Events) -> Tuple[int, int]:
    """From the first event to the end of the last."""
    return int(events.start.min()), int(events.end.max())


def by_device(events: Events) -> Iterator[Tuple[int, NDArray[np.intp]]]:
    """Each device with the places of its events, in their order."""
    yield from grouped(events.device)


def grouped(column: NDArray[Any]) -> Iterator[Tuple[int, NDArray[np.intp]]]:
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


def parts_of(events: Events, devices: Sequence[int], span: Tuple[int, int]) -> List[Parts]:
    """Of all devices that have events, and of those of `devices`."""
    found = {device: _parts(device, events, places, span) for device, places in by_device(events)}
    nothing = np.zeros(0, np.intp)
    found.update((device, _parts(device, events, nothing, span)) for device in devices if device not in found)
    return [found[device] for device in sorted(found)]


def _parts(device: int, events: Events, places: NDArray[np.intp], span: Tuple[int, int]) -> Parts:
    group = _GROUP_OF[events.kind[places]]
    start, end = events.start[places], events.end[places]

    def moments(which: int) -> Intervals:
        chosen = group == which
        return merged(start[chosen], end[chosen]) if chosen.any() else NONE

    begin, last = span
    passes = group == 0
    if passes.any():
        begin, last = int(start[passes].min()), int(end[passes].max())
    compute, messages = moments(0), moments(1)
    worked = union(compute, messages)
    inside = worked.within(begin, last)
    waits_for, waited = _waits(start, end, events.peer[places], group == 2, inside, (begin, last))
    covered = union(inside, waited)
    wait_ns = sum(waits_for.values())
    assert covered.length == inside.length + wait_ns
    busy_ns, idle_in, outside = compute.length, {}, NONE
    for which, kind in enumerate(OUTSIDE, start=3):
        of_kind = moments(which)
        wider = union(covered, of_kind.within(begin, last))
        idle_in[kind] = wider.length - covered.length
        covered, outside = wider, union(outside, of_kind)
    ramps = outside.length - outside.within(begin, last).length
    idle_ns = last - begin - inside.length - wait_ns
    idle_in[OWN_TIME] = idle_ns - sum(idle_in.values())
    stages = np.unique(events.stage[places])
    return Parts(
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
    own_start, own_end, whose = shared_out(start[waits], end[waits])
    own_start, own_end = np.maximum(own_start, window[0]), np.minimum(own_end, window[1])
    inside = own_end > own_start
    own_start, own_end, peers = own_start[inside], own_end[inside], peer[waits][whose[inside]]
    if not len(own_start):
        return {}, NONE
    lengths = own_end - own_start - (worked.before(own_end) - worked.before(own_start))
    sums = {who: int(lengths[peers == who].sum()) for who in np.unique(peers).tolist()}
    return {who: ns for who, ns in sums.items() if ns}, Intervals(own_start, own_end)
