"""The exact partition: the cut of a row of units into consecutive stages whose slowest is the fastest possible.

What a stage costs may depend on where its boundaries lie (what crosses them) and on how many stages follow (how many
microbatches it holds, and so whether it fits), so no greedy cut is exact. Dynamic programming from the last stage forward,

    least(k, j) = min over i of max(cost(k, j, i), least(k - 1, i)),

`k` stages for the units from j on, is. Two things keep it fast: units cost at least their work, so a stage that would do more
than the best cut by work alone costs cannot be part of the answer; and a row of the table is one array operation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.model.balance import balance, greatest

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Of many stages at once, of the units from `first` to before `end`: their cost when they are the k-th from the end (1: last),
# infinite where they do not fit. Asked with an array of k that broadcasts with theirs.
StageCosts = Callable[[IntArray], FloatArray]


def best_cuts(
    work: Sequence[float], count: int, costs: Callable[[IntArray, IntArray], StageCosts]
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


def least_greatest(work: Sequence[float], count: int) -> float:
    """The greatest sum of `count` consecutive parts of `work`, cut so that it is least: what the slowest stage costs at least.
    Infinite where there are not so many units."""
    if count > len(work):
        return float("inf")
    return greatest(work, _balanced(tuple(work), count))


@lru_cache(maxsize=1024)
def _balanced(work: Tuple[float, ...], count: int) -> Tuple[int, ...]:
    return tuple(balance(work, count))


def _candidates(
    work: FloatArray, count: int, costs: Callable[[IntArray, IntArray], StageCosts]
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
