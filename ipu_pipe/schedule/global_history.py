"""Count the delays that a schedule has in the global history of block updates (randomized
PipeDream, section 4).

The entries of the history are updates of single stages in the order of (slot, stage); delays stated
by a method, without a schedule, are in `delays`. PipeDream on two stages; Uk.s is U(k) of stage s:

    slot     2          3          4          5
    history  U0.1       U0.0       U1.1       U1.0
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

import numpy as np

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.stretches import IntArray
from ipu_pipe.schedule.versions import WINDOW, VersionTable


class HistoryPositions(NamedTuple):
    """The positions of passes in the global history of block updates, (P, n) each.

    `written[a, m]`: the entries before m's backward on stage a. `read[r, m]`: the entries that m's
    forward on stage r has seen. The gradient that stage a applies for microbatch m belongs to an
    iterate whose block r is `written[a, m] - read[r, m]` entries old.
    """

    written: IntArray
    read: IntArray


def summarize_history_delays(table: VersionTable) -> tuple[int | None, float | None]:
    """Return the greatest and the mean delay in the steady state; (None, None) if no pass reads old
    weights.

    The delay of microbatch m, active stage a and read block r is the number of entries between m's
    forward on r and its backward on a. The first and last quarter of the microbatches are left out
    (`find_steady_range`).
    """
    if not table.method.is_stale:
        return None, None
    first, last = find_steady_range(table)
    greatest = 0
    written_sum = 0
    read_sum = 0
    for start, stop in _split_range(first, last, table.schedule.stages):
        positions = count_history_delays(table, start, stop)
        greatest = max(
            greatest,
            int((positions.written.max(axis=0) - positions.read.min(axis=0)).max()),
        )
        written_sum += int(positions.written.sum())
        read_sum += int(positions.read.sum())
    return greatest, (written_sum - read_sum) / (table.schedule.stages * (last - first))


def find_steady_range(table: VersionTable) -> tuple[int, int]:
    """Return the first and the end microbatch without the outer quarters, in whole batches if at
    least one remains.
    """
    M = table.schedule.microbatches
    N = table.schedule.accumulate
    first = -(-M // 4)
    last = -(-3 * M // 4)
    batch_first = -(-first // N) * N
    batch_last = last // N * N
    if batch_first < batch_last:
        return batch_first, batch_last
    return (first, last) if first < last else (0, M)


def count_history_delays(table: VersionTable, first: int, last: int) -> HistoryPositions:
    """Return the positions in the history of the backwards and forwards of the microbatches [first,
    last).

    A forward has seen the entries of earlier slots, and of lower stages in its own slot. If it
    reads an older version than the newest, its position is the latest iterate that still has that
    version.
    """
    schedule = table.schedule
    N = table.schedule.accumulate
    forward = schedule.slots(Kind.FORWARD, first, last)
    # the gradient is applied after the last pass
    backward = schedule.slots(schedule.passes[-1], first, last)
    if table.method.forward_reads is Reads.NEWEST:
        return HistoryPositions(*_count_entries_before(table, backward, forward))
    version = table.forward(first, last)
    low = int(version.min())
    high = min(int(version.max()) + 1, schedule.update_count)
    # no version that is read here is ever replaced
    if high <= low:
        return HistoryPositions(*_count_entries_before(table, backward, forward))
    # update v is the entry that replaces version v
    replaced = schedule.slots(Kind.UPDATE, low, high)
    written, newest, before_replaced = _count_entries_before(table, backward, forward, replaced)
    latest = np.take_along_axis(before_replaced, np.minimum(version - low, high - low - 1), axis=1)
    # versions that are never replaced have no end
    latest = np.where(version < high, latest, np.iinfo(np.int64).max)
    assert int(version.max()) <= last // N
    return HistoryPositions(written, np.minimum(newest, latest))


def _count_entries_before(table: VersionTable, *slots: IntArray) -> tuple[IntArray, ...]:
    """Return for each array of slots (P, n) the entries before the updates of the row's stage in
    those slots.
    """
    schedule = table.schedule
    start = min(int(s.min()) for s in slots)
    stop = max(int(s.max()) for s in slots) + 1
    updates = schedule.update_grid(start, stop) >= 0  # (P, slots)
    before = np.cumsum(updates, axis=0, dtype=np.int64)
    # a copy, since `before` is changed in place below
    slot_totals = before[-1].copy()
    # entries of lower stages in the slot
    before -= updates
    # and of earlier slots
    before += (
        int(schedule.count_before(Kind.UPDATE, np.array([start])).sum())
        + np.cumsum(slot_totals)
        - slot_totals
    )
    return tuple(np.take_along_axis(before, s - start, axis=1) for s in slots)


def _split_range(first: int, last: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of microbatches, each at least 2P long, because the passes of a microbatch are
    up to 2P slots apart.
    """
    width = max(WINDOW // stages, 2 * stages)
    for start in range(first, last, width):
        yield start, min(start + width, last)
