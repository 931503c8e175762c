"""PipeDream, randomized PipeDream and LocalSGD on the vectors of `ipu_pipe.studies.objectives`, all learning rates of a grid
at once.

The replays are those of the emulator; the passes are products of float64 matrices, which makes a grid some hundred times as fast
(tests compare the iterates with the emulator's). All versions of all blocks are kept: history[v] holds block r after v of its
updates. PipeDream reads history[versions[r, m]] for microbatch m and then makes version m + 1 of every block; randomized
PipeDream reads for each block update and makes a version of one block. LocalSGD always reads its replica's newest weights.
"""

from __future__ import annotations

from typing import Any, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from ipu_pipe.backends.randomized import RandomizedReplays, order_of_updates
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.studies.objectives import Floats, Objective, draw_noise

WINDOW = 4096  # block updates whose reads are fetched at a time


class Curve(NamedTuple):
    """The full objective along a run, at each point after so many block updates and slots, for each learning rate.

    Slots are those of the timeline (of randomized PipeDream: of PipeDream's timeline with as many updates). `x` is the last
    iterate, (d, G). Between microbatches the blocks of an iterate have different numbers of updates, as in the paper: those that
    the stages have made by then.
    """

    updates: IntArray
    slots: IntArray
    values: Floats  # (points, G)
    x: Floats


def make_randomized_source(
    stages: int, microbatches: int, batches: int, args: Mapping[str, Any], seed: int
) -> RandomizedReplays:
    """Return randomized PipeDream's replays, as many block updates as PipeDream makes; `args` are its method_args."""
    method = resolve_method("randomized_pipedream", args)
    assert method.history is not None
    table = VersionTable(make_schedule(method, stages, microbatches, 1), method)
    return RandomizedReplays(table, method.history, batches, seed)


def run_pipedream(
    objective: Objective, stages: int, microbatches: int, rates: Floats, seed: int, points: int = 60
) -> Curve:
    """Run PipeDream over its timeline, microbatch after microbatch; the batches repeat in fixed order."""
    method = resolve_method("pipedream")
    schedule = make_schedule(method, stages, microbatches, 1)
    versions = VersionTable(schedule, method).forward(0, microbatches)
    d, G, block = objective.dimension, len(rates), objective.dimension // stages
    history = np.zeros((microbatches + 1, stages, block, G))
    noise = draw_noise_by_pass(objective, schedule, block, seed)
    all_stages = np.arange(stages)
    with np.errstate(over="ignore", invalid="ignore"):
        for m in range(microbatches):
            x = history[versions[:, m], all_stages].reshape(d, G)
            gradient = objective.compute_gradient(x, m % objective.batches).reshape(stages, block, G)
            if noise is not None:
                gradient = gradient + noise[:, m]
            np.subtract(history[m], rates * gradient, out=history[m + 1])
    return _evaluate(objective, schedule, history, None, points)


def run_randomized(
    objective: Objective,
    sources: Sequence[RandomizedReplays],
    rates: Floats,
    seed: int,
    points: int = 60,
) -> List[Curve]:
    """Run randomized PipeDream; a source says which versions each block update reads and which block it updates.

    Several sources (delay bounds) that draw the same stages and microbatches share their products.
    """
    P, d, G, S, count = sources[0].stages, objective.dimension, len(rates), len(sources), sources[0].count
    block = d // P
    noise = draw_noise(objective, count, block, seed)
    updates_by_block = sources[0].count_updates(count)
    first_version = np.concatenate(
        [[0], np.cumsum(updates_by_block + 1)[:-1]]
    )  # of each block, one after another in history
    history = np.zeros((int((updates_by_block + 1).sum()), block, S, G))
    newest = first_version.copy()
    x = np.empty((P, block, S, G))
    columns = x.reshape(d, S * G)
    blocks = [slice(s * block, (s + 1) * block) for s in range(P)]
    rate_columns = np.tile(rates, S).reshape(S, G)
    marks, values, place = _spread_marks(count, points), [], 0
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, count, WINDOW):
            windows = [source.window(first, min(first + WINDOW, count)) for source in sources]
            reads = np.stack([(window.forward + first_version[:, None]).T for window in windows], axis=1)  # (n, S, P)
            stage = windows[0].updates.argmax(axis=0)
            batch = (windows[0].microbatch % objective.batches).tolist()
            for i, s in enumerate(stage.tolist()):
                if first + i == marks[place]:
                    values.append(_compute_value(objective, history[newest].reshape(d, S * G)))
                    place += 1
                for source in range(S):
                    x[:, :, source] = history[reads[i, source], :, source]
                gradient = objective.compute_gradient(columns, batch[i], blocks[s])
                if noise is not None:
                    gradient += noise[first + i]
                at = newest[s]
                np.subtract(history[at], gradient.reshape(block, S, G) * rate_columns, out=history[at + 1])
                newest[s] = at + 1
    last = history[newest].reshape(d, S * G)
    values.append(_compute_value(objective, last))
    slots = np.where(marks > 0, 2 * -(-marks // P) + 2 * (P - 1), 0)
    by_source = np.stack(values).reshape(-1, S, G)
    return [Curve(marks, slots, by_source[:, i], last.reshape(d, S, G)[:, i]) for i in range(S)]


def run_local_sgd(
    objective: Objective,
    stages: int,
    replicas: int,
    steps: int,
    jobs: int,
    rates: Floats,
    seed: int,
    slots: Optional[int] = None,
    points: int = 60,
) -> Curve:
    """Run LocalSGD over its timeline of so many jobs, or over the first `slots` slots of it.

    The value is that of the mean of the replicas, within a round too.
    """
    schedule = make_schedule(resolve_method("local_sgd", {"local_steps": steps}), stages, jobs, replicas)
    d, G, block = objective.dimension, len(rates), objective.dimension // stages
    noise = draw_noise_by_pass(objective, schedule, block, seed)
    x = np.zeros((replicas, d, G))
    mean = np.zeros((jobs + 1, d, G))
    with np.errstate(over="ignore", invalid="ignore"):
        for job in range(jobs):
            replica = job % replicas
            gradient = objective.compute_gradient(x[replica], job % objective.batches)
            if noise is not None:
                gradient = gradient + noise[:, job].reshape(d, 1)
            x[replica] -= rates * gradient
            mean[job + 1] = mean[job] - rates / replicas * gradient
            if (job + 1) % (replicas * steps) == 0:
                x[:] = mean[job + 1] = x.mean(axis=0)
    return _evaluate(objective, schedule, mean.reshape(jobs + 1, stages, block, G), slots, points)


def _evaluate(objective: Objective, schedule: Schedule, history: Floats, slots: Optional[int], points: int) -> Curve:
    """Return the curve over the first `slots` slots (None: all) of a timeline; history: (microbatches + 1, stages, block, G)."""
    P, d, G = schedule.stages, objective.dimension, history.shape[-1]
    marks = _spread_marks(schedule.slot_count if slots is None else slots, points)
    ends = schedule.slots(Kind.BACKWARD, 0, schedule.microbatches)
    versions = np.stack([np.searchsorted(ends_of_stage, marks) for ends_of_stage in ends], axis=1)  # (points, P)
    iterates = [history[at, np.arange(P)].reshape(d, G) for at in versions]
    values = np.stack([_compute_value(objective, x) for x in iterates])
    return Curve(versions.sum(axis=1), marks, values, iterates[-1])


def _spread_marks(count: int, points: int) -> IntArray:
    """Return up to `points` + 1 places from 0 to `count`, both included."""
    return np.unique(np.linspace(0, count, min(points, count) + 1).round().astype(np.int64))


def _compute_value(objective: Objective, x: Floats) -> Floats:
    """Return the full objective; infinite where a run has diverged."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = objective.compute_value(x)
    return np.where(np.isfinite(value), value, np.inf)


def draw_noise_by_pass(objective: Objective, schedule: Schedule, block: int, seed: int) -> Optional[Floats]:
    """Draw the noise block update by block update, in the order of (slot, stage); return it by pass: (P, M, block, 1)."""
    P, M = schedule.stages, schedule.microbatches
    drawn = draw_noise(objective, P * M, block, seed)
    if drawn is None:
        return None
    stage, microbatch = order_of_updates(schedule)
    placed = np.empty((P, M, block, 1))
    placed[stage, microbatch] = drawn
    return placed


# ---- budgets in slots


def count_microbatches(slots: int, stages: int) -> int:
    """Return the fewest microbatches with which PipeDream's timeline, 2M + 2(P-1), has that many slots."""
    return max(-(-(slots - 2 * (stages - 1)) // 2), 1)


def count_jobs(slots: int, stages: int, replicas: int, steps: int) -> int:
    """Return the fewest jobs with which LocalSGD's timeline has that many slots."""
    method = resolve_method("local_sgd", {"local_steps": steps})
    low, high = 1, slots
    while low < high:
        middle = (low + high) // 2
        long_enough = make_schedule(method, stages, middle, replicas).slot_count >= slots
        low, high = (low, middle) if long_enough else (middle + 1, high)
    return low
