"""Compare the exact partition with all cuts, tried one by one."""

from __future__ import annotations

import itertools
from typing import Callable, List, Optional

import numpy as np
import pytest

from ipu_pipe.model.balance import FloatArray, IntArray, find_best_cut


def make_random_costs(
    rng: np.random.Generator, units: int, limit: float
) -> Callable[[IntArray, IntArray], Callable[[int], FloatArray]]:
    """Return a cost function over random work, transfers at both boundaries of a stage, and
    memory that grows with the number of later stages."""
    work = np.concatenate([[0.0], np.cumsum(rng.integers(1, 9, units))])
    crossing = np.concatenate([[0.0], rng.integers(0, 9, units - 1), [0.0]])
    bytes_before = np.concatenate([[0.0], np.cumsum(rng.integers(1, 5, units))])

    def compute_costs(first: IntArray, end: IntArray) -> Callable[[int], FloatArray]:
        seconds = np.maximum(work[end] - work[first], 0) + crossing[first] + crossing[end]
        return lambda k: np.where(
            k * (bytes_before[end] - bytes_before[first]) <= limit, seconds, np.inf
        )

    compute_costs.work = np.diff(work)  # type: ignore[attr-defined]
    return compute_costs


def try_all_cuts(
    units: int, count: int, costs: Callable[[IntArray, IntArray], Callable[[int], FloatArray]]
) -> Optional[List[float]]:
    """Return the greatest cost and the sum of squares of the best of all cuts, or None if none
    fits."""
    result = []
    for inner in itertools.combinations(range(1, units), count - 1):
        edges = [0, *inner, units]
        by_stage = [
            float(costs(np.array([a]), np.array([b]))(count - s)[0])
            for s, (a, b) in enumerate(zip(edges, edges[1:]))
        ]
        result.append([max(by_stage), sum(x * x for x in by_stage)])
    best = min(result, default=None)
    return best if best is not None and np.isfinite(best[0]) else None


@pytest.mark.parametrize("limit", [1e9, 40.0, 12.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_the_cut_is_the_best_of_all(count: int, limit: float) -> None:
    rng = np.random.default_rng(count)
    for units in (count, 9, 10):
        for _ in range(6):
            costs = make_random_costs(rng, units, limit)
            starts = find_best_cut(costs.work, count, costs)  # type: ignore[attr-defined]
            best = try_all_cuts(units, count, costs)
            if best is None:
                assert starts is None
                continue
            assert starts is not None and starts[0] == 0 and len(starts) == count
            edges = [*starts, units]
            by_stage = [
                float(costs(np.array([a]), np.array([b]))(count - s)[0])
                for s, (a, b) in enumerate(zip(edges, edges[1:]))
            ]
            assert max(by_stage) == best[0]
            assert sum(x * x for x in by_stage) == pytest.approx(best[1])


def test_more_stages_than_units_have_no_cut() -> None:
    assert (
        find_best_cut(
            [1.0, 1.0], 3, lambda first, end: lambda k: np.zeros(np.broadcast(first, end).shape)
        )
        is None
    )
