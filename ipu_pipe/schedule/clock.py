"""The clock: when each pass of a schedule runs if passes take time.

Every device does its row in order, every pass waits for what it needs, messages that share a link follow one another. With unit
costs the clock gives the slots:

    clock(schedule, slot_costs(schedule)).start[Kind.FORWARD]  ==  schedule.slots(Kind.FORWARD, 0, M)
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind, pass_needs
from ipu_pipe.schedule.table import Schedule

FloatArray = NDArray[np.float64]
HOST = "link to the host"


class Transfer(NamedTuple):
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
    lasts as long as its slowest device and then its messages (see `_Lockstep`); `enter`: before a cycle in which stage 0 has a
    forward all wait so long for what comes from the host. Elsewhere that goes on beside the passes.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    link: float = 0.0
    slot: float = 0.0
    weight_gradient: Sequence[float] = ()
    onward: Sequence[Transfer] = ()
    back: Sequence[Transfer] = ()
    reduce: Sequence[Transfer] = ()
    lockstep: bool = False
    enter: float = 0.0

    def __post_init__(self) -> None:
        """Raise BadInput unless there is a figure for every stage and boundary; damaged traces lack some."""
        stages = len(self.forward)
        for key, figures, count, optional in (
            ("backward", self.backward, stages, False),
            ("update", self.update, stages, False),
            ("weight_gradient", self.weight_gradient, stages, True),
            ("onward", self.onward, stages - 1, True),
            ("back", self.back, stages - 1, True),
            ("reduce", self.reduce, stages, True),
        ):
            if len(figures) != count and (figures or not optional):
                raise BadInput(f"costs: {key}: {len(figures)} figures: expected {count} for {stages} stages")

    def durations(self, passes: Sequence[Kind]) -> Dict[Kind, Sequence[float]]:
        """Of each of these passes, by stage."""
        if Kind.BACKWARD in passes:
            return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        assert len(self.weight_gradient) == len(self.backward), "the schedule splits the backward: say in what parts"
        rest = [whole - part for whole, part in zip(self.backward, self.weight_gradient)]
        return {Kind.FORWARD: self.forward, Kind.INPUT_GRADIENT: rest, Kind.WEIGHT_GRADIENT: self.weight_gradient}

    def message(self, source: int, target: int) -> Transfer:
        """That between two neighbouring stages."""
        given = self.onward if target > source else self.back
        return given[min(source, target)] if given else Transfer(self.link)


def make_slot_costs(schedule: Schedule) -> Costs:
    """The unit costs: a slot takes 1, its passes fill it, messages and updates take no time."""
    share = [1 / schedule.slot_capacity] * schedule.stages
    if Kind.BACKWARD in schedule.passes:
        return Costs(share, share, [0.0] * schedule.stages, slot=1.0)
    return Costs(share, [2 * part for part in share], [0.0] * schedule.stages, slot=1.0, weight_gradient=share)


class Times(NamedTuple):
    """When each action begins and ends, by kind: (P, M) of the passes, (P, updates) of the updates; and how long each link was
    busy."""

    start: Dict[Kind, FloatArray]
    end: Dict[Kind, FloatArray]
    link_busy: Dict[str, float] = {}

    @property
    def finish(self) -> float:
        """The end of the last action, counted from the start of the first."""
        return max(float(end.max()) for end in self.end.values() if end.size)


def clock(schedule: Schedule, costs: Costs, microbatches: Optional[int] = None) -> Times:
    """The times of the actions of the first `microbatches` (None: all) of `schedule`."""
    count = schedule.microbatches if microbatches is None else microbatches
    played = _Lockstep(schedule, costs, count) if costs.lockstep else _Eager(schedule, costs, count)
    played.play()
    return played.times()


def sum_link_times(flows: Iterable[Tuple[int, Transfer]]) -> Dict[str, float]:
    """How long each link is busy with so many of each message."""
    found: Dict[str, float] = {}
    for count, message in flows:
        for link in message.links if count else ():
            found[link] = found.get(link, 0.0) + count * message.seconds
    return found


def time_first_updates(schedule: Schedule, costs: Costs, updates: int) -> FloatArray:
    """When the first `updates` of each stage end, (P, updates); what comes behind them is not played. Not in lock-step."""
    played = _Eager(schedule, costs, schedule.microbatches)
    played.play(updates)
    return np.array(played.updates, np.float64)[:, :updates, 1]


class _Played:
    """Times being found: what both ways of playing a schedule share. A *pass* is the number kind * P + stage of one, the kinds
    counted in the order of `schedule.passes`; with a microbatch it is one action."""

    def __init__(self, schedule: Schedule, costs: Costs, count: int) -> None:
        self.schedule, self.costs, self.count = schedule, costs, count
        P, self.kinds = schedule.stages, schedule.passes
        durations = costs.durations(self.kinds)
        self.duration = [seconds for kind in self.kinds for seconds in durations[kind]]
        self.device = [*schedule.device_of_stage] * len(self.kinds)
        self.rows = _rows(schedule, count)
        longest = 1 + max(row[-1] for row in self.rows)
        self.start = [[0.0] * longest for _ in self.duration]
        self.end = [[0.0] * longest for _ in self.duration]
        self.updates: List[List[Tuple[float, float]]] = [
            [(0.0, 0.0)] * (count // schedule.accumulate) for _ in range(P)
        ]
        self.link_busy: Dict[str, float] = {}
        self._left = [[schedule.accumulate] * (1 + longest // schedule.accumulate) for _ in range(P)]
        self.needs = {
            kind * P + stage: [
                self.kinds.index(need) * P + stage + offset
                for need, offset in pass_needs(self.kinds[kind], schedule.local)
                if 0 <= stage + offset < P
            ]
            for kind in range(len(self.kinds))
            for stage in range(P)
        }

    def message(self, source: int, target: int) -> Optional[Transfer]:
        """What the result of one pass takes to another that needs it; None on the same stage."""
        a, b = source % self.schedule.stages, target % self.schedule.stages
        return None if a == b else self.costs.message(a, b)

    def sent(self) -> List[Tuple[int, int, Transfer]]:
        """The messages of a microbatch: from which pass, to which, and what it takes."""
        pairs = [(source, which) for which, needed in self.needs.items() for source in needed]
        found = [(source, which, self.message(source, which)) for source, which in pairs]
        return [(source, which, message) for source, which, message in found if message is not None]

    def completes(self, done: int, microbatch: int) -> Optional[int]:
        """The update of its stage that a pass is the last to be waited for by."""
        stage = done - (len(self.kinds) - 1) * self.schedule.stages
        if stage < 0:
            return None
        k = microbatch // self.schedule.accumulate
        self._left[stage][k] -= 1
        return None if self._left[stage][k] else k

    def note_update(self, stage: int, k: int, start: float, end: float) -> None:
        """Write down an update, if it is one of those asked for."""
        if k < len(self.updates[stage]):
            self.updates[stage][k] = start, end

    def times(self) -> Times:
        """What was found."""
        P, count = self.schedule.stages, self.count
        found = Times({}, {}, self.link_busy)
        for place, kind in enumerate(self.kinds):
            for columns, values in ((found.start, self.start), (found.end, self.end)):
                columns[kind] = np.array([row[:count] for row in values[place * P : (place + 1) * P]], np.float64)
        pairs = np.array(self.updates, np.float64).reshape(P, -1, 2)
        found.start[Kind.UPDATE], found.end[Kind.UPDATE] = pairs[:, :, 0], pairs[:, :, 1]
        return found


class _Eager(_Played):
    """Every device goes on as soon as it can. What ends is looked at in the order of time, so that links are given to messages in
    the order in which these come."""

    def play(self, updates: Optional[int] = None) -> int:
        """Find the times, of all or until every stage has made so many `updates`; how many passes were begun."""
        P, costs, device_of = self.schedule.stages, self.costs, self.device
        later = costs.slot / 2 if self.schedule.slot_capacity == 2 else 0.0  # in its slot, of what follows a forward
        queues: List[List[Tuple[float, int, int]]] = [[] for _ in range(1 + max(device_of))]
        for slot, which, m in self.rows:
            queues[device_of[which]].append((slot * costs.slot + (later if which >= P else 0.0), which, m))
        coming = [iter(queue) for queue in queues]
        following = [next(queue, None) for queue in coming]
        free = [0.0] * len(queues)  # when each device is through with what it has begun
        runs = [False] * len(queues)
        link_free: Dict[str, float] = {}
        running: List[Tuple[float, int, int, int]] = []  # a heap: end, order, pass, microbatch
        # when what a pass needs of another stage is there; what it needs of its own is done before it
        there: List[Optional[List[float]]] = [None] * len(device_of)
        results: List[Optional[Tuple[int, List[float], Transfer]]] = [None] * len(device_of)
        for source, which, message in self.sent():
            moments = there[which] = [math.inf] * len(self.start[0])
            results[source] = device_of[which], moments, message
        starts, ends, duration, last = self.start, self.end, self.duration, (len(self.kinds) - 1) * P
        begun, waited = 0, P * updates if updates is not None else -1

        def arrival(message: Transfer, at: float) -> float:
            """When a message that is ready `at` a time is there."""
            seconds, latency, links = message
            for link in links:
                if link in link_free and link_free[link] > at:
                    at = link_free[link]
            at += seconds
            for link in links:
                link_free[link] = at
            return at + latency

        ready: Sequence[int] = range(len(queues))  # devices that may go on
        while waited:
            for device in ready:
                action = following[device]
                if action is None:
                    continue
                start, which, m = action
                if free[device] > start:
                    start = free[device]
                needed = there[which]
                if needed is not None and needed[m] > start:
                    start = needed[m]
                    if start == math.inf:  # what it needs is not on its way yet
                        continue
                end = start + duration[which]
                starts[which][m] = start
                ends[which][m] = free[device] = end
                following[device], runs[device] = next(coming[device], None), True
                begun += 1
                heapq.heappush(running, (end, begun, which, m))
            if not running:
                break
            end, _, done, m = heapq.heappop(running)
            own = device_of[done]
            if done >= last:
                k = self.completes(done, m)
                if k is not None:
                    stage = done - last
                    start = arrival(costs.reduce[stage], end) if costs.reduce else end
                    free[own] = start + costs.update[stage]
                    self.note_update(stage, k, start, free[own])
                    waited -= updates is not None and k < updates
            runs[own], ready = False, (own,)
            result = results[done]
            if result is not None:
                device, moments, message = result
                moments[m] = arrival(message, end)
                if not runs[device]:
                    ready = (device, own) if device != own else ready
        return begun

    def times(self) -> Times:
        """What was found, if all was played."""
        passes = Counter(which for _, which, _ in self.rows)
        flows = [(passes[source], message) for source, _, message in self.sent()]
        flows += [(left.count(0), message) for left, message in zip(self._left, self.costs.reduce)]
        self.link_busy = sum_link_times(flows)
        return super().times()


class _Lockstep(_Played):
    """PopTorch's pipelines: all devices do what a slot holds, then all its messages go, then all begin the next slot. An update
    before which the pipeline empties is made on all stages together when it has; any other is part of its slot."""

    def play(self) -> None:
        """Find the times."""
        P, costs = self.schedule.stages, self.costs
        sends: Dict[int, List[Transfer]] = {which: [] for which in self.needs}
        for which, needed in self.needs.items():
            for source in needed:
                message = self.message(source, which)
                sends[source] += [] if message is None else [message]
        now = 0.0
        waiting: Dict[int, List[int]] = {}  # update -> stages that are through with its batch
        for _, rows in groupby(self.rows, key=lambda row: row[0]):
            cycle = list(rows)
            if costs.enter and any(done == 0 for _, done, _ in cycle):
                now += costs.enter
                self.link_busy[HOST] = self.link_busy.get(HOST, 0.0) + costs.enter
            used = dict.fromkeys(self.device, now)
            sent: List[Transfer] = []
            for _, done, m in cycle:
                device, stage = self.device[done], done % P
                start, used[device] = used[device], used[device] + self.duration[done]
                self.start[done][m], self.end[done][m] = start, used[device]
                sent += sends[done]
                k = self.completes(done, m)
                if k is not None and self.schedule.stretch(k)[1] == k + 1:
                    waiting.setdefault(k, []).append(stage)
                elif k is not None:
                    start = used[device] + (sum(costs.reduce[stage][:2]) if costs.reduce else 0.0)
                    used[device] = start + costs.update[stage]
                    self.note_update(stage, k, start, used[device])
            now = max(used.values()) + self._exchange(sent)
            for k in [k for k, stages in waiting.items() if len(stages) == P]:
                now += self._exchange(costs.reduce)
                for stage in waiting.pop(k):
                    self.note_update(stage, k, now, now + costs.update[stage])
                now += max(costs.update)

    def _exchange(self, messages: Iterable[Transfer]) -> float:
        """How long it takes until messages that begin together are all there."""
        busy: Dict[str, float] = {}
        alone, latency = 0.0, 0.0
        for message in messages:
            latency = max(latency, message.latency)
            alone = max(alone, message.seconds)
            for link in message.links:
                busy[link] = busy.get(link, 0.0) + message.seconds
        for link, seconds in busy.items():
            self.link_busy[link] = self.link_busy.get(link, 0.0) + seconds
        return max([alone, *busy.values()]) + latency


def _rows(schedule: Schedule, count: int) -> List[Tuple[int, int, int]]:
    """All passes (slot, kind * P + stage, microbatch) of the slots in which the first `count` microbatches are at work."""
    passes = schedule.passes
    end = 1 + max(int(schedule.slots(kind, 0, count).max()) for kind in passes)
    found = []
    for order, kind in enumerate(passes):
        ascends = all(part.pieces[kind].ascends() for part in schedule.parts)
        reach = int(schedule.count_before(kind, np.array([end])).max()) if ascends else schedule.microbatches
        slots = schedule.slots(kind, 0, reach)
        stage, microbatch = np.nonzero(slots < end)
        found.append(np.stack([slots[stage, microbatch], order * schedule.stages + stage, microbatch]))
    slot, which, microbatch = np.concatenate(found, axis=1)
    by_slot = np.lexsort((microbatch, which, slot))
    return list(zip(slot[by_slot].tolist(), which[by_slot].tolist(), microbatch[by_slot].tolist()))
