"""The events of a schedule that was played by the clock: passes, updates, messages, and in each gap whom a device waits for.

device 0   F0 F1 wait........... B0        B0 needs the gradients of B0 on device 1, which came last:
device 1      F0 wait  B0                  device 0 waits for device 1
device 2         F0 B0
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind, pass_needs
from ipu_pipe.schedule.clock import Times
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.trace.events import (
    KIND_CODE,
    KINDS,
    PAYLOAD_CODE,
    WAIT,
    Counters,
    Events,
    concatenate_counters,
    concatenate_events,
)

IN_FLIGHT = "microbatches in flight"
CROSSING = {-1: "activations", +1: "gradients"}  # what comes from the previous and from the next stage
# The order of events that begin at one time; passes come last.
_ORDER = {"send": 0, Kind.UPDATE.word: 1, WAIT: 2, "pause": 2}
_ORDER_OF_CODE = np.array([_ORDER.get(kind, 3) for kind in KINDS], np.int8)


def build_modelled_events(
    times: Times,
    versions: Tuple[IntArray, IntArray],
    accumulate: int,
    unit_ns: float,
    device_of_stage: Sequence[int],
    boundary_bytes: Optional[Sequence[int]] = None,
    gradients_cross: bool = True,
    updates: Optional[range] = None,
) -> Tuple[Events, Counters]:
    """Return the events of a played schedule, device by device in their order, and its counters of microbatches in flight.

    `times`: of the actions, a unit of which takes `unit_ns`. `versions`: that each forward and each backward reads, each (P, M).
    `boundary_bytes[s]`: that stage s sends to stage s + 1 for a microbatch, and gets back unless `gradients_cross` is false;
    without them there are no messages. `updates`: those to record (None: all); what is left out between two is a pause.
    """
    start, end = (
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()} for column in times[:2]
    )
    stages = len(device_of_stage)

    def get_sent_bytes(kind: Kind, s: int) -> Optional[int]:
        """Return the bytes that a pass of stage s leaves for another stage; None without any."""
        if boundary_bytes is None:
            return None
        if kind is Kind.FORWARD:
            return boundary_bytes[s] if s < stages - 1 else None
        returns = kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and gradients_cross
        return boundary_bytes[s - 1] if returns and s else None

    def build_actions(kind: Kind, s: int) -> Events:
        index = np.arange(start[kind].shape[1])
        is_update = kind is Kind.UPDATE
        version = index + 1 if is_update else versions[kind is not Kind.FORWARD][s, : len(index)]
        size = get_sent_bytes(kind, s)
        return Events.from_columns(
            len(index), stage=s, device=device_of_stage[s], kind=KIND_CODE[kind.word], microbatch=index,
            start=start[kind][s], end=end[kind][s], version=version, bytes=-1 if size is None else size,
        )  # fmt: skip

    def find_needed(kind: Kind, s: int) -> IntArray:
        """Return when what each action needs from another device was there, that device, and the payload; (3, n), -1: nothing."""
        needed = np.full((3, start[kind].shape[1]), -1, np.int64)
        for need in pass_needs(kind, local=not gradients_cross) if kind is not Kind.UPDATE else ():
            other = s + need.offset
            if 0 <= other < stages and device_of_stage[other] != device_of_stage[s]:
                needed[0], needed[1] = end[need.kind][other], device_of_stage[other]
                needed[2] = PAYLOAD_CODE[CROSSING[other - s]]
                break
        return needed

    def build_sends(kind: Kind, s: int) -> Events:
        """Return a message at the end of each pass; the clock lets messages take no time of the device."""
        size, other = get_sent_bytes(kind, s), s + 1 if kind is Kind.FORWARD else s - 1
        if size is None or device_of_stage[other] == device_of_stage[s]:
            return Events.from_rows([])
        ends = end[kind][s]
        return Events.from_columns(
            len(ends), stage=s, device=device_of_stage[s], kind=KIND_CODE["send"], microbatch=np.arange(len(ends)),
            start=ends, end=ends, bytes=size, peer=device_of_stage[other], carries=PAYLOAD_CODE[CROSSING[s - other]],
        )  # fmt: skip

    completing = list(start)[-2]  # the pass before the update, which completes a microbatch on its stage
    events: List[Events] = []
    counters: List[Counters] = []
    for device in dict.fromkeys(device_of_stage):
        here = [s for s in range(stages) if device_of_stage[s] == device]
        actions = concatenate_events([build_actions(kind, s) for s in here for kind in start])
        needed = np.concatenate([find_needed(kind, s) for s in here for kind in start], axis=1)
        sends = [build_sends(kind, s) for s in here for kind in start]
        all_events = concatenate_events([actions, _find_waits(actions, needed), *sends])
        events.append(_select_updates(all_events.select(_order(all_events)), accumulate, updates))
        counters.append(_count_in_flight(device, end[Kind.FORWARD][here].ravel(), end[completing][here].ravel()))
    return concatenate_events(events), concatenate_counters(counters)


def _order(events: Events) -> NDArray[np.intp]:
    return np.lexsort((_ORDER_OF_CODE[events.kind], events.start))


def _find_waits(actions: Events, needed: IntArray) -> Events:
    """Return the gaps between a device's actions, each a wait for what the next action needs, if that came within the gap."""
    order = _order(actions)
    actions, needed = actions.select(order), needed[:, order]
    free = np.concatenate([[0], np.maximum.accumulate(actions.end)[:-1]])
    gap = actions.start > free
    actions, needed, free = actions.select(gap), needed[:, gap], free[gap]
    came_late = needed[0] > free
    return Events.from_columns(
        len(free), stage=actions.stage, device=actions.device, kind=KIND_CODE[WAIT], microbatch=actions.microbatch,
        start=free, end=actions.start, peer=np.where(came_late, needed[1], -1), carries=np.where(came_late, needed[2], 0),
    )  # fmt: skip


def _select_updates(events: Events, accumulate: int, updates: Optional[range]) -> Events:
    """Return a device's events of these updates, with a pause in the place of what is left out between two of them."""
    if updates is None:
        return events
    update = np.where(events.is_kind(Kind.UPDATE.word), events.microbatch, events.microbatch // accumulate)
    recorded = np.flatnonzero(np.isin(update, updates))
    if not len(recorded):
        return events.select(recorded)
    gap = np.diff(recorded) > 1
    start, end = np.maximum.accumulate(events.end)[recorded[:-1][gap]], events.start[recorded[1:][gap]]
    start, end = start[end > start], end[end > start]
    pauses = Events.from_columns(
        len(start), device=int(events.device[0]), kind=KIND_CODE["pause"], start=start, end=end
    )
    selected = concatenate_events([events.select(recorded), pauses])
    return selected.select(_order(selected))


def _count_in_flight(device: int, forward_ends: IntArray, last_ends: IntArray) -> Counters:
    """Count the microbatches whose activations a device holds: from the end of the forward to the end of the last pass."""
    times = np.concatenate([forward_ends, last_ends])
    steps = np.concatenate([np.ones(len(forward_ends), np.int64), -np.ones(len(last_ends), np.int64)])
    order = np.argsort(times, kind="stable")
    values, times = np.cumsum(steps[order]).astype(np.float64), times[order]
    is_last = np.append(times[1:] != times[:-1], True)  # of several changes at one time
    count = int(is_last.sum())
    device_column, name_column = np.full(count, device, np.int32), np.zeros(count, np.int16)
    return Counters(device_column, name_column, times[is_last], values[is_last], (IN_FLIGHT,))
