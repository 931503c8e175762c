"""The clock's fast path: the eager discipline where no transfer waits for another, as one row of array operations.

Slot by slot, all passes of a slot at once: when a pass begins then depends on its device's last pass and on what it needs alone.
Where no two transfers meet on a link these are the clock's own times, to the bit; elsewhere no pass is earlier on the clock. A
plan of many candidates takes a fraction of the time that playing their passes one by one takes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.schedule.clock import Costs, FloatArray, Transfer, get_transfer
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule

NOTHING = Transfer()


class UncontendedTimes(NamedTuple):
    """When the first updates of each stage end, (P, updates). `meet`: transfers would have met on a link before the last of these
    ends, so that the clock's own times may be later."""

    ends: FloatArray
    meet: bool


class _Step(NamedTuple):
    """Passes that begin together, as slices and places of the arrays of `_Program`.

    first, end: these of all passes in their order. device: of each. place: pass * M + microbatch. goes_to: the places of the
    passes that need them. completes: of those after which a stage makes an update, the position in the step, the stage and the
    number of the update.
    """

    first: int
    end: int
    device: IntArray
    place: IntArray
    goes_to: IntArray
    completes: Optional[Tuple[IntArray, IntArray, IntArray]]


class _Program(NamedTuple):
    """A schedule as `steps`; in their order, the pass (numbered as in `clock`) and the place of each action."""

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
    # the first half takes the time of both halves
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
    # when what the pass at each place needs of another stage arrives; the last place is nobody's
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
    meet = _do_transfers_meet(schedule, transfers, reduce, by_place.reshape(-1, M), float(asked.max()))
    return UncontendedTimes(asked, meet)


def _list_transfers(schedule: Schedule, costs: Costs) -> List[Transfer]:
    """Return what takes the result of each pass to another stage."""
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
    """Return whether a link is asked for before `until` while it is busy. `ends` of each pass, (passes, M)."""
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
