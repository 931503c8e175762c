"""Compute when each pass of a schedule starts and ends, from the durations of passes and messages.

A device does its passes in the order of its slots, each pass waits for the tensors that it needs, and messages that share a link
follow one another.

    _EagerPlayer       every device continues as soon as it can
    _LockstepPlayer    all devices begin each slot together (PopTorch's pipelines)
    time_uncontended   the eager times in array operations, for the planner; exact if no two messages contend for a link

From these follow `estimate_run_time` (the time of a whole run, extrapolated if long), `compute_bubbles` and
`compute_busy_share`. With unit costs the clock gives back the slots:

    clock(schedule, make_slot_costs(schedule)).start[Kind.FORWARD]  ==  schedule.slots(Kind.FORWARD, 0, M)
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind, get_pass_needs
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule, list_stages

FloatArray = NDArray[np.float64]
HOST = "link to the host"
# the most forwards of a run that are simulated; the time of a longer run is extrapolated
MOST_SIMULATED = 40_000


class Transfer(NamedTuple):
    """The costs of a message: it occupies all its `links` for `seconds`, once they are free, and arrives `latency` later.

    A transfer without links waits for no other transfer.
    """

    seconds: float = 0.0
    latency: float = 0.0
    links: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Durations by stage, in any unit of time. Raise `BadInput` unless there is one for every stage and boundary.

    forward, backward, update: durations of the passes and of a stage's update.
    weight_gradient: the part of `backward` that is the weight gradient of a split backward; empty: half of it.
    link: duration of a message between neighbouring stages if `onward` and `back` are empty; links are then not shared.
    onward, back: the transfers from stage s to s + 1 and from s + 1 to s, by s.
    reduce: the transfer between the replicas of stage s before its update; empty: none.
    slot: duration of a slot. A pass begins no earlier than its slot; in slots with a forward and a backward the backward begins
        no earlier than the second half. 0: every pass begins as soon as it can.
    lockstep: every slot is a cycle as long as its slowest device and then its messages (`_LockstepPlayer`).
    enter: in lock-step, the time that all devices wait for the host before a cycle with a forward of stage 0.
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
        # a damaged trace may lack figures of some stages
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

    def get_durations(self, passes: Sequence[Kind]) -> Dict[Kind, Sequence[float]]:
        """Return the durations of each of these passes, by stage."""
        if Kind.BACKWARD in passes:
            return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        # by default half: each gradient of a matrix product costs as much as the product
        second = self.weight_gradient or [whole / 2 for whole in self.backward]
        first = [whole - part for whole, part in zip(self.backward, second)]
        return {Kind.FORWARD: self.forward, Kind.INPUT_GRADIENT: first, Kind.WEIGHT_GRADIENT: second}

    def get_transfer(self, source: int, target: int) -> Transfer:
        """Return the transfer between two neighbouring stages."""
        transfers = self.onward if target > source else self.back
        return transfers[min(source, target)] if transfers else Transfer(self.link)


def make_slot_costs(schedule: Schedule) -> Costs:
    """Return the unit costs: a slot takes 1, its passes fill it, messages and updates take no time."""
    share = [1 / schedule.slot_capacity] * schedule.stages
    if Kind.BACKWARD in schedule.passes:
        return Costs(share, share, [0.0] * schedule.stages, slot=1.0)
    return Costs(share, [2 * part for part in share], [0.0] * schedule.stages, slot=1.0, weight_gradient=share)


class Times(NamedTuple):
    """The start and end of each action by kind, (P, M) for passes and (P, updates) for updates; the busy time of each link."""

    start: Dict[Kind, FloatArray]
    end: Dict[Kind, FloatArray]
    link_busy: Dict[str, float] = {}

    @property
    def finish(self) -> float:
        """The makespan: the end of the last action; the first begins at 0."""
        return max(float(end.max()) for end in self.end.values() if end.size)


def clock(
    schedule: Schedule, costs: Costs, microbatches: Optional[int] = None, placement: Sequence[int] = ()
) -> Times:
    """Return the times of the actions of the first `microbatches` (None: all) of `schedule`.

    `placement`: the device of each stage, in place of the schedule's own. A device does the actions of its stages in the order
    of their slots.
    """
    count = schedule.microbatches if microbatches is None else microbatches
    make = _LockstepPlayer if costs.lockstep else _EagerPlayer
    player = make(schedule, costs, count, tuple(placement) or schedule.device_of_stage)
    player.play()
    return player.get_times()


def time_first_updates(schedule: Schedule, costs: Costs, updates: int) -> FloatArray:
    """Return the ends of the first `updates` updates of each stage, (P, updates), without lock-step; play no further."""
    player = _EagerPlayer(schedule, costs, schedule.microbatches, schedule.device_of_stage)
    player.play(updates)
    return np.array(player.updates, np.float64)[:, :updates, 1]


def estimate_run_time(schedule: Schedule, costs: Costs, microbatches: int, placement: Sequence[int] = ()) -> float:
    """Return the time of `microbatches`; `placement` as in `clock`.

    A long run is played only at its beginning, and extrapolated on the line through half and all of that.
    """
    batch = schedule.accumulate
    known = min(schedule.microbatches, microbatches)
    most = max(MOST_SIMULATED // schedule.stages, 8 * schedule.stages, 4 * batch) // (2 * batch) * 2 * batch
    if known <= most:
        # the schedule may be one batch, which the run repeats
        return clock(schedule, costs, known, placement).finish * (microbatches / known)
    times = clock(schedule, costs, most, placement)
    half, whole = _find_finish(times, most // 2, batch), times.finish
    return whole + (microbatches - most) * (whole - half) / (most - most // 2)


def _find_finish(times: Times, count: int, batch: int) -> float:
    """Return the time at which the first `count` microbatches are complete."""
    ends = [end[:, : count // batch if kind is Kind.UPDATE else count] for kind, end in times.end.items()]
    return max(float(end.max()) for end in ends if end.size)


def compute_busy_share(schedule: Schedule, placement: Sequence[int]) -> float:
    """Return the share of the devices' unit slots in which they do passes; `placement`: the device of each stage."""
    if tuple(placement) == schedule.device_of_stage:
        return schedule.busy_share()
    # stages that share a device run later than their slots
    costs = replace(make_slot_costs(schedule), slot=0.0)
    work = schedule.microbatches * (sum(costs.forward) + sum(costs.backward))
    return work / (estimate_run_time(schedule, costs, schedule.microbatches, placement) * len(set(placement)))


class Bubbles(NamedTuple):
    """The bubbles of a batch: the shares of `makespan` and of `span` that exceed M (F + I + W), the work of the busiest device.

    span: the longest time from a device's first forward to the end of its last pass.
    """

    makespan: float
    span: float
    bubble_rate: float
    span_bubble_rate: float


def compute_bubbles(
    schedule: Schedule, durations: Sequence[float], link: float = 0.0, work: Sequence[float] = ()
) -> Bubbles:
    """Measure the bubbles of a schedule: F, I and W of a device's microbatch take `durations`, and a message takes `link`.

    The stages of a device share its durations. `work`: the work of each stage in any unit, if stages are unequal; `durations`
    then belong to the mean device.
    """
    devices = schedule.device_of_stage
    work = work or [1 / devices.count(device) for device in devices]
    shares = [part * len(set(devices)) / sum(work) for part in work]
    forward, rest, weight = durations
    costs = Costs(
        [forward * share for share in shares], [(rest + weight) * share for share in shares], [0.0] * schedule.stages,
        link, weight_gradient=[weight * share for share in shares],
    )  # fmt: skip
    times = clock(schedule, costs)
    begin = times.start[Kind.FORWARD].min(axis=1)
    end = np.max([times.end[kind].max(axis=1) for kind in schedule.passes], axis=0)
    rows = [list_stages(devices, device) for device in set(devices)]
    makespan, span = float(end.max() - begin.min()), max(float(end[row].max() - begin[row].min()) for row in rows)
    ideal = schedule.microbatches * sum(durations) * max(sum(shares[stage] for stage in row) for row in rows)
    return Bubbles(makespan, span, *((cost - ideal) / cost if cost else 0.0 for cost in (makespan, span)))


def sum_link_times(flows: Iterable[Tuple[int, Transfer]]) -> Dict[str, float]:
    """Return the busy time of each link; `flows`: (number of transfers, transfer)."""
    busy: Dict[str, float] = {}
    for count, transfer in flows:
        for link in transfer.links if count else ():
            busy[link] = busy.get(link, 0.0) + count * transfer.seconds
    return busy


def get_transfer(placement: Sequence[int], costs: Costs, source: int, target: int) -> Transfer:
    """Return the transfer between two neighbouring stages; an empty one if they are on one device."""
    return Transfer() if placement[source] == placement[target] else costs.get_transfer(source, target)


class _Player:
    """The common part of both disciplines.

    A *pass* is the number kind * P + stage, with kinds numbered in the order of `schedule.passes`. A pass and a microbatch are
    one action.
    """

    def __init__(self, schedule: Schedule, costs: Costs, count: int, placement: Sequence[int]) -> None:
        self.schedule, self.costs, self.count = schedule, costs, count
        P, self.kinds = schedule.stages, schedule.passes
        durations = costs.get_durations(self.kinds)
        self.duration = [seconds for kind in self.kinds for seconds in durations[kind]]
        self.device = [*placement] * len(self.kinds)
        self.rows = _list_passes(schedule, count)
        longest = 1 + max(row[-1] for row in self.rows)
        self.start = [[0.0] * longest for _ in self.duration]
        self.end = [[0.0] * longest for _ in self.duration]
        self.updates: List[List[Tuple[float, float]]] = [
            [(0.0, 0.0)] * (count // schedule.accumulate) for _ in range(P)
        ]
        self.link_busy: Dict[str, float] = {}
        self._missing = [[schedule.accumulate] * (1 + longest // schedule.accumulate) for _ in range(P)]
        # (source pass, target pass, transfer), for every microbatch
        self.transfers: List[Tuple[int, int, Transfer]] = []
        for place, kind in enumerate(self.kinds):
            for stage in range(P):
                for need, offset in get_pass_needs(kind, schedule.local):
                    if offset and 0 <= stage + offset < P:
                        source = self.kinds.index(need) * P + stage + offset
                        transfer = get_transfer(placement, costs, stage + offset, stage)
                        self.transfers.append((source, place * P + stage, transfer))
        # (stage, microbatch) of whole backwards among split ones: their second half is done with the first
        self.whole = (
            set(zip(*(part.tolist() for part in np.nonzero(schedule.is_whole)))) if len(self.kinds) > 2 else set()
        )

    def get_pass_duration(self, which: int, microbatch: int) -> float:
        """Return the duration of a pass; the first half of a whole backward takes the time of both halves."""
        stage = which % self.schedule.stages
        if self.whole and which >= self.schedule.stages and (stage, microbatch) in self.whole:
            first, second = self.duration[self.schedule.stages + stage], self.duration[2 * self.schedule.stages + stage]
            return first + second if which < 2 * self.schedule.stages else 0.0
        return self.duration[which]

    def complete_pass(self, done: int, microbatch: int) -> Optional[int]:
        """Count a completed pass; return the update of its stage that waited only for this pass, None if there is none."""
        stage = done - (len(self.kinds) - 1) * self.schedule.stages
        if stage < 0:
            return None
        k = microbatch // self.schedule.accumulate
        self._missing[stage][k] -= 1
        return None if self._missing[stage][k] else k

    def note_update(self, stage: int, k: int, start: float, end: float) -> None:
        """Store the times of update k of a stage, if it is one of the updates that are played."""
        if k < len(self.updates[stage]):
            self.updates[stage][k] = start, end

    def get_times(self) -> Times:
        """Return the times after `play`."""
        P, count = self.schedule.stages, self.count
        times = Times({}, {}, self.link_busy)
        for place, kind in enumerate(self.kinds):
            for columns, values in ((times.start, self.start), (times.end, self.end)):
                columns[kind] = np.array([row[:count] for row in values[place * P : (place + 1) * P]], np.float64)
        pairs = np.array(self.updates, np.float64).reshape(P, -1, 2)
        times.start[Kind.UPDATE], times.end[Kind.UPDATE] = pairs[:, :, 0], pairs[:, :, 1]
        return times


class _EagerPlayer(_Player):
    """The eager discipline: every device continues as soon as it can.

    Passes are completed in the order of time, so transfers get links in the order in which they are ready.
    """

    def play(self, updates: Optional[int] = None) -> None:
        """Play all, or until every stage has made `updates`."""
        P, costs, device_of = self.schedule.stages, self.costs, self.device
        # the offset, in a slot with two passes, of the pass after the forward
        later = costs.slot / 2 if self.schedule.slot_capacity == 2 else 0.0
        queues: List[List[Tuple[float, int, int]]] = [[] for _ in range(1 + max(device_of))]
        for slot, which, m in self.rows:
            queues[device_of[which]].append((slot * costs.slot + (later if which >= P else 0.0), which, m))
        coming = [iter(queue) for queue in queues]
        following = [next(queue, None) for queue in coming]
        # the time at which each device is free again
        free = [0.0] * len(queues)
        runs = [False] * len(queues)
        link_free: Dict[str, float] = {}
        # a heap of (end, order, pass, microbatch)
        running: List[Tuple[float, int, int, int]] = []
        # the arrival of each pass's input from another stage; needs of its own stage are earlier in its row
        arrivals: List[Optional[List[float]]] = [None] * len(device_of)
        results: List[Optional[Tuple[int, List[float], Transfer]]] = [None] * len(device_of)
        for source, which, transfer in self.transfers:
            moments = arrivals[which] = [math.inf] * len(self.start[0])
            results[source] = device_of[which], moments, transfer
        starts, ends, duration, last = self.start, self.end, self.duration, (len(self.kinds) - 1) * P
        begun, waited = 0, P * updates if updates is not None else -1

        def send(transfer: Transfer, at: float) -> float:
            """Return the arrival of a transfer that is ready at the time `at`."""
            seconds, latency, links = transfer
            for link in links:
                if link in link_free and link_free[link] > at:
                    at = link_free[link]
            at += seconds
            for link in links:
                link_free[link] = at
            return at + latency

        # devices that may continue
        ready: Sequence[int] = range(len(queues))
        while waited:
            for device in ready:
                action = following[device]
                if action is None:
                    continue
                start, which, m = action
                if free[device] > start:
                    start = free[device]
                needed = arrivals[which]
                if needed is not None and needed[m] > start:
                    start = needed[m]
                    # its input has not been sent yet
                    if start == math.inf:
                        continue
                end = start + (self.get_pass_duration(which, m) if self.whole else duration[which])
                starts[which][m] = start
                ends[which][m] = free[device] = end
                following[device], runs[device] = next(coming[device], None), True
                begun += 1
                heapq.heappush(running, (end, begun, which, m))
            if not running:
                break
            end, _, done, m = heapq.heappop(running)
            this = device_of[done]
            if done >= last:
                k = self.complete_pass(done, m)
                if k is not None:
                    stage = done - last
                    start = send(costs.reduce[stage], end) if costs.reduce else end
                    free[this] = start + costs.update[stage]
                    self.note_update(stage, k, start, free[this])
                    waited -= updates is not None and k < updates
            runs[this], ready = False, (this,)
            result = results[done]
            if result is not None:
                device, moments, transfer = result
                moments[m] = send(transfer, end)
                if not runs[device]:
                    ready = (device, this) if device != this else ready

    def get_times(self) -> Times:
        """Return the times after `play`; every transfer occupies its links once."""
        passes = Counter(which for _, which, _ in self.rows)
        flows = [(passes[source], transfer) for source, _, transfer in self.transfers]
        flows += [(missing.count(0), transfer) for missing, transfer in zip(self._missing, self.costs.reduce)]
        self.link_busy = sum_link_times(flows)
        return super().get_times()


class _LockstepPlayer(_Player):
    """The lock-step discipline of PopTorch's pipelines: all devices do the passes of a slot, then all its messages are sent, then
    all devices begin the next slot.

    An update after a drain is made on all stages together; any other update is part of its slot.
    """

    def play(self) -> None:
        """Play all slots."""
        P, costs = self.schedule.stages, self.costs
        sends: Dict[int, List[Transfer]] = {}
        for source, _, transfer in self.transfers:
            sends.setdefault(source, []).append(transfer)
        now = 0.0
        # update -> stages that have completed its batch
        waiting: Dict[int, List[int]] = {}
        for _, rows in groupby(self.rows, key=lambda row: row[0]):
            cycle = list(rows)
            if costs.enter and any(done == 0 for _, done, _ in cycle):
                now += costs.enter
                self.link_busy[HOST] = self.link_busy.get(HOST, 0.0) + costs.enter
            used = dict.fromkeys(self.device, now)
            sent: List[Transfer] = []
            for _, done, m in cycle:
                device, stage = self.device[done], done % P
                start, used[device] = used[device], used[device] + self.get_pass_duration(done, m)
                self.start[done][m], self.end[done][m] = start, used[device]
                sent += sends.get(done, ())
                k = self.complete_pass(done, m)
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

    def _exchange(self, transfers: Iterable[Transfer]) -> float:
        """Return the time until transfers that begin together have all arrived."""
        busy: Dict[str, float] = {}
        alone, latency = 0.0, 0.0
        for transfer in transfers:
            latency = max(latency, transfer.latency)
            alone = max(alone, transfer.seconds)
            for link in transfer.links:
                busy[link] = busy.get(link, 0.0) + transfer.seconds
        for link, seconds in busy.items():
            self.link_busy[link] = self.link_busy.get(link, 0.0) + seconds
        return max([alone, *busy.values()]) + latency


def _list_passes(schedule: Schedule, count: int) -> List[Tuple[int, int, int]]:
    """Return all passes (slot, kind * P + stage, microbatch) of the slots up to the end of the first `count` microbatches."""
    passes = schedule.passes
    end = 1 + max(int(schedule.slots(kind, 0, count).max()) for kind in passes)
    columns = []
    for order, kind in enumerate(passes):
        ascends = all(stretch.pieces[kind].ascends() for stretch in schedule.stretches)
        reach = int(schedule.count_before(kind, np.array([end])).max()) if ascends else schedule.microbatches
        slots = schedule.slots(kind, 0, reach)
        stage, microbatch = np.nonzero(slots < end)
        columns.append(np.stack([slots[stage, microbatch], order * schedule.stages + stage, microbatch]))
    slot, which, microbatch = np.concatenate(columns, axis=1)
    by_slot = np.lexsort((microbatch, which, slot))
    return list(zip(slot[by_slot].tolist(), which[by_slot].tolist(), microbatch[by_slot].tolist()))


# ---- the clock's fast path: the eager discipline without contention of transfers, in array operations
#
# It computes all passes of a slot at once: the start of a pass depends only on its device's last pass and on its needs. If no
# two transfers meet on a link, the times equal the clock's bit for bit; otherwise the clock's times are not earlier. The
# planner times many candidates with it in a fraction of the time of playing them.

NOTHING = Transfer()


class UncontendedTimes(NamedTuple):
    """The ends of the first updates of each stage, (P, updates).

    `has_contention`: transfers meet on a link before the last of these ends, so the clock's times may be later.
    """

    ends: FloatArray
    has_contention: bool


class _Step(NamedTuple):
    """Passes that begin together, as slices and places of the arrays of `_Program`.

    first, end: the range of these passes in the order of the program. device: the device of each pass. place: pass * M +
    microbatch. goes_to: the places of the passes that need them. completes: (position in the step, stage, number of the update)
    of the passes after which a stage makes an update.
    """

    first: int
    end: int
    device: IntArray
    place: IntArray
    goes_to: IntArray
    completes: Optional[Tuple[IntArray, IntArray, IntArray]]


class _Program(NamedTuple):
    """A schedule as `steps`; `passes` and `places`: the pass (numbered as in `_Player`) and the place of each action in order."""

    passes: IntArray
    places: IntArray
    steps: Tuple[_Step, ...]


def time_uncontended(schedule: Schedule, costs: Costs, updates: int) -> UncontendedTimes:
    """Time the first `updates` of each stage of a schedule whose stages complete their microbatches in order.

    `costs` without `slot` and not in lock-step.
    """
    assert schedule.in_order and not costs.slot and not costs.lockstep
    P, M = schedule.stages, schedule.microbatches
    program = _make_program(schedule)
    durations = costs.get_durations(schedule.passes)
    duration = np.array([durations[kind] for kind in schedule.passes], np.float64).ravel()[program.passes]
    # the first half of a whole backward takes the time of both halves
    if schedule.stretches[0].whole is not None:
        halves = np.repeat(np.array([durations[kind] for kind in schedule.passes], np.float64)[:, :, None], M, axis=2)
        halves[1] += np.where(schedule.is_whole, halves[2], 0.0)
        halves[2][schedule.is_whole] = 0.0
        duration = halves.ravel()[program.places]
    transfers = _list_transfers(schedule, costs)
    seconds, latency = (
        np.array(column, np.float64)[program.passes] for column in zip(*(transfer[:2] for transfer in transfers))
    )
    reduce = costs.reduce or (NOTHING,) * P
    reduce_seconds, reduce_latency = (
        np.array(column, np.float64) for column in zip(*(transfer[:2] for transfer in reduce))
    )
    updating = np.array(costs.update, np.float64)
    free = np.zeros(1 + max(schedule.device_of_stage))
    # the arrival of the input of the pass at each place; the last place is a dummy target
    arrival = np.zeros(len(schedule.passes) * P * M + 1)
    ends = np.empty(len(program.passes))
    update_ends = np.zeros((P, schedule.update_count))
    for first, end, device, place, goes_to, completes in program.steps:
        until = np.maximum(free[device], arrival[place])
        until += duration[first:end]
        ends[first:end] = free[device] = until
        arrival[goes_to] = (until + seconds[first:end]) + latency[first:end]
        if completes is not None:
            which, stage, k = completes
            updated = until[which] + reduce_seconds[stage]
            updated += reduce_latency[stage]
            updated += updating[stage]
            update_ends[stage, k] = free[device[which]] = updated
    by_place = np.empty_like(ends)
    by_place[program.places] = ends
    asked = update_ends[:, :updates]
    has_contention = _do_transfers_meet(schedule, transfers, reduce, by_place.reshape(-1, M), float(asked.max()))
    return UncontendedTimes(asked, has_contention)


def _list_transfers(schedule: Schedule, costs: Costs) -> List[Transfer]:
    """Return the transfer of the result of each pass."""
    P = schedule.stages
    devices = schedule.device_of_stage
    onward = [get_transfer(devices, costs, s, s + 1) for s in range(P - 1)]
    back = [] if schedule.local else [get_transfer(devices, costs, s, s - 1) for s in range(1, P)]
    none = [NOTHING] * P
    return [*onward, NOTHING, NOTHING, *back, *none][: 2 * P] + none * (len(schedule.passes) - 2)


@lru_cache(maxsize=32)
def _make_program(schedule: Schedule) -> _Program:
    P, M, N, kinds = schedule.stages, schedule.microbatches, schedule.accumulate, len(schedule.passes)
    slots = np.stack([schedule.slots(kind, 0, M) for kind in schedule.passes])
    begins = slots * 2 + (np.arange(kinds) > 0)[:, None, None] * (schedule.slot_capacity - 1)
    order = np.argsort(begins.ravel(), kind="stable")
    which, m = np.divmod(order, M)
    kind, stage = np.divmod(which, P)
    device = np.array(schedule.device_of_stage)[stage]
    onward, back = (kind == 0) & (stage < P - 1), (kind == 1) & (stage > 0) & (not schedule.local)
    goes_to = np.where(onward, order + M, np.where(back, order - M, kinds * P * M))
    last = (kind == kinds - 1) & (m % N == N - 1)
    edges = np.flatnonzero(np.diff(begins.ravel()[order])) + 1
    steps = []
    for a, b in zip([0, *edges.tolist()], [*edges.tolist(), len(order)]):
        done = np.flatnonzero(last[a:b])
        completes = (done, stage[a:b][done], m[a:b][done] // N) if len(done) else None
        steps.append(_Step(a, b, device[a:b], order[a:b], goes_to[a:b], completes))
    return _Program(which, order, tuple(steps))


def _do_transfers_meet(
    schedule: Schedule, transfers: List[Transfer], reduce: Sequence[Transfer], ends: FloatArray, until: float
) -> bool:
    """Return whether a transfer is ready before `until` while its link is busy; `ends`: the end of each pass, (passes, M)."""
    sent: Dict[str, List[Tuple[FloatArray, float]]] = {}
    for which, (seconds, _, links) in enumerate(transfers):
        for link in links:
            sent.setdefault(link, []).append((ends[which], seconds))
    for stage, (seconds, _, links) in enumerate(reduce):
        completing = ends[stage - schedule.stages][schedule.accumulate - 1 :: schedule.accumulate]
        for link in links:
            sent.setdefault(link, []).append((completing, seconds))
    for flows in sent.values():
        ready = np.concatenate([moments for moments, _ in flows])
        taken = np.concatenate([np.full(len(moments), seconds) for moments, seconds in flows])
        order = np.argsort(ready, kind="stable")
        free = ready[order] + taken[order]
        if ((free[:-1] > ready[order][1:]) & (ready[order][1:] < until)).any():
            return True
    return False
