"""Find the critical path of a run: the chain of passes, messages and host time that decides its
span.

The path is walked back in time from the end of the span. At each moment it is on one device, and
takes the first of these that covers the moment there:

    compute, communication, outside    the path goes on where it began
    a wait for another device          the path goes on there, at the end of the message's send
    nothing                            the host's own time, back to the end of the event before

    device 0    F0===send=            B0===
                        \\           /
    device 1             F0=====B0==send        the path:  F0 send | F0 B0 send | B0
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.devices import HOST, find_span
from ipu_pipe.report.analysis.stages import join_pieces
from ipu_pipe.trace.chrome import find_arrows
from ipu_pipe.trace.events import (
    COMMUNICATION,
    COMPUTE,
    KINDS,
    OUTSIDE,
    WAIT,
    Events,
    group_indices,
)

# the share by which the passes of a stage are shortened to see what that would save
SHORTER = 0.1
# the most events that are played again for that
MOST_PLAYED = 100_000
# the most events whose path is walked, at 20 microseconds a piece
MOST_WALKED = 200_000
# the most pieces of the path that are listed
MOST_LISTED = 2000
# events that cover a moment, in this order
_GROUPS = (COMPUTE, COMMUNICATION, OUTSIDE, (WAIT,))
Row = Dict[str, Any]
# by event: the events of other devices that it needs, and how long after their ends it begins
Needs = Dict[int, List[Tuple[int, int]]]


class PathPiece(NamedTuple):
    """A part of the path. `event`: its place in the columns, -1 for the host's own time and for a
    message that is on its way.
    """

    event: int
    device: int
    source: int
    start: int
    end: int


class _Lane(NamedTuple):
    """Events of a device in a group, by their starts; `reach` and `at`: of all up to each one, the
    greatest end, and the event that has it.
    """

    start: NDArray[np.int64]
    reach: NDArray[np.int64]
    at: NDArray[np.int64]
    ends: NDArray[np.int64]

    def find_cover(self, moment: int) -> int:
        """Return the event that covers the time just before a moment, -1 without one."""
        # an event that begins at the moment does not cover the time before it
        place = int(np.searchsorted(self.start, moment)) - 1
        return int(self.at[place]) if place >= 0 and self.reach[place] >= moment else -1

    def find_end_before(self, moment: int, least: int) -> int:
        """Return the last end before a moment."""
        place = int(np.searchsorted(self.ends, moment)) - 1
        return max(int(self.ends[place]), least) if place >= 0 else least


def find_critical_path(events: Events) -> list[PathPiece]:
    """Return the pieces of the path, first to last. They cover the span without gaps."""
    begin, end = find_span(events)
    lanes = {
        device: [_make_lane(events, places, group) for group in _GROUPS]
        for device, places in group_indices(events.device)
    }
    sends = _index_sends(events)
    device = int(events.device[int(events.end.argmax())])
    moment = end
    path: list[PathPiece] = []
    # devices that the path came through at this moment: two that wait for each other end it
    passed: set[int] = set()
    while moment > begin:
        group, index = _find_cover(lanes[device], moment)
        if group == len(_GROUPS) - 1:
            peer = int(events.peer[index])
            if peer in lanes and peer not in passed:
                passed.add(device)
                # where the send is not recorded, at this moment; clocks must not lead it forward
                sent = min(sends.get(_make_key(events, index), moment), moment)
                if sent < moment:
                    path.append(PathPiece(-1, device, peer, sent, moment))
                    passed = set()
                device = peer
                moment = sent
                continue
        start = begin if index < 0 else max(int(events.start[index]), begin)
        # up to the end of an event of an earlier group, which covers the time before
        for lane in lanes[device][: group if index >= 0 else len(_GROUPS)]:
            start = lane.find_end_before(moment, start)
        path.append(PathPiece(index, device, device, start, moment))
        moment = start
        passed = set()
    # it was walked from the end
    return path[::-1]


def _make_lane(events: Events, places: NDArray[np.intp], kinds: Sequence[str]) -> _Lane:
    chosen = places[events.select(places).is_kind(*kinds)]
    # without events of no length, at which the path would not move
    chosen = chosen[events.end[chosen] > events.start[chosen]]
    chosen = chosen[np.argsort(events.start[chosen], kind="stable")]
    ends = events.end[chosen]
    reach = np.maximum.accumulate(ends)
    places_of_reach = np.where(ends == reach, np.arange(len(ends)), 0)
    at = np.maximum.accumulate(places_of_reach)
    return _Lane(events.start[chosen], reach, chosen[at], np.sort(ends))


def _find_cover(lanes: Sequence[_Lane], moment: int) -> tuple[int, int]:
    for group, lane in enumerate(lanes):
        index = lane.find_cover(moment)
        if index >= 0:
            return group, index
    return -1, -1


def _make_key(events: Events, index: int) -> tuple[int, int, int, int]:
    """Return what identifies the message that is waited for."""
    columns = (events.peer, events.device, events.carries, events.microbatch)
    peer, device, carries, microbatch = (int(column[index]) for column in columns)
    return peer, device, carries, microbatch


def _index_sends(events: Events) -> dict[tuple[int, int, int, int], int]:
    """Return the end of each send by its devices, payload and microbatch; the first of several."""
    # reversed, so that of several the first one stays in the dict
    sends = np.flatnonzero(events.is_kind("send") & (events.peer >= 0))[::-1]
    columns = (events.device, events.peer, events.carries, events.microbatch, events.end)
    rows = zip(*(column[sends].tolist() for column in columns))
    return {row[:4]: row[4] for row in rows}


# ---- figures


def measure_critical_path(events: Events, metadata: dict[str, Any]) -> Row | None:
    """Return the analysis's row of the critical path, None for more than MOST_WALKED events. Times
    count from the span's begin.
    """
    if len(events.start) > MOST_WALKED:
        return None
    begin, end = find_span(events)
    # a pass is one piece of the path, however many operations it has
    passes, _ = join_pieces(events)
    path = find_critical_path(passes)
    by: dict[str, dict[Any, int]] = {name: {} for name in ("stage", "kind", "link")}
    rows: list[Row] = []
    for piece in path:
        kind, stage, microbatch, link = _describe(passes, piece)
        took = piece.end - piece.start
        by["kind"][kind] = by["kind"].get(kind, 0) + took
        if link is not None:
            by["link"][link] = by["link"].get(link, 0) + took
        elif stage >= 0 and kind in COMPUTE:
            by["stage"][stage] = by["stage"].get(stage, 0) + took
        row = {
            "device": piece.device,
            "stage": stage if stage >= 0 else None,
            "kind": kind,
            "microbatch": microbatch if microbatch >= 0 else None,
            "start_ns": piece.start - begin,
            "duration_ns": took,
        }
        last = rows[-1] if rows else {}
        same = ("device", "stage", "kind", "microbatch")
        if last and all(last[key] == row[key] for key in same):
            last["duration_ns"] += took
        else:
            rows.append(row)
    # the shares of a trace of no length are 0 instead of an error
    span = end - begin or 1
    return {
        "stages": [
            {"stage": stage, "ns": ns, "share": ns / span}
            for stage, ns in sorted(by["stage"].items())
        ],
        "kinds": [
            {"kind": kind, "ns": ns, "share": ns / span}
            for kind, ns in sorted(by["kind"].items(), key=lambda item: -item[1])
        ],
        "links": [
            {"src": src, "dst": dst, "ns": ns, "share": ns / span}
            for (src, dst), ns in sorted(by["link"].items())
        ],
        "what_if": _measure_what_if(passes, metadata),
        "count": len(rows),
        "pieces": rows[:MOST_LISTED],
    }


def _describe(events: Events, piece: PathPiece) -> tuple[str, int, int, tuple[int, int] | None]:
    """Return the kind, stage and microbatch of a piece, and its link if it is a message."""
    if piece.event < 0:
        is_message = piece.source != piece.device
        link = (piece.source, piece.device) if is_message else None
        return ("message" if is_message else HOST), -1, -1, link
    kind = KINDS[int(events.kind[piece.event])]
    stage = int(events.stage[piece.event])
    microbatch = int(events.microbatch[piece.event])
    peer = int(events.peer[piece.event])
    if kind not in ("send", "recv") or peer < 0:
        return kind, stage, microbatch, None
    return kind, stage, microbatch, (piece.device, peer) if kind == "send" else (peer, piece.device)


# ---- what if the passes of a stage were shorter


def _measure_what_if(events: Events, metadata: dict[str, Any]) -> list[Row]:
    """Return for each stage and kind of pass how much shorter the span would be if those passes
    took SHORTER less, by playing the events again: each begins when its device and its message are
    ready, and waits are what is left.
    """
    is_pass = events.is_kind(*COMPUTE) & (events.stage >= 0) & (events.microbatch >= 0)
    keys = np.unique(
        events.stage[is_pass].astype(np.int64) * len(KINDS) + events.kind[is_pass]
    ).tolist()
    # the ends of all events are held for each key
    if not keys or len(events.start) > MOST_PLAYED or len(keys) > 256:
        return []
    ends = _play(events, metadata, keys)
    spans = ends.max(axis=0) - int(events.start.min())
    rows = []
    for column, key in enumerate(keys, 1):
        stage, code = divmod(key, len(KINDS))
        rows.append(
            {
                "stage": stage,
                "kind": KINDS[code],
                "shorter": SHORTER,
                "saves_ns": max(0, round(float(spans[0] - spans[column]))),
                "share": max(0.0, float(1 - spans[column] / spans[0])) if spans[0] else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -row["saves_ns"])


def _play(events: Events, metadata: dict[str, Any], keys: Sequence[int]) -> NDArray[np.float64]:
    """Return the ends of all events (n, 1 + keys): as they were, and with shorter passes of each
    key.
    """
    took = (events.end - events.start).astype(np.float64)
    # (n, 1 + keys): column 0 is played as it was
    durations = np.repeat(took[:, None], 1 + len(keys), axis=1)
    key = events.stage.astype(np.int64) * len(KINDS) + events.kind
    for column, chosen in enumerate(keys, 1):
        durations[(key == chosen) & (events.microbatch >= 0), column] *= 1 - SHORTER
    needs = _list_needs(events, metadata)
    is_wait = events.is_kind(WAIT)
    ends = np.zeros_like(durations)
    # what an event needs is played before it
    order = np.lexsort((events.end, events.start))
    last: dict[int, int] = {}
    # waiting since the device's last event, in which the host does nothing of its own
    waited: dict[int, int] = {}
    starts = events.start.tolist()
    originals = events.end.tolist()
    devices = events.device.tolist()
    for index in order.tolist():
        device = devices[index]
        start = starts[index]
        previous = last.get(device)
        if is_wait[index]:
            # a wait is over when its message has come: the need of the event after it
            waited[device] = waited.get(device, 0) + originals[index] - start
            # a key below 0 is a device: the needs of all its waits, until its next event
            needs.setdefault(-1 - device, []).extend(needs.pop(index, []))
            continue
        # the first event of a device begins by itself after what it waits for
        begin: Any = float(start - waited.get(device, 0))
        if previous is not None:
            since = start - originals[previous]
            begin = ends[previous] + min(max(0, since - waited.get(device, 0)), since)
        waited_for = needs.pop(-1 - device, [])
        for source, lag in needs.get(index, []) + waited_for:
            # not an arrow back in time, as clocks that disagree make
            if originals[source] <= start:
                begin = np.maximum(begin, ends[source] + min(lag, start - originals[source]))
        ends[index] = begin + durations[index]
        # an event inside another one does not free its device
        if previous is None or originals[index] >= originals[previous]:
            last[device] = index
        waited[device] = 0
    return ends


def _list_needs(events: Events, metadata: dict[str, Any]) -> Needs:
    """Return for each event the events of other devices that it needs, and how long after their
    ends it can begin.
    """
    needs: Needs = {}
    arrows = find_arrows(events, metadata)
    for source, target in zip(arrows.source.tolist(), arrows.target.tolist()):
        needs.setdefault(target, []).append((source, 0))
    # a wait ends so long after the last event of the device that it waits for
    is_wait = events.is_kind(WAIT) & (events.peer >= 0)
    by_device = dict(group_indices(events.device))
    for peer, waits in group_indices(events.peer):
        waits = waits[is_wait[waits]]
        of_peer = by_device.get(peer)
        if of_peer is None or not len(waits):
            continue
        of_peer = of_peer[~events.is_kind(WAIT)[of_peer]]
        of_peer = of_peer[np.argsort(events.end[of_peer], kind="stable")]
        place = np.searchsorted(events.end[of_peer], events.end[waits], side="right") - 1
        has_source = place >= 0
        sources = of_peer[place[has_source]]
        for wait, source in zip(waits[has_source].tolist(), sources.tolist()):
            lag = int(events.end[wait] - events.end[source])
            needs.setdefault(wait, []).append((source, lag))
    return needs
