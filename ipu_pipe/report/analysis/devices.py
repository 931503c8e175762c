"""Compute from a trace how each device spent its time, which tensors filled its memory, and what it
sent.

The parts of a device's time add up to the span of the trace, to the nanosecond.

The begins and ends of events divide a device's time into pieces. Within a piece the set of running
events does not change:

    compute   |------|        |---|         a piece counts as the first of: compute, communication, wait, outside, the host's own;
    wait           |------|                 before the first and after the last compute it is a ramp
    pieces    |    | |    |   |   |
"""

from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import (
    ALLOCATED,
    COMMUNICATION,
    COMPUTE,
    KINDS,
    MEMORY,
    OUTSIDE,
    PAYLOAD_CODE,
    PAYLOADS,
    WAIT,
    Counters,
    Events,
    group_indices,
)

# idle time that no event explains
HOST = "host"
# A group for each kind's code: 0 compute, 1 communication, 2 wait, 3 and on OUTSIDE, and an earlier
# group hides a later one
_GROUPS = (COMPUTE, COMMUNICATION, (WAIT,), *((kind,) for kind in OUTSIDE))
_GROUP_OF_KIND = np.array(
    [next(i for i, kinds in enumerate(_GROUPS) if kind in kinds) for kind in KINDS], np.int8
)


def find_span(events: Events) -> tuple[int, int]:
    """Return the start of the first event and the end of the last one."""
    return int(events.start.min()), int(events.end.max())


def measure_devices(
    events: Events, devices: Sequence[int], span: tuple[int, int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Divide the span of each device that has events, and of each of `devices`, into parts that
    docs/reference/analysis.md defines.

    Return the analysis's rows of devices, and the part of all communication that overlaps with
    compute.
    """
    places = {**dict.fromkeys(devices, np.zeros(0, np.intp)), **dict(group_indices(events.device))}
    rows, messages = zip(
        *(_measure_device(device, events.select(places[device]), span) for device in sorted(places))
    )
    messages_ns, hidden_ns = (sum(column) for column in zip(*messages))
    share = hidden_ns / messages_ns if messages_ns else None
    return list(rows), {"communication_ns": messages_ns, "hidden_ns": hidden_ns, "share": share}


def _measure_device(
    device: int, events: Events, span: tuple[int, int]
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the row of a device, its time in communication, and the part of this time that
    overlaps with compute.
    """
    group = _GROUP_OF_KIND[events.kind]
    count = len(events.start)
    is_pass = group == 0
    # a device that computes nothing has no ramps
    first, last = find_span(events.select(is_pass)) if is_pass.any() else span
    # first and last are edges, too, so that no piece reaches across them
    edges, place = np.unique(
        np.concatenate([events.start, events.end, [first, last]]), return_inverse=True
    )
    # (pieces,)
    lengths = np.diff(edges)

    def find_pieces(chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask of the pieces that chosen events cover."""
        # the last two places are those of first and last
        begins, ends = (
            np.bincount(at[chosen], minlength=len(edges)) for at in (place[:count], place[count:-2])
        )
        # how many events have begun and not ended in each piece
        return np.cumsum(begins - ends)[:-1] > 0

    def measure(pieces: NDArray[np.bool_]) -> int:
        return int(lengths[pieces].sum())

    compute, messages, waits, *outside = (find_pieces(group == g) for g in range(len(_GROUPS)))
    for_data = find_pieces((group == 2) & (events.carries == PAYLOAD_CODE["data"]))
    is_inside = (edges[:-1] >= first) & (edges[1:] <= last)
    worked = compute | messages
    idle = is_inside & ~worked & ~waits
    # in the ramps too: a run begins and ends with an evaluation
    outside_ns = measure(np.logical_or.reduce(outside) & (idle | ~is_inside))
    idle_ns = measure(idle)
    idle_in = {}
    for kind, pieces in zip(OUTSIDE, outside):
        idle_in[kind] = measure(idle & pieces)
        # an earlier kind hides a later one, so that the parts add up
        idle = idle & ~pieces
    idle_in[HOST] = measure(idle)
    waits_for = _divide_waits(events.select(group == 2), edges, is_inside & ~worked & waits)
    training_ns = span[1] - span[0] - outside_ns
    busy_ns = measure(compute)
    row = {
        "index": device,
        "stages": np.unique(events.stage[events.stage >= 0]).tolist(),
        "busy_ns": busy_ns,
        "busy_ns_by_stage": _measure_busy_by_stage(events.select(is_pass & (events.stage >= 0))),
        "wait_ns": sum(waits_for.values()),
        "communication_ns": measure(is_inside & messages & ~compute),
        "ramp_up_ns": first - span[0],
        "ramp_down_ns": span[1] - last,
        "idle_ns": idle_ns,
        "data_ns": measure(for_data & ~worked),
        # texts, as JSON's keys are
        "waits_for": {str(who) if who >= 0 else "unknown": ns for who, ns in waits_for.items()},
        "idle_in": idle_in,
        "outside_ns": outside_ns,
        "utilization": busy_ns / training_ns if training_ns else None,
    }
    return row, (measure(messages), measure(messages & compute))


def _measure_busy_by_stage(passes: Events) -> dict[str, int]:
    times = ((stage, passes.select(places)) for stage, places in group_indices(passes.stage))
    return {str(stage): measure_union(of_stage.start, of_stage.end) for stage, of_stage in times}


def _divide_waits(
    waits: Events, edges: NDArray[np.int64], pieces: NDArray[np.bool_]
) -> dict[int, int]:
    """Return the time of pieces with waits, by the device that the wait which began first waits
    for.
    """
    waits = waits.select(np.argsort(waits.start, kind="stable"))
    # the first place whose reach is past a moment is the running wait that began first
    reach = np.maximum.accumulate(waits.end)
    peer = waits.peer[np.searchsorted(reach, edges[:-1][pieces], side="right")]
    lengths = np.diff(edges)[pieces]
    return {device: int(lengths[places].sum()) for device, places in group_indices(peer)}


def measure_union(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Return the length of the union of intervals, which may overlap and be in any order."""
    # by the start, each interval adds what reaches beyond all before it
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    return int(
        (reach - np.maximum(start[order], np.append(start[order[:1]], reach[:-1]))).clip(0).sum()
    )


# ---- memory, from the counters: bytes by category, and the categories at the peak of their sum

# greater values in bytes, and NaN, are ignored
IMPLAUSIBLE = 2.0**60
MOST_POINTS = 400
MOST_MICROBATCHES = 64
_COMPLETING = (Kind.BACKWARD.word, Kind.WEIGHT_GRADIENT.word)


def measure_memory(counters: Counters, events: Events, begin_ns: int) -> list[dict[str, Any]]:
    """Return a row for each device that has counters of memory. Times count from `begin_ns`."""
    is_category = np.isin(counters.name, [*MEMORY.values()])
    # what an allocator holds, of a device without categories
    has_categories = np.isin(counters.device, counters.device[is_category])
    is_chosen = is_category | (counters.name == ALLOCATED) & ~has_categories
    chosen = np.flatnonzero(is_chosen & (np.abs(counters.value) < IMPLAUSIBLE))
    by_device = {device: events.select(places) for device, places in group_indices(events.device)}
    nothing = events.select(slice(0))
    return [
        _measure_device_memory(
            device, counters.select(chosen[places]), by_device.get(device, nothing), begin_ns
        )
        for device, places in group_indices(counters.device[chosen])
    ]


def _measure_device_memory(
    device: int, counters: Counters, events: Events, begin_ns: int
) -> dict[str, Any]:
    counters = counters.select(np.argsort(counters.time, kind="stable"))
    change = np.zeros(len(counters.value))
    places_of = {}
    for category, name in {**MEMORY, "allocated": ALLOCATED}.items():
        places_of[category] = places = np.flatnonzero(counters.name == name)
        # categories have values at different times, so their sum is that of their changes
        change[places] = np.diff(counters.value[places], prepend=0.0)
    # the sum of all changes at the same time
    is_last = np.append(counters.time[1:] != counters.time[:-1], True)
    times = counters.time[is_last]
    # the changes are floats, bytes are whole
    total = np.rint(np.cumsum(change)[is_last]).astype(np.int64)
    peak = int(total.argmax())
    at = int(times[peak])
    categories: dict[str, int] = {}
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


def _list_in_flight(events: Events, at: int) -> list[int]:
    """Return the microbatches whose forward has begun and whose backward is not complete on a
    device at a time.
    """
    # on each stage of the device by itself
    keys = (events.stage.astype(np.int64) << 32) + events.microbatch
    known = events.microbatch >= 0
    begun = known & (events.start <= at) & events.is_kind(Kind.FORWARD.word)
    completed = known & (events.end <= at) & events.is_kind(*_COMPLETING)
    in_flight = np.unique(np.setdiff1d(keys[begun], keys[completed]) & 0xFFFFFFFF)
    return [int(microbatch) for microbatch in in_flight[:MOST_MICROBATCHES]]


def _thin(
    times: NDArray[np.int64],
    total: NDArray[np.int64],
) -> list[list[int]]:
    """Return points (time, bytes). If there are many, return the greatest bytes of each
    interval.
    """
    if len(times) > MOST_POINTS:
        edges = np.linspace(0, len(times), MOST_POINTS + 1).astype(np.int64)[:-1]
        times = times[edges]
        # the greatest of each interval: the peak must stay
        total = np.maximum.reduceat(total, edges)
    return [list(point) for point in zip(times.tolist(), total.tolist())]


# ---- bytes and latencies of the links between devices

Row = Dict[str, Any]


def measure_links(events: Events, has_latencies: bool = True) -> list[Row]:
    """Return the analysis's rows of links, one for each direction between two devices and each
    payload, from the messages. A link is busy for its sends or its receives, whichever is longer: a
    send may be through before its message is. `has_latencies`: the waits of the trace last until
    their messages have arrived.
    """
    sends = events.select(events.is_kind("send") & (events.peer >= 0))
    recvs = events.select(events.is_kind("recv") & (events.peer >= 0))
    waits = events.select(events.is_kind(WAIT) & (events.peer >= 0) & has_latencies)
    if not len(sends.start):
        return []
    # Both ends of a direction and payload get the same number.
    devices = 1 + int(
        max(
            column.max(initial=0)
            for part in (sends, recvs, waits)
            for column in (part.device, part.peer)
        )
    )
    wide = np.int64(devices) * len(PAYLOADS)
    link_of_send = sends.device * wide + sends.peer.astype(np.int64) * len(PAYLOADS) + sends.carries
    link_of_wait, link_of_recv = (
        part.peer * wide + part.device.astype(np.int64) * len(PAYLOADS) + part.carries
        for part in (waits, recvs)
    )
    took = recvs.end - recvs.start
    received = {number: int(took[at].sum()) for number, at in group_indices(link_of_recv)}
    links, link = np.unique(link_of_send, return_inverse=True)
    place = np.searchsorted(links, link_of_wait)
    # the send of a message that is waited for may not be in the trace
    known = (place < len(links)) & (links[np.minimum(place, len(links) - 1)] == link_of_wait)
    latencies = _measure_latencies(sends, link, waits.select(known), place[known])
    rows = []
    for number, places in group_indices(link):
        source, target = divmod(int(links[number]), int(wide))
        row = _add_up(
            sends.select(places),
            source,
            target // len(PAYLOADS),
            latencies.get(number),
            received.get(int(links[number]), 0),
        )
        rows.append(row)
    return rows


def _measure_latencies(
    sends: Events, link: NDArray[np.intp], waits: Events, link_of_wait: NDArray[np.intp]
) -> dict[int, Row]:
    """Return the latencies by link: from the begin of a send to the end of the wait for it, of
    messages that were waited for before they were sent. A message is identified by its link and
    microbatch. Messages that share both do not count.
    """
    send_keys, wait_keys = (
        # + 1, because an unknown microbatch, -1, would borrow from the bits of the link
        (number.astype(np.int64) << 32) + microbatch + 1
        for number, microbatch in ((link, sends.microbatch), (link_of_wait, waits.microbatch))
    )
    keys, first, count = np.unique(send_keys, return_index=True, return_counts=True)
    keys = keys[count == 1]
    first = first[count == 1]
    if not len(keys):
        return {}
    place = np.minimum(np.searchsorted(keys, wait_keys), len(keys) - 1)
    sent_at = sends.start[first[place]]
    # a later wait may be for a message that has already arrived
    matched = (keys[place] == wait_keys) & (waits.start <= sent_at)
    took = (waits.end - sent_at)[matched]
    return {
        number: {
            "waited": len(places),
            "min": int(took[places].min()),
            "median": float(np.median(took[places])),
        }
        for number, places in group_indices(link_of_wait[matched])
    }


def _add_up(events: Events, source: int, target: int, latency: Row | None, received_ns: int) -> Row:
    # a sum without the unknown ones would be too small
    size = int(events.bytes.sum()) if (events.bytes >= 0).all() else None
    microbatches = len(np.unique(events.microbatch[events.microbatch >= 0]))
    busy_ns = max(int((events.end - events.start).sum()), received_ns)
    return {
        "src": source,
        "dst": target,
        "carries": PAYLOADS[int(events.carries[0])],
        "messages": len(events.start),
        "bytes": size,
        "bytes_per_microbatch": size / microbatches if size is not None and microbatches else None,
        "busy_ns": busy_ns,
        "busy_ns_per_microbatch": busy_ns / microbatches if microbatches else None,
        "latency_ns": latency,
        "counted": "messages",
    }
