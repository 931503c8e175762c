"""Search for the best configurations: bound every candidate, and cut and simulate only those that may be among the best.

    [1] stages balanced perfectly                       a bound of the throughput
    [2] its slowest stage, if memory and messages were free          tighter
    [3] once cut: its stages, links and microbatches in flight       tighter
    [4] simulated with messages that never wait for one another      tighter
    [5] simulated by the clock                          the prediction

The candidate with the greatest bound takes the next step. So the first one that has taken all steps is the best of all, and the
next one the second best.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from ipu_pipe.model.balance import bound_slowest
from ipu_pipe.plan.batches import bound_seconds
from ipu_pipe.plan.candidates import BoundaryTransfers, Candidate, ReplicaLayout, list_layouts, make_transfers
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, make_batches, predict_cut
from ipu_pipe.schedule.methods import METHODS

NO_ROOM = "the fullest stage needs more memory than a device has, however the model is cut"
ALIKE = "other microbatches, accumulations and schedules of those shown, no faster or with no room"
SLOWER = "no faster than those shown, by the least time that they can take"
# slack so that a bound equal to the time does not reorder ties
ROUNDING = 1e-9


class SearchResult(NamedTuple):
    """The best predictions, best first, and how many candidates are not among them, by reason."""

    best: List[Prediction]
    refused: Dict[str, int]


class _Costings:
    """Makes the costings of a problem's candidates, and caches the parts that several share."""

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


_Steps = Iterator[Tuple[float, Optional[Prediction]]]


def search(problem: Problem, asked: Iterable[Candidate], count: int) -> SearchResult:
    """Return the `count` candidates with the greatest predicted throughput, each with its best cut and layout.

    If candidates differ in microbatch, accumulation and schedule alone, only the best is listed. The search is exact: what is not
    cut or not simulated cannot be better.
    """
    candidates = list(asked)
    shown: Set[Tuple[Any, ...]] = set()
    costings = _Costings(problem)
    # ordered by least seconds per sample, then by the order of the candidates and of their layouts
    waiting: List[Tuple[float, int, int, _Steps, Optional[Prediction]]] = []
    for order, candidate in enumerate(candidates):
        bound = bound_seconds(candidate, sum(costings.get_work(candidate))) / candidate.global_batch_size
        for place, layout in enumerate(list_layouts(candidate.depth, candidate.width, candidate.placement)):
            waiting.append((bound, order, place, _bound(candidate, layout, costings), None))
    heapq.heapify(waiting)
    best: List[Prediction] = []
    no_room: Set[Candidate] = set()
    while waiting and len(best) < count:
        bound, order, place, steps, prediction = heapq.heappop(waiting)
        candidate = candidates[order]
        # a faster one with the same shape is already listed
        if candidate in no_room or candidate.shape in shown:
            continue
        if prediction is not None:
            best.append(prediction)
            shown.add(candidate.shape)
            continue
        step = next(steps, None)
        if step is None:
            no_room.add(candidate)
        else:
            seconds, prediction = step
            heapq.heappush(waiting, (max(bound, seconds / candidate.global_batch_size), order, place, steps, prediction))
    alike = sum(candidate.shape in shown for candidate in candidates) - len(best)
    without = sum(candidate.shape not in shown for candidate in no_room)
    refused = {NO_ROOM: without, ALIKE: alike, SLOWER: len(candidates) - len(best) - alike - without}
    return SearchResult(best, {reason: number for reason, number in refused.items() if number})


def _bound(asked: Candidate, layout: ReplicaLayout, costings: _Costings) -> _Steps:
    """Yield ever tighter lower bounds of the seconds of a batch, at last its prediction; stop early if no cut fits."""
    costing = costings.make(asked, layout)
    work = costings.get_work(asked)
    slowest = bound_slowest(work, asked.stages)
    if slowest == math.inf:
        return
    # the stages of a device need not follow one another
    if asked.stages_per_device > 1:
        slowest = max(sum(work) / asked.depth, slowest)
    yield asked.gradient_accumulation * slowest, None  # [2]
    starts = costing.cut() if costing.may_fit() else None
    if starts is None:
        return
    batches = make_batches(costing, starts)
    yield costing.least_seconds(batches.costs), None  # [3]
    yield (1 - ROUNDING) * batches.least_seconds(asked.gradient_accumulation), None  # [4]
    prediction = predict_cut(costing, starts, batches)
    yield prediction.seconds, prediction  # [5]


def find_least_memory(problem: Problem, asked: Iterable[Candidate]) -> Optional[Tuple[float, Candidate]]:
    """Return the fewest bytes per device with which one of the candidates fits, and that candidate; None if there are none."""
    costings = _Costings(problem)
    best: Optional[Tuple[float, Candidate]] = None
    for candidate in asked:
        layout = list_layouts(candidate.depth, candidate.width, candidate.placement)[0]
        needed = costings.make(candidate, layout).least_memory()
        if needed is not None and (best is None or needed < best[0]):
            best = needed, candidate
    return best
