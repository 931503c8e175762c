"""The time of an update of any number of microbatches, from batches that are played.

Long batches are not played to their end: in the steady state a microbatch more takes as long as the one before, so the time of a
batch is that of a short one and so many times the steady state's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from ipu_pipe.hardware.memory import make_lockstep_schedule
from ipu_pipe.model.balance import FloatArray
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, Transfer, clock, sum_link_times, time_first_updates
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.uncontended import UncontendedTimes, time_uncontended

STEADY = 1e-6  # of the time of a microbatch: by how much less it changes where it changes no more


class BatchTime(NamedTuple):
    """Seconds of a batch, and of it those in which each link was busy."""

    seconds: float
    link_busy: Dict[str, float]


class Batches:
    """Updates of any number of microbatches on a pipeline of `depth` stages, in the steady state. Each length is played once, and
    one pass after another only where messages meet on a link."""

    def __init__(self, method: Method, depth: int, costs: Costs) -> None:
        self.method, self.depth, self.costs = method, depth, costs
        self._least = max([*np.add(costs.forward, costs.backward), *sum_link_times(self._flows(1, ())).values()])
        self._known: Dict[int, BatchTime] = {}
        self._apart: Dict[int, UncontendedTimes] = {}

    def time(self, accumulate: int) -> BatchTime:
        """Of N = `accumulate` microbatches.

        Batches of three lengths are played. Where a microbatch more takes as long between the first two as between the others,
        and no less than the slowest stage and the fullest link do, the steady state is reached, and N follows on that line; else
        longer ones are played, at last N itself.
        """
        return self._extended(accumulate, self._played)

    def least_seconds(self, accumulate: int) -> float:
        """What N take at least: if no message waited for another. That is what they take where none does."""
        if self.costs.lockstep:
            return 0.0
        return self._extended(
            accumulate, lambda length: BatchTime(self._seconds(length, self._apart_of(length).ends), {})
        ).seconds

    def _extended(self, accumulate: int, played: Callable[[int], BatchTime]) -> BatchTime:
        step = max(self.depth, 4)
        # where the pipeline does not empty, batches shorter than its fill have a steady state of their own
        shortest = step if self.method.flushes else 2 * step
        while accumulate > shortest + 2 * step:
            first, second, third = (played(shortest + more * step) for more in range(3))
            slope, before = third.seconds - second.seconds, second.seconds - first.seconds
            if abs(slope - before) <= STEADY * slope and slope >= (1 - STEADY) * step * self._least:
                more = (accumulate - shortest) / step - 2
                link_busy = {
                    link: busy + more * (busy - second.link_busy.get(link, 0.0))
                    for link, busy in third.link_busy.items()
                }
                return BatchTime(third.seconds + more * slope, link_busy)
            shortest, step = 2 * shortest, 2 * step
        return played(accumulate)

    def _played(self, accumulate: int) -> BatchTime:
        if accumulate not in self._known:
            self._known[accumulate] = self._in_lockstep(accumulate) if self.costs.lockstep else self._eager(accumulate)
        return self._known[accumulate]

    def _eager(self, accumulate: int) -> BatchTime:
        ends, meet = self._apart_of(accumulate)
        if meet:
            ends = time_first_updates(self._schedule(accumulate), self.costs, ends.shape[1])
        return BatchTime(self._seconds(accumulate, ends), sum_link_times(self._flows(accumulate, self.costs.reduce)))

    def _flows(self, accumulate: int, reduce: Sequence[Transfer]) -> List[Tuple[int, Transfer]]:
        """The messages of a batch, in the order in which they first come."""
        back = () if self.method.structure is not None else tuple(self.costs.back)[::-1]
        return [(accumulate, message) for message in (*self.costs.onward, *back)] + [(1, message) for message in reduce]

    def _apart_of(self, accumulate: int) -> UncontendedTimes:
        if accumulate not in self._apart:
            updates = 1 if self.method.flushes else 2 * _filling(self.depth, accumulate)
            self._apart[accumulate] = time_uncontended(self._schedule(accumulate), self.costs, updates)
        return self._apart[accumulate]

    def _in_lockstep(self, accumulate: int) -> BatchTime:
        schedule = self._schedule(accumulate)
        times, batches = clock(schedule, self.costs), schedule.update_count
        link_busy = {link: busy / batches for link, busy in times.link_busy.items()}
        updates = 1 if self.method.flushes else 2 * _filling(self.depth, accumulate)
        return BatchTime(self._seconds(accumulate, times.end[Kind.UPDATE][:, :updates]), link_busy)

    def _schedule(self, accumulate: int) -> Schedule:
        batches = 1 if self.method.flushes else 3 * _filling(self.depth, accumulate)
        return _schedule(self.method, self.depth, batches * accumulate, accumulate, self.costs.lockstep)

    def _seconds(self, accumulate: int, ends: FloatArray) -> float:
        """Of a batch, from the ends of the first updates of each stage."""
        last = ends.max(axis=0)
        if self.method.flushes:
            return float(last[0])
        fill = _filling(self.depth, accumulate)
        return float(last[2 * fill - 1] - last[fill - 1]) / fill


def _filling(depth: int, accumulate: int) -> int:
    """Batches until the pipeline is in its steady state, of which as many are measured, and in which it empties."""
    return -(-2 * depth // accumulate)


@lru_cache(maxsize=16)
def _schedule(method: Method, depth: int, microbatches: int, accumulate: int, lockstep: bool) -> Schedule:
    return (make_lockstep_schedule if lockstep else make_schedule)(method, depth, microbatches, accumulate)


def compute_batch_time(method: Method, depth: int, accumulate: int, costs: Costs) -> BatchTime:
    """Of an update of N = `accumulate` microbatches on a pipeline of `depth` stages, in the steady state."""
    return Batches(method, depth, costs).time(accumulate)
