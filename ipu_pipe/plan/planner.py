"""The planner: search the best configurations for a model's units, hardware and limits, and name the bottleneck of each."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.unit_costs import count_state_bytes
from ipu_pipe.model.balance import bound_slowest
from ipu_pipe.plan.batches import bound_seconds, compute_batch_time
from ipu_pipe.plan.candidates import (
    BoundaryTransfers,
    Candidate,
    ReplicaLayout,
    list_candidates,
    list_layouts,
    make_transfers,
)
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, make_batches, predict_cut, remove_transfers
from ipu_pipe.schedule.clock import HOST
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import format_bytes, show

# ---- the bottleneck of a configuration: its share of the time, and the changes that would lift it
#
# The time of a batch consists of the devices' average compute, and of waits: for a stage that is slower than the average
# (imbalance), for filling, draining and updating (bubble), and for messages (link). The time of recomputation counts as a
# bottleneck of memory.

STREAMED = "backend.ipu.tensor_locations.optimizer.on_chip: false"
# a smaller share of the time is not a bottleneck
SMALL = 0.02


class Binding(NamedTuple):
    """A bottleneck of a configuration.

    `kind`: memory, link, bubble, imbalance or compute; `share`: its share of the time; `what`: its description; `lifts`: the
    changes that would lift it.
    """

    kind: str
    share: float
    what: str
    lifts: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}; {self.lifts}"


def find_binding(problem: Problem, prediction: Prediction) -> Binding:
    """Return the greatest bottleneck of a configuration, with the share of time of streamed optimizer state."""
    greatest = max(_list_bindings(problem, prediction), key=lambda binding: binding.share)
    if greatest.share < SMALL:
        greatest = Binding("compute", prediction.utilization, f"devices are busy {prediction.utilization:.0%} of the time",
                           "only faster or more devices would do more")  # fmt: skip
    if not problem.streamed:
        return greatest
    share = _sum_streaming_seconds(problem, prediction) / prediction.seconds
    words = f"{greatest.what}; optimizer state in streaming memory, whose traffic takes {share:.0%} of the time"
    return greatest._replace(what=words)


def _sum_streaming_seconds(problem: Problem, prediction: Prediction) -> float:
    """Return the most seconds of an update that streaming takes on a stage."""
    on_chip = replace(problem, streamed=False)
    edges = [*prediction.starts, len(problem.units)]
    longer = [problem.get_update_seconds(unit) - on_chip.get_update_seconds(unit) for unit in problem.units]
    return max(sum(longer[a:b]) for a, b in zip(edges, edges[1:]))


def _list_bindings(problem: Problem, prediction: Prediction) -> List[Binding]:
    """Return all bottlenecks of a configuration, unordered."""
    asked, loads, seconds = prediction.asked, prediction.loads, prediction.seconds
    count, mean, greatest = asked.gradient_accumulation, sum(loads) / asked.depth, max(loads)
    quiet = compute_batch_time(asked.row, asked.stages, count, remove_transfers(prediction.costs)).seconds
    slowest, kind = loads.index(greatest), "stage" if asked.stages_per_device == 1 else "device"
    name = problem.units[prediction.starts[slowest]].name or "the model's beginning"
    idle = max(quiet - count * greatest, 0.0) / seconds
    reasons = [
        Binding(
            "imbalance",
            count * (greatest - mean) / seconds,
            f"{kind} {slowest} (from {name}) computes {greatest / mean - 1:.0%} more than the mean",
            "boundaries inside its modules, or a depth that divides the model better, would lift it",
        ),
        # a model on one device has no pipeline to fill or drain; besides passes it only updates its weights
        Binding(
            "compute",
            idle,
            f"{idle:.0%} of the time goes to updating the weights",
            "more microbatches an update would lift it",
        )
        if asked.depth == 1
        else Binding(
            "bubble",
            idle,
            f"{idle:.0%} of the time goes to filling, draining and updating",
            "more microbatches an update (a greater batch), fewer stages or a method that does not flush would lift it"
            if asked.row.flushes
            else "more microbatches an update would lift it",
        ),
    ]
    if prediction.link_busy:
        link = max(prediction.link_busy, key=lambda link: prediction.link_busy[link])
        reduces = any(link in transfer.links for transfer in prediction.costs.reduce)
        what = "all-reduces of gradients" if reduces else "activations and their gradients"
        what = "samples" if link == HOST else what
        waited, busy = (seconds - quiet) / seconds, min(prediction.link_busy[link] / seconds, 1.0)
        # most of the waiting time is latency
        late = busy < waited / 2
        words = f"{waited:.0%} of the time is waited for messages, "
        if late:
            words += f"most of that for their latency; {link} itself is busy {busy:.2%} of the time, with {what}"
        else:
            words += f"{link} is busy {busy:.0%} of it, with {what}"
        faster = "links of less latency" if late else "a faster link"
        fewer = "or a greater micro_batch_size, of which there are fewer" if late else "or a cut where less crosses"
        lifts = f"{faster}, {'or more microbatches an update' if reduces else fewer}, would lift it"
        reasons.append(Binding("link", waited, words, lifts))
    if asked.recompute and not _fits_without_recomputing(problem, prediction):
        fullest = max(range(asked.depth), key=lambda s: prediction.memory[s].total)
        again = count * sum(prediction.costs.forward) / asked.depth / seconds
        reasons.append(
            Binding(
                "memory",
                again,
                f"{kind} {fullest} holds {format_bytes(prediction.memory[fullest].total)} of"
                f" {format_bytes(int(problem.memory_bytes))}; recomputing, which fits, takes {again:.0%} of the time",
                "more memory a device or more stages would lift it",
            )
        )
    return reasons


def _fits_without_recomputing(problem: Problem, prediction: Prediction) -> bool:
    asked = replace(prediction.asked, recompute=False)
    return (
        Costing(problem, asked, prediction.layout, Sums(problem.resolve(asked.method), asked.micro_batch_size)).cut()
        is not None
    )



# ---- the search: bound every candidate, and cut and simulate only candidates that may be among the best
#
#     [1] stages balanced perfectly                       a bound of the throughput
#     [2] its slowest stage, if memory and messages were free          tighter
#     [3] once cut: its stages, links and microbatches in flight       tighter
#     [4] simulated with messages that never wait for one another      tighter
#     [5] simulated by the clock                          the prediction
#
# The candidate with the greatest bound takes the next step. So the first candidate that has taken all steps is the best one, the
# next one is the second best, and so on.

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
    """Make the costings of a problem's candidates, and cache their shared parts."""

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

    If candidates differ only in microbatch, accumulation and schedule, only the best is listed. The search is exact: candidates
    that are not cut or not simulated cannot be better.
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
    """Yield tighter and tighter lower bounds of the seconds of a batch, and at last its prediction; stop early if no cut fits."""
    costing = costings.make(asked, layout)
    work = costings.get_work(asked)
    slowest = bound_slowest(work, asked.stages)
    if slowest == math.inf:
        return
    # the stages of a device need not be consecutive
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


# ---- the planner

# the number of configurations in an answer
SHOWN = 10
# greater plans take minutes
MOST_DEVICES, MOST_BATCH = 4_096, 1_000_000_000


@dataclass(frozen=True)
class Answer:
    """The answer of a plan: configurations, best first, each with its bottleneck; reason -> number of others that were `refused`;
    and if nothing fits, the `smallest_change` with which a configuration would."""

    problem: Problem
    devices: int
    plans: Tuple[Tuple[Prediction, Binding], ...]
    refused: Dict[str, int]
    smallest_change: Optional[str] = None


def make_plan(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int, count: int = SHOWN
) -> Answer:
    """Return the `count` configurations with the greatest predicted throughput on all `devices`.

    Updates have at most `greatest_batch` samples. If nothing fits and the devices have streaming memory, the optimizer's state is
    put there. Raise `BadInput` for too many devices or samples.
    """
    for key, value, most in (("devices", devices, MOST_DEVICES), ("batch", greatest_batch, MOST_BATCH)):
        if not 1 <= value <= most:
            raise BadInput(f"--{key}: {show(value)}: must be an integer from 1 to {most}")
    asked = tuple(list_candidates(methods, devices, len(problem.units), greatest_batch))
    result, change = search(problem, asked, count), None
    if not result.best and _may_stream(problem):
        problem, change = replace(problem, streamed=True), f"{STREAMED}, as planned here"
        result = search(problem, asked, count)
    plans = tuple((prediction, find_binding(problem, prediction)) for prediction in result.best)
    if not plans:
        change = _find_smallest_change(problem, asked, methods, devices, greatest_batch)
    return Answer(problem, devices, plans, result.refused, change)


def _may_stream(problem: Problem) -> bool:
    """Return whether optimizer state could move from the device to its streaming memory."""
    state = count_state_bytes(problem.precision, problem.moments)
    return not problem.streamed and problem.hardware.device.streaming_bytes is not None and state > 0


def _find_smallest_change(
    problem: Problem, asked: Sequence[Candidate], methods: Sequence[str], devices: int, greatest_batch: int
) -> Optional[str]:
    """Return the change that makes a candidate fit: more memory per device or more devices, whichever factor is smaller."""
    least = find_least_memory(problem, asked)
    if least is None:
        return None
    size, candidate = least
    memory = (
        f"{format_bytes(int(size))} of usable memory a device in place of {format_bytes(int(problem.memory_bytes))} "
        f"({_describe(candidate)})"
    )
    if problem.streamed:
        memory += ", optimizer state in streaming memory"
    for number in _list_more_devices(problem, devices):
        more = list_candidates(methods, number, len(problem.units), greatest_batch, (True,))
        needed = find_least_memory(problem, more)
        if needed is not None and needed[0] <= problem.memory_bytes:
            if number / devices < size / problem.memory_bytes:
                return f"{number} devices in place of {devices} ({_describe(needed[1])})"
            return f"{memory}, or {number} devices"
    return memory


def _list_more_devices(problem: Problem, devices: int) -> List[int]:
    """Return twice, four times and eight times the devices, as far as the hardware's links join them."""
    most = problem.hardware.most_devices
    return [devices * factor for factor in (2, 4, 8) if most is None or devices * factor <= most]


def _describe(asked: Candidate) -> str:
    again = ", recompute" if asked.recompute else ""
    return f"{asked.method}, depth {asked.depth}, width {asked.width}, micro_batch_size {asked.micro_batch_size}{again}"
