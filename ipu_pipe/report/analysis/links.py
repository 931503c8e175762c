"""Which device sends how much to which other one, and how long it takes."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import PAYLOADS, WAIT, Events, concatenate_events, group_places

MESSAGES, PASSES = "messages", "passes"  # what a link was counted from
Row = Dict[str, Any]


def measure_links(events: Events, device_of_stage: Sequence[int], gradients_cross: bool) -> List[Row]:
    """Return the analysis's rows of links, one for each direction between two devices and each payload.

    Counted from the messages, or where none are recorded from the bytes that passes hand on.
    """
    sends = events.select(events.is_kind("send") & (events.peer >= 0))
    if len(sends.start):
        return _measure_messages(sends, events.select(events.is_kind(WAIT) & (events.peer >= 0)), MESSAGES)
    return _measure_messages(_infer_sends(events, device_of_stage, gradients_cross), events.select(slice(0)), PASSES)


def _infer_sends(events: Events, device_of_stage: Sequence[int], gradients_cross: bool) -> Events:
    """Return the passes that hand something on to another device, as if they were messages to it."""
    devices, count = np.array(device_of_stage, np.int32), len(device_of_stage)
    directions: List[Tuple[Tuple[str, ...], int, str]] = [((Kind.FORWARD.word,), 1, "activations")]
    if gradients_cross:
        directions.append(((Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word), -1, "gradients"))
    parts = []
    for kinds, step, payload in directions:
        target = events.stage + step
        is_known = (events.stage >= 0) & (events.stage < count) & (target >= 0) & (target < count)
        passes = events.select(events.is_kind(*kinds) & (events.bytes >= 0) & is_known)
        peer = passes.device + devices[passes.stage + step] - devices[passes.stage]  # of the same replica
        carries = np.full(len(peer), PAYLOADS.index(payload), np.int8)
        parts.append(passes._replace(peer=peer, carries=carries).select((peer != passes.device) & (peer >= 0)))
    return concatenate_events(parts)


def _measure_messages(sends: Events, waits: Events, counted: str) -> List[Row]:
    # one number for a direction and a payload, at both of its ends
    devices = 1 + int(max(column.max(initial=0) for column in (sends.device, sends.peer, waits.device, waits.peer)))
    wide = np.int64(devices) * len(PAYLOADS)
    link_of_send = sends.device * wide + sends.peer.astype(np.int64) * len(PAYLOADS) + sends.carries
    link_of_wait = waits.peer * wide + waits.device.astype(np.int64) * len(PAYLOADS) + waits.carries
    links, link = np.unique(link_of_send, return_inverse=True)
    place = np.searchsorted(links, link_of_wait)
    known = (place < len(links)) & (links[np.minimum(place, len(links) - 1)] == link_of_wait)
    latencies = _measure_latencies(sends, link, waits.select(known), place[known])
    rows = []
    for number, places in group_places(link):
        source, target = divmod(int(links[number]), int(wide))
        rows.append(_add_up(sends.select(places), source, target // len(PAYLOADS), latencies.get(number), counted))
    return rows


def _measure_latencies(
    sends: Events, link: NDArray[np.intp], waits: Events, link_of_wait: NDArray[np.intp]
) -> Dict[int, Row]:
    """Return the latencies by link: from the begin of a send to the end of the wait for it, of messages that were waited for
    before they were sent. A message is known by its link and microbatch; where several have the same, none counts."""
    send_keys, wait_keys = (
        (number.astype(np.int64) << 32) + microbatch + 1
        for number, microbatch in ((link, sends.microbatch), (link_of_wait, waits.microbatch))
    )
    keys, first, count = np.unique(send_keys, return_index=True, return_counts=True)
    keys, first = keys[count == 1], first[count == 1]
    if not len(keys):
        return {}
    place = np.minimum(np.searchsorted(keys, wait_keys), len(keys) - 1)
    sent_at = sends.start[first[place]]
    matched = (keys[place] == wait_keys) & (waits.start <= sent_at)  # later waits may be for what has arrived already
    took = (waits.end - sent_at)[matched]
    return {
        number: {"waited": len(places), "min": int(took[places].min()), "median": float(np.median(took[places]))}
        for number, places in group_places(link_of_wait[matched])
    }


def _add_up(events: Events, source: int, target: int, latency: Optional[Row], counted: str) -> Row:
    size = int(events.bytes.sum()) if (events.bytes >= 0).all() else None
    microbatches = len(np.unique(events.microbatch[events.microbatch >= 0]))
    busy_ns = int((events.end - events.start).sum()) if counted == MESSAGES else None
    return {
        "src": source,
        "dst": target,
        "carries": PAYLOADS[int(events.carries[0])],
        "messages": len(events.start),
        "bytes": size,
        "bytes_per_microbatch": size / microbatches if size is not None and microbatches else None,
        "busy_ns": busy_ns,
        "busy_ns_per_microbatch": busy_ns / microbatches if busy_ns is not None and microbatches else None,
        "latency_ns": latency,
        "counted": counted,
    }
