"""Runs on a vector in blocks, all steps of a grid at once: what the emulator does with `ipu_pipe.studies.objectives.modules`, as
products of float64 matrices.

A run is carried out replay by replay, as the emulator does it, with all versions of all blocks kept: history[v] holds block r
after v updates of it. PipeDream reads, for microbatch m, history[versions[r, m]] of each block and then makes version m + 1 of
all; randomized PipeDream reads for a block update and makes one block's. What LocalSGD reads is always its replica's newest.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Union

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.backends.randomized import RandomizedReplays, order_of_updates
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.studies.objectives.functions import Floats, Logistic, Quadratic, noise_of

Objective = Union[Quadratic, Logistic]
WINDOW = 4096  # block updates read ahead


class Curve(NamedTuple):
    """The full objective along a run: after so many block updates, at the end of which slot (of the timeline, or of PipeDream's
    with as many updates), for each step of the grid. `x`: the last iterate, (d, G)."""

    updates: IntArray
    slots: IntArray
    values: Floats  # (points, G)
    x: Floats


def _marks(count: int, points: int) -> IntArray:
    """So many places from 0 to `count`, both included."""
    return np.unique(np.linspace(0, count, min(points, count) + 1).round().astype(np.int64))


def pipedream(
    objective: Objective, stages: int, microbatches: int, rates: Floats, seed: int, points: int = 60
) -> Curve:
    """PipeDream over its timeline, microbatch after microbatch; the batches in fixed order, over and over."""
    method = resolve_method("pipedream")
    schedule = make_schedule(method, stages, microbatches, 1)
    versions = VersionTable(schedule, method).forward(0, microbatches)
    d, G, block = objective.dimension, len(rates), objective.dimension // stages
    history = np.zeros((microbatches + 1, stages, block, G))
    noise = _noise_by_pass(objective, schedule, block, seed)
    every = np.arange(stages)
    with np.errstate(over="ignore", invalid="ignore"):
        for m in range(microbatches):
            x = history[versions[:, m], every].reshape(d, G)
            gradient = objective.gradient(x, m % objective.batches).reshape(stages, block, G)
            if noise is not None:
                gradient = gradient + noise[:, m]
            np.subtract(history[m], rates * gradient, out=history[m + 1])
    marks = _marks(microbatches, points)
    # of the iterates between two microbatches' last updates: all blocks after the same number of updates
    values = np.stack([_value(objective, history[m].reshape(d, G)) for m in marks])
    slots = schedule.slots(Kind.BACKWARD, 0, microbatches)[0]
    return Curve(marks * stages, np.where(marks > 0, slots[marks - 1] + 1, 0), values, history[-1].reshape(d, G))


def randomized(
    objective: Objective,
    sources: Sequence[RandomizedReplays],
    rates: Floats,
    seed: int,
    beta: Optional[float] = None,
    points: int = 60,
) -> List[Curve]:
    """Randomized PipeDream: a source says what each block update reads and is. Several of them (delay bounds) go together, which
    must draw the same stages and microbatches: their columns are those of one product."""
    first_source = sources[0]
    P, d, G, S, count = first_source.stages, objective.dimension, len(rates), len(sources), first_source.count
    block = d // P
    noise = noise_of(objective, count, block, seed)
    total = first_source.made(count)
    begin = np.concatenate([[0], np.cumsum(total + 1)[:-1]])  # of each block's versions, which lie one after another
    history = np.zeros((int((total + 1).sum()), block, S, G))
    now = begin.copy()
    x = np.empty((P, block, S, G))
    columns = x.reshape(d, S * G)
    blocks = [slice(s * block, (s + 1) * block) for s in range(P)]
    wide = np.tile(rates, S).reshape(S, G)
    marks, values, place = _marks(count, points), [], 0
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, count, WINDOW):
            windows = [source.window(first, min(first + WINDOW, count)) for source in sources]
            reads = np.stack([(window.forward + begin[:, None]).T for window in windows], axis=1)  # (n, S, P)
            stage = windows[0].updates.argmax(axis=0)
            for other in windows[1:]:
                assert (other.updates == windows[0].updates).all(), "sources draw the same stages"
            batch = (windows[0].microbatch % objective.batches).tolist()
            for i, s in enumerate(stage.tolist()):
                if first + i == marks[place]:
                    values.append(_value(objective, history[now].reshape(d, S * G)))
                    place += 1
                for source in range(S):
                    x[:, :, source] = history[reads[i, source], :, source]
                if beta is not None:
                    _extrapolate(x, history, reads[i], [window.corrected for window in windows], i, beta)
                gradient = objective.gradient(columns, batch[i], blocks[s])
                if noise is not None:
                    gradient += noise[first + i]
                at = now[s]
                np.subtract(history[at], gradient.reshape(block, S, G) * wide, out=history[at + 1])
                now[s] = at + 1
    last = history[now].reshape(d, S * G)
    values.append(_value(objective, last))
    slots = np.where(marks > 0, 2 * -(-marks // P) + 2 * (P - 1), 0)
    each = np.stack(values).reshape(-1, S, G)
    return [Curve(marks, slots, each[:, i], last.reshape(d, S, G)[:, i]) for i in range(S)]


def _extrapolate(
    x: Floats, history: Floats, reads: IntArray, moved: Sequence[Optional[NDArray[np.bool_]]], at: int, beta: float
) -> None:
    """x + beta times what the iterate read has changed its block by."""
    for source, corrected in enumerate(moved):
        assert corrected is not None, "a source with nag"
        for j in np.flatnonzero(corrected[:, at]):
            version = reads[source, j]
            x[j, :, source] += beta * (history[version, :, source] - history[version - 1, :, source])


def local_sgd(
    objective: Objective, stages: int, replicas: int, steps: int, jobs: int, rates: Floats, seed: int
) -> Curve:
    """LocalSGD over its timeline of so many jobs, the last round as long as these last; the value is that of the mean of the
    replicas, at the end of each round."""
    schedule = make_schedule(resolve_method("local_sgd", {"local_steps": steps}), stages, jobs, replicas)
    d, G, block = objective.dimension, len(rates), objective.dimension // stages
    noise = _noise_by_pass(objective, schedule, block, seed)
    ends = schedule.slots(Kind.BACKWARD, 0, jobs)[0] + 1
    x = np.zeros((replicas, d, G))
    values, updates, slots = [_value(objective, x[0])], [0], [0]
    with np.errstate(over="ignore", invalid="ignore"):
        for job in range(jobs):
            replica = job % replicas
            gradient = objective.gradient(x[replica], job % objective.batches)
            if noise is not None:
                gradient = gradient + noise[:, job].reshape(d, 1)
            x[replica] -= rates * gradient
            if (job + 1) % (replicas * steps) == 0 or job + 1 == jobs:
                x[:] = x.mean(axis=0)
                values.append(_value(objective, x[0]))
                updates.append((job + 1) * stages)
                slots.append(int(ends[job]))
    return Curve(np.array(updates), np.array(slots), np.stack(values), x[0].copy())


def _value(objective: Objective, x: Floats) -> Floats:
    """The full objective; where a run has diverged, infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = objective.value(x)
    return np.where(np.isfinite(found), found, np.inf)


def _noise_by_pass(objective: Objective, schedule: Schedule, block: int, seed: int) -> Optional[Floats]:
    """The noise of each stage and microbatch, (P, M, block, 1): drawn block update by block update, in the order of (slot,
    stage)."""
    P, M = schedule.stages, schedule.microbatches
    drawn = noise_of(objective, P * M, block, seed)
    if drawn is None:
        return None
    stage, microbatch = order_of_updates(schedule)
    placed = np.empty((P, M, block, 1))
    placed[stage, microbatch] = drawn
    return placed


def microbatches_for(slots: int, stages: int) -> int:
    """The fewest microbatches with which PipeDream's timeline, 2M + 2(P-1), is that long."""
    return max(-(-(slots - 2 * (stages - 1)) // 2), 1)


def jobs_for(slots: int, stages: int, replicas: int, steps: int) -> int:
    """The fewest jobs with which LocalSGD's timeline is that long."""
    method = resolve_method("local_sgd", {"local_steps": steps})
    low, high = 1, slots
    while low < high:
        middle = (low + high) // 2
        long_enough = make_schedule(method, stages, middle, replicas).slot_count >= slots
        low, high = (low, middle) if long_enough else (middle + 1, high)
    return low


def best(curves: Sequence[Floats]) -> List[int]:
    """Of each run's last values, (G,), the step with the least."""
    return [int(np.argmin(values)) for values in curves]
