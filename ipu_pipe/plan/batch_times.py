"""Predict the time of a batch of any number of microbatches: simulate it by the clock, extrapolate,
and bound it from below.

A batch is an update. Long ones are not simulated to their end: in the steady state each further
microbatch takes equally long, so the time of a batch is that of a short one plus a multiple of the
steady time per microbatch. If transfers wait for one another on a shared link, the times can seem
steady too early; an error of 0.03 % has been seen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Sequence

import numpy as np

from ipu_pipe.hardware.memory import make_lockstep_schedule
from ipu_pipe.model.balance import FloatArray, IntArray
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import (
    Costs,
    Transfer,
    clock,
    sum_link_times,
    time_first_updates,
)
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule

# the relative difference below which two times of a microbatch count as equal
STEADY = 1e-6


class BatchTime(NamedTuple):
    """The seconds of a batch, and the seconds of it in which each link is busy."""

    seconds: float
    link_busy: dict[str, float]


class BatchTimes:
    """The times of batches of any number of microbatches on a pipeline of `stages` stages in the
    steady state.

    Each number of microbatches is simulated once.
    """

    def __init__(self, method: Method, stages: int, costs: Costs) -> None:
        self.method = method
        self.stages = stages
        self.costs = costs
        loads = sum_loads(np.add(costs.forward, costs.backward), method)
        self._devices = len(loads)
        # in no state does a microbatch take less
        self._slowest = max([*loads, *sum_link_times(self._list_flows(1, ())).values()])
        self._known: dict[int, BatchTime] = {}

    def compute(self, accumulate: int) -> BatchTime:
        """Return the time of N = `accumulate` microbatches.

        Batches of three lengths are simulated. If the time per microbatch is the same between the
        first two and the last two, and not less than on the slowest stage and the busiest link, the
        steady state is reached and N is on that line. Otherwise longer batches are simulated, at
        last N itself.
        """
        step = max(self._devices, 4)
        # use whole rounds
        if self.method.order is not None:
            step += -step % self._devices
        # without a drain, batches shorter than the pipeline's fill have another steady state;
        # DualPipeV has none for short batches
        shortest = step if self.method.flushes and self.method.order is None else 2 * step
        while accumulate > shortest + 2 * step:
            first, second, third = (self._simulate(shortest + i * step) for i in range(3))
            slope = third.seconds - second.seconds
            before = second.seconds - first.seconds
            if (
                abs(slope - before) <= STEADY * slope
                and slope >= (1 - STEADY) * step * self._slowest
            ):
                further_steps = (accumulate - shortest) / step - 2  # beyond the third length
                link_busy = {
                    link: busy + further_steps * (busy - second.link_busy.get(link, 0.0))
                    for link, busy in third.link_busy.items()
                }
                return BatchTime(third.seconds + further_steps * slope, link_busy)
            # not steady yet: three longer batches
            shortest = 2 * shortest
            step = 2 * step
        return self._simulate(accumulate)

    def _simulate(self, accumulate: int) -> BatchTime:
        if accumulate not in self._known:
            simulate = self._simulate_lockstep if self.costs.lockstep else self._simulate_eager
            self._known[accumulate] = simulate(accumulate)
        return self._known[accumulate]

    def _simulate_eager(self, accumulate: int) -> BatchTime:
        # one filling, and as many more that are timed
        updates = 1 if self.method.flushes else 2 * _count_filling(self.stages, accumulate)
        ends = time_first_updates(self._make_schedule(accumulate), self.costs, updates)
        return BatchTime(
            self._find_seconds(accumulate, ends),
            sum_link_times(self._list_flows(accumulate, self.costs.reduce)),
        )

    def _simulate_lockstep(self, accumulate: int) -> BatchTime:
        schedule = self._make_schedule(accumulate)
        times = clock(schedule, self.costs)
        batches = schedule.update_count
        # on average: in lock-step all batches are counted, also those that fill and drain
        link_busy = {link: busy / batches for link, busy in times.link_busy.items()}
        updates = 1 if self.method.flushes else 2 * _count_filling(self.stages, accumulate)
        return BatchTime(
            self._find_seconds(accumulate, times.end[Kind.UPDATE][:, :updates]), link_busy
        )

    def _list_flows(
        self, accumulate: int, reduce: Sequence[Transfer]
    ) -> list[tuple[int, Transfer]]:
        """Return (how many in a batch, transfer) in the order in which they first come."""
        # gradients do not cross blocks with losses of their own; elsewhere the last stage sends
        # first
        back = () if self.method.structure is not None else tuple(self.costs.back)[::-1]
        return [(accumulate, transfer) for transfer in (*self.costs.onward, *back)] + [
            (1, transfer) for transfer in reduce
        ]

    def _make_schedule(self, accumulate: int) -> Schedule:
        batches = 1 if self.method.flushes else 3 * _count_filling(self.stages, accumulate)
        return _make_schedule(
            self.method, self.stages, batches * accumulate, accumulate, self.costs.lockstep
        )

    def _find_seconds(self, accumulate: int, ends: FloatArray) -> float:
        """Return the seconds of a batch in the steady state from the ends of the first updates of
        each stage.
        """
        last = ends.max(axis=0)
        if self.method.flushes:
            return float(last[0])
        fill = _count_filling(self.stages, accumulate)
        return float(last[2 * fill - 1] - last[fill - 1]) / fill


def sum_loads(work: FloatArray, method: Method) -> FloatArray:
    """Return the sum of the `work` of each device's stages."""
    return (
        work
        if method.order is None
        else np.bincount(method.order.place(len(work)), work).astype(np.float64)
    )


def _count_filling(stages: int, accumulate: int) -> int:
    """Return how many batches fill the pipeline; as many more are timed in the steady state, and as
    many drain it.
    """
    return -(-2 * stages // accumulate)


# many candidates, and their bottlenecks, play one schedule with other costs
@lru_cache(maxsize=512)
def _make_schedule(
    method: Method, stages: int, microbatches: int, accumulate: int, lockstep: bool
) -> Schedule:
    return (make_lockstep_schedule if lockstep else make_schedule)(
        method, stages, microbatches, accumulate
    )


# ---- lower bounds for the search, before anything is simulated


def bound_seconds_of_any_cut(candidate: Candidate, work: float) -> float:
    """Return a lower bound of the seconds of a batch for any cut if a microbatch takes `work` on
    all stages together.

    `work`: seconds. At best all stages are busy all the time. If the pipeline drains, stage s
    begins after a forward of the previous stages, which end a backward later: T >= w_0 + ... +
    w_(s-1) + N w_s for every s. This is least if all these bounds are equal, with w_s = w_0 (1 -
    1/N)^s. Methods with generated orders may fill these waits: for them only `work` N / P is a
    bound.
    """
    depth = candidate.depth
    count = candidate.gradient_accumulation
    if candidate.method_row.flushes and candidate.method_row.order is None:
        return work / (1 - (1 - 1 / count) ** depth)
    return work * count / depth


def bound_by_costs(
    candidate: Candidate, costs: Costs, in_flight: IntArray, local: bool, whole_work: float
) -> float:
    """Return a lower bound of the seconds of a batch with stages of these `costs`.

    No stage and no link is busy for longer than the batch, and no stage has more than `in_flight`
    (P,) microbatches at once, each of which returns after the passes of all later stages (Little's
    law). `local`: blocks wait for no later stage. `whole_work`: seconds of a microbatch on all
    stages together, for any cut.
    """
    count = candidate.gradient_accumulation
    flushes = candidate.method_row.flushes
    work: FloatArray = np.add(costs.forward, costs.backward)
    # a single replica reduces nothing
    reduce = costs.reduce or (Transfer(),) * len(work)
    back = () if local else costs.back
    flows = [(count, transfer) for transfer in (*costs.onward, *back)] + [
        (1, transfer) for transfer in reduce
    ]
    updates = [
        update + transfer.seconds + transfer.latency
        for update, transfer in zip(costs.update, reduce)
    ]
    busy: FloatArray = sum_loads(count * work + updates, candidate.method_row)
    bounds = [float(busy.max()) + count * costs.enter, *sum_link_times(flows).values()]
    if local or candidate.method_row.order is not None:
        return max(bound_seconds_of_any_cut(candidate, whole_work), *bounds)
    crossing = [
        one.seconds + one.latency + other.seconds + other.latency
        for one, other in zip(costs.onward, costs.back)
    ]
    # (P,): from each stage to the last one and back
    round_trip = np.cumsum((work + np.array([*crossing, 0.0]))[::-1])[::-1]
    bounds.append(count * float((round_trip / in_flight).max()))
    # previous stages compute before a stage begins and after it ends
    if flushes:
        before = np.cumsum([0.0, *(work[:-1] + crossing)])
        bounds.append(float((before + count * work).max()) + updates[0])
    return max(bound_seconds_of_any_cut(candidate, float(work.sum())), *bounds)
