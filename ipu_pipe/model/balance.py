"""Where to cut a row of units, which run one after another, into consecutive parts of nearly equal cost.

The cost of a part may be more than the sum of its units' (what crosses its boundaries, whether it fits), so no greedy cut is
exact. Dynamic programming from the last part on is, with k parts for the units from j on:

    least(k, j) = min over i of max(price(k, j, i), least(k - 1, i))

Of all cuts whose greatest price is least (or little more) a second pass chooses the one with the least sum of second prices.
`find_best_cut` is the planner's use of it and `WeightedCuts` the one of a model's stages. `balance` is exact for sums alone, and
fast: it bounds the first and merges stages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

SLACK = 1.1  # of a model's stages: cuts whose greatest parts differ by less count as equally balanced

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# (first, end) -> k -> prices. Of parts of the units from `first` to before `end` (arrays that broadcast) as the k-th parts from
# the end (1: last; an array that broadcasts with theirs): what they cost, infinite where they may not be.
StagePrices = Callable[[IntArray], FloatArray]
PriceParts = Callable[[IntArray, IntArray], StagePrices]


# ---- sums alone


def balance(costs: Sequence[float], count: int) -> List[int]:
    """Return the first units of `count` consecutive parts whose greatest sum is least, by bisection and greedy filling.

    No part is empty; parts that are left over split the costliest part that has more than one unit.
    """
    assert 1 <= count <= len(costs)
    low, high = max(costs), float(sum(costs))
    starts = _fill_parts(costs, high)
    for _ in range(60):
        middle = (low + high) / 2
        attempt = _fill_parts(costs, middle)
        if len(attempt) <= count:
            high, starts = middle, attempt
        else:
            low = middle
    exact = _fill_parts(costs, low)
    starts = exact if len(exact) <= count else starts
    while len(starts) < count:
        edges = [*starts, len(costs)]
        _, a, b = max((sum(costs[a:b]), a, b) for a, b in zip(edges, edges[1:]) if b - a > 1)
        halving = min(range(a + 1, b), key=lambda cut: max(sum(costs[a:cut]), sum(costs[cut:b])))
        starts = sorted([*starts, halving])
    return starts


def _fill_parts(costs: Sequence[float], limit: float) -> List[int]:
    starts, total = [0], 0.0
    for i, cost in enumerate(costs):
        if total + cost > limit and i > starts[-1]:
            starts, total = [*starts, i], 0.0
        total += cost
    return starts


def find_greatest(costs: Sequence[float], starts: Sequence[int]) -> float:
    """Return the greatest sum of the parts that begin at `starts`."""
    edges = [*starts, len(costs)]
    return max(float(sum(costs[a:b])) for a, b in zip(edges, edges[1:]))


def bound_slowest(work: Sequence[float], count: int) -> float:
    """Return the least possible greatest sum of `count` parts of `work`; infinite where there are fewer units."""
    return find_greatest(work, _balance_once(tuple(work), count)) if count <= len(work) else float("inf")


@lru_cache(maxsize=1024)
def _balance_once(work: Tuple[float, ...], count: int) -> Tuple[int, ...]:
    return tuple(balance(work, count))


# ---- any price of a part


def _find_bottleneck(prices: FloatArray, end: IntArray) -> float:
    """Return the least possible greatest price, infinite if no cut is possible.

    `prices` (count, n, width): of the k-th parts from the end, of the units from the row to before `end` (n, width).
    """
    reach = np.full(len(end) + 1, np.inf)
    reach[-1] = 0.0
    for price in prices:
        reach[:-1], reach[-1] = np.maximum(price, reach[end]).min(axis=1), np.inf
    return float(reach[0])


def _choose_cut(seconds: FloatArray, end: IntArray) -> List[int]:
    """Return the edges of the cut with the least sum of second prices, of equals that with the earlier ends.

    Arrays as in `_find_bottleneck`; the edges are first units of the parts, and then the number of units.
    """
    rows, paid = np.arange(len(end)), np.full(len(end) + 1, np.inf)
    paid[-1] = 0.0
    ends: List[IntArray] = []
    for second in seconds:
        total = second + paid[end]
        best = total.argmin(axis=1)
        ends.append(end[rows, best])
        paid[:-1], paid[-1] = total[rows, best], np.inf
    edges = [0]
    for chosen in reversed(ends):
        edges.append(int(chosen[edges[-1]]))
    return edges


def find_best_cut(work: Sequence[float], count: int, price_parts: Optional[PriceParts] = None) -> Optional[List[int]]:
    """Return the first units of the `count` parts whose greatest price is least, then with the least sum of squares.

    `work`: a lower bound of what each unit adds to its part's price; without `price_parts` that price itself. A part that does
    more work than the best cut by work alone costs is no part of the answer, which keeps the arrays narrow. None where no cut is
    possible.
    """
    units = len(work)
    if not 1 <= count <= units:
        return None
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(work, np.float64))])
    price_parts = price_parts or (lambda first, end: lambda k: sums[end] - sums[first])
    starts = np.array(_balance_once(tuple(work), count))
    slowest = float(price_parts(starts, np.append(starts[1:], units))(np.arange(count, 0, -1)).max())
    rounding = 1e-9 * sums[-1]
    fits = np.searchsorted(sums, sums[:-1] + slowest + rounding, side="right") - 1 - np.arange(units)
    width = int(min(units - count + 1, max(1, fits.max())))
    first = np.arange(units)[:, None]
    end = first + 1 + np.arange(width)[None, :]
    inside, end = end <= units, np.minimum(end, units)
    prices = np.where(inside, price_parts(first, end)(np.arange(1, count + 1)[:, None, None]), np.inf)
    prices = np.broadcast_to(prices, (count, *inside.shape))
    least = _find_bottleneck(prices, end)
    if not np.isfinite(least):
        return None
    squares = np.where(prices <= least, (prices / (least or 1.0)) ** 2, np.inf)
    return _choose_cut(squares, end)[:-1]


class WeightedCuts:
    """All cuts of a row of units into consecutive parts that each hold a weight.

    `costs`, `weights` (their number) and `through` (how many modules a cut before the unit goes through), one per unit. Of all
    cuts whose greatest part is within SLACK of the least the one through fewest modules is best:

        unit     patches | block0.norm  block0.attention  block0.mlp | block1.norm ...
        through     0    |     0              1               1      |     0            here block0 would be cut through
    """

    def __init__(self, costs: Sequence[float], weights: Sequence[int], through: Sequence[int]) -> None:
        n = len(costs)
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
        counts = np.concatenate([[0], np.cumsum(np.asarray(weights, np.int64))])
        # the row is read backwards, so that of equal cuts that with the latest starts is chosen: what costs nothing stays with
        # the unit before it. Part [a, b) is the row n - b to before n - a of the solver
        row, end = np.arange(n)[:, None], np.arange(1, n + 1)[None, :]
        a, b = n - end, n - row
        self._end = np.broadcast_to(end, (n, n))
        self._parts = np.where((end > row) & (counts[b] - counts[a] >= 1), sums[b] - sums[a], np.inf)
        self._through = np.asarray(through, np.float64)[a]
        self._total = float(sums[-1]) or 1.0

    def find_least(self, count: int) -> float:
        """Return the least possible cost of the greatest of `count` parts; infinite where there are fewer."""
        return _find_bottleneck(np.broadcast_to(self._parts, (count, *self._parts.shape)), self._end)

    def find_best(self, count: int) -> Optional[List[int]]:
        """Return the first units of the best `count` parts; None where there are fewer.

        None costs more than SLACK times the least possible; through fewest modules, then with the least sum of squares, then
        with the latest starts.
        """
        limit = self.find_least(count) * SLACK
        if limit == np.inf:
            return None
        inside = np.where(self._parts <= limit, self._parts, 0.0) / self._total
        # squares of shares add up to 1 at most, half of that is less than one module more
        seconds = np.where(self._parts <= limit, self._through + inside**2 / 2, np.inf)
        edges = _choose_cut(np.broadcast_to(seconds, (count, *seconds.shape)), self._end)
        return [len(self._end) - edge for edge in reversed(edges[1:])]
