"""The best configurations: every candidate is bounded, and only those that may be among the best are cut and played.

    [1] stages balanced perfectly                       a bound of the throughput
    [2] its slowest stage, if memory and messages were free          tighter
    [3] once cut: its stages, links and microbatches in flight       tighter
    [4] played with messages that never wait for one another         tighter
    [5] played by the clock                             the prediction

The candidate with the greatest bound takes the next step. So the first one that has taken all is the best of all, and the next
one the next best.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ipu_pipe.model.balance import bound_slowest
from ipu_pipe.plan.batches import Batches, bound_seconds
from ipu_pipe.plan.candidates import BoundaryTransfers, Candidate, ReplicaLayout, list_layouts, make_transfers
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, make_batches, predict_cut
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
class _Progress:
    """A candidate with a layout, as far as it has come: costing [2], cut [3], played uncontended [4], prediction [5]."""

    asked: Candidate
    layout: ReplicaLayout
    costing: Optional[Costing] = None
    starts: Optional[List[int]] = None
    batches: Optional[Batches] = None
    is_bounded: bool = False
    prediction: Optional[Prediction] = None


class _Costings:
    """The costings of a problem's candidates; what several have in common is made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sums: Dict[Tuple[int, str], Sums] = {}
        self._transfers: Dict[ReplicaLayout, BoundaryTransfers] = {}
        self._work: Dict[Tuple[int, bool, bool, str], List[float]] = {}

    def make(self, asked: Candidate, layout: ReplicaLayout) -> Costing:
        """Return the costing of a candidate."""
        problem = self._problem.resolve(asked.method)
        key = asked.micro_batch_size, problem.precision
        if key not in self._sums:
            self._sums[key] = Sums(problem, asked.micro_batch_size)
        if layout not in self._transfers:
            self._transfers[layout] = make_transfers(self._problem.hardware, layout)
        return Costing(problem, asked, layout, self._sums[key], self._transfers[layout])

    def get_work(self, asked: Candidate) -> List[float]:
        """Return the seconds of each unit for a microbatch: the same for all with one microbatch and recomputation."""
        row = self._problem.resolve(asked.method).precision
        key = asked.micro_batch_size, asked.recompute, METHODS[asked.method].structure is None, row
        if key not in self._work:
            self._work[key] = self.make(asked, list_layouts(asked.depth, asked.width, asked.placement)[0]).work.tolist()
        return self._work[key]


def search(problem: Problem, asked: Iterable[Candidate], count: int) -> Found:
    """Return the `count` candidates with the greatest predicted throughput, each with its best cut and layout.

    Of those that differ in microbatch and accumulation alone, only the best. Exact: what is not cut or not played cannot be
    better.
    """
    candidates = list(asked)
    shown: Set[Tuple[Any, ...]] = set()
    costings = _Costings(problem)
    waiting: List[Tuple[float, int, int, _Progress]] = []  # by least seconds per sample, then as they came
    for order, candidate in enumerate(candidates):
        bound = bound_seconds(candidate, sum(costings.get_work(candidate))) / candidate.global_batch_size
        for place, layout in enumerate(list_layouts(candidate.depth, candidate.width, candidate.placement)):
            waiting.append((bound, order, place, _Progress(candidate, layout)))
    heapq.heapify(waiting)
    best: List[Prediction] = []
    no_room: Set[Candidate] = set()
    while waiting and len(best) < count:
        bound, order, place, progress = heapq.heappop(waiting)
        candidate = progress.asked
        if candidate in no_room or candidate.shape in shown:  # by one that is faster
            continue
        if progress.prediction is not None:
            best.append(progress.prediction)
            shown.add(candidate.shape)
            continue
        seconds = _take_step(progress, costings)
        if seconds is None:
            no_room.add(candidate)
        else:
            heapq.heappush(waiting, (max(bound, seconds / candidate.global_batch_size), order, place, progress))
    alike = sum(candidate.shape in shown for candidate in candidates) - len(best)
    without = sum(candidate.shape not in shown for candidate in no_room)
    refused = {NO_ROOM: without, ALIKE: alike, SLOWER: len(candidates) - len(best) - alike - without}
    return Found(best, {reason: number for reason, number in refused.items() if number})


def _take_step(progress: _Progress, costings: _Costings) -> Optional[float]:
    """Take the next step with a candidate; return what its batch takes at least, by that; None where it does not fit."""
    asked = progress.asked
    if progress.costing is None:  # [2]
        progress.costing = costings.make(asked, progress.layout)
        work = costings.get_work(asked)
        slowest = bound_slowest(work, asked.stages)
        if asked.stages_per_device > 1 and slowest < math.inf:  # the stages of a device need not follow one another
            slowest = max(sum(work) / asked.depth, slowest)
        return asked.gradient_accumulation * slowest if slowest < math.inf else None
    if progress.starts is None:  # [3]
        progress.starts = progress.costing.cut() if progress.costing.may_fit() else None
        if progress.starts is None:
            return None
        progress.batches = make_batches(progress.costing, progress.starts)
        return progress.costing.least_seconds(progress.batches.costs)
    assert progress.batches is not None
    if not progress.is_bounded:  # [4]
        progress.is_bounded = True
        return (1 - ROUNDING) * progress.batches.least_seconds(asked.gradient_accumulation)
    progress.prediction = predict_cut(progress.costing, progress.starts, progress.batches)  # [5]
    return progress.prediction.seconds


def find_least_memory(problem: Problem, asked: Iterable[Candidate]) -> Optional[Tuple[float, Candidate]]:
    """Return the fewest bytes per device with which one of the candidates fits, and that candidate; None if there are none."""
    best: Optional[Tuple[float, Candidate]] = None
    for candidate in asked:
        layout = list_layouts(candidate.depth, candidate.width, candidate.placement)[0]
        sums = Sums(problem.resolve(candidate.method), candidate.micro_batch_size)
        needed = Costing(problem, candidate, layout, sums).least_memory()
        if needed is not None and (best is None or needed < best[0]):
            best = needed, candidate
    return best
