"""The clock: when each pass of a schedule runs if passes take time, and the events of a run that went so.

Every device does its row in order, every pass waits for what it needs, messages that share a link follow one another. With unit
costs the clock gives the slots:

    clock(schedule, slot_costs(schedule)).start[Kind.FORWARD]  ==  schedule.slots(Kind.FORWARD, 0, M)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import groupby
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import PASSES, Kind, pass_needs
from ipu_pipe.schedule.events import Counter, Event
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule

FloatArray = NDArray[np.float64]


class Message(NamedTuple):
    """What goes from one device to another: it has all of its `links` to itself for so many `seconds`, once they are free, and is
    there `latency` later. Without links it waits for no other message."""

    seconds: float = 0.0
    latency: float = 0.0
    links: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit of time: of a `forward`, `backward` and `update` by stage, of a message on its `link`.

    `weight_gradient`: of `backward`, the part that a split backward does on its own; only schedules that split it need it.
    `slot`: all stages keep step, and a pass begins no earlier than its slot, each of which takes so long (what follows a
    forward in a slot that holds two passes, in the slot's second half); 0: every pass begins as soon as it can. `onward[s]`:
    the message from stage s to s + 1, `back[s]` from s + 1 to s; empty: `link` for all, which are not shared. `reduce[s]`:
    what the replicas of stage s tell each other before its update; empty: nothing. `lockstep`: every slot is a cycle that
    lasts as long as its slowest device and then its messages (see `_Lockstep`).
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    link: float = 0.0
    slot: float = 0.0
    weight_gradient: Sequence[float] = ()
    onward: Sequence[Message] = ()
    back: Sequence[Message] = ()
    reduce: Sequence[Message] = ()
    lockstep: bool = False

    def durations(self, passes: Sequence[Kind]) -> Dict[Kind, Sequence[float]]:
        """Of each of these passes, by stage."""
        if Kind.BACKWARD in passes:
            return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        assert len(self.weight_gradient) == len(self.backward), "the schedule splits the backward: say in what parts"
        rest = [whole - part for whole, part in zip(self.backward, self.weight_gradient)]
        return {Kind.FORWARD: self.forward, Kind.INPUT_GRADIENT: rest, Kind.WEIGHT_GRADIENT: self.weight_gradient}

    def message(self, source: int, target: int) -> Message:
        """That between two neighbouring stages."""
        given = self.onward if target > source else self.back
        return given[min(source, target)] if given else Message(self.link)


def slot_costs(schedule: Schedule) -> Costs:
    """The unit costs: a slot takes 1, its passes fill it, messages and updates take no time."""
    share = [1 / schedule.slot_capacity] * schedule.stages
    if Kind.BACKWARD in schedule.passes:
        return Costs(share, share, [0.0] * schedule.stages, slot=1.0)
    return Costs(share, [2 * part for part in share], [0.0] * schedule.stages, slot=1.0, weight_gradient=share)


class Times(NamedTuple):
    """When each action begins and ends, by kind: (P, M) of the passes, (P, updates) of the updates; `carried`: how long each link
    was busy."""

    start: Dict[Kind, FloatArray]
    end: Dict[Kind, FloatArray]
    carried: Dict[str, float] = {}

    @property
    def finish(self) -> float:
        """The end of the last action, counted from the start of the first."""
        return max(float(end.max()) for end in self.end.values() if end.size)


class Pass(NamedTuple):
    """A pass of a schedule and its slot."""

    slot: int
    kind: Kind
    stage: int
    microbatch: int


def clock(schedule: Schedule, costs: Costs, microbatches: Optional[int] = None) -> Times:
    """The times of the actions of the first `microbatches` (None: all) of `schedule`."""
    count = schedule.microbatches if microbatches is None else microbatches
    played = _Lockstep(schedule, costs, count) if costs.lockstep else _Eager(schedule, costs, count)
    played.play()
    return played.times


class _Played:
    """Times being found: what both ways of playing a schedule share."""

    def __init__(self, schedule: Schedule, costs: Costs, count: int) -> None:
        self.schedule, self.costs, self.count = schedule, costs, count
        self.device = schedule.device_of_stage
        passes = schedule.passes
        self.duration = costs.durations(passes)
        self.needs = {kind: pass_needs(kind, schedule.local) for kind in passes}
        self.times = Times({}, {}, {})
        for kind in (*passes, Kind.UPDATE):
            for columns in (self.times.start, self.times.end):
                size = count // schedule.accumulate if kind is Kind.UPDATE else count
                columns[kind] = np.zeros((schedule.stages, size))
        self._missing: Dict[Tuple[int, int], int] = {}  # microbatches that a stage's update waits for
        self._targets = {(kind, s): self._targets_of(kind, s) for kind in passes for s in range(schedule.stages)}

    def note(self, kind: Kind, stage: int, index: int, start: float, end: float) -> None:
        """Write down an action, if it is one of those asked for."""
        if index < self.times.start[kind].shape[1]:
            self.times.start[kind][stage, index], self.times.end[kind][stage, index] = start, end

    def completes(self, done: Pass) -> Optional[int]:
        """The update that a pass is the last to be waited for by."""
        if done.kind is not self.schedule.passes[-1]:
            return None
        batch = self.schedule.accumulate
        key = done.stage, done.microbatch // batch
        self._missing[key] = self._missing.get(key, batch) - 1
        return None if self._missing[key] else key[1]

    def sent(self, done: Pass) -> List[Tuple[int, Message]]:
        """What a pass sends: the neighbouring stages that wait for its result, and the message to each."""
        return self._targets[done.kind, done.stage]

    def _targets_of(self, kind: Kind, s: int) -> List[Tuple[int, Message]]:
        offsets = {need.offset for needs in self.needs.values() for need in needs if need.kind is kind and need.offset}
        stages = [s - offset for offset in sorted(offsets) if 0 <= s - offset < self.schedule.stages]
        return [(stage, self.costs.message(s, stage)) for stage in stages]


class _Eager(_Played):
    """Every device goes on as soon as it can. What ends is looked at in the order of time, so that links are given to messages in
    the order in which these come."""

    def __init__(self, schedule: Schedule, costs: Costs, count: int) -> None:
        super().__init__(schedule, costs, count)
        self._begins_at = dict.fromkeys(schedule.passes, costs.slot / 2 if schedule.slot_capacity == 2 else 0.0)
        self._begins_at[Kind.FORWARD] = 0.0
        self._rows: Dict[int, Iterator[Pass]] = {}
        rows: Dict[int, List[Pass]] = {device: [] for device in self.device}
        for each in _passes(schedule, count):
            rows[self.device[each.stage]].append(each)
        self._rows = {device: iter(row) for device, row in rows.items()}
        self._free = dict.fromkeys(self.device, 0.0)  # when each device is through with what it has begun
        self._link_free: Dict[str, float] = {}
        self._there: Dict[Tuple[Kind, int, int, int], float] = {}  # when a pass's result is at a stage
        self._waits: Dict[
            Tuple[Kind, int, int, int], Tuple[int, Pass]
        ] = {}  # the pass that waits for one, and its device
        self._ends: List[Tuple[float, int, int, Pass]] = []  # of passes that run, a heap
        self._begun = 0

    def play(self) -> None:
        for device in self._rows:
            self._go_on(device)
        while self._ends:
            end, _, device, done = heapq.heappop(self._ends)
            self._there[done.kind, done.stage, done.microbatch, done.stage] = end
            k = self.completes(done)
            if k is not None:
                reduce = self.costs.reduce
                start = self._arrival(reduce[done.stage], end) if reduce else end
                self._free[device] = start + self.costs.update[done.stage]
                self.note(Kind.UPDATE, done.stage, k, start, self._free[device])
            for target, message in self.sent(done):
                key = done.kind, done.stage, done.microbatch, target
                self._there[key] = self._arrival(message, end)
                if key in self._waits:
                    self._try(*self._waits.pop(key))
            self._go_on(device)

    def _go_on(self, device: int) -> None:
        following = next(self._rows[device], None)
        if following is not None:
            self._try(device, following)

    def _try(self, device: int, wanted: Pass) -> None:
        """Begin a pass, or wait for what it needs and is not on its way yet."""
        slot, kind, s, m = wanted
        start = max(self._free[device], slot * self.costs.slot + self._begins_at[kind])
        for need, offset in self.needs[kind]:
            if 0 <= s + offset < self.schedule.stages:
                key = need, s + offset, m, s
                if key not in self._there:
                    self._waits[key] = device, wanted
                    return
                start = max(start, self._there[key])
        end = self._free[device] = start + self.duration[kind][s]
        self.note(kind, s, m, start, end)
        self._begun += 1
        heapq.heappush(self._ends, (end, self._begun, device, wanted))

    def _arrival(self, message: Message, at: float) -> float:
        """When a message that is ready `at` a time is there."""
        begin = at
        for link in message.links:
            begin = max(begin, self._link_free.get(link, 0.0))
        for link in message.links:
            self._link_free[link] = begin + message.seconds
            self.times.carried[link] = self.times.carried.get(link, 0.0) + message.seconds
        return begin + message.seconds + message.latency


class _Lockstep(_Played):
    """PopTorch's pipelines: all devices do what a slot holds, then all its messages go, then all begin the next slot. An update
    before which the pipeline empties is made on all stages together when it has; any other is part of its slot."""

    def play(self) -> None:
        now = 0.0
        waiting: Dict[int, List[int]] = {}  # update -> stages that are through with its batch
        for _, cycle in groupby(_passes(self.schedule, self.count), key=lambda each: each.slot):
            used = dict.fromkeys(self.device, now)
            sent: List[Message] = []
            for done in cycle:
                device, s = self.device[done.stage], done.stage
                start, used[device] = used[device], used[device] + self.duration[done.kind][s]
                self.note(done.kind, s, done.microbatch, start, used[device])
                sent += [message for _, message in self.sent(done)]
                k = self.completes(done)
                if k is not None and self.schedule.stretch(k)[1] == k + 1:
                    waiting.setdefault(k, []).append(s)
                elif k is not None:
                    start = used[device] + (sum(self.costs.reduce[s][:2]) if self.costs.reduce else 0.0)
                    used[device] = start + self.costs.update[s]
                    self.note(Kind.UPDATE, s, k, start, used[device])
            now = max(used.values()) + self._exchange(sent)
            for k in [k for k, stages in waiting.items() if len(stages) == self.schedule.stages]:
                now += self._exchange(self.costs.reduce)
                for s in waiting.pop(k):
                    self.note(Kind.UPDATE, s, k, now, now + self.costs.update[s])
                now += max(self.costs.update)

    def _exchange(self, messages: Iterable[Message]) -> float:
        """How long it takes until messages that begin together are all there."""
        busy: Dict[str, float] = {}
        alone, latency = 0.0, 0.0
        for message in messages:
            latency = max(latency, message.latency)
            alone = max(alone, message.seconds)
            for link in message.links:
                busy[link] = busy.get(link, 0.0) + message.seconds
        for link, seconds in busy.items():
            self.times.carried[link] = self.times.carried.get(link, 0.0) + seconds
        return max([alone, *busy.values()]) + latency


def _passes(schedule: Schedule, count: int) -> Iterator[Pass]:
    """All passes of the slots in which the first `count` microbatches are at work, in order."""
    passes = schedule.passes
    end = 1 + max(int(schedule.slots(kind, 0, count).max()) for kind in passes)
    found = []
    for order, kind in enumerate(passes):
        ascends = all(part.pieces[kind].ascends() for part in schedule.parts)
        reach = int(schedule.count_before(kind, np.array([end])).max()) if ascends else schedule.microbatches
        slots = schedule.slots(kind, 0, reach)
        stage, microbatch = np.nonzero(slots < end)
        found.append(np.stack([slots[stage, microbatch], np.full_like(stage, order), stage, microbatch]))
    slot, order, stage, microbatch = np.concatenate(found, axis=1)
    by_slot = np.lexsort((microbatch, stage, order, slot))
    for at, code, s, m in zip(*(column[by_slot].tolist() for column in (slot, order, stage, microbatch))):
        yield Pass(at, passes[code], s, m)


def modelled_events(
    times: Times,
    versions: Tuple[IntArray, IntArray],
    accumulate: int,
    unit_ns: float,
    device_of_stage: Sequence[int],
    boundary_bytes: Optional[Sequence[int]] = None,
    gradients_cross: bool = True,
) -> Tuple[List[Event], List[Counter]]:
    """Events and in-flight counters of a schedule whose actions went by `times`, a unit of which takes `unit_ns`.

    `versions`: of each forward and of each backward (P, M). `boundary_bytes[s]`: what goes from stage s to s + 1, None if not
    known; back the same unless `gradients_cross` is false. The counters tell, for each device, the microbatches in flight,
    summed over its stages.
    """
    start, end = (
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()} for column in times[:2]
    )
    events: List[Event] = []
    for s, device in enumerate(device_of_stage):
        onward = boundary_bytes[s] if boundary_bytes is not None and s < len(device_of_stage) - 1 else None
        back = boundary_bytes[s - 1] if boundary_bytes is not None and s and gradients_cross else None
        forwards, backwards, updates = (
            list(zip(start[kind][s].tolist(), end[kind][s].tolist())) for kind in (*PASSES, Kind.UPDATE)
        )
        for m, ((begin, done), version) in enumerate(zip(forwards, versions[0][s].tolist())):
            events.append(Event(s, device, Kind.FORWARD.word, m, begin, done, version, onward))
        for m, ((begin, done), version) in enumerate(zip(backwards, versions[1][s].tolist())):
            events.append(Event(s, device, Kind.BACKWARD.word, m, begin, done, version, back))
            if (m + 1) % accumulate == 0:
                k = m // accumulate
                events.append(Event(s, device, Kind.UPDATE.word, k, *updates[k], k + 1, None))
    counters: List[Counter] = []
    for device in dict.fromkeys(device_of_stage):
        stages = [s for s, place in enumerate(device_of_stage) if place == device]
        counters += _in_flight(device, end[Kind.FORWARD][stages].ravel(), end[Kind.BACKWARD][stages].ravel())
    return events, counters


def _in_flight(device: int, f_end: IntArray, b_end: IntArray) -> List[Counter]:
    """Microbatches whose activations a device holds: from the end of the forward to the end of the backward."""
    times = np.concatenate([f_end, b_end])
    steps = np.concatenate([np.ones(len(f_end), np.int64), -np.ones(len(b_end), np.int64)])
    order = np.argsort(times, kind="stable")
    values, times = np.cumsum(steps[order]), times[order]
    last = np.append(times[1:] != times[:-1], True)  # of those at one time, the last stands
    return [
        Counter(device, "microbatches in flight", t, v) for t, v in zip(times[last].tolist(), values[last].tolist())
    ]
