"""Find the pipeline in the records of PyTorch's profiler: which pass each operation belongs to, and
which receive takes which send.

Stages and microbatches are named by ranges where the schedule annotates its passes:

    range      |----- Forward 3 -----|            the operations and messages that begin inside
    records      |recv| |op| |op|  |send---|      belong to it

Where nothing is annotated they are inferred from the messages: the k-th activations that a rank
receives are microbatch k's, and it computes a forward until it sends the k-th activations on. Then
a rank is a stage, and the ranks are in the order of their numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import COMPUTE, KIND_CODE, PAYLOAD_CODE, Events
from ipu_pipe.trace.kineto import RankRecords

FORWARD = KIND_CODE[Kind.FORWARD.word]
BACKWARD = KIND_CODE[Kind.BACKWARD.word]
UPDATE = KIND_CODE[Kind.UPDATE.word]
UNSPECIFIED = KIND_CODE[ev.UNSPECIFIED]
SEND = KIND_CODE["send"]
RECV = KIND_CODE["recv"]
ACTIVATIONS = PAYLOAD_CODE["activations"]
GRADIENTS = PAYLOAD_CODE["gradients"]
INFERRED = (
    "stages and microbatches are inferred from the sends and receives: a rank is taken as a stage, "
    "and its microbatches are numbered in the order of its messages"
)
ANNOTATED = "stages and microbatches are read from the names of the trace's ranges"
NOT_KNOWN = (
    "stages and microbatches are not known: no range names them, and no messages between "
    "neighbours tell them; a rank is taken as a stage"
)


class PipelineEvents(NamedTuple):
    """The events of all ranks with their stages, microbatches and peers. `microbatches`: of an
    update, None if not known.
    """

    events: Events
    microbatches: int | None
    note: str


def find_pipeline(ranks: Sequence[int], records: Sequence[RankRecords]) -> PipelineEvents:
    """Return the events of all ranks, by one clock, as passes and messages of a pipeline."""
    columns = [_join_calls(rank, of_rank) for rank, of_rank in zip(ranks, records)]
    passes = [of_rank.ranges for of_rank in records]
    named = [r.is_kind(*COMPUTE) & (r.microbatch >= 0) for r in passes]
    is_named = any(mask.any() for mask in named)
    is_distributed = any((events.is_kind("send", "recv")).any() for events, _ in columns)
    if is_named:
        count = 1 + max(int(r.microbatch.max(initial=-1)) for r in passes)
        events = [
            _label_by_ranges(events, r, position, count)
            for position, ((events, _), r) in enumerate(zip(columns, passes))
        ]
        return PipelineEvents(_find_peers(events), count, ANNOTATED)
    if is_distributed and len(records) > 1 and not any(of_rank.on_device for of_rank in records):
        by_rank = dict(zip(ranks, columns))
        events = [
            _label_by_messages(*by_rank[rank], chain.index(rank), chain)
            for chain in _find_replicas(by_rank)
            for rank in chain
        ]
        if _agree(events):
            return PipelineEvents(ev.concatenate_events(events), None, INFERRED)
    events = [
        _number_messages(events._replace(stage=np.full_like(events.stage, rank)))
        for rank, (events, _) in zip(ranks, columns)
    ]
    return PipelineEvents(ev.concatenate_events(events), None, NOT_KNOWN)


def _join_calls(rank: int, records: RankRecords) -> tuple[Events, NDArray[np.bool_]]:
    """Return a rank's events, in the order of their starts, and which are of a backward: a message
    and the call that posts it become one message, which begins with the call and ends when it has
    been waited for.
    """
    events = records.events._replace(device=np.full_like(records.events.device, rank))
    order = np.argsort(events.start, kind="stable")
    events = events.select(order)
    is_call = records.is_call[order]
    is_backward = records.is_backward[order]
    is_kept = np.ones(len(order), bool)
    for kind in (SEND, RECV, KIND_CODE[ev.COLLECTIVE]):
        calls = np.flatnonzero(is_call & (events.kind == kind))
        messages = np.flatnonzero(~is_call & (events.kind == kind))
        if not len(calls) or not len(messages):
            continue
        place = np.searchsorted(events.start[calls], events.start[messages], side="right") - 1
        call = calls[np.maximum(place, 0)]
        posts = (place >= 0) & (events.start[messages] <= events.end[call])
        # a call may post several messages: the first one begins with it
        _, first = np.unique(call[posts], return_index=True)
        joined = call[posts][first]
        posted = messages[posts][first]
        events.start[posted] = events.start[joined]
        for column in (events.peer, events.bytes):
            unknown = column[messages[posts]] < 0
            column[messages[posts]] = np.where(
                unknown, column[call[posts]], column[messages[posts]]
            )
        is_kept[joined] = False
    order = np.flatnonzero(is_kept)
    order = order[np.argsort(events.start[order], kind="stable")]
    return events.select(order), is_backward[order]


# ---- passes that ranges name


def _label_by_ranges(events: Events, ranges: Events, position: int, microbatches: int) -> Events:
    """Return the events of a rank with the kind, stage and microbatch of the range in which they
    begin. Microbatches are counted over all updates: the n-th time that a pass occurs it is of
    update n.
    """
    ranges = ranges.select(np.lexsort((-ranges.end, ranges.start)))
    stage = np.where(ranges.stage < 0, position, ranges.stage)
    keys = (stage.astype(np.int64) << 40) + (ranges.kind.astype(np.int64) << 32)
    keys += (ranges.carries.astype(np.int64) << 37) + ranges.microbatch.astype(np.int64)
    update = _count_occurrences(keys)
    is_numbered = ranges.microbatch >= 0
    microbatch = np.where(is_numbered, update * microbatches + ranges.microbatch, update)
    place = _find_innermost(events.start, ranges)
    is_inside = place >= 0
    place = np.maximum(place, 0)
    is_message = events.is_kind("send", "recv")
    is_message_range = ranges.is_kind("send", "recv")[place]
    is_compute = events.kind == UNSPECIFIED
    labelled = is_inside & (is_compute & ~is_message_range | is_message)
    kind = np.where(labelled & is_compute, ranges.kind[place], events.kind)
    carries = _guess_payload(events, ranges, place, labelled, is_message_range)
    # the messages of an update have no microbatch
    labelled &= ~(is_message & (ranges.kind[place] == UPDATE))
    events = events._replace(
        kind=kind.astype(np.int8),
        stage=np.where(labelled, stage[place], -1).astype(np.int32),
        microbatch=np.where(labelled, microbatch[place], -1).astype(np.int32),
        carries=np.where(labelled & is_message, carries, 0).astype(np.int8),
    )
    stages = np.unique(stage[ranges.is_kind(*COMPUTE) & is_numbered])
    if len(stages) == 1:
        # what no range names is of the rank's one stage
        events = events._replace(
            stage=np.where(events.stage < 0, stages[0], events.stage).astype(np.int32)
        )
    return events


def _guess_payload(
    events: Events,
    ranges: Events,
    place: NDArray[np.intp],
    labelled: NDArray[np.bool_],
    is_message_range: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return what each message carries: as its range says, and inside a pass what the pass takes
    and sends on.
    """
    of_pass = np.where(ranges.kind[place] == FORWARD, ACTIVATIONS, GRADIENTS)
    return np.where(is_message_range, ranges.carries[place], of_pass) * labelled


def _count_occurrences(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many equal keys come before each one."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(ordered)), 0))
    count = np.empty(len(keys), np.int64)
    count[order] = np.arange(len(ordered)) - first
    return count


def _find_innermost(moments: NDArray[np.int64], ranges: Events) -> NDArray[np.intp]:
    """Return for each moment the range that began last and has not ended, -1 without one.
    `ranges`: by start.
    """
    place = np.searchsorted(ranges.start, moments, side="right") - 1
    # step out of ranges that have ended, at most as deep as ranges are nested
    outer = _find_outer(ranges)
    while True:
        has_ended = (place >= 0) & (ranges.end[place] <= moments)
        if not has_ended.any():
            return place
        place[has_ended] = outer[place[has_ended]]


def _find_outer(ranges: Events) -> NDArray[np.intp]:
    """Return for each range the one around it, -1 without one."""
    outer = np.full(len(ranges.start), -1)
    around: list[int] = []
    ends = ranges.end.tolist()
    for index, start in enumerate(ranges.start.tolist()):
        while around and ends[around[-1]] <= start:
            around.pop()
        outer[index] = around[-1] if around else -1
        around.append(index)
    return outer


def _find_peers(parts: Sequence[Events]) -> Events:
    """Return the events of all ranks; the peer of a message is the rank of the stage that takes or
    sends it.
    """
    events = ev.concatenate_events(parts)
    is_pass = events.is_kind(*COMPUTE) & (events.microbatch >= 0) & (events.stage >= 0)
    device_of_stage = np.full(int(events.stage.max(initial=0)) + 3, -1)
    device_of_stage[events.stage[is_pass] + 1] = events.device[is_pass]
    is_message = events.is_kind("send", "recv") & (events.stage >= 0) & (events.carries > 0)
    goes_on = (events.kind == SEND) == (events.carries == ACTIVATIONS)
    # the table begins with stage -1
    peer = device_of_stage[events.stage + 1 + np.where(goes_on, 1, -1)]
    return events._replace(
        peer=np.where(is_message & (events.peer < 0), peer, events.peer).astype(np.int32)
    )


# ---- passes that are inferred from messages


def _number_messages(events: Events) -> Events:
    """Return the events of a rank with the order of its messages to each peer as their numbers."""
    is_message = events.is_kind("send", "recv") & (events.peer >= 0)
    keys = (events.peer.astype(np.int64) << 8) + events.kind
    number = np.full(len(keys), -1, np.int64)
    number[is_message] = _count_occurrences(keys[is_message])
    return events._replace(microbatch=number.astype(np.int32))


def _find_replicas(columns: dict[int, tuple[Events, NDArray[np.bool_]]]) -> list[list[int]]:
    """Return the ranks of each pipeline, in the order of its stages. A rank that sends what its
    forwards make is followed by the rank that it sends to, or by the next one where no record says
    which; the last rank of a pipeline sends nothing on.
    """
    ranks = [*columns]
    next_rank = {}
    for rank, follower in zip(ranks, [*ranks[1:], -1]):
        events, is_backward = columns[rank]
        compute = np.flatnonzero(events.kind == UNSPECIFIED)
        sends = np.flatnonzero(events.kind == SEND)
        goes_on = np.broadcast_to(
            _identify_payload(events, sends, compute, is_backward, 0) == ACTIVATIONS, len(sends)
        )
        peers = events.peer[sends[goes_on]]
        if len(peers):
            named = peers[peers >= 0]
            next_rank[rank] = int(np.bincount(named).argmax()) if len(named) else follower
    replicas = []
    for first in [rank for rank in ranks if rank not in next_rank.values()]:
        chain = [first]
        while next_rank.get(chain[-1], -1) in columns and next_rank[chain[-1]] not in chain:
            chain.append(next_rank[chain[-1]])
        replicas.append(chain)
    is_partition = sorted(sum(replicas, [])) == sorted(ranks)
    return replicas if is_partition else [ranks]


def _agree(parts: Sequence[Events]) -> bool:
    """Tell whether each rank receives something of what another one sends to it, and the reverse."""
    events = ev.concatenate_events(parts)
    messages = events.select(events.is_kind("send", "recv"))
    is_send = messages.kind == SEND
    source = np.where(is_send, messages.device, messages.peer)
    target = np.where(is_send, messages.peer, messages.device)
    ways = [
        set(zip(source[mask].tolist(), target[mask].tolist(), messages.carries[mask].tolist()))
        for mask in (is_send, ~is_send)
    ]
    return ways[0] == ways[1]


def _label_by_messages(
    events: Events, is_backward: NDArray[np.bool_], position: int, ranks: Sequence[int]
) -> Events:
    """Return the events of a rank, in the order of their starts, with the passes that are
    inferred from its messages.
    """
    is_first = position == 0
    is_last = position == len(ranks) - 1
    compute = np.flatnonzero(events.kind == UNSPECIFIED)
    sends, recvs = (np.flatnonzero(events.kind == kind) for kind in (SEND, RECV))
    carries = np.zeros(len(events.kind), np.int64)
    peer = events.peer.copy()
    # the first rank sends activations and receives gradients, the last one the reverse
    payloads = (ACTIVATIONS, GRADIENTS) if is_first else (GRADIENTS, ACTIVATIONS)
    for messages, payload in zip((sends, recvs), payloads):
        only = payload if is_first or is_last else 0
        carries[messages] = _identify_payload(events, messages, compute, is_backward, only)
    for places, goes_on in ((sends, ACTIVATIONS), (recvs, GRADIENTS)):
        neighbour = position + np.where(carries[places] == goes_on, 1, -1)
        is_known = (neighbour >= 0) & (neighbour < len(ranks))
        rank = np.array([*ranks])[neighbour.clip(0, len(ranks) - 1)]
        peer[places] = np.where((peer[places] < 0) & is_known, rank, peer[places])
    number = np.full(len(carries), -1, np.int64)
    is_message = (events.kind == SEND) | (events.kind == RECV)
    keys = events.kind.astype(np.int64) * 16 + carries
    number[is_message] = _count_occurrences(keys[is_message])

    start = events.start[compute]

    def count(of: NDArray[np.intp], payload: int) -> NDArray[np.int64]:
        """Count the messages before each compute: receives by their ends, sends by their starts."""
        chosen = of[carries[of] == payload]
        times = np.sort(events.end[chosen] if of is recvs else events.start[chosen])
        return np.searchsorted(times, start, side="right")

    sent = {payload: count(sends, payload) for payload in (ACTIVATIONS, GRADIENTS)}
    received = {payload: count(recvs, payload) for payload in (ACTIVATIONS, GRADIENTS)}
    totals = {
        payload: int((carries[sends] == payload).sum()) for payload in (ACTIVATIONS, GRADIENTS)
    }
    forward = sent[ACTIVATIONS] if is_first else received[ACTIVATIONS] - 1
    # a forward ends before its activations are sent on, on the last rank before its gradients are
    sent_then = sent[GRADIENTS] if is_last else sent[ACTIVATIONS]
    is_forward = ~is_backward[compute] & (forward >= 0) & (sent_then <= forward)
    is_forward &= forward < (totals[ACTIVATIONS] if is_first else 1 << 60)
    if not is_first:
        # between a backward and the next message the host does what is of neither pass
        back_starts = np.append(-(1 << 62), start[is_backward[compute]])
        last_back = back_starts[np.searchsorted(back_starts, start, side="right") - 1]
        taken = np.sort(events.end[recvs[carries[recvs] == ACTIVATIONS]])
        if len(taken):
            is_forward &= last_back < taken[(received[ACTIVATIONS] - 1).clip(0)]
    backward = sent[GRADIENTS] if is_last else received[GRADIENTS] - 1
    is_pass_back = is_backward[compute] & (backward >= 0)
    number[compute] = np.where(is_forward, forward, np.where(is_pass_back, backward, -1))
    kind = events.kind.copy()
    kind[compute[is_forward]] = FORWARD
    kind[compute[is_pass_back]] = BACKWARD
    return events._replace(
        kind=kind,
        stage=np.full_like(events.stage, position),
        microbatch=number.astype(np.int32),
        peer=peer,
        carries=carries.astype(np.int8),
    )


def _identify_payload(
    events: Events,
    messages: NDArray[np.intp],
    compute: NDArray[np.intp],
    is_backward: NDArray[np.bool_],
    only: int,
) -> Any:
    """Return what each message carries: a send what the compute before it makes, a receive what the
    compute after it needs. `only`: what all of them carry, 0 if both are possible.
    """
    if only or not len(messages) or not len(compute):
        return only
    if events.kind[messages[0]] == SEND:
        place = np.searchsorted(events.start[compute], events.start[messages]) - 1
    else:
        place = np.searchsorted(events.start[compute], events.end[messages])
    of_backward = is_backward[compute[place.clip(0, len(compute) - 1)]]
    return np.where(of_backward, GRADIENTS, ACTIVATIONS)
