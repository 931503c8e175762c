"""Find the best configurations for a model, hardware and limits, and the bottleneck of each. A unit
is the smallest part of the model that a stage may begin with.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Any, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.unit_costs import count_state_bytes
from ipu_pipe.model.balance import bound_slowest
from ipu_pipe.plan.batch_times import BatchTimes, bound_seconds_of_any_cut
from ipu_pipe.plan.candidates import (
    BoundaryTransfers,
    Candidate,
    ReplicaLayout,
    list_candidates,
    list_layouts,
    make_transfers,
)
from ipu_pipe.plan.prediction import (
    Costing,
    Prediction,
    Problem,
    UnitSums,
    predict_cut,
    remove_transfers,
)
from ipu_pipe.schedule.clock import HOST
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import format_bytes, show

# ---- the bottleneck of a configuration: its share of the time, and the changes that would reduce it
#
# The time of a batch consists of the devices' average compute, and of waits: for a stage that is
# slower than the average (imbalance), for filling, draining and updating (bubble), and for
# messages (link). The time of recomputation counts as a bottleneck of memory.

STREAMED = "backend.ipu.options.TensorLocations.setOptimizerLocation.useOnChipStorage: false"
# a smaller share of the time is not a bottleneck
SMALL = 0.02


class Bottleneck(NamedTuple):
    """A bottleneck of a configuration.

    `kind`: memory, link, bubble, imbalance or compute; `share`: its share of the time; `what`: its
    description; `remedy`: the changes that would reduce it.
    """

    kind: str
    share: float
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}; {self.remedy}"


def find_bottleneck(problem: Problem, prediction: Prediction) -> Bottleneck:
    """Return the greatest bottleneck of a configuration, with the share of time of streamed
    optimizer state.
    """
    greatest = max(_list_bottlenecks(problem, prediction), key=lambda bottleneck: bottleneck.share)
    if greatest.share < SMALL:
        greatest = Bottleneck(
            "compute",
            prediction.utilization,
            f"devices are busy {prediction.utilization:.0%} of the time",
            "only faster or more devices would raise the throughput",
        )
    if not problem.streamed:
        return greatest
    share = _sum_streaming_seconds(problem, prediction) / prediction.seconds
    words = (
        f"{greatest.what}; optimizer state in streaming memory, whose traffic takes "
        f"{share:.0%} of the time"
    )
    return greatest._replace(what=words)


def _sum_streaming_seconds(problem: Problem, prediction: Prediction) -> float:
    """Return the most seconds of an update that streaming takes on a stage."""
    on_chip = replace(problem, streamed=False)
    edges = [*prediction.starts, len(problem.units)]
    extra_seconds = [
        problem.get_update_seconds(unit) - on_chip.get_update_seconds(unit)
        for unit in problem.units
    ]
    return max(sum(extra_seconds[a:b]) for a, b in zip(edges, edges[1:]))


def _list_bottlenecks(problem: Problem, prediction: Prediction) -> list[Bottleneck]:
    """Return all bottlenecks of a configuration, unordered."""
    candidate = prediction.candidate
    batch_times = BatchTimes(
        candidate.method_row, candidate.stages, remove_transfers(prediction.costs)
    )
    compute_seconds = batch_times.compute(candidate.gradient_accumulation).seconds
    bottlenecks = [
        _describe_imbalance(problem, prediction),
        _describe_bubble(prediction, compute_seconds),
    ]
    if prediction.link_busy:
        bottlenecks.append(_describe_link(prediction, compute_seconds))
    if candidate.recompute and not _fits_without_recomputing(problem, prediction):
        bottlenecks.append(_describe_memory(problem, prediction))
    return bottlenecks


def _name_part(candidate: Candidate) -> str:
    """Return "stage", or "device" if a device has several stages."""
    return "stage" if candidate.stages_per_device == 1 else "device"


def _describe_imbalance(problem: Problem, prediction: Prediction) -> Bottleneck:
    candidate = prediction.candidate
    mean = sum(prediction.loads) / candidate.depth
    greatest = max(prediction.loads)
    slowest = prediction.loads.index(greatest)
    name = problem.units[prediction.starts[slowest]].name or "the start of the model"
    return Bottleneck(
        "imbalance",
        candidate.gradient_accumulation * (greatest - mean) / prediction.seconds,
        f"{_name_part(candidate)} {slowest} (from {name}) computes {greatest / mean - 1:.0%} more "
        f"than the mean",
        "boundaries inside its modules, or another number of stages, would balance the stages",
    )


def _describe_bubble(prediction: Prediction, compute_seconds: float) -> Bottleneck:
    """Return the time in which the slowest stage neither computes nor waits for messages.

    `compute_seconds`: the time of a batch whose messages take none.
    """
    candidate = prediction.candidate
    busy_seconds = candidate.gradient_accumulation * max(prediction.loads)
    idle = max(compute_seconds - busy_seconds, 0.0) / prediction.seconds
    # a model on one device has no pipeline to fill or drain; besides passes it only updates its
    # weights
    if candidate.depth == 1:
        return Bottleneck(
            "compute",
            idle,
            f"{idle:.0%} of the time goes to updating the weights",
            "more microbatches per update would reduce this",
        )
    return Bottleneck(
        "bubble",
        idle,
        f"{idle:.0%} of the time goes to filling and draining the pipeline and to updates",
        "more microbatches per update (a larger batch), fewer stages or a method that does not "
        "flush would reduce this"
        if candidate.method_row.flushes
        else "more microbatches per update would reduce this",
    )


def _describe_link(prediction: Prediction, compute_seconds: float) -> Bottleneck:
    """Return the time spent waiting for messages, and the busiest link."""
    seconds = prediction.seconds
    link = max(prediction.link_busy, key=lambda link: prediction.link_busy[link])
    reduces = any(link in transfer.links for transfer in prediction.costs.reduce)
    if link == HOST:
        payload = "samples"
    else:
        payload = "all-reduces of gradients" if reduces else "activations and their gradients"
    waited = (seconds - compute_seconds) / seconds
    busy = min(prediction.link_busy[link] / seconds, 1.0)
    # most of the waiting time is latency
    if busy < waited / 2:
        cause = (
            f"mostly because of their latency; {link} is busy only {busy:.2%} of the time, with "
            f"{payload}"
        )
        faster = "links with lower latency"
        fewer = "a larger micro_batch_size (fewer messages)"
    else:
        cause = f"and {link} is busy {busy:.0%} of the time, with {payload}"
        faster = "a faster link"
        fewer = "boundaries that fewer bytes cross"
    if reduces:
        fewer = "more microbatches per update"
    return Bottleneck(
        "link",
        waited,
        f"{waited:.0%} of the time is spent waiting for messages, {cause}",
        f"{faster}, or {fewer}, would reduce this",
    )


def _describe_memory(problem: Problem, prediction: Prediction) -> Bottleneck:
    """Return the time of recomputation, without which the configuration does not fit."""
    candidate = prediction.candidate
    fullest = max(range(candidate.depth), key=lambda s: prediction.memory[s].total)
    forward_seconds = sum(prediction.costs.forward) / candidate.depth
    share = candidate.gradient_accumulation * forward_seconds / prediction.seconds
    return Bottleneck(
        "memory",
        share,
        f"{_name_part(candidate)} {fullest} uses {format_bytes(prediction.memory[fullest].total)} "
        f"of {format_bytes(int(problem.memory_bytes))}; it fits only with recomputation, which "
        f"takes {share:.0%} of the time",
        "more memory per device or more stages would make recomputation unnecessary",
    )


def _fits_without_recomputing(problem: Problem, prediction: Prediction) -> bool:
    candidate = replace(prediction.candidate, recompute=False)
    sums = UnitSums(problem.adapt_to(candidate.method), candidate.micro_batch_size)
    return Costing(problem, candidate, prediction.layout, sums).find_cut() is not None


# ---- the search: bound every candidate, and cut and simulate only candidates that may be among the best
#
#     [1] stages balanced perfectly                       a bound of the throughput
#     [2] its slowest stage, if memory and messages were free          tighter
#     [3] once cut: its stages, links and microbatches in flight       tighter
#     [4] simulated by the clock                          the prediction
#
# The candidate with the greatest bound takes the next step. So the first candidate that has taken
# all steps is the best one, the next one is the second best, and so on.

NO_ROOM = "a stage needs more memory than a device has, for every cut of the model"
ALIKE = (
    "a method with these stages is listed; with this microbatch, accumulation or schedule it is "
    "not faster, or out of memory"
)
SLOWER = "slower than those listed, by a lower bound of their time"
# slack so that a bound equal to the time does not reorder ties
ROUNDING = 1e-9


class SearchResult(NamedTuple):
    """The best predictions, best first, and how many candidates are not among them, by reason."""

    best: list[Prediction]
    refused: dict[str, int]


class _Costings:
    """Makes the `Costing` of each candidate, which prices it, and caches what several of them need."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sums: dict[tuple[int, str], UnitSums] = {}
        self._transfers: dict[ReplicaLayout, BoundaryTransfers] = {}
        self._work: dict[tuple[int, bool, bool, str], list[float]] = {}

    def make(self, candidate: Candidate, layout: ReplicaLayout) -> Costing:
        """Return the costing of a candidate."""
        problem = self._problem.adapt_to(candidate.method)
        key = candidate.micro_batch_size, problem.precision
        if key not in self._sums:
            self._sums[key] = UnitSums(problem, candidate.micro_batch_size)
        if layout not in self._transfers:
            self._transfers[layout] = make_transfers(self._problem.hardware, layout)
        return Costing(problem, candidate, layout, self._sums[key], self._transfers[layout])

    def get_unit_seconds(self, candidate: Candidate) -> list[float]:
        """Return the seconds of each unit for a microbatch."""
        precision = self._problem.adapt_to(candidate.method).precision
        key = (
            candidate.micro_batch_size,
            candidate.recompute,
            # units of blocks take less, since a block computes no gradient of its input
            METHODS[candidate.method].structure is None,
            precision,
        )
        if key not in self._work:
            layout = list_layouts(candidate.depth, candidate.width, candidate.placement)[0]
            self._work[key] = self.make(candidate, layout).work.tolist()
        return self._work[key]


_Steps = Iterator[Tuple[float, Optional[Prediction]]]


def search(problem: Problem, candidates: Sequence[Candidate], count: int) -> SearchResult:
    """Return the `count` candidates with the greatest predicted throughput, each with its best cut
    and layout.

    If candidates differ only in microbatch, accumulation and schedule, only the best is listed. The
    search is exact: candidates that are not cut or not simulated cannot be better.
    """
    listed_shapes: set[tuple[Any, ...]] = set()
    costings = _Costings(problem)
    # ordered by least seconds per sample, then by the order of the candidates and of their layouts
    waiting: list[tuple[float, int, int, _Steps, Prediction | None]] = []
    for order, candidate in enumerate(candidates):
        bound = (
            bound_seconds_of_any_cut(candidate, sum(costings.get_unit_seconds(candidate)))
            / candidate.global_batch_size
        )
        for layout_order, layout in enumerate(
            list_layouts(candidate.depth, candidate.width, candidate.placement)
        ):
            waiting.append((bound, order, layout_order, _bound(candidate, layout, costings), None))
    heapq.heapify(waiting)
    best: list[Prediction] = []
    no_room: set[Candidate] = set()
    while waiting and len(best) < count:
        bound, order, layout_order, steps, prediction = heapq.heappop(waiting)
        candidate = candidates[order]
        # a faster one with the same shape is already listed
        if candidate in no_room or candidate.shape in listed_shapes:
            continue
        if prediction is not None:
            best.append(prediction)
            listed_shapes.add(candidate.shape)
            continue
        step = next(steps, None)
        if step is None:
            no_room.add(candidate)
        else:
            seconds, prediction = step
            # a later bound is mostly tighter, not always
            bound = max(bound, seconds / candidate.global_batch_size)
            heapq.heappush(waiting, (bound, order, layout_order, steps, prediction))
    # less the listed ones themselves, one of each shape
    alike = sum(candidate.shape in listed_shapes for candidate in candidates) - len(best)
    without_room = sum(candidate.shape not in listed_shapes for candidate in no_room)
    refused = {
        NO_ROOM: without_room,
        ALIKE: alike,
        SLOWER: len(candidates) - len(best) - alike - without_room,
    }
    return SearchResult(best, {reason: number for reason, number in refused.items() if number})


def _bound(candidate: Candidate, layout: ReplicaLayout, costings: _Costings) -> _Steps:
    """Yield tighter and tighter lower bounds of the seconds of a batch, and at last its prediction;
    stop early if no cut fits.
    """
    costing = costings.make(candidate, layout)
    work = costings.get_unit_seconds(candidate)
    slowest = bound_slowest(work, candidate.stages)
    # fewer units than stages
    if slowest == math.inf:
        return
    # the stages of a device need not be consecutive
    if candidate.stages_per_device > 1:
        slowest = max(sum(work) / candidate.depth, slowest)
    yield candidate.gradient_accumulation * slowest, None  # [2]
    starts = costing.find_cut() if costing.can_fit() else None
    if starts is None:
        return
    batch_times = costing.make_batch_times(starts)
    yield costing.bound_seconds(batch_times.costs), None  # [3]
    prediction = predict_cut(costing, starts, batch_times)
    yield prediction.seconds, prediction  # [4]


def find_least_memory(
    problem: Problem, candidates: Iterable[Candidate]
) -> tuple[float, Candidate] | None:
    """Return the fewest bytes per device with which one of the candidates fits, and that candidate;
    None if there are none.
    """
    costings = _Costings(problem)
    best: tuple[float, Candidate] | None = None
    for candidate in candidates:
        layout = list_layouts(candidate.depth, candidate.width, candidate.placement)[0]
        # every layout takes the same memory
        needed = costings.make(candidate, layout).find_least_memory()
        if needed is not None and (best is None or needed < best[0]):
            best = needed, candidate
    return best


# ---- the planner

# the number of configurations in an answer
SHOWN = 10
# greater plans take minutes
MOST_DEVICES = 4_096
MOST_BATCH = 1_000_000_000


@dataclass(frozen=True)
class Answer:
    """The answer to a planning problem.

    `plans`: configurations, best first, each with its bottleneck. `refused`: reason -> number of
    other candidates. `smallest_change`: if nothing fits, the change with which a configuration
    would.
    """

    problem: Problem
    devices: int
    plans: tuple[tuple[Prediction, Bottleneck], ...]
    refused: dict[str, int]
    smallest_change: str | None = None


def make_plan(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int, count: int = SHOWN
) -> Answer:
    """Return the `count` configurations with the greatest predicted throughput on all `devices`.

    Updates have at most `greatest_batch` samples. If nothing fits and the devices have streaming
    memory, the optimizer's state is put there. Raise `BadInput` for too many devices or samples.
    """
    for key, value, most in (
        ("devices", devices, MOST_DEVICES),
        ("batch", greatest_batch, MOST_BATCH),
    ):
        if not 1 <= value <= most:
            raise BadInput(f"--{key}: {show(value)}: must be an integer from 1 to {most}")
    candidates = tuple(list_candidates(methods, devices, len(problem.units), greatest_batch))
    result = search(problem, candidates, count)
    change = None
    if not result.best and _may_stream(problem):
        problem = replace(problem, streamed=True)
        change = f"{STREAMED}, as in this plan"
        result = search(problem, candidates, count)
    plans = tuple((prediction, find_bottleneck(problem, prediction)) for prediction in result.best)
    if not plans:
        change = _find_smallest_change(problem, candidates, methods, devices, greatest_batch)
    return Answer(problem, devices, plans, result.refused, change)


def _may_stream(problem: Problem) -> bool:
    """Return whether optimizer state could move from the device to its streaming memory."""
    state = count_state_bytes(problem.precision, problem.moments)
    return (
        not problem.streamed and problem.hardware.device.streaming_bytes is not None and state > 0
    )


def _find_smallest_change(
    problem: Problem,
    candidates: Sequence[Candidate],
    methods: Sequence[str],
    devices: int,
    greatest_batch: int,
) -> str | None:
    """Describe the smaller change that makes a candidate fit: more memory per device or more
    devices, by their factors.
    """
    least = find_least_memory(problem, candidates)
    if least is None:
        return None
    size, candidate = least
    memory = (
        f"{format_bytes(int(size))} of usable memory per device instead of "
        f"{format_bytes(int(problem.memory_bytes))} "
        f"({_describe(candidate)})"
    )
    if problem.streamed:
        memory += ", optimizer state in streaming memory"
    for number in _list_more_devices(problem, devices):
        # (True,): with recomputation alone, which needs the least memory
        needed = find_least_memory(
            problem, list_candidates(methods, number, len(problem.units), greatest_batch, (True,))
        )
        if needed is not None and needed[0] <= problem.memory_bytes:
            # the smaller factor is the smaller change
            if number / devices < size / problem.memory_bytes:
                return f"{number} devices instead of {devices} ({_describe(needed[1])})"
            return f"{memory}, or {number} devices"
    return memory


def _list_more_devices(problem: Problem, devices: int) -> list[int]:
    """Return twice, four times and eight times the devices, as far as the hardware's links join
    them.
    """
    most = problem.hardware.most_devices
    return [devices * factor for factor in (2, 4, 8) if most is None or devices * factor <= most]


def _describe(candidate: Candidate) -> str:
    text = (
        f"{candidate.method}, depth {candidate.depth}, width {candidate.width}, "
        f"micro_batch_size {candidate.micro_batch_size}"
    )
    return text + (", recompute" if candidate.recompute else "")
