"""Randomized PipeDream as one would first write it, one step at a time: what the fast runs are compared with.

The history is that of the last tau + 1 iterates, which is copied for every block update: as one array, or as a list of arrays.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import numpy as np

from ipu_pipe.backends.randomized import RandomizedReplays
from ipu_pipe.studies.objectives.functions import Floats, Quadratic

Shift = Callable[[Any, Floats, int], Any]  # (history, newest, bound) -> the history with it, at most bound + 1 iterates


def _array(history: Floats, newest: Floats, bound: int) -> Floats:
    return np.concatenate([history[max(len(history) - bound, 0) :], newest[None]])


def _list(history: List[Floats], newest: Floats, bound: int) -> List[Floats]:
    return [x.copy() for x in history[max(len(history) - bound, 0) :]] + [newest]


def _replay(
    shift: Shift, history: Any, objective: Quadratic, source: RandomizedReplays, bound: int, rate: float, count: int
) -> Floats:
    P, d = source.stages, objective.dimension
    size = d // P
    stages, microbatches = source.stages_of(0, count), source.microbatches_of(0, count)
    delays = source.delays(0, count)
    for k in range(count):
        stale = np.empty(d)
        for j in range(P):
            block = slice(j * size, (j + 1) * size)
            stale[block] = history[len(history) - 1 - delays[j, k]][block]
        b, s = int(microbatches[k]) % objective.batches, int(stages[k])
        block, rows = slice(s * size, (s + 1) * size), slice(b * objective.size, (b + 1) * objective.size)
        A = objective.A[rows]
        new = history[-1].copy()
        new[block] -= rate * (A[:, block].T @ (A @ stale - objective.b[rows])) / objective.size
        history = shift(history, new, bound)
    return np.asarray(history[-1])


def randomized_quadratic(
    objective: Quadratic, source: RandomizedReplays, bound: int, rate: float, count: int
) -> Floats:
    """The iterate (d,) after `count` block updates from 0, by Algorithm 1 with the batch's own rows."""
    return _replay(_array, np.zeros((1, objective.dimension)), objective, source, bound, rate, count)


def randomized_quadratic_in_a_list(
    objective: Quadratic, source: RandomizedReplays, bound: int, rate: float, count: int
) -> Floats:
    """The same, the history a list."""
    return _replay(_list, [np.zeros(objective.dimension)], objective, source, bound, rate, count)


PLAIN: Dict[str, Callable[[Quadratic, RandomizedReplays, int, float, int], Floats]] = {
    "an array": randomized_quadratic,
    "a list": randomized_quadratic_in_a_list,
}
