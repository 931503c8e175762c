"""The best configurations: every candidate is bounded, and only those that may be among the best are cut and played.

A candidate's throughput is at most that of stages balanced perfectly; then at most that of its slowest stage, cut as if memory
were enough and messages took no time; once cut, that of what it has, then that with messages that never wait for one another;
once played by the clock, what it is. The one with the
greatest bound is looked at next. So what comes out first, all steps done, is the best of all, and what follows the next best.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ipu_pipe.model.balance import bound_slowest
from ipu_pipe.plan.batches import Batches
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.layouts import BoundaryTransfers, ReplicaLayout, list_layouts, make_transfers
from ipu_pipe.plan.prediction import (
    Costing,
    Prediction,
    Problem,
    Sums,
    bound_seconds,
    make_batches,
    predict_cut,
)
from ipu_pipe.schedule.methods import METHODS

NO_ROOM = "the fullest stage needs more memory than a device has, however the model is cut"
ROUNDING = 1e-9  # of a bound that may be the time itself: of equals the first is shown
ALIKE = "other microbatches and accumulations of those shown, slower or with no room"
SLOWER = "slower than those shown, even if nothing but its slowest stage or its fill and drain took time"


class Found(NamedTuple):
    """The best predictions, best first, and how many candidates are not among them, by reason."""

    best: List[Prediction]
    refused: Dict[str, int]


@dataclass
class _Looked:
    """A candidate with a layout as far as it has been looked at: bounded (twice), cut, played `apart`, or played."""

    asked: Candidate
    layout: ReplicaLayout
    costing: Optional[Costing] = None
    starts: Optional[List[int]] = None
    batches: Optional[Batches] = None
    apart: bool = False
    played: Optional[Prediction] = None


class _Costings:
    """Of the candidates of a problem; what several have in common is made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sums: Dict[Tuple[int, str], Sums] = {}
        self._messages: Dict[ReplicaLayout, BoundaryTransfers] = {}
        self._work: Dict[Tuple[int, bool, bool, str], List[float]] = {}

    def of(self, asked: Candidate, layout: ReplicaLayout) -> Costing:
        """Of one."""
        problem = self._problem.of(asked.method)
        key = asked.micro_batch_size, problem.precision
        if key not in self._sums:
            self._sums[key] = Sums(problem, asked.micro_batch_size)
        if layout not in self._messages:
            self._messages[layout] = make_transfers(self._problem.hardware, layout)
        return Costing(problem, asked, layout, self._sums[key], self._messages[layout])

    def work(self, asked: Candidate) -> List[float]:
        """Seconds of each unit for a microbatch: of all candidates with one microbatch and recomputation the same."""
        row = self._problem.of(asked.method).precision
        key = asked.micro_batch_size, asked.recompute, METHODS[asked.method].structure is None, row
        if key not in self._work:
            self._work[key] = self.of(asked, list_layouts(asked.depth, asked.width)[0]).work.tolist()
        return self._work[key]


def search(problem: Problem, asked: Iterable[Candidate], count: int) -> Found:
    """The `count` candidates with the greatest predicted throughput, each with its best cut and layout; of those that differ in
    microbatch and accumulation alone, the best. Exact: what is not cut or not played cannot be better."""
    every = list(asked)
    shown: Set[Tuple[Any, ...]] = set()
    costings = _Costings(problem)
    waiting: List[Tuple[float, int, int, _Looked]] = []  # by least seconds a sample, then as they came
    for order, candidate in enumerate(every):
        bound = bound_seconds(candidate, sum(costings.work(candidate))) / candidate.global_batch_size
        for place, layout in enumerate(list_layouts(candidate.depth, candidate.width)):
            waiting.append((bound, order, place, _Looked(candidate, layout)))
    heapq.heapify(waiting)
    best: List[Prediction] = []
    no_room: Set[Candidate] = set()
    while waiting and len(best) < count:
        bound, order, place, looked = heapq.heappop(waiting)
        one, batch = looked.asked, looked.asked.global_batch_size
        if one in no_room or one.shape in shown:  # by one that is faster
            continue
        if looked.played is not None:
            best.append(looked.played)
            shown.add(one.shape)
        else:
            seconds = _looked_further(looked, costings)
            if seconds is None:
                no_room.add(one)
            else:
                heapq.heappush(waiting, (max(bound, seconds / batch), order, place, looked))
    alike = sum(one.shape in shown for one in every) - len(best)
    without = sum(one.shape not in shown for one in no_room)
    refused = {NO_ROOM: without, ALIKE: alike, SLOWER: len(every) - len(best) - alike - without}
    return Found(best, {reason: number for reason, number in refused.items() if number})


def _looked_further(looked: _Looked, costings: _Costings) -> Optional[float]:
    """The next step with a candidate: what its batch takes at least, by that; None where it does not fit."""
    asked = looked.asked
    if looked.costing is None:
        looked.costing = costings.of(asked, looked.layout)
        slowest = bound_slowest(costings.work(asked), asked.depth)
        return asked.gradient_accumulation * slowest if slowest < math.inf else None
    if looked.starts is None:
        looked.starts = looked.costing.cut() if looked.costing.may_fit() else None
        if looked.starts is None:
            return None
        looked.batches = make_batches(looked.costing, looked.starts)
        return looked.costing.least_seconds(looked.batches.costs)
    assert looked.batches is not None
    if not looked.apart:
        looked.apart = True
        return (1 - ROUNDING) * looked.batches.least_seconds(asked.gradient_accumulation)
    looked.played = predict_cut(looked.costing, looked.starts, looked.batches)
    return looked.played.seconds


def find_least_memory(problem: Problem, asked: Iterable[Candidate]) -> Optional[Tuple[float, Candidate]]:
    """The fewest bytes a device with which one of the candidates fits, and that candidate; None where there are none."""
    best: Optional[Tuple[float, Candidate]] = None
    for candidate in asked:
        layout = list_layouts(candidate.depth, candidate.width)[0]
        sums = Sums(problem.of(candidate.method), candidate.micro_batch_size)
        needed = Costing(problem, candidate, layout, sums).least_memory()
        if needed is not None and (best is None or needed < best[0]):
            best = needed, candidate
    return best
