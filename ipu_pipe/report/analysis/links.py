"""Which device sends how much to which other one, and how long it takes."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.trace.events import PAYLOADS, WAIT, Events, group_places

Row = Dict[str, Any]


def measure_links(events: Events) -> List[Row]:
    """Return the analysis's rows of links, one for each direction between two devices and each payload, from the messages."""
    sends = events.select(events.is_kind("send") & (events.peer >= 0))
    waits = events.select(events.is_kind(WAIT) & (events.peer >= 0))
    if not len(sends.start):
        return []
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
        rows.append(_add_up(sends.select(places), source, target // len(PAYLOADS), latencies.get(number)))
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


def _add_up(events: Events, source: int, target: int, latency: Optional[Row]) -> Row:
    size = int(events.bytes.sum()) if (events.bytes >= 0).all() else None
    microbatches = len(np.unique(events.microbatch[events.microbatch >= 0]))
    busy_ns = int((events.end - events.start).sum())
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
