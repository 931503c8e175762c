"""Cut a row of units, which run one after another, into consecutive parts of nearly equal cost.

A part may cost more than the sum of its units (messages at its boundaries), or may not fit, so no
greedy cut is exact. Dynamic programming from the last part on is exact, with k parts for the units
from j on:

    least(k, j) = min over i of max(price(k, j, i), least(k - 1, i))

Among the cuts whose greatest price is least (or little more) a second pass chooses the one with the
least sum of second prices. The planner uses `find_best_cut`; the stages of a model use
`WeightedCuts`. `balance` handles plain sums only, exactly and fast: it bounds `find_best_cut` and
merges stages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# cuts of a model whose greatest stages differ by a smaller factor count as equally balanced
SLACK = 1.1

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# (first, end) -> k -> prices. The price of the part of units [first, end) if it is the k-th part
# from the end (1 is the last), infinite for a part that is not allowed. All three are arrays that
# broadcast.
StagePrices = Callable[[IntArray], FloatArray]
PriceParts = Callable[[IntArray, IntArray], StagePrices]


# ---- parts that cost the sum of their units


def balance(costs: Sequence[float], count: int) -> list[int]:
    """Return the first units of `count` consecutive parts whose greatest sum is least, by bisection
    and greedy filling.

    No part is empty: if the filling needs fewer parts, the costliest part with more than one unit
    is split until there are enough.
    """
    assert 1 <= count <= len(costs)
    low = max(costs)
    high = float(sum(costs))
    starts = _fill_parts(costs, high)
    # more halvings than a float64 has digits
    for _ in range(60):
        middle = (low + high) / 2
        attempt = _fill_parts(costs, middle)
        if len(attempt) <= count:
            high = middle
            starts = attempt
        else:
            low = middle
    # the least limit may be the greatest unit itself, which halving only comes near
    exact = _fill_parts(costs, low)
    starts = exact if len(exact) <= count else starts
    while len(starts) < count:
        edges = [*starts, len(costs)]
        divisible = [(a, b) for a, b in zip(edges, edges[1:]) if b - a > 1]
        _, a, b = max((sum(costs[a:b]), a, b) for a, b in divisible)

        def measure_split(cut: int, a: int = a, b: int = b) -> float:
            return max(sum(costs[a:cut]), sum(costs[cut:b]))

        best_split = min(range(a + 1, b), key=measure_split)
        starts = sorted([*starts, best_split])
    return starts


def _fill_parts(costs: Sequence[float], limit: float) -> list[int]:
    starts = [0]
    total = 0.0
    for i, cost in enumerate(costs):
        # no part is closed empty, not even before a unit above the limit
        if total + cost > limit and i > starts[-1]:
            starts = [*starts, i]
            total = 0.0
        total += cost
    return starts


def find_greatest(costs: Sequence[float], starts: Sequence[int]) -> float:
    """Return the greatest sum of the parts that begin at `starts`."""
    edges = [*starts, len(costs)]
    return max(float(sum(costs[a:b])) for a, b in zip(edges, edges[1:]))


def bound_slowest(work: Sequence[float], count: int) -> float:
    """Return the least possible greatest sum of `count` parts of `work`; infinite if there are
    fewer units.
    """
    return (
        find_greatest(work, _balance_once(tuple(work), count))
        if count <= len(work)
        else float("inf")
    )


@lru_cache(maxsize=1024)
def _balance_once(work: tuple[float, ...], count: int) -> tuple[int, ...]:
    return tuple(balance(work, count))


# ---- parts of any price


def _find_bottleneck(prices: FloatArray, end: IntArray) -> float:
    """Return the least possible greatest price, infinite if no cut is possible.

    `prices` (count, n, width): prices[k - 1, i, j] is the price of the part of units [i, end[i, j])
    as the k-th from the end; `end` is (n, width).
    """
    least_price = np.full(len(end) + 1, np.inf)
    least_price[-1] = 0.0
    for price in prices:
        least_price[:-1], least_price[-1] = np.maximum(price, least_price[end]).min(axis=1), np.inf
    return float(least_price[0])


def _choose_cut(secondary: FloatArray, end: IntArray) -> list[int]:
    """Return the edges of the cut with the least sum of second prices, and among equal ones the cut
    with the earlier ends.

    The arrays are as in `_find_bottleneck`. The edges are the first units of the parts, and then
    the number of units.
    """
    rows = np.arange(len(end))
    least_sum = np.full(len(end) + 1, np.inf)
    least_sum[-1] = 0.0
    ends: list[IntArray] = []
    for price in secondary:
        total = price + least_sum[end]
        best = total.argmin(axis=1)
        ends.append(end[rows, best])
        least_sum[:-1], least_sum[-1] = total[rows, best], np.inf
    edges = [0]
    # the last one chosen is the end of the first part
    for chosen in reversed(ends):
        edges.append(int(chosen[edges[-1]]))
    return edges


def find_best_cut(
    work: Sequence[float], count: int, price_parts: PriceParts | None = None
) -> list[int] | None:
    """Return the first units of the `count` parts whose greatest price is least, then with the
    least sum of squares.

    `work`: a lower bound on the price that each unit adds to its part; without `price_parts` it is
    that price. A part with more work than the price of the best cut by work cannot be in the
    answer, which keeps the arrays narrow. Return None if no cut is possible.
    """
    units = len(work)
    if not 1 <= count <= units:
        return None
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(work, np.float64))])  # (units + 1,)
    price_parts = price_parts or (lambda first, end: lambda k: sums[end] - sums[first])
    starts = np.array(_balance_once(tuple(work), count))
    greatest = float(
        price_parts(starts, np.append(starts[1:], units))(np.arange(count, 0, -1)).max()
    )
    # differences of running sums are off by rounding
    rounding = 1e-9 * sums[-1]
    longest = (
        np.searchsorted(sums, sums[:-1] + greatest + rounding, side="right") - 1 - np.arange(units)
    )
    width = int(min(units - count + 1, max(1, longest.max())))
    first = np.arange(units)[:, None]  # (units, 1)
    end = first + 1 + np.arange(width)[None, :]  # (units, width)
    inside = end <= units
    end = np.minimum(end, units)
    prices = np.where(
        inside,
        price_parts(first, end)(np.arange(1, count + 1)[:, None, None]),
        np.inf,
    )
    prices = np.broadcast_to(prices, (count, *inside.shape))  # (count, units, width)
    least = _find_bottleneck(prices, end)
    if not np.isfinite(least):
        return None
    squares = np.where(prices <= least, (prices / (least or 1.0)) ** 2, np.inf)
    return _choose_cut(squares, end)[:-1]


class WeightedCuts:
    """All cuts of a row of units into consecutive parts of which each has a weight.

    By unit: `costs`, `weights` (their number) and `divided` (the number of modules that a cut
    before the unit divides). Among the cuts whose greatest part is within SLACK of the least, the
    best one divides the fewest modules:

        unit     patches | block0.norm  block0.attention  block0.mlp | block1.norm ...
        divided     0    |     0              1               1      |     0            here block0 would be cut through
    """

    def __init__(
        self, costs: Sequence[float], weights: Sequence[int], divided: Sequence[int]
    ) -> None:
        n = len(costs)
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
        counts = np.concatenate([[0], np.cumsum(np.asarray(weights, np.int64))])
        # Reverse the row, so that the solver chooses the cut with the latest starts among equal
        # ones: a unit without cost stays with the unit before it. Part [a, b) is the solver's
        # part [n - b, n - a).
        row = np.arange(n)[:, None]
        end = np.arange(1, n + 1)[None, :]
        a = n - end
        b = n - row
        self._end = np.broadcast_to(end, (n, n))
        self._prices = np.where(
            (end > row) & (counts[b] - counts[a] >= 1),
            sums[b] - sums[a],
            np.inf,
        )
        self._divided = np.asarray(divided, np.float64)[a]
        self._total = float(sums[-1]) or 1.0

    def find_least(self, count: int) -> float:
        """Return the least possible cost of the greatest of `count` parts; infinite if there are
        fewer units.
        """
        return _find_bottleneck(
            np.broadcast_to(self._prices, (count, *self._prices.shape)), self._end
        )

    def find_best(self, count: int) -> list[int] | None:
        """Return the first units of the best `count` parts; None if there are fewer units.

        No part costs more than SLACK times the least possible. The cut divides the fewest modules,
        then has the least sum of squares, then the latest starts.
        """
        limit = self.find_least(count) * SLACK
        if limit == np.inf:
            return None
        inside = np.where(self._prices <= limit, self._prices, 0.0) / self._total
        # the squares of shares sum up to at most 1; half of them counts less than one divided
        # module
        secondary = np.where(self._prices <= limit, self._divided + inside**2 / 2, np.inf)
        edges = _choose_cut(np.broadcast_to(secondary, (count, *secondary.shape)), self._end)
        return [len(self._end) - edge for edge in reversed(edges[1:])]
