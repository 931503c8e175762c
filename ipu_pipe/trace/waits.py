"""Tell waiting from communication in traces whose recorder does not: the only place that says what
a wait is.

A message can be sent once both ends are ready: the sender has computed it, and the receiver has
done all that it does before it. Until then the end that is ready waits for the other one; from then
on the message is communication.

    sender     |-- compute --|  send ----|
    receiver   |compute| recv -----------|
                       |wait |  recv     |

Our own backends record waits themselves, by the same meaning.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import COMPUTE, KIND_CODE, WAIT, Events, group_indices

IntArray = NDArray[np.int64]


class Matches(NamedTuple):
    """The indices of sends and of the receives that take them, and how many of either have none."""

    sends: NDArray[np.intp]
    recvs: NDArray[np.intp]
    unmatched: int


def match_messages(events: Events) -> Matches:
    """Match sends with receives by their devices, payload, stage and microbatch."""
    sends, recvs = (np.flatnonzero(events.is_kind(kind)) for kind in ("send", "recv"))
    is_known = (events.peer >= 0) & (events.microbatch >= 0)
    known_sends = sends[is_known[sends]]
    known_recvs = recvs[is_known[recvs]]
    # a send names its own stage, and its receive the next one; of a device's one stage there is
    # nothing to tell apart
    is_onward = events.carries == ev.PAYLOAD_CODE["activations"]
    places = np.stack([events.device[recvs], events.stage[recvs]])
    has_one_stage = np.unique(places, axis=1).shape[1] <= len(np.unique(events.device[recvs]))
    stage = np.zeros_like(events.stage) if has_one_stage else events.stage
    step = np.where(is_onward, 1, -1) * (not has_one_stage)
    keys = [
        np.stack(
            [
                events.device[known_sends], events.peer[known_sends], events.carries[known_sends],
                (stage + step)[known_sends], events.microbatch[known_sends],
            ]
        ),
        np.stack(
            [
                events.peer[known_recvs], events.device[known_recvs], events.carries[known_recvs],
                stage[known_recvs], events.microbatch[known_recvs],
            ]
        ),
    ]  # fmt: skip
    if not len(known_sends) or not len(known_recvs):
        return Matches(sends[:0], recvs[:0], len(sends) + len(recvs))
    _, number = np.unique(np.concatenate(keys, axis=1), axis=1, return_inverse=True)
    # NumPy 2.0 returned it with two dimensions
    number = number.reshape(-1)
    of_send = number[: len(known_sends)]
    of_recv = number[len(known_sends) :]
    # a key that occurs twice does not identify a message
    is_single = (np.bincount(of_send, minlength=number.max() + 1) == 1) & (
        np.bincount(of_recv, minlength=number.max() + 1) == 1
    )
    send_of_number = np.full(number.max() + 1, -1)
    send_of_number[of_send] = known_sends
    chosen = is_single[of_recv]
    matched = known_recvs[chosen]
    return Matches(
        send_of_number[of_recv[chosen]], matched, len(sends) + len(recvs) - 2 * len(matched)
    )


def estimate_offsets(
    events: Events, matches: Matches, hosts: dict[int, str]
) -> dict[int, int] | None:
    """Return for each device what to add to its times, by messages in both directions between
    hosts; None where messages in one direction alone cannot tell.

    Devices of one host have one clock. Of two hosts the least times that messages take in either
    direction are taken as equal.
    """
    host_names = list(dict.fromkeys(hosts.values()))
    if len(host_names) == 1:
        return dict.fromkeys(hosts, 0)
    number = {name: index for index, name in enumerate(host_names)}
    host_of = np.full(max(hosts) + 1, -1)
    for device, name in hosts.items():
        host_of[device] = number[name]
    source = host_of[events.device[matches.sends]]
    target = host_of[events.device[matches.recvs]]
    took = events.end[matches.recvs] - events.start[matches.sends]
    least: dict[tuple[int, int], int] = {}
    for a, b, ns in zip(source.tolist(), target.tolist(), took.tolist()):
        least[a, b] = min(ns, least.get((a, b), ns))
    offset = {0: 0}
    reached = [0]
    # the list grows as it is walked, until no further host can be reached
    for host in reached:
        for (a, b), ns in least.items():
            if a == host and b not in offset and (b, a) in least:
                # the two times differ by twice the difference of the clocks
                offset[b] = offset[a] - (ns - least[b, a]) // 2
                reached.append(b)
    if len(offset) < len(host_names):
        return None
    return {device: offset[number[name]] for device, name in hosts.items()}


def split_waits(events: Events, matches: Matches, ends_late: bool) -> Events:
    """Return events whose matched messages are divided into waits for the other end, and
    communication. `ends_late`: a message ends when its device has waited for it, so that only the
    time since the device's last compute before that end is spent on it.
    """
    ready = _find_ready(events)
    spent = _cut_to_blocked(events).start if ends_late else events.start
    start = events.start.copy()
    end = events.end.copy()
    sends, recvs, _ = matches
    both_ready = np.maximum(ready[sends], ready[recvs])
    waits = []
    for places, others in ((sends, recvs), (recvs, sends)):
        # the time spent on the message while the other end is not ready
        begin = spent[places]
        # no longer than the message itself
        until = np.minimum(np.maximum(ready[others], begin), events.end[places])
        waits.append(_make_waits(events, places, begin, until, events.device[others]))
        # what the host does between its last compute and the message, it does for the message
        is_direct = begin == events.start[places]
        begin = np.maximum(both_ready, np.where(is_direct, ready[places], begin))
        start[places] = np.minimum(begin, events.end[places])
    # a message that has arrived is not being sent any more
    end[sends] = np.maximum(np.minimum(end[sends], end[recvs]), start[sends])
    peer = events.peer.copy()
    peer[sends] = events.device[recvs]
    peer[recvs] = events.device[sends]
    messages = events._replace(start=start, end=end, peer=peer)
    return ev.concatenate_events([messages, *waits])


def split_collectives(events: Events, groups: Sequence[Sequence[int]]) -> Events:
    """Return events whose collectives are divided, too: until the last rank of a group joins its
    n-th collective the others wait for it. Groups whose ranks have different numbers of collectives
    are left as they are.
    """
    is_collective = events.is_kind(ev.COLLECTIVE)
    of_device = {
        device: places[is_collective[places]] for device, places in group_indices(events.device)
    }
    waits = []
    start = events.start.copy()
    for group in groups:
        columns = [of_device.get(rank, np.zeros(0, np.intp)) for rank in group]
        if len({len(column) for column in columns}) > 1 or not len(columns[0]):
            continue
        # (ranks, collectives)
        places = np.stack([c[np.argsort(events.start[c], kind="stable")] for c in columns])
        joined = events.start[places]
        # (collectives,): the rank that joins each one last
        last = np.array(group, np.int32)[joined.argmax(axis=0)]
        until = np.minimum(joined.max(axis=0), events.end[places])
        waits += [_make_waits(events, c, j, u, last) for c, j, u in zip(places, joined, until)]
        start[places] = np.maximum(joined, until)
    return ev.concatenate_events([events._replace(start=start), *waits])


def _make_waits(
    events: Events, places: NDArray[np.intp], begin: IntArray, until: IntArray, peer: NDArray[Any]
) -> Events:
    """Return the waits of messages for other devices, where they last."""
    lasts = until > begin
    waits = events.select(places[lasts])
    return waits._replace(
        start=begin[lasts],
        end=until[lasts],
        kind=np.full_like(waits.kind, KIND_CODE[WAIT]),
        bytes=np.full_like(waits.bytes, -1),
        peer=peer[lasts],
    )


def _cut_to_blocked(events: Events) -> Events:
    """Return events whose messages begin no earlier than the last compute of their device ends that
    ends before they do.
    """
    start = events.start.copy()
    is_compute = events.is_kind(*COMPUTE)
    is_message = events.is_kind("send", "recv")
    for _, places in group_indices(events.device):
        messages = places[is_message[places]]
        ends = np.sort(events.end[places[is_compute[places]]])
        place = np.searchsorted(ends, events.end[messages], side="right") - 1
        has_compute = place >= 0
        cut = messages[has_compute]
        start[cut] = np.maximum(start[cut], ends[place[has_compute]])
    return events._replace(start=start)


def _find_ready(events: Events) -> IntArray:
    """Return for each message the end of its device's last event that ends before the message
    begins: what the host does from then on, it does for the message. Its start where there is none.
    """
    ready = events.start.copy()
    is_compute = events.is_kind(*COMPUTE)
    for _, places in group_indices(events.device):
        messages = places[~is_compute[places]]
        ends = np.sort(events.end[places])
        place = np.searchsorted(ends, events.start[messages], side="right") - 1
        before = place >= 0
        ready[messages[before]] = ends[place[before]]
    return ready
