"""The exact partition against all cuts tried one by one."""

from __future__ import annotations

import itertools
from typing import Callable, List, Optional

import numpy as np
import pytest

from ipu_pipe.model.balance import FloatArray, IntArray, find_best_cut


def model(
    rng: np.random.Generator, units: int, limit: float
) -> Callable[[IntArray, IntArray], Callable[[int], FloatArray]]:
    """Work, what crosses a stage's two boundaries, and memory that grows with the stages that follow."""
    work = np.concatenate([[0.0], np.cumsum(rng.integers(1, 9, units))])
    crossing = np.concatenate([[0.0], rng.integers(0, 9, units - 1), [0.0]])
    bytes_before = np.concatenate([[0.0], np.cumsum(rng.integers(1, 5, units))])

    def costs(first: IntArray, end: IntArray) -> Callable[[int], FloatArray]:
        seconds = np.maximum(work[end] - work[first], 0) + crossing[first] + crossing[end]
        return lambda k: np.where(
            k * (bytes_before[end] - bytes_before[first]) <= limit, seconds, np.inf
        )

    costs.work = np.diff(work)  # type: ignore[attr-defined]
    return costs


def every_cut(
    units: int, count: int, costs: Callable[[IntArray, IntArray], Callable[[int], FloatArray]]
) -> Optional[List[float]]:
    """Return the greatest cost and sum of squares of the best of all by_stage."""
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
def test_no_cut_is_better(count: int, limit: float) -> None:
    rng = np.random.default_rng(count)
    for units in (count, 9, 10):
        for _ in range(6):
            costs = model(rng, units, limit)
            starts = find_best_cut(costs.work, count, costs)  # type: ignore[attr-defined]
            best = every_cut(units, count, costs)
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


def test_more_stages_than_units_is_no_cut() -> None:
    assert (
        find_best_cut(
            [1.0, 1.0], 3, lambda first, end: lambda k: np.zeros(np.broadcast(first, end).shape)
        )
        is None
    )
