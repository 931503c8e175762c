"""The events of a schedule whose actions went by the clock: passes, updates, messages, and in each gap whom a device waits for.

device 0   F0 F1 wait........... B0        what B0 needs, the gradients of B0 on device 1, came last:
device 1      F0 wait  B0                  device 0 waits for device 1
device 2         F0 B0
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind, pass_needs
from ipu_pipe.schedule.clock import Times
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.trace.events import KINDS, PAYLOADS, WAIT, Counters, Events, concatenate_counters, concatenate_events

IN_FLIGHT = "microbatches in flight"
CROSSING = {-1: "activations", +1: "gradients"}  # what comes from the stage before, and from the next one
FIRST = {"send": 0, Kind.UPDATE.word: 1, WAIT: 2, "pause": 2}  # of what begins at one time; passes last

Moments = Dict[Kind, NDArray[np.int64]]


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
    """Events, device by device in their order, and in-flight counters of a schedule whose actions went by `times`, a unit of
    which takes `unit_ns`.

    `versions`: of each forward and of each backward (P, M). `boundary_bytes[s]`: what goes from stage s to s + 1, back the same
    unless `gradients_cross` is false; None where that is not known: no messages are told. `updates`: whose microbatches are
    recorded, None for all; what is left out between them is a pause. The counters tell, for each device, the microbatches in
    flight, summed over its stages.
    """
    start, end = (
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()} for column in times[:2]
    )
    stages = _Stages(start, end, versions, device_of_stage, boundary_bytes, gradients_cross)
    last = list(start)[-2]  # before the update: the pass that completes a microbatch on its stage
    found: List[Events] = []
    counters: List[Counters] = []
    for device in dict.fromkeys(device_of_stage):
        own = [s for s, place in enumerate(device_of_stage) if place == device]
        found.append(_recorded(_ordered(stages.of_device(own)), accumulate, updates))
        counters.append(_in_flight(device, end[Kind.FORWARD][own].ravel(), end[last][own].ravel()))
    return concatenate_events(found), concatenate_counters(counters)


class _Stages:
    """What all stages did, when, on which device."""

    def __init__(
        self,
        start: Moments,
        end: Moments,
        versions: Tuple[IntArray, IntArray],
        device_of_stage: Sequence[int],
        boundary_bytes: Optional[Sequence[int]],
        gradients_cross: bool,
    ) -> None:
        self.start, self.end, self.versions = start, end, versions
        self.device, self.bytes, self.gradients_cross = device_of_stage, boundary_bytes, gradients_cross

    def of_device(self, stages: Sequence[int]) -> Events:
        """Passes, updates, waits and messages of one device."""
        work = [self._work(kind, s) for s in stages for kind in self.start]
        needed = np.concatenate([self._needed(kind, s) for s in stages for kind in self.start], axis=1)
        sends = [self._sends(kind, s) for s in stages for kind in self.start]
        done = concatenate_events(work)
        return concatenate_events([done, _waits(done, needed), *(each for each in sends if each is not None)])

    def _work(self, kind: Kind, s: int) -> Events:
        count = self.start[kind].shape[1]
        index = np.arange(count)
        if kind is Kind.UPDATE:
            version = index + 1
        else:
            version = self.versions[kind is not Kind.FORWARD][s, :count]
        size = self._handed_on(kind, s)
        return _events(s, self.device[s], kind.word, index, self.start[kind][s], self.end[kind][s], version, size)

    def _handed_on(self, kind: Kind, s: int) -> Optional[int]:
        """Bytes that a pass leaves for another stage."""
        if self.bytes is None:
            return None
        if kind is Kind.FORWARD:
            return self.bytes[s] if s < len(self.device) - 1 else None
        back = kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        return self.bytes[s - 1] if back and s and self.gradients_cross else None

    def _source(self, kind: Kind, s: int) -> Optional[Tuple[Kind, int]]:
        """The pass of another device that a pass needs."""
        for need in pass_needs(kind, local=not self.gradients_cross) if kind is not Kind.UPDATE else ():
            other = s + need.offset
            if 0 <= other < len(self.device) and self.device[other] != self.device[s]:
                return need.kind, other
        return None

    def _needed(self, kind: Kind, s: int) -> IntArray:
        """Of each action: when the last of what it needs was there, from which device, and what that is; (3, n), -1 for none."""
        found = np.full((3, self.start[kind].shape[1]), -1, np.int64)
        source = self._source(kind, s)
        if source is not None:
            found[0] = self.end[source[0]][source[1]]
            found[1] = self.device[source[1]]
            found[2] = PAYLOADS.index(CROSSING[source[1] - s])
        return found

    def _sends(self, kind: Kind, s: int) -> Optional[Events]:
        """Messages at the end of each pass, which the clock lets take no time of the device."""
        size = self._handed_on(kind, s)
        other = s + 1 if kind is Kind.FORWARD else s - 1
        if size is None or self.device[other] == self.device[s]:
            return None
        moments = self.end[kind][s]
        index, carried = np.arange(len(moments)), CROSSING[s - other]
        return _events(
            s, self.device[s], "send", index, moments, moments, index * 0 - 1, size, self.device[other], carried
        )


def _events(
    stage: int,
    device: int,
    kind: str,
    index: IntArray,
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    version: IntArray,
    size: Optional[int],
    peer: int = -1,
    carries: str = "",
) -> Events:
    """Columns of one stage's events of one kind."""

    def same(value: int, kind: Any) -> NDArray[Any]:
        return np.full(len(index), value, kind)

    return Events(
        same(stage, np.int32), same(device, np.int32), same(KINDS.index(kind), np.int8), index.astype(np.int32), start, end,
        version.astype(np.int32), same(-1 if size is None else size, np.int64), same(peer, np.int32),
        same(PAYLOADS.index(carries), np.int8),
    )  # fmt: skip


def _rank(kinds: NDArray[np.int8]) -> NDArray[np.int8]:
    return np.array([FIRST.get(kind, 3) for kind in KINDS], np.int8)[kinds]


def _ordered(events: Events) -> Events:
    return events.select(np.lexsort((_rank(events.kind), events.start)))


def _waits(done: Events, needed: IntArray) -> Events:
    """The gaps between what a device did, each a wait for what the action behind it needs, if that came within the gap."""
    order = np.lexsort((_rank(done.kind), done.start))
    done, needed = done.select(order), needed[:, order]
    free = np.concatenate([[0], np.maximum.accumulate(done.end)[:-1]])
    gap = done.start > free
    done, needed, free = done.select(gap), needed[:, gap], free[gap]
    last = needed[0] > free  # what is needed came later than the device was free
    return done._replace(
        kind=np.full(len(free), KINDS.index(WAIT), np.int8),
        start=free,
        end=done.start,
        version=np.full(len(free), -1, np.int32),
        bytes=np.full(len(free), -1, np.int64),
        peer=np.where(last, needed[1], -1).astype(np.int32),
        carries=np.where(last, needed[2], 0).astype(np.int8),
    )


def _recorded(events: Events, accumulate: int, updates: Optional[range]) -> Events:
    """Of a device's events in order those of these updates, with a pause in the place of what is left out between two."""
    if updates is None:
        return events
    is_update = events.is_kind(Kind.UPDATE.word)
    kept = np.flatnonzero(np.isin(np.where(is_update, events.microbatch, events.microbatch // accumulate), updates))
    if not len(kept):
        return events.select(kept)
    before, after = kept[:-1][np.diff(kept) > 1], kept[1:][np.diff(kept) > 1]
    start, end = np.maximum.accumulate(events.end)[before], events.start[after]
    longer = end > start
    nothing = np.full(int(longer.sum()), -1)
    pauses = _events(-1, int(events.device[0]), "pause", nothing, start[longer], end[longer], nothing, None)
    return _ordered(concatenate_events([events.select(kept), pauses]))


def _in_flight(device: int, f_end: IntArray, b_end: IntArray) -> Counters:
    """Microbatches whose activations a device holds: from the end of the forward to the end of the last pass."""
    times = np.concatenate([f_end, b_end])
    steps = np.concatenate([np.ones(len(f_end), np.int64), -np.ones(len(b_end), np.int64)])
    order = np.argsort(times, kind="stable")
    values, times = np.cumsum(steps[order]), times[order]
    last = np.append(times[1:] != times[:-1], True)  # of those at one time, the last stands
    count = int(last.sum())
    return Counters(
        np.full(count, device, np.int32), np.zeros(count, np.int16), times[last], values[last].astype(np.float64), (IN_FLIGHT,)
    )  # fmt: skip
