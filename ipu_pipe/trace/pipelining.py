"""Find the pipeline in the records of PyTorch's profiler: which pass each operation belongs to, and
which receive takes which send.

Stages and microbatches are named by ranges where the schedule annotates its passes:

    range      |----- Forward 3 -----|            the operations and messages that begin inside
    records      |recv| |op| |op|  |send---|      belong to it

A message outside of them belongs to the pass next to it. Where nothing is annotated passes are
inferred from the messages: the k-th activations that a rank receives are microbatch k's, and it
computes a forward until it sends the k-th activations on. Then a rank is a stage.

Which ranks form a pipeline is tried out: of the partitions of `trace.process_groups` the one is
taken whose messages all have another end that was not sent after it had arrived.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.text import list_some
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.events import COMPUTE, KIND_CODE, PAYLOAD_CODE, Events
from ipu_pipe.trace.kineto import RankRecords
from ipu_pipe.trace.process_groups import Partition, list_partitions, resolve_peers
from ipu_pipe.trace.waits import match_messages

FORWARD = KIND_CODE[Kind.FORWARD.word]
BACKWARD = KIND_CODE[Kind.BACKWARD.word]
UPDATE = KIND_CODE[Kind.UPDATE.word]
BACKWARDS = tuple(kind.word for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT))
PASSES = (Kind.FORWARD.word, *BACKWARDS)
ENDS = ("send", "recv")
# an operation of less than a 20th of the longest one beside it is short
SHORT = 20
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
COUNTED = (
    "passes are read from the names of the trace's ranges, and numbered in their order: the names "
    "do not say microbatches"
)
NOT_KNOWN = (
    "stages and microbatches are not known: no range names them, and no messages between "
    "neighbours tell them; a rank is taken as a stage"
)


# a rank's events, and which of them are of a backward
Column = Tuple[Events, NDArray[np.bool_]]
# all events, and the ranks of each pipeline by their stages
Layout = Tuple[Events, Partition]
# from a column, the place in the pipeline and its ranks to events with stages and microbatches
Label = Callable[[Events, NDArray[np.bool_], int, Sequence[int]], Events]


class PipelineEvents(NamedTuple):
    """The events of all ranks with their stages, microbatches and peers. `microbatches`: of an
    update, None if not known; `replicas`: the process groups whose ranks have the same stages.
    """

    events: Events
    microbatches: int | None
    notes: tuple[str, ...]
    replicas: Partition = []


def find_pipeline(ranks: Sequence[int], records: Sequence[RankRecords]) -> PipelineEvents:
    """Return the events of all ranks, by one clock, as passes and messages of a pipeline."""
    columns = {rank: _join_calls(rank, of_rank) for rank, of_rank in zip(ranks, records)}
    ranges = [of_rank.ranges for of_rank in records]
    partitions = list_partitions(ranks, records)
    if any(r.is_kind(*PASSES).any() for r in ranges):
        # 0 where no name says a microbatch
        count = 1 + max(int(r.microbatch.max(initial=-1)) for r in ranges)
        for rank, of_rank in zip(ranks, records):
            if len(of_rank.ranges.start):
                columns[rank] = _label_by_ranges(*columns[rank], of_rank, count)
        has_stages = any((r.stage >= 0).any() for r in ranges)
        layouts = _list_layouts(columns, partitions, _label_named, has_stages)
        # ranks of which no group is a pipeline are one
        layouts = layouts or [_lay_out(columns, [tuple(ranks)], _label_named)]
        note = ANNOTATED if count else COUNTED
    else:
        count = 0
        note = INFERRED
        is_inferred = len(records) > 1 and not any(of_rank.on_device for of_rank in records)
        layouts = _list_layouts(columns, partitions * is_inferred, _label_inferred, False)
        layouts = [layout for layout in layouts if _agree(layout[0])]
    if not layouts:
        # a peer within one of several process groups is not known
        resolved = _resolve(columns, partitions[0] if len(partitions) == 1 else [])
        events = ev.concatenate_events(
            _number_messages(events._replace(stage=np.full_like(events.stage, rank)))
            for rank, (events, _) in resolved.items()
        )
        return PipelineEvents(events, None, (NOT_KNOWN,))
    if len(layouts) > 1:
        # stable: of equal ones the partition into smaller groups stays first
        layouts.sort(key=lambda layout: _count_misfits(layout[0]))
    events, pipelines = layouts[0]
    notes: tuple[str, ...] = (note,)
    if len(pipelines) > 1:
        listed = list_some([f"({', '.join(map(str, pipeline))})" for pipeline in pipelines])
        notes += (f"{len(pipelines)} pipelines, told by their messages: ranks {listed}",)
    replicas = [group for group in zip(*pipelines) if any(group in p for p in partitions)]
    return PipelineEvents(events, count or None, notes, replicas)


def _list_layouts(
    columns: dict[int, Column], partitions: Sequence[Partition], label: Label, has_stages: bool
) -> list[Layout]:
    """Return the ways in which the ranks may be pipelines, with their events. Where ranges name
    stages, no pipeline has a stage twice; else all its ranks but the last one send activations on.
    """
    layouts = []
    for groups in partitions:
        resolved = _resolve(columns, groups)
        if has_stages:
            is_possible = all(_has_each_stage_once(resolved, group) for group in groups)
        # one group of all ranks does not tell the pipelines in it, but their messages do
        elif len(groups) == 1 and columns.keys() >= {*groups[0]}:
            groups = _find_replicas(resolved)
            is_possible = True
        else:
            is_possible = all(_is_sent_on(resolved, group) for group in groups)
        if is_possible:
            layouts.append(_lay_out(resolved, groups, label))
    return layouts


def _lay_out(columns: dict[int, Column], pipelines: Partition, label: Label) -> Layout:
    """Return the events of pipelines. A rank whose file is missing has none."""
    parts = []
    for pipeline in pipelines:
        of_pipeline = [
            label(*columns[rank], position, pipeline)
            for position, rank in enumerate(pipeline)
            if rank in columns
        ]
        parts.append(_find_peers(of_pipeline))
    return ev.concatenate_events(parts), pipelines


def _resolve(columns: dict[int, Column], groups: Partition) -> dict[int, Column]:
    group_of = {rank: group for group in groups for rank in group}
    return {
        rank: (resolve_peers(events, group_of.get(rank)), is_backward)
        for rank, (events, is_backward) in columns.items()
    }


def _has_each_stage_once(columns: dict[int, Column], group: Sequence[int]) -> bool:
    stages = [np.unique(columns[rank][0].stage) for rank in group if rank in columns]
    known = [stage for of_rank in stages for stage in of_rank.tolist() if stage >= 0]
    return len(known) == len({*known})


def _is_sent_on(columns: dict[int, Column], group: Sequence[int]) -> bool:
    """Tell whether all ranks of a group but the last one send what their forwards make."""
    return all(
        (len(_list_receivers(columns[rank])) > 0) == (rank != group[-1])
        for rank in group
        if rank in columns
    )


def _list_receivers(column: Column) -> NDArray[np.int32]:
    """Return the peers of a rank's sends of what its forwards make; -1 where they are not known."""
    events, is_backward = column
    sends = np.flatnonzero(events.kind == SEND)
    compute = np.flatnonzero(events.is_kind(*COMPUTE))
    payload = _identify_payload(events, sends, compute, is_backward, 0)
    return events.peer[sends[np.broadcast_to(payload == ACTIVATIONS, len(sends))]]


def _count_misfits(events: Events) -> int:
    """Return how many messages have no other end, or arrived before they were sent."""
    sends, recvs, unmatched = match_messages(events)
    return unmatched + int((events.end[recvs] < events.start[sends]).sum())


def _join_calls(rank: int, records: RankRecords) -> Column:
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
        if kind == KIND_CODE[ev.COLLECTIVE] and len(calls) == len(messages):
            # another thread runs them in order, after their calls have returned
            call = calls
            posts = events.start[calls] <= events.start[messages]
        # a call may post several messages: the first one begins with it
        _, first = np.unique(call[posts], return_index=True)
        joined = call[posts][first]
        posted = messages[posts][first]
        events.start[posted] = events.start[joined]
        for column in (events.peer, events.bytes):
            unknown = column[messages[posts]] == -1
            column[messages[posts]] = np.where(
                unknown, column[call[posts]], column[messages[posts]]
            )
        # from now on the message stands for its call
        is_kept[joined] = False
    order = np.flatnonzero(is_kept)
    order = order[np.argsort(events.start[order], kind="stable")]
    return events.select(order), is_backward[order]


# ---- passes that ranges name


def _label_by_ranges(
    events: Events, is_backward: NDArray[np.bool_], records: RankRecords, microbatches: int
) -> Column:
    """Return the events of a rank with the kind, stage and microbatch of the range in which they
    begin, or are launched by the host. Microbatches are counted over all updates: the n-th time
    that a pass occurs it is of update n.
    """
    # an outer range comes before the inner ones that begin with it
    ranges = records.ranges.select(np.lexsort((-records.ranges.end, records.ranges.start)))
    ranges = ranges.select(~_find_repeated(ranges))
    stage = ranges.stage
    update = _count_occurrences(_make_keys(ranges))
    is_numbered = ranges.microbatch >= 0
    microbatch = np.where(is_numbered, update * microbatches + ranges.microbatch, update)
    moments = events.start
    if records.launched is not None:
        moments = records.launched[np.argsort(records.events.start, kind="stable")]
    place = _find_innermost(moments, ranges)
    # of a forward and a backward in one range the operations tell which of them they are
    other = np.maximum(place - 1, 0)
    is_twin = (ranges.start[other] == ranges.start[place]) & (
        ranges.end[other] == ranges.end[place]
    )
    is_twin &= (ranges.kind[place] == FORWARD) == is_backward
    place = np.where(is_twin & (place > 0), other, place)
    is_inside = place >= 0
    place = np.maximum(place, 0)
    is_message = events.is_kind("send", "recv")
    is_message_range = ranges.is_kind("send", "recv")[place]
    is_compute = events.kind == UNSPECIFIED
    labelled = is_inside & (is_compute & ~is_message_range | is_message)
    kind = np.where(labelled & is_compute, ranges.kind[place], events.kind)
    carries = _guess_payload(ranges, place, is_message_range)
    # the messages of an update have no microbatch
    labelled &= ~(is_message & (ranges.kind[place] == UPDATE))
    events = events._replace(
        kind=kind.astype(np.int8),
        stage=np.where(labelled, stage[place], -1).astype(np.int32),
        microbatch=np.where(labelled, microbatch[place], -1).astype(np.int32),
        carries=np.where(is_message, carries * labelled, events.carries).astype(np.int8),
    )
    stages = np.unique(stage[ranges.is_kind(*PASSES)])
    if len(stages) == 1:
        # what no range names is of the rank's one stage
        events = events._replace(
            stage=np.where(events.stage < 0, stages[0], events.stage).astype(np.int32)
        )
    return events, is_backward | events.is_kind(*BACKWARDS)


def _label_named(
    events: Events, is_backward: NDArray[np.bool_], position: int, ranks: Sequence[int]
) -> Events:
    """Return the events of a rank, in the order of their starts, with its messages outside of
    ranges as those of the pass next to them: a send of the one before, a receive of the one after.
    """
    if (events.stage < 0).all():
        events = events._replace(stage=np.full_like(events.stage, position))
    passes = np.flatnonzero(
        events.is_kind(*COMPUTE) & (events.microbatch >= 0) & (events.kind != UPDATE)
    )
    messages = np.flatnonzero(events.is_kind("send", "recv") & (events.microbatch < 0))
    starts = events.start[passes]
    before = np.searchsorted(starts, events.start[messages], side="right") - 1
    after = np.searchsorted(starts, events.end[messages])
    place = np.where(events.kind[messages] == SEND, before, after)
    is_known = (place >= 0) & (place < len(passes))
    messages = messages[is_known]
    beside = passes[place[is_known]]
    events.stage[messages] = events.stage[beside]
    events.microbatch[messages] = events.microbatch[beside]
    is_forward = events.kind[beside] == FORWARD
    events.carries[messages] = np.where(is_forward, ACTIVATIONS, GRADIENTS)
    return events


def _guess_payload(
    ranges: Events, place: NDArray[np.intp], is_message_range: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return what each message carries: as its range says, and inside a pass what the pass takes
    and sends on.
    """
    of_pass = np.where(ranges.kind[place] == FORWARD, ACTIVATIONS, GRADIENTS)
    return np.where(is_message_range, ranges.carries[place], of_pass)


def _count_occurrences(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many equal keys come before each one."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    # cut, because without any key one place would be left
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(ordered)), 0))
    count = np.empty(len(keys), np.int64)
    count[order] = np.arange(len(ordered)) - first
    return count


def _make_keys(ranges: Events) -> NDArray[np.int64]:
    """Return a number for each range, equal for equal passes or messages."""
    # + 1, because a stage that is not named is -1
    keys = ((ranges.stage + 1).astype(np.int64) << 40) + (ranges.kind.astype(np.int64) << 32)
    return keys + (ranges.carries.astype(np.int64) << 37) + ranges.microbatch.astype(np.int64)


def _find_repeated(ranges: Events) -> NDArray[np.bool_]:
    """Return a mask of ranges directly inside one of the same name, as a function that calls
    another one of its trainer: together they are one pass.
    """
    keys = _make_keys(ranges)
    outer = _find_outer(ranges)
    return (outer >= 0) & (keys[outer] == keys)


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
    # a stack of the ranges that are open
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
    # a place more at each end, for the neighbours that the first and the last stage do not have
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
    # a kind is a number of one byte
    keys = (events.peer.astype(np.int64) << 8) + events.kind
    number = np.full(len(keys), -1, np.int64)
    number[is_message] = _count_occurrences(keys[is_message])
    return events._replace(microbatch=number.astype(np.int32))


def _find_replicas(columns: dict[int, Column]) -> Partition:
    """Return the ranks of each pipeline, in the order of its stages. A rank that sends what its
    forwards make is followed by the rank that it sends to, or by the next one where no record says
    which; the last rank of a pipeline sends nothing on.
    """
    ranks = [*columns]
    next_rank = {}
    for rank, follower in zip(ranks, [*ranks[1:], -1]):
        peers = _list_receivers(columns[rank])
        if len(peers):
            named = peers[peers >= 0]
            next_rank[rank] = int(np.bincount(named).argmax()) if len(named) else follower
    replicas = []
    for first in [rank for rank in ranks if rank not in next_rank.values()]:
        chain = [first]
        while next_rank.get(chain[-1], -1) in columns and next_rank[chain[-1]] not in chain:
            chain.append(next_rank[chain[-1]])
        replicas.append(tuple(chain))
    # messages in a ring, or of two ranks to one, do not divide the ranks
    is_partition = sorted(rank for chain in replicas for rank in chain) == sorted(ranks)
    return replicas if is_partition else [tuple(ranks)]


def _agree(events: Events) -> bool:
    """Tell whether each rank receives something of what another one sends to it, and the reverse,
    among the ranks of the trace.
    """
    messages = events.select(
        events.is_kind("send", "recv") & np.isin(events.peer, np.unique(events.device))
    )
    is_send = messages.kind == SEND
    source = np.where(is_send, messages.device, messages.peer)
    target = np.where(is_send, messages.peer, messages.device)
    ways = [
        set(zip(source[mask].tolist(), target[mask].tolist(), messages.carries[mask].tolist()))
        for mask in (is_send, ~is_send)
    ]
    return ways[0] == ways[1] and bool(ways[0])


def _label_inferred(
    events: Events, is_backward: NDArray[np.bool_], position: int, ranks: Sequence[int]
) -> Events:
    """Return the events of a rank, in the order of their starts, with the passes that are
    inferred from its messages.
    """
    is_first = position == 0
    is_last = position == len(ranks) - 1
    compute = np.flatnonzero(events.kind == UNSPECIFIED)
    sends, recvs = (np.flatnonzero(events.kind == kind) for kind in (SEND, RECV))
    carries = events.carries.astype(np.int64)
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
    if is_first:
        # what comes before a receive that is through before the next send is of no forward
        sent_at = np.append(events.start[sends], 1 << 62)
        received_at = np.append(events.end[recvs], 1 << 62)
        next_send = sent_at[np.searchsorted(sent_at, start, side="right")]
        next_recv = received_at[np.searchsorted(events.start[recvs], start, side="right")]
        is_forward &= next_send < next_recv
    else:
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
    # a detach after a backward says nothing of what is sent
    took = events.end[compute] - events.start[compute]
    compute = compute[took * SHORT >= _find_longest(events, compute)]
    if events.kind[messages[0]] == SEND:
        place = np.searchsorted(events.start[compute], events.start[messages]) - 1
    else:
        place = np.searchsorted(events.start[compute], events.end[messages])
    of_backward = is_backward[compute[place.clip(0, len(compute) - 1)]]
    return np.where(of_backward, GRADIENTS, ACTIVATIONS)


def _find_longest(events: Events, compute: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return for each compute the time of the longest one between the messages around it."""
    edges = np.sort(np.where(events.kind == SEND, events.start, events.end)[events.is_kind(*ENDS)])
    window = np.searchsorted(edges, events.start[compute], side="right")
    longest = np.zeros(len(edges) + 1, np.int64)
    np.maximum.at(longest, window, events.end[compute] - events.start[compute])
    return longest[window]
