"""Delays in the global history of block updates: what randomized PipeDream (section 4) counts."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional, Tuple

import numpy as np

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.versions import WINDOW, VersionTable


class HistoryDelays(NamedTuple):
    """Where passes stand in the global history of block updates, (P, n) each.

    The gradient that stage a applies for microbatch m was taken at an iterate whose block r is
    `written[a, m] - read[r, m]` entries old.
    """

    written: IntArray  # entries before m's backward on stage a
    read: IntArray  # entries that m's forward on stage r has seen


def summarize_history_delays(table: VersionTable) -> Tuple[Optional[int], Optional[float]]:
    """The greatest and the mean global-history delay in the steady state; (None, None) where none reads old weights.

    Entries are single stages' updates in the order of (slot, stage); the delay of microbatch m, active stage a and
    read block r is the entries between m's forward on r and its backward on a (randomized PipeDream, section 4).
    The first and last quarter of the microbatches are left out, in whole batches, or, where no whole batch remains,
    as they are.
    """
    if not table.method.is_stale:
        return None, None
    first, last = find_steady_range(table)
    greatest, written_sum, read_sum = 0, 0, 0
    for start, stop in _spans(first, last, table.schedule.stages):
        delays = count_history_delays(table, start, stop)
        greatest = max(greatest, int((delays.written.max(axis=0) - delays.read.min(axis=0)).max()))
        written_sum += int(delays.written.sum())
        read_sum += int(delays.read.sum())
    return greatest, (written_sum - read_sum) / (table.schedule.stages * (last - first))


def find_steady_range(table: VersionTable) -> Tuple[int, int]:
    """The first microbatch of the steady state, and the first after it: without the outer quarters, in whole batches."""
    M, N = table.schedule.microbatches, table.schedule.accumulate
    first, last = -(-M // 4), -(-3 * M // 4)
    whole_first, whole_last = -(-first // N) * N, last // N * N
    if whole_first < whole_last:
        return whole_first, whole_last
    return (first, last) if first < last else (0, M)


def count_history_delays(table: VersionTable, first: int, last: int) -> HistoryDelays:
    """The history before the backwards, and seen by the forwards, of the microbatches [first, last).

    A forward sees the entries of earlier slots and those of lower stages in its own slot. Where it reads an older
    version than the newest, it stands at the latest iterate that still holds that version.
    """
    schedule, N = table.schedule, table.schedule.accumulate
    forward = schedule.slots(Kind.FORWARD, first, last)
    backward = schedule.slots(Kind.BACKWARD, first, last)
    if table.method.forward_reads is Reads.NEWEST:
        return HistoryDelays(*_entries_before(table, backward, forward))
    version = table.forward(first, last)
    low, high = int(version.min()), min(int(version.max()) + 1, schedule.update_count)
    if high <= low:
        return HistoryDelays(*_entries_before(table, backward, forward))
    replaced = schedule.slots(Kind.UPDATE, low, high)  # update v is the entry that replaces version v
    written, seen, replacing = _entries_before(table, backward, forward, replaced)
    held = np.take_along_axis(replacing, np.minimum(version - low, high - low - 1), axis=1)
    held = np.where(version < high, held, np.iinfo(np.int64).max)  # a version that is never replaced
    assert int(version.max()) <= last // N
    return HistoryDelays(written, np.minimum(seen, held))


def _entries_before(table: VersionTable, *slots: IntArray) -> Tuple[IntArray, ...]:
    """For each array of slots (P, n), the entries before those slots' updates of the row's stage."""
    schedule = table.schedule
    start, stop = min(int(s.min()) for s in slots), max(int(s.max()) for s in slots) + 1
    made = schedule.update_grid(start, stop) >= 0  # (P, slots)
    below = np.cumsum(made, axis=0, dtype=np.int64)
    total = below[-1].copy()
    below -= made  # entries of lower stages in the slot
    earlier = int(schedule.count_before(Kind.UPDATE, np.array([start])).sum())
    below += earlier + np.cumsum(total) - total
    return tuple(np.take_along_axis(below, s - start, axis=1) for s in slots)


def _spans(first: int, last: int, stages: int) -> Iterator[Tuple[int, int]]:
    """Consecutive microbatches; at least 2P at a time, since passes of one microbatch are up to 2P slots apart."""
    width = max(WINDOW // stages, 2 * stages)
    for start in range(first, last, width):
        yield start, min(start + width, last)
