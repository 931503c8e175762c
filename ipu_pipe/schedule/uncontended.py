"""The clock where no message waits for another: slot by slot, all passes of a slot at once.

When a pass begins depends then on its device's last pass and on what it needs alone, so that a schedule is one row of array
operations. Where no two messages meet on a link these are the clock's own times, to the bit; elsewhere no pass is earlier there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.schedule.clock import Costs, FloatArray, Transfer
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule

NOTHING = Transfer()


class UncontendedTimes(NamedTuple):
    """When the first updates of each stage end, (P, updates). `meet`: messages would have met on a link before the last of these
    does, so that the clock's own may be later."""

    ends: FloatArray
    meet: bool


class _Step(NamedTuple):
    """What begins together. A pass is a number as in `clock`, a place that number * M + microbatch. `first` and `end`: which of
    all passes in their order; `goes_to`: the places of the passes that need them; `completes`: of those after which a stage
    makes an update, the place in the step, stage and number of the update."""

    first: int
    end: int
    device: IntArray
    place: IntArray
    goes_to: IntArray
    completes: Optional[Tuple[IntArray, IntArray, IntArray]]


class _Program(NamedTuple):
    """A schedule as `steps`, and in their order the pass of each."""

    passes: IntArray
    places: IntArray
    steps: Tuple[_Step, ...]


def time_uncontended(schedule: Schedule, costs: Costs, updates: int) -> UncontendedTimes:
    """The first `updates` of each stage of a schedule whose stages complete their microbatches in order. For costs of passes
    that begin as soon as they can: without `slot` and not in lock-step."""
    assert schedule.in_order and not costs.slot and not costs.lockstep
    P, M = schedule.stages, schedule.microbatches
    program = _program(schedule)
    durations = costs.durations(schedule.passes)
    duration = np.array([durations[kind] for kind in schedule.passes], np.float64).ravel()[program.passes]
    messages = _messages(schedule, costs)
    taking, late = (np.array(each, np.float64)[program.passes] for each in zip(*(each[:2] for each in messages)))
    reduce = costs.reduce or (NOTHING,) * P
    summing, summed = (np.array(each, np.float64) for each in zip(*(each[:2] for each in reduce)))
    updating = np.array(costs.update, np.float64)
    free = np.zeros(1 + max(schedule.device_of_stage))
    there = np.zeros(
        len(schedule.passes) * P * M + 1
    )  # when what a pass needs of another stage is there; the last: nobody's
    ends = np.empty(len(program.passes))
    made = np.zeros((P, schedule.update_count))
    for first, end, device, place, goes_to, completes in program.steps:
        found = np.maximum(free[device], there[place])
        found += duration[first:end]
        ends[first:end] = free[device] = found
        there[goes_to] = (found + taking[first:end]) + late[first:end]
        if completes is not None:
            which, stage, k = completes
            now = found[which] + summing[stage]
            now += summed[stage]
            now += updating[stage]
            made[stage, k] = free[device[which]] = now
    by_place = np.empty_like(ends)
    by_place[program.places] = ends
    asked = made[:, :updates]
    return UncontendedTimes(asked, _meet(schedule, messages, reduce, by_place.reshape(-1, M), float(asked.max())))


def _messages(schedule: Schedule, costs: Costs) -> List[Transfer]:
    """What takes each pass's result to another stage."""
    P = schedule.stages
    onward = [costs.message(s, s + 1) for s in range(P - 1)]
    back = [] if schedule.local else [costs.message(s, s - 1) for s in range(1, P)]
    none = [NOTHING] * P
    return [*onward, NOTHING, NOTHING, *back, *none][: 2 * P] + none * (len(schedule.passes) - 2)


@lru_cache(maxsize=32)
def _program(schedule: Schedule) -> _Program:
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


def _meet(
    schedule: Schedule, messages: List[Transfer], reduce: Sequence[Transfer], ends: FloatArray, until: float
) -> bool:
    """Whether a link is asked for before `until` while it carries another message. `ends`: of each pass, (passes, M)."""
    sent: Dict[str, List[Tuple[FloatArray, float]]] = {}
    for which, (seconds, _, links) in enumerate(messages):
        for link in links:
            sent.setdefault(link, []).append((ends[which], seconds))
    for stage, (seconds, _, links) in enumerate(reduce):
        completing = ends[stage - schedule.stages][schedule.accumulate - 1 :: schedule.accumulate]
        for link in links:
            sent.setdefault(link, []).append((completing, seconds))
    for flows in sent.values():
        at = np.concatenate([moments for moments, _ in flows])
        seconds_each = np.concatenate([np.full(len(moments), seconds) for moments, seconds in flows])
        order = np.argsort(at, kind="stable")
        free = at[order] + seconds_each[order]
        if ((free[:-1] > at[order][1:]) & (at[order][1:] < until)).any():
            return True
    return False
