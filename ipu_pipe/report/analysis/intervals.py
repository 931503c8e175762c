"""Sets of moments as disjoint intervals in order, so that lengths of unions and differences are a few array operations."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


class Intervals(NamedTuple):
    """Disjoint, in order, none empty: the moments from each `start` up to, not including, its `end`."""

    start: Times
    end: Times

    @property
    def length(self) -> int:
        """Of all together, in nanoseconds."""
        return int((self.end - self.start).sum())

    def within(self, begin: int, end: int) -> "Intervals":
        """What of them lies between two moments."""
        first, last = np.searchsorted(self.end, begin, side="right"), np.searchsorted(self.start, end, side="left")
        if last <= first or end <= begin:
            return NONE
        start, stop = self.start[first:last].copy(), self.end[first:last].copy()
        start[0], stop[-1] = max(int(start[0]), begin), min(int(stop[-1]), end)
        return Intervals(start, stop)

    def before(self, moments: Any) -> Times:
        """How much of them lies before each of `moments`."""
        sums = np.concatenate([[0], np.cumsum(self.end - self.start)])
        place = np.searchsorted(self.start, moments, side="right")
        last_end = np.concatenate([[np.iinfo(np.int64).min], self.end])[place]
        return np.asarray(sums[place] - np.where(last_end > moments, last_end - moments, 0), np.int64)


NONE = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def merged(start: Times, end: Times) -> Intervals:
    """The union of any intervals."""
    longer = end > start
    if not longer.all():
        start, end = start[longer], end[longer]
    if not len(start):
        return NONE
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return Intervals(start[begins], reach[np.concatenate([begins[1:] - 1, [len(reach) - 1]])])


def union(*sets: Intervals) -> Intervals:
    """Of several."""
    held = [each for each in sets if len(each.start)]
    if len(held) < 2:
        return held[0] if held else NONE
    return merged(np.concatenate([each.start for each in held]), np.concatenate([each.end for each in held]))


def shared_out(start: Times, end: Times) -> Tuple[Times, Times, NDArray[np.intp]]:
    """Intervals that overlap, cut so that every moment belongs to the one that began first: starts, ends, and whose each is."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    if not len(start):
        return start, end, order
    reach = np.maximum.accumulate(end)
    start = np.maximum(start, np.concatenate([start[:1], reach[:-1]]))
    left = end > start
    return start[left], end[left], order[left]
