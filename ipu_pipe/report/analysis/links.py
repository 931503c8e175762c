"""Which device sends how much to which other one, and how long it takes."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import PAYLOADS, WAIT, Events, concatenate_events, group_places

MESSAGES, PASSES = "messages", "passes"


class LinkLatency(NamedTuple):
    """Time from the begin of a send to the end of the wait for it, of messages that were waited for before they were sent."""

    waited: int
    min: int
    median: float


class LinkTraffic(NamedTuple):
    """One direction between two devices, for one payload. None: not known. `counted`: from messages, or from what passes hand on.
    `busy_ns_per_microbatch`: 0 where it is not known."""

    src: int
    dst: int
    carries: str
    messages: int
    bytes: Optional[int]
    bytes_per_microbatch: Optional[float]
    busy_ns: Optional[int]
    latency_ns: Optional[LinkLatency]
    counted: str
    busy_ns_per_microbatch: float


def measure_links(events: Events, device_of_stage: Sequence[int], gradients_cross: bool) -> List[LinkTraffic]:
    """Measure all links: from the messages, or where none are recorded from the bytes that passes hand on."""
    sends = events.select(events.is_kind("send") & (events.peer >= 0))
    if len(sends.start):
        return _measure_messages(sends, events.select(events.is_kind(WAIT) & (events.peer >= 0)))
    return _measure_passes(events, device_of_stage, gradients_cross)


def _measure_messages(sends: Events, waits: Events) -> List[LinkTraffic]:
    # one number for a direction and a payload, at both of its ends
    devices = 1 + int(max(column.max(initial=0) for column in (sends.device, sends.peer, waits.device, waits.peer)))
    wide = np.int64(devices) * len(PAYLOADS)
    link_of_send = sends.device * wide + sends.peer.astype(np.int64) * len(PAYLOADS) + sends.carries
    link_of_wait = waits.peer * wide + waits.device.astype(np.int64) * len(PAYLOADS) + waits.carries
    links, link = np.unique(link_of_send, return_inverse=True)
    place = np.searchsorted(links, link_of_wait)
    known = (place < len(links)) & (links[np.minimum(place, len(links) - 1)] == link_of_wait)
    latencies = _measure_latencies(sends, link, waits.select(known), place[known])
    traffic = []
    for number, places in group_places(link):
        source, target = divmod(int(links[number]), int(wide))
        of_link = sends.select(places)
        traffic.append(_add_up(of_link, source, target // len(PAYLOADS), latencies.get(number), MESSAGES))
    return traffic


def _measure_latencies(
    sends: Events, link: NDArray[np.intp], waits: Events, link_of_wait: NDArray[np.intp]
) -> Dict[int, LinkLatency]:
    """Return the latencies by link. A message is known by its link and microbatch; where several have the same, none counts."""
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
        number: LinkLatency(len(places), int(took[places].min()), float(np.median(took[places])))
        for number, places in group_places(link_of_wait[matched])
    }


def _add_up(events: Events, source: int, target: int, latency: Optional[LinkLatency], counted: str) -> LinkTraffic:
    size = int(events.bytes.sum()) if (events.bytes >= 0).all() else None
    microbatches = len(np.unique(events.microbatch[events.microbatch >= 0]))
    busy_ns = int((events.end - events.start).sum()) if counted == MESSAGES else None
    return LinkTraffic(
        src=source,
        dst=target,
        carries=PAYLOADS[int(events.carries[0])],
        messages=len(events.start),
        bytes=size,
        bytes_per_microbatch=size / microbatches if size is not None and microbatches else None,
        busy_ns=busy_ns,
        latency_ns=latency,
        counted=counted,
        busy_ns_per_microbatch=busy_ns / microbatches if busy_ns and microbatches else 0.0,
    )


def _measure_passes(events: Events, device_of_stage: Sequence[int], gradients_cross: bool) -> List[LinkTraffic]:
    parts: Dict[Tuple[int, int, str], List[Events]] = {}
    directions: List[Tuple[Tuple[str, ...], int, str]] = [((Kind.FORWARD.word,), 1, "activations")]
    if gradients_cross:
        directions.append(((Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word), -1, "gradients"))
    for kinds, step, payload in directions:
        passes = events.select(events.is_kind(*kinds) & (events.bytes >= 0) & (events.stage >= 0))
        passes = passes._replace(carries=np.full(len(passes.start), PAYLOADS.index(payload), np.int8))
        for stage, places in group_places(passes.stage):
            if stage < len(device_of_stage) and 0 <= stage + step < len(device_of_stage):
                apart = device_of_stage[stage + step] - device_of_stage[stage]
                for device, on_device in group_places(passes.device[places]) if apart else ():
                    link = device, device + apart, payload
                    parts.setdefault(link, []).append(passes.select(places[on_device]))
    return [_add_up(concatenate_events(parts[link]), link[0], link[1], None, PASSES) for link in sorted(parts)]
