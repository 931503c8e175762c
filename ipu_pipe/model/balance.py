"""Where to cut a row of units, which run one after another, into consecutive parts of equal cost.

`balance` needs costs alone. `cut` also knows units that must not begin a part alone (no weights) and prefers some places to
others: of all cuts whose greatest part is within a tenth of the least possible it takes the one that goes through fewest modules:

    unit     patches | block0.norm  block0.attention  block0.mlp | block1.norm ...
    through     0    |     0              1               1      |     0            here block0 would be cut through
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

SLACK = 1.1  # cuts whose greatest parts differ by less count as equally balanced


def balance(costs: Sequence[float], count: int) -> List[int]:
    """First units of `count` consecutive non-empty parts of `costs` whose greatest sum is least (bisection, greedy fill)."""
    assert 1 <= count <= len(costs)
    low, high = max(costs), float(sum(costs))
    starts = _fill(costs, high)
    for _ in range(60):
        middle = (low + high) / 2
        attempt = _fill(costs, middle)
        if len(attempt) <= count:
            high, starts = middle, attempt
        else:
            low = middle
    exact = _fill(costs, low)
    starts = exact if len(exact) <= count else starts
    while len(starts) < count:  # parts left over: split the costliest part that has more than one unit
        edges = [*starts, len(costs)]
        parts = [(sum(costs[a:b]), a, b) for a, b in zip(edges, edges[1:]) if b - a > 1]
        _, a, b = max(parts)
        starts = sorted([*starts, _halving(costs, a, b)])
    return starts


def _fill(costs: Sequence[float], limit: float) -> List[int]:
    starts, total = [0], 0.0
    for i, cost in enumerate(costs):
        if total + cost > limit and i > starts[-1]:
            starts, total = [*starts, i], 0.0
        total += cost
    return starts


def _halving(costs: Sequence[float], a: int, b: int) -> int:
    return min(range(a + 1, b), key=lambda cut: max(sum(costs[a:cut]), sum(costs[cut:b])))


def find_greatest(costs: Sequence[float], starts: Sequence[int]) -> float:
    """The greatest sum of the parts that begin at `starts`."""
    edges = [*starts, len(costs)]
    return max(float(sum(costs[a:b])) for a, b in zip(edges, edges[1:]))


class Cuts:
    """All cuts of a row of units into consecutive parts that each hold a weight, searched exactly (dynamic programming).

    `costs`, `weights` (how many) and `through` (how many modules a cut before it goes through), one of each unit.
    """

    def __init__(self, costs: Sequence[float], weights: Sequence[int], through: Sequence[int]) -> None:
        until = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
        held = np.concatenate([[0], np.cumsum(np.asarray(weights, np.int64))])
        whole = (
            held[None, :] - held[:, None]
        ) >= 1  # a part of units i..j-1 is [i, j]; one without units holds nothing
        self._part = np.where(whole, until[None, :] - until[:, None], np.inf)
        self._through = np.array([*through, 0], np.float64)[:, None]
        self._total = float(until[-1]) or 1.0

    def least(self, count: int) -> float:
        """The least possible cost of the greatest of `count` parts; infinite where there are not so many."""
        best = self._part[0]
        for _ in range(count - 1):
            best = np.min(np.maximum(best[:, None], self._part), axis=0)
        return float(best[-1])

    def best(self, count: int) -> Optional[List[int]]:
        """First units of `count` parts, none above SLACK times the least possible: through fewest modules, then with the least
        sum of squares, then the latest (what costs nothing stays with what is before). None where there are not so many."""
        limit = self.least(count) * SLACK
        if limit == np.inf:
            return None
        inside = np.where(self._part <= limit, self._part, 0.0) / self._total
        # squares of shares add up to 1 at most, half of that is less than one module more
        price = np.where(self._part <= limit, self._through + inside**2 / 2, np.inf)
        paid, came = price[0], []
        for _ in range(count - 1):
            ways = paid[:, None] + price
            came.append(len(ways) - 1 - np.argmin(ways[::-1], axis=0))
            paid = np.min(ways, axis=0)
        starts, end = [], len(price) - 1
        for choice in reversed(came):
            end = int(choice[end])
            starts.append(end)
        return [0, *reversed(starts)]


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Of many stages at once, of the units from `first` to before `end`: their cost when they are the k-th from the end (1: last),
# infinite where they do not fit. Asked with an array of k that broadcasts with theirs.
StagePrices = Callable[[IntArray], FloatArray]


def find_best_cut(
    work: Sequence[float], count: int, costs: Callable[[IntArray, IntArray], StagePrices]
) -> Optional[List[int]]:
    """First units of the `count` stages whose greatest cost is least, and of these cuts the one with the least sum of squares.

    `work`: a lower bound of what each unit adds to its stage's cost. `costs(first, end)`: what stages cost (`StageCosts`); asked
    with arrays that broadcast. None where no cut fits.
    """
    units = len(work)
    if not 1 <= count <= units:
        return None
    first, end, inside = _candidates(np.asarray(work, np.float64), count, costs)
    prices = np.where(inside, costs(first, end)(np.arange(1, count + 1)[:, None, None]), np.inf)
    prices = np.broadcast_to(prices, (count, *inside.shape))
    reach = np.full(units + 1, np.inf)
    reach[units] = 0.0
    for price in prices:
        reach[:-1], reach[-1] = np.maximum(price, reach[end]).min(axis=1), np.inf
    least = reach[0]
    if not np.isfinite(least):
        return None
    squares = np.full(units + 1, np.inf)
    squares[units] = 0.0
    rows = np.arange(units)
    chosen: List[IntArray] = []
    for price in prices:
        total = np.where(price <= least, (price / (least or 1.0)) ** 2, np.inf) + squares[end]
        best = total.argmin(axis=1)
        chosen.append(end[rows, best])
        squares[:-1], squares[-1] = total[rows, best], np.inf
    starts = [0]
    for then in reversed(chosen[1:]):
        starts.append(int(then[starts[-1]]))
    return starts


def bound_slowest(work: Sequence[float], count: int) -> float:
    """The greatest sum of `count` consecutive parts of `work`, cut so that it is least: what the slowest stage costs at least.
    Infinite where there are not so many units."""
    if count > len(work):
        return float("inf")
    return find_greatest(work, _balanced(tuple(work), count))


@lru_cache(maxsize=1024)
def _balanced(work: Tuple[float, ...], count: int) -> Tuple[int, ...]:
    return tuple(balance(work, count))


def _candidates(
    work: FloatArray, count: int, costs: Callable[[IntArray, IntArray], StagePrices]
) -> Tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """All stages that the best cut may hold: first units (n, 1), ends (n, width), and which of them there are."""
    units = len(work)
    starts = np.array(_balanced(tuple(work.tolist()), count))
    ends = np.append(starts[1:], units)
    slowest = float(costs(starts, ends)(np.arange(count, 0, -1)).max())
    sums = np.concatenate([[0.0], np.cumsum(work)])
    slack = 1e-9 * sums[-1]  # of the sums' rounding
    fits = np.searchsorted(sums, sums[:-1] + slowest + slack, side="right") - 1 - np.arange(units)
    width = int(min(units - count + 1, max(1, fits.max())))
    first = np.arange(units)[:, None]
    end = first + 1 + np.arange(width)[None, :]
    return first, np.minimum(end, units), end <= units
