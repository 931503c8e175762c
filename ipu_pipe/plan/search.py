"""The best configurations: every candidate is bounded, and only those that may be among the best are cut and played.

A candidate's throughput is at most that of stages balanced perfectly; once cut, at most that of its slowest stage; once played by
the clock, what it is. The one with the greatest bound is looked at next, so that what comes out first, all steps done, is the
best of all, and what follows the next best.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.placing import Layout, Neighbours, layouts, neighbours
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, least_seconds, predict_cut

NO_ROOM = "the fullest stage needs more memory than a device has, however the model is cut"
ALIKE = "other microbatches and accumulations of those shown, slower"
SLOWER = "slower than those shown, even if nothing but its slowest stage or its fill and drain took time"


class Found(NamedTuple):
    """The best predictions, best first, and how many candidates are not among them, by reason."""

    best: List[Prediction]
    refused: Dict[str, int]


@dataclass
class _Looked:
    """A candidate with a layout as far as it has been looked at: bounded, cut, or played."""

    asked: Candidate
    costing: Costing
    starts: Optional[List[int]] = None
    played: Optional[Prediction] = None


def search(problem: Problem, asked: Iterable[Candidate], count: int) -> Found:
    """The `count` candidates with the greatest predicted throughput, each with its best cut and layout; of those that differ in
    microbatch and accumulation alone, the best. Exact: what is not cut or not played cannot be better."""
    refused = {NO_ROOM: 0, ALIKE: 0, SLOWER: 0}
    shown: Set[Tuple[Any, ...]] = set()
    sums: Dict[int, Sums] = {}
    messages: Dict[Layout, Neighbours] = {}
    waiting: List[Tuple[float, int, int, _Looked]] = []  # by least seconds a sample, then as they came
    left = 0
    for order, candidate in enumerate(asked):
        size = candidate.micro_batch_size
        if size not in sums:
            sums[size] = Sums(problem, size)
        left += 1
        for place, layout in enumerate(layouts(candidate.depth, candidate.width)):
            if layout not in messages:
                messages[layout] = neighbours(problem.hardware, layout)
            costing = Costing(problem, candidate, layout, sums[size], messages[layout])
            bound = least_seconds(candidate, float(costing.work.sum()))
            waiting.append((bound / candidate.global_batch_size, order, place, _Looked(candidate, costing)))
    heapq.heapify(waiting)
    best: List[Prediction] = []
    done: Dict[Candidate, bool] = {}  # whether it came out, or does not fit
    while waiting and len(best) < count:
        _, order, place, looked = heapq.heappop(waiting)
        if looked.asked in done:
            continue
        if looked.played is not None:
            if looked.asked.shape in shown:
                refused[ALIKE] += 1
            else:
                best.append(looked.played)
            shown.add(looked.asked.shape)
            done[looked.asked] = True
            continue
        if looked.starts is not None:
            looked.played = predict_cut(looked.costing, looked.starts)
            seconds = looked.played.seconds
        else:
            looked.starts = looked.costing.cut() if looked.costing.may_fit() else None
            if looked.starts is None:
                refused[NO_ROOM] += 1
                done[looked.asked] = True
                continue
            seconds = looked.costing.least_seconds(looked.costing.costs(looked.starts))
        heapq.heappush(waiting, (seconds / looked.asked.global_batch_size, order, place, looked))
    refused[SLOWER] = left - len(done)
    return Found(best, {reason: number for reason, number in refused.items() if number})


def least_memory(problem: Problem, asked: Iterable[Candidate]) -> Optional[Tuple[float, Candidate]]:
    """The fewest bytes a device with which one of the candidates fits, and that candidate; None where there are none."""
    best: Optional[Tuple[float, Candidate]] = None
    for candidate in asked:
        layout = layouts(candidate.depth, candidate.width)[0]
        needed = Costing(problem, candidate, layout, Sums(problem, candidate.micro_batch_size)).least_memory()
        if needed is not None and (best is None or needed < best[0]):
            best = needed, candidate
    return best
