"""Weight versions alive at once: the copies of its weights that a stage needs."""

from __future__ import annotations

from typing import Iterator

import numpy as np

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.versions import WINDOW, VersionTable


def weight_copies(table: VersionTable) -> IntArray:
    """The most versions (P,) of each stage that are alive at once in this run, the newest included.

    A version is alive from its making until the last pass that reads it, and at least until the next is made. The
    start-up counts: PipeDream's timeline may there keep more copies than later on.
    """
    P, N = table.schedule.stages, table.schedule.accumulate
    history = table.method.history
    if table.method.delay is not None or (history is not None and history.delays != "schedule"):
        return table.greatest_lag() + 1  # no schedule's: all that a pass may read
    if table.method.rounds is not None:  # a replica's each
        return np.full(P, N)
    if table.method.flushes:  # no pass reads an older version, however long the batch
        return np.ones(P, np.int64)
    reach = N * (-(-4 * (P + N) // N))  # by then a stretch has long been in its steady state
    copies = np.ones(P, np.int64)
    # the pipeline is empty between parts and only the newest version left: parts of one length are alike
    for part in {(part.microbatches, part.slots): part for part in table.schedule.parts}.values():
        first, last = part.first_microbatch, min(part.first_microbatch + reach, part.end_microbatch)
        for stages in _bands(P, last - first):
            copies[stages] = np.maximum(copies[stages], _alive(table, first, last, stages))
    return copies


def _alive(table: VersionTable, first: int, last: int, stages: slice) -> IntArray:
    """The most versions alive at once between the microbatches `first` (a multiple of N) and `last`.

    Moments in a slot: 0 forward, 1 backward, 2 update; what ends at a moment makes room for what is made then.
    """
    N = table.schedule.accumulate
    forward, backward = table.window(first, last, stages)
    oldest, newest, rows = int(forward.min()), last // N, np.arange(forward.shape[0])[:, None]
    update_moment = 3 * table.schedule.slots(Kind.UPDATE, first // N, newest, stages) + 2
    made = np.full((len(rows), newest - oldest + 1), -1, np.int64)
    made[:, first // N + 1 - oldest :] = update_moment  # update k makes version k + 1
    ended = np.full_like(made, -1)
    ended[:, first // N - oldest : -1] = update_moment  # and supersedes version k
    ended[:, -1] = 3 * table.schedule.slot_count
    for moment, (kind, version) in enumerate(((Kind.FORWARD, forward), (Kind.BACKWARD, backward))):
        read = 3 * table.schedule.slots(kind, first, last, stages) + moment
        np.maximum.at(ended, (rows, version - oldest), read)
    # Only stretches of two ascending runs: a stable sort merges them fast.
    events = np.sort(np.concatenate([2 * ended, 2 * made + 1], axis=1), axis=1, kind="stable")
    alive = np.cumsum(np.where(events & 1, 1, -1), axis=1)
    return np.asarray(alive.max(axis=1))


def _bands(stages: int, width: int) -> Iterator[slice]:
    """Consecutive stages, as many at a time as a window of `width` microbatches affords."""
    height = max(WINDOW // max(width, 1), 1)
    for first in range(0, stages, height):
        yield slice(first, min(first + height, stages))
