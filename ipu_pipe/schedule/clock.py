"""The clock: when each pass of a schedule runs if passes take time, and the events of a run that went so.

Every device does its row in order, every pass waits for what it needs. With unit costs the clock gives the slots:

    clock(schedule, slot_costs(schedule)).start[Kind.FORWARD]  ==  schedule.slots(Kind.FORWARD, 0, M)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import PASSES, Kind, pass_needs
from ipu_pipe.schedule.events import Counter, Event
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule, SlotHolds

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit of time: of a `forward`, `backward` and `update` by stage, of a message on its `link`.

    `weight_gradient`: of `backward`, the part that a split backward does on its own; only schedules that split it need it.
    `slot`: all stages keep step, and a pass begins no earlier than its slot, each of which takes so long (what follows a
    forward in a slot that holds two passes, in the slot's second half); 0: every pass begins as soon as it can.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    link: float = 0.0
    slot: float = 0.0
    weight_gradient: Sequence[float] = ()

    def durations(self, passes: Sequence[Kind]) -> Dict[Kind, Sequence[float]]:
        """Of each of these passes, by stage."""
        if Kind.BACKWARD in passes:
            return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        assert len(self.weight_gradient) == len(self.backward), "the schedule splits the backward: say in what parts"
        rest = [whole - part for whole, part in zip(self.backward, self.weight_gradient)]
        return {Kind.FORWARD: self.forward, Kind.INPUT_GRADIENT: rest, Kind.WEIGHT_GRADIENT: self.weight_gradient}


def slot_costs(schedule: Schedule) -> Costs:
    """The unit costs: a slot takes 1, its passes fill it, messages and updates take no time."""
    share = [1 / schedule.slot_capacity] * schedule.stages
    if Kind.BACKWARD in schedule.passes:
        return Costs(share, share, [0.0] * schedule.stages, slot=1.0)
    return Costs(share, [2 * part for part in share], [0.0] * schedule.stages, slot=1.0, weight_gradient=share)


class Times(NamedTuple):
    """When each action begins and ends, by kind: (P, M) of the passes, (P, updates) of the updates."""

    start: Dict[Kind, FloatArray]
    end: Dict[Kind, FloatArray]

    @property
    def finish(self) -> float:
        """The end of the last action, counted from the start of the first."""
        return max(float(end.max()) for end in self.end.values() if end.size)


def clock(schedule: Schedule, costs: Costs, microbatches: Optional[int] = None) -> Times:
    """The times of the actions of the first `microbatches` (None: all) of `schedule`."""
    count = schedule.microbatches if microbatches is None else microbatches
    batch, device = schedule.accumulate, schedule.device_of_stage
    free = dict.fromkeys(device, 0.0)  # when each device is through with what it has begun
    passes, duration = schedule.passes, costs.durations(schedule.passes)
    waits = {kind: pass_needs(kind, schedule.local) for kind in passes}
    begins_at = dict.fromkeys(passes, costs.slot / 2 if schedule.slot_holds is SlotHolds.BOTH else 0.0)
    begins_at[Kind.FORWARD] = 0.0
    times = Times({}, {})
    for kind in (*passes, Kind.UPDATE):
        for columns in times:
            columns[kind] = np.zeros((schedule.stages, count // batch if kind is Kind.UPDATE else count))
    done: Dict[Tuple[Kind, int, int], float] = {}
    missing: Dict[Tuple[int, int], int] = {}  # microbatches that a stage's update waits for
    for slot, kind, s, m in _rows(schedule, count):
        start = max(free[device[s]], slot * costs.slot + begins_at[kind])
        for need, offset in waits[kind]:
            if 0 <= s + offset < schedule.stages:
                start = max(start, done[need, s + offset, m] + (costs.link if offset else 0.0))
        end = done[kind, s, m] = free[device[s]] = start + duration[kind][s]
        if m < count:
            times.start[kind][s, m], times.end[kind][s, m] = start, end
        if kind is passes[-1]:
            k = m // batch
            missing[s, k] = missing.get((s, k), batch) - 1
            if not missing[s, k]:
                free[device[s]] = end + costs.update[s]
                if k < count // batch:
                    times.start[Kind.UPDATE][s, k], times.end[Kind.UPDATE][s, k] = end, free[device[s]]
    return times


def _rows(schedule: Schedule, count: int) -> Iterator[Tuple[int, Kind, int, int]]:
    """All passes (slot, kind, stage, microbatch) of the slots in which the first `count` microbatches are at work, in order."""
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
        yield at, passes[code], s, m


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
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()} for column in times
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
