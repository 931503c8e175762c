"""Compute when each pass of a schedule starts and ends, from the durations of passes and messages.

A device does its passes in the order of its slots, each pass waits for the tensors that it needs,
and messages that share a link follow one another.

    _EagerPlayer       every device continues as soon as it can
    _LockstepPlayer    all devices begin each slot together (PopTorch's pipelines)

From these follow `time_updates` (when updates are made, extrapolated if there are many),
`compute_bubbles` and `compute_busy_share`. With unit costs the clock gives back the slots:

    clock(schedule, make_slot_costs(schedule)).start[Kind.FORWARD]  ==  schedule.slots(Kind.FORWARD, 0, M)
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Iterable, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind, get_pass_needs
from ipu_pipe.schedule.table import Schedule, list_stages

FloatArray = NDArray[np.float64]
HOST = "link to the host"
# the most forwards of a run that are simulated; the time of a longer run is extrapolated
MOST_SIMULATED = 40_000


class Transfer(NamedTuple):
    """The costs of a message: it occupies all its `links` for `seconds`, once they are free, and
    arrives `latency` later.

    A transfer without links waits for no other transfer.
    """

    seconds: float = 0.0
    latency: float = 0.0
    links: tuple[str, ...] = ()


NOTHING = Transfer()


@dataclass(frozen=True)
class Costs:
    """Durations by stage, in any unit of time. Raise `BadInput` unless there is one for every stage
    and boundary.

    forward, backward, update: durations of the passes and of a stage's update.
    weight_gradient: the part of `backward` that is the weight gradient of a split backward; empty:
    half of it.
    link: duration of a message between neighbouring stages if `onward` and `back` are empty; links
    are then not shared.
    onward, back: the transfers from stage s to s + 1 and from s + 1 to s, by s.
    reduce: the transfer between the replicas of stage s before its update; empty: none.
    slot: duration of a slot. A pass begins no earlier than its slot; in slots with a forward and a
        backward the backward begins no earlier than the second half. 0: every pass begins as soon
        as it can.
    lockstep: every slot is a cycle as long as its slowest device and then its messages
    (`_LockstepPlayer`).
    enter: in lock-step, the time that all devices wait for the host before a cycle with a forward
    of stage 0.
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
        for key, figures, expected, optional in (
            ("backward", self.backward, stages, False),
            ("update", self.update, stages, False),
            ("weight_gradient", self.weight_gradient, stages, True),
            ("onward", self.onward, stages - 1, True),
            ("back", self.back, stages - 1, True),
            ("reduce", self.reduce, stages, True),
        ):
            if len(figures) != expected and (figures or not optional):
                raise BadInput(
                    f"costs: {key}: {len(figures)} figures: expected {expected} for {stages} stages"
                )

    def get_durations(self, passes: Sequence[Kind]) -> dict[Kind, Sequence[float]]:
        """Return the durations of each of these passes, by stage."""
        if Kind.BACKWARD in passes:
            return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        # by default half: each gradient of a matrix product costs as much as the product
        second = self.weight_gradient or [whole / 2 for whole in self.backward]
        first = [whole - part for whole, part in zip(self.backward, second)]
        return {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRADIENT: first,
            Kind.WEIGHT_GRADIENT: second,
        }

    def get_transfer(self, source: int, target: int, placement: Sequence[int]) -> Transfer:
        """Return the transfer between two neighbouring stages; an empty one if they are on one
        device.
        """
        if placement[source] == placement[target]:
            return NOTHING
        transfers = self.onward if target > source else self.back
        return transfers[min(source, target)] if transfers else Transfer(self.link)


def make_slot_costs(schedule: Schedule) -> Costs:
    """Return the unit costs: a slot takes 1, its passes fill it, messages and updates take no
    time.
    """
    share = [1 / schedule.slot_capacity] * schedule.stages
    if Kind.BACKWARD in schedule.passes:
        return Costs(share, share, [0.0] * schedule.stages, slot=1.0)
    return Costs(
        share,
        [2 * part for part in share],
        [0.0] * schedule.stages,
        slot=1.0,
        weight_gradient=share,
    )


def make_pass_costs(schedule: Schedule, placement: Sequence[int]) -> Costs:
    """Return the costs at which each pass takes 1, the halves of a split backward half of that, and
    messages and updates nothing. `placement`: the device of each stage.
    """
    passes = [1.0] * schedule.stages
    # stages that share a device, and halves of passes, run at other times than their slots
    has_slots = Kind.BACKWARD in schedule.passes and schedule.device_of_stage == tuple(placement)
    slot = float(schedule.slot_capacity) if has_slots else 0.0
    return Costs(passes, passes, [0.0] * schedule.stages, slot=slot)


class Times(NamedTuple):
    """The start and end of each action by kind, (P, M) for passes and (P, updates) for updates; the
    busy time of each link.
    """

    start: dict[Kind, FloatArray]
    end: dict[Kind, FloatArray]
    link_busy: dict[str, float] = {}

    @property
    def finish(self) -> float:
        """The makespan: the end of the last action; the first begins at 0."""
        return max(float(end.max()) for end in self.end.values() if end.size)


def clock(
    schedule: Schedule, costs: Costs, microbatches: int | None = None, placement: Sequence[int] = ()
) -> Times:
    """Return the times of the actions of the first `microbatches` (None: all) of `schedule`.

    `placement`: the device of each stage, in place of the schedule's own. A device does the actions
    of its stages in the order of their slots.
    """
    count = schedule.microbatches if microbatches is None else microbatches
    # PopTorch's pipelines wait for one another in every slot; processes and GPUs do not
    discipline = _LockstepPlayer if costs.lockstep else _EagerPlayer
    player = discipline(schedule, costs, count, tuple(placement) or schedule.device_of_stage)
    player.play()
    return player.get_times()


def time_first_updates(schedule: Schedule, costs: Costs, updates: int) -> FloatArray:
    """Return the ends of the first `updates` updates of each stage, (P, updates), without
    lock-step; play no further.
    """
    player = _EagerPlayer(schedule, costs, schedule.microbatches, schedule.device_of_stage)
    player.play(updates)
    # (P, updates, start and end)
    return np.array(player.updates, np.float64)[:, :updates, 1]


def time_updates(schedule: Schedule, costs: Costs, placement: Sequence[int] = ()) -> FloatArray:
    """Return the time at which all stages have made each update of a schedule, (updates,);
    `placement` as in `clock`.

    Of a long schedule the beginning is played; the rest continues at the pace of its second half.
    """
    ends, pace = _play_beginning(schedule, costs, placement)
    rest = schedule.microbatches // schedule.accumulate - len(ends)
    return np.concatenate([ends, ends[-1] + pace * np.arange(1, rest + 1)])


def _play_beginning(
    schedule: Schedule, costs: Costs, placement: Sequence[int]
) -> tuple[FloatArray, float]:
    """Return the times of the first updates, as `time_updates`, and the time from each later one to
    the next.
    """
    P, N = schedule.stages, schedule.accumulate
    # long enough for several times the pipeline to fill
    count = min(schedule.microbatches // N, max(MOST_SIMULATED // P, 8 * P, 4 * N) // N)
    ends = clock(schedule, costs, count * N, placement).end[Kind.UPDATE].max(axis=0)
    half = count // 2
    # the slope between half and all leaves out the time to fill
    return ends, float(ends[-1] - ends[half]) / max(count - 1 - half, 1)


def compute_busy_share(schedule: Schedule, placement: Sequence[int]) -> float:
    """Return the share of the devices' unit slots in which they do passes; `placement`: the device
    of each stage.
    """
    if tuple(placement) == schedule.device_of_stage:
        return schedule.busy_share()
    # an open schedule has more updates than an array of their times could hold
    ends, pace = _play_beginning(schedule, make_pass_costs(schedule, placement), placement)
    rest = schedule.microbatches // schedule.accumulate - len(ends)
    busy = 2.0 * schedule.stages * schedule.microbatches
    return busy / ((float(ends[-1]) + pace * rest) * len(set(placement)))


class Bubbles(NamedTuple):
    """The bubbles of a batch: the shares of `makespan` and of `span` that exceed M (F + I + W), the
    work of the busiest device.

    span: the longest time from a device's first forward to the end of its last pass.
    """

    makespan: float
    span: float
    bubble_rate: float
    span_bubble_rate: float


def compute_bubbles(
    schedule: Schedule, durations: Sequence[float], link: float = 0.0, work: Sequence[float] = ()
) -> Bubbles:
    """Return the bubbles of a schedule: F, I and W of a device's microbatch take `durations`, and a
    message takes `link`.

    The stages of a device share its durations. `work`: the work of each stage in any unit, if
    stages are unequal; `durations` then belong to the mean device.
    """
    devices = schedule.device_of_stage
    work = work or [1 / devices.count(device) for device in devices]
    # on the mean device the shares add up to 1
    shares = [part * len(set(devices)) / sum(work) for part in work]
    F, I, W = durations  # noqa: E741
    costs = Costs(
        [F * share for share in shares],
        [(I + W) * share for share in shares],
        [0.0] * schedule.stages,
        link,
        weight_gradient=[W * share for share in shares],
    )
    times = clock(schedule, costs)
    begin = times.start[Kind.FORWARD].min(axis=1)  # (P,)
    end = np.max([times.end[kind].max(axis=1) for kind in schedule.passes], axis=0)  # (P,)
    stages_by_device = [list_stages(devices, device) for device in set(devices)]
    makespan = float(end.max() - begin.min())
    span = max(float(end[stages].max() - begin[stages].min()) for stages in stages_by_device)
    ideal = (
        schedule.microbatches
        * sum(durations)
        * max(sum(shares[s] for s in stages) for stages in stages_by_device)
    )
    return Bubbles(
        makespan, span, *((cost - ideal) / cost if cost else 0.0 for cost in (makespan, span))
    )


def sum_link_times(flows: Iterable[tuple[int, Transfer]]) -> dict[str, float]:
    """Return the busy time of each link; `flows`: (number of transfers, transfer)."""
    busy: dict[str, float] = {}
    for count, transfer in flows:
        for link in transfer.links if count else ():
            busy[link] = busy.get(link, 0.0) + count * transfer.seconds
    return busy


class _Player:
    """The common part of both disciplines.

    The *number of a pass* is kind * P + stage, with kinds numbered in the order of
    `schedule.passes`: on two stages F, F, B, B. By this number: `duration`, `device_of_pass`, and
    the rows of `start` and `end`. `passes`: (slot, number, microbatch) in the order of the slots.
    `transfers`: (number of the sending pass, number of the receiving pass, transfer), for every
    microbatch.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, count: int, placement: Sequence[int]
    ) -> None:
        self.schedule = schedule
        self.costs = costs
        self.count = count
        P = schedule.stages
        self.kinds = schedule.passes
        durations = costs.get_durations(self.kinds)
        self.duration = [seconds for kind in self.kinds for seconds in durations[kind]]
        self.device_of_pass = [*placement] * len(self.kinds)
        self.passes = _list_passes(schedule, count)
        # later ones than `count` run beside the last of them
        microbatches = 1 + max(m for _, _, m in self.passes)
        self.start = [[0.0] * microbatches for _ in self.duration]
        self.end = [[0.0] * microbatches for _ in self.duration]
        self.updates: list[list[tuple[float, float]]] = [
            [(0.0, 0.0)] * (count // schedule.accumulate) for _ in range(P)
        ]
        self.link_busy: dict[str, float] = {}
        # by stage and update: the last passes that it still waits for
        # with rows from a file the microbatches of a batch may end in any order
        # one more batch, which an end within it leaves incomplete
        self._missing = [
            [schedule.accumulate] * (1 + microbatches // schedule.accumulate) for _ in range(P)
        ]
        self.transfers: list[tuple[int, int, Transfer]] = []
        for code, kind in enumerate(self.kinds):
            for stage in range(P):
                for need, offset in get_pass_needs(kind, schedule.local):
                    if offset and 0 <= stage + offset < P:
                        source = self.kinds.index(need) * P + stage + offset
                        transfer = costs.get_transfer(stage + offset, stage, placement)
                        self.transfers.append((source, code * P + stage, transfer))
        # (stage, microbatch) of whole backwards among split ones: their second half is done with
        # the first
        self.whole = (
            set(map(tuple, np.argwhere(schedule.is_whole).tolist()))
            if len(self.kinds) > 2
            else set()
        )

    def get_pass_duration(self, number: int, microbatch: int) -> float:
        """Return the duration of a pass; the first half of a whole backward takes the time of both
        halves.
        """
        P = self.schedule.stages
        if self.whole and number >= P and (number % P, microbatch) in self.whole:
            input_gradient = self.duration[P + number % P]
            weight_gradient = self.duration[2 * P + number % P]
            return input_gradient + weight_gradient if number < 2 * P else 0.0
        return self.duration[number]

    def complete_pass(self, number: int, microbatch: int) -> int | None:
        """Count a completed pass; return the update of its stage that waited only for this pass,
        None if there is none.
        """
        # a microbatch is complete after the last kind of pass
        stage = number - (len(self.kinds) - 1) * self.schedule.stages
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
        P = self.schedule.stages
        count = self.count
        times = Times({}, {}, self.link_busy)
        for code, kind in enumerate(self.kinds):
            for columns, values in ((times.start, self.start), (times.end, self.end)):
                columns[kind] = np.array(
                    [row[:count] for row in values[code * P : (code + 1) * P]], np.float64
                )
        # without an update the array would have no last dimension
        pairs = np.array(self.updates, np.float64).reshape(P, -1, 2)
        times.start[Kind.UPDATE], times.end[Kind.UPDATE] = pairs[:, :, 0], pairs[:, :, 1]
        return times


class _Sending(NamedTuple):
    """The device that needs a pass's result, the arrivals there by microbatch, and the transfer."""

    receiver: int
    arrivals: list[float]
    transfer: Transfer


def _send(transfer: Transfer, ready: float, link_free: dict[str, float]) -> float:
    """Return the arrival of a transfer that is ready at this time. `link_free`: when each link is
    free again, which moves on.
    """
    seconds, latency, links = transfer
    for link in links:
        if link in link_free and link_free[link] > ready:
            ready = link_free[link]
    end = ready + seconds
    for link in links:
        link_free[link] = end
    return end + latency


class _EagerPlayer(_Player):
    """The eager discipline: every device continues as soon as it can.

    Passes are completed in the order of time, so transfers get links in the order in which they are
    ready.
    """

    def play(self, updates: int | None = None) -> None:
        """Play all, or until every stage has made `updates`."""
        P = self.schedule.stages
        costs = self.costs
        device_of = self.device_of_pass
        queues = self._queue_passes()
        remaining = [iter(queue) for queue in queues]
        next_passes = [next(queue, None) for queue in remaining]
        # the time at which each device is free again
        free = [0.0] * len(queues)
        is_busy = [False] * len(queues)
        link_free: dict[str, float] = {}
        # a heap of (end, order, pass, microbatch)
        running: list[tuple[float, int, int, int]] = []
        arrivals, sends = self._connect_passes()
        starts = self.start
        ends = self.end
        duration = self.duration
        first_last_pass = (len(self.kinds) - 1) * P
        begun = 0
        # -1 never reaches 0: all are played
        updates_left = P * updates if updates is not None else -1

        may_continue: Sequence[int] = range(len(queues))
        while updates_left:
            # begin the next pass of each of these devices, if its input has been sent
            for device in may_continue:
                next_pass = next_passes[device]
                if next_pass is None:
                    continue
                start, number, m = next_pass
                if free[device] > start:
                    start = free[device]
                input_arrivals = arrivals[number]
                if input_arrivals is not None and input_arrivals[m] > start:
                    start = input_arrivals[m]
                    # not sent yet: whoever sends it lets this device continue
                    if start == math.inf:
                        continue
                end = start + (
                    self.get_pass_duration(number, m) if self.whole else duration[number]
                )
                starts[number][m] = start
                ends[number][m] = free[device] = end
                next_passes[device], is_busy[device] = next(remaining[device], None), True
                begun += 1
                # of passes that end together the one that began first is completed first
                heapq.heappush(running, (end, begun, number, m))
            if not running:
                break
            # complete the pass that ends first: update its stage, send its result
            end, _, number, m = heapq.heappop(running)
            device = device_of[number]
            if number >= first_last_pass:
                k = self.complete_pass(number, m)
                if k is not None:
                    stage = number - first_last_pass
                    start = _send(costs.reduce[stage], end, link_free) if costs.reduce else end
                    free[device] = start + costs.update[stage]
                    self.note_update(stage, k, start, free[device])
                    # a stage may be updates ahead of another that still has some to make
                    updates_left -= updates is not None and k < updates
            is_busy[device], may_continue = False, (device,)
            result = sends[number]
            if result is not None:
                receiver, target_arrivals, transfer = result
                target_arrivals[m] = _send(transfer, end, link_free)
                # a busy device looks for its next input itself, at the end of its pass
                if receiver != device and not is_busy[receiver]:
                    may_continue = (receiver, device)

    def _queue_passes(self) -> list[list[tuple[float, int, int]]]:
        """Return the passes of each device in order: (earliest start, pass, microbatch)."""
        # the offset, in a slot with two passes, of the pass after the forward
        second_offset = self.costs.slot / 2 if self.schedule.slot_capacity == 2 else 0.0
        device_of = self.device_of_pass
        queues: list[list[tuple[float, int, int]]] = [[] for _ in range(1 + max(device_of))]
        for slot, number, m in self.passes:
            offset = second_offset if number >= self.schedule.stages else 0.0
            queues[device_of[number]].append((slot * self.costs.slot + offset, number, m))
        return queues

    def _connect_passes(self) -> tuple[list[list[float] | None], list[_Sending | None]]:
        """Return the arrivals of each pass's input from another stage, by microbatch, which are not
        known yet (needs of its own stage are earlier in its row); and where each pass sends its
        result.
        """
        device_of = self.device_of_pass
        arrivals: list[list[float] | None] = [None] * len(device_of)
        sends: list[_Sending | None] = [None] * len(device_of)
        for source, target, transfer in self.transfers:
            target_arrivals = arrivals[target] = [math.inf] * len(self.start[0])
            sends[source] = _Sending(device_of[target], target_arrivals, transfer)
        return arrivals, sends

    def get_times(self) -> Times:
        """Return the times after `play`; every transfer occupies its links once."""
        counts = Counter(number for _, number, _ in self.passes)
        flows = [(counts[source], transfer) for source, _, transfer in self.transfers]
        flows += [
            # an incomplete batch has no update, and no average before it
            (missing.count(0), transfer)
            for missing, transfer in zip(self._missing, self.costs.reduce)
        ]
        self.link_busy = sum_link_times(flows)
        return super().get_times()


class _LockstepPlayer(_Player):
    """The lock-step discipline of PopTorch's pipelines: all devices do the passes of a slot, then
    all its messages are sent, then all devices begin the next slot.

    An update after a drain is made on all stages together; any other update is part of its slot.
    """

    def play(self) -> None:
        """Play all slots."""
        P = self.schedule.stages
        costs = self.costs
        sends: dict[int, list[Transfer]] = {}
        for source, _, transfer in self.transfers:
            sends.setdefault(source, []).append(transfer)
        now = 0.0
        # update -> stages that have completed its batch
        waiting: dict[int, list[int]] = {}
        for _, passes in groupby(self.passes, key=lambda one: one[0]):
            cycle = list(passes)
            if costs.enter and any(number == 0 for _, number, _ in cycle):
                now += costs.enter
                self.link_busy[HOST] = self.link_busy.get(HOST, 0.0) + costs.enter
            # the time until which each device is busy
            free = dict.fromkeys(self.device_of_pass, now)
            sent: list[Transfer] = []
            for _, number, m in cycle:
                device = self.device_of_pass[number]
                stage = number % P
                start, free[device] = free[device], free[device] + self.get_pass_duration(number, m)
                self.start[number][m], self.end[number][m] = start, free[device]
                sent += sends.get(number, ())
                k = self.complete_pass(number, m)
                if k is not None and self.schedule.get_drain_interval(k)[1] == k + 1:
                    waiting.setdefault(k, []).append(stage)
                elif k is not None:
                    # its seconds and its latency
                    start = free[device] + (sum(costs.reduce[stage][:2]) if costs.reduce else 0.0)
                    free[device] = start + costs.update[stage]
                    self.note_update(stage, k, start, free[device])
            now = max(free.values()) + self._exchange(sent)
            for k in [k for k, stages in waiting.items() if len(stages) == P]:
                now += self._exchange(costs.reduce)
                for stage in waiting.pop(k):
                    self.note_update(stage, k, now, now + costs.update[stage])
                # the next slot begins when the slowest stage has updated
                now += max(costs.update)

    def _exchange(self, transfers: Iterable[Transfer]) -> float:
        """Return the time until transfers that begin together have all arrived."""
        busy: dict[str, float] = {}
        longest = 0.0
        latency = 0.0
        for transfer in transfers:
            latency = max(latency, transfer.latency)
            longest = max(longest, transfer.seconds)
            # messages on one link follow one another, those on different links do not wait
            for link in transfer.links:
                busy[link] = busy.get(link, 0.0) + transfer.seconds
        for link, seconds in busy.items():
            self.link_busy[link] = self.link_busy.get(link, 0.0) + seconds
        return max([longest, *busy.values()]) + latency


def _list_passes(schedule: Schedule, count: int) -> list[tuple[int, int, int]]:
    """Return all passes (slot, kind * P + stage, microbatch) of the slots up to the end of the
    first `count` microbatches.
    """
    passes = schedule.passes
    end = 1 + max(int(schedule.slots(kind, 0, count).max()) for kind in passes)
    columns = []
    for code, kind in enumerate(passes):
        is_in_order = schedule.keeps_order(kind)
        # in another order than the microbatches' any of them may come before `end`
        reach = (
            int(schedule.count_before(kind, np.array([end])).max())
            if is_in_order
            else schedule.microbatches
        )
        slots = schedule.slots(kind, 0, reach)
        stage, microbatch = np.nonzero(slots < end)
        columns.append(
            np.stack([slots[stage, microbatch], code * schedule.stages + stage, microbatch])
        )
    slot, number, microbatch = np.concatenate(columns, axis=1)
    # in a slot forwards come first: their kind has the number 0
    by_slot = np.lexsort((microbatch, number, slot))
    return list(zip(slot[by_slot].tolist(), number[by_slot].tolist(), microbatch[by_slot].tolist()))
