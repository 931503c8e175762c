"""Who sends how much to whom, and how long it takes."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.report.analysis.device_time import group_places
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace.events import KINDS, PAYLOADS, WAIT, Events

MESSAGES, PASSES = "messages", "passes"
_SEND = KINDS.index("send")
_ONWARD, _BACK = (Kind.FORWARD.word,), (Kind.BACKWARD.word, Kind.INPUT_GRADIENT.word)


class LinkLatency(NamedTuple):
    """From the begin of a send to the end of the wait for it, of messages that were waited for before they were sent."""

    waited: int
    min_ns: int
    median_ns: float


class LinkTraffic(NamedTuple):
    """One direction between two devices, of one thing carried. `bytes`, `busy_ns`: None where not told. `counted`: whether
    messages were, or what passes hand on."""

    source: int
    target: int
    carries: str
    messages: int
    bytes: Optional[int]
    microbatches: int
    busy_ns: Optional[int]
    latency: Optional[LinkLatency]
    counted: str

    @property
    def bytes_per_microbatch(self) -> Optional[float]:
        """Mean over the microbatches that it carried something of."""
        return self.bytes / self.microbatches if self.bytes is not None and self.microbatches else None

    @property
    def busy_each_ns(self) -> float:
        """For a microbatch; 0 where it is not told."""
        return self.busy_ns / self.microbatches if self.busy_ns and self.microbatches else 0.0


def measure_links(events: Events, device_of_stage: Sequence[int], gradients_cross: bool) -> List[LinkTraffic]:
    """All links, as messages tell, or where none are recorded the bytes that passes hand on."""
    sends = np.flatnonzero((events.kind == _SEND) & (events.peer >= 0))
    if len(sends):
        return _of_messages(events, sends)
    return _of_passes(events, device_of_stage, gradients_cross)


def _of_messages(events: Events, sends: NDArray[np.intp]) -> List[LinkTraffic]:
    waits = np.flatnonzero((events.kind == KINDS.index(WAIT)) & (events.peer >= 0))
    sent, awaited = events.select(sends), events.select(waits)
    # one number a direction and thing carried, for both of its ends
    devices = 1 + int(max(column.max(initial=0) for column in (sent.device, sent.peer, awaited.device, awaited.peer)))
    wide = np.int64(devices) * len(PAYLOADS)
    of_send = sent.device * wide + sent.peer.astype(np.int64) * len(PAYLOADS) + sent.carries
    of_wait = awaited.peer * wide + awaited.device.astype(np.int64) * len(PAYLOADS) + awaited.carries
    names, link = np.unique(of_send, return_inverse=True)
    place = np.searchsorted(names, of_wait)
    known = (place < len(names)) & (names[np.minimum(place, len(names) - 1)] == of_wait)
    took = _latencies(sent, link, awaited.select(known), place[known])
    return [
        _link(
            sent.select(own),
            int(names[number]) // wide,
            int(names[number]) % wide // len(PAYLOADS),
            took.get(number),
            MESSAGES,
        )
        for number, own in group_places(link)
    ]


def _latencies(
    sent: Events, link: NDArray[np.intp], awaited: Events, of_wait: NDArray[np.intp]
) -> Dict[int, LinkLatency]:
    """By link. A microbatch's message is told by its link and number; where several have the same, none of them is."""
    send_keys, wait_keys = (
        (number.astype(np.int64) << 32) + microbatch + 1
        for number, microbatch in ((link, sent.microbatch), (of_wait, awaited.microbatch))
    )
    keys, first, count = np.unique(send_keys, return_index=True, return_counts=True)
    keys, first = keys[count == 1], first[count == 1]
    if not len(keys):
        return {}
    place = np.minimum(np.searchsorted(keys, wait_keys), len(keys) - 1)
    sent_at = sent.start[first[place]]
    matched = (keys[place] == wait_keys) & (awaited.start <= sent_at)  # later waits may be for what is there already
    took, where = (awaited.end - sent_at)[matched], of_wait[matched]
    return {
        number: LinkLatency(len(own), int(took[own].min()), float(np.median(took[own])))
        for number, own in group_places(where)
    }


def _link(own: Events, source: int, target: int, latency: Optional[LinkLatency], counted: str) -> LinkTraffic:
    sizes = own.bytes
    return LinkTraffic(
        int(source),
        int(target),
        PAYLOADS[int(own.carries[0])],
        len(sizes),
        int(sizes.sum()) if (sizes >= 0).all() else None,
        len(np.unique(own.microbatch[own.microbatch >= 0])),
        int((own.end - own.start).sum()) if counted == MESSAGES else None,
        latency,
        counted,
    )


def _of_passes(events: Events, device_of_stage: Sequence[int], gradients_cross: bool) -> List[LinkTraffic]:
    found: Dict[Tuple[int, int, str], LinkTraffic] = {}
    directions = [(_ONWARD, 1, "activations")] + ([(_BACK, -1, "gradients")] if gradients_cross else [])
    for kinds, step, carries in directions:
        own = events.select(events.is_kind(*kinds) & (events.bytes >= 0) & (events.stage >= 0))
        for stage, places in group_places(own.stage):
            if not (stage < len(device_of_stage) and 0 <= stage + step < len(device_of_stage)):
                continue
            apart = device_of_stage[stage + step] - device_of_stage[stage]
            for device, on_device in group_places(own.device[places]) if apart else []:
                passes = own.select(places[on_device])
                passes = passes._replace(carries=np.full(len(passes.start), PAYLOADS.index(carries), np.int8))
                link, key = _link(passes, device, device + apart, None, PASSES), (device, device + apart, carries)
                before = found.get(key)
                if before is not None:
                    link = link._replace(
                        messages=link.messages + before.messages, bytes=(link.bytes or 0) + (before.bytes or 0)
                    )
                found[key] = link
    return [found[key] for key in sorted(found)]
