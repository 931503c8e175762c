"""What a configuration would do on a hardware description: its stages' costs, its cut, its time for a batch, its memory.

All figures are predicted: times from `hardware.unit_costs` (or from measured units) by the clock (`plan.batches`), memory from
`hardware.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.hardware.description import Hardware
from ipu_pipe.hardware.links import compute_host_seconds
from ipu_pipe.hardware.memory import StageMemory, StashCounts, compute_stage_memory, count_stashed
from ipu_pipe.hardware.precision import PRECISIONS, resolve_precision
from ipu_pipe.hardware.unit_costs import (
    Unit,
    UnitSeconds,
    compute_pass_seconds,
    compute_update_seconds,
    count_state_bytes,
)
from ipu_pipe.model.balance import FloatArray, IntArray, StagePrices, find_best_cut
from ipu_pipe.plan.batches import Batches
from ipu_pipe.plan.blocks import BlockUnits
from ipu_pipe.plan.bounds import bound_by_reduces
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.layouts import (
    BoundaryTransfers,
    ReplicaLayout,
    make_reduce_transfer,
    make_transfers,
    scale_transfer,
)
from ipu_pipe.schedule.clock import Costs, Transfer
from ipu_pipe.schedule.methods import METHODS, Pipeline


@dataclass(frozen=True)
class Problem:
    """What is planned: `units` of the model in order, `input_bytes` of a sample, on `hardware` with so many usable bytes a
    device. `optimizer`: a key of MOMENTS. `blocks`: for methods that train blocks by losses of their own. `streamed`: the
    optimizer's state lies in streaming memory (PopTorch's tensor_locations.optimizer.on_chip false)."""

    units: Tuple[Unit, ...]
    input_bytes: float
    hardware: Hardware
    memory_bytes: float
    precision: str
    optimizer: str
    blocks: Optional[BlockUnits] = None
    streamed: bool = False

    @property
    def lockstep(self) -> bool:
        """Whether stages begin their cycles together."""
        return self.hardware.lockstep

    def update_seconds(self, unit: Unit) -> float:
        """Of an update of the unit's weights."""
        return compute_update_seconds(unit, self.hardware, self.precision, self.optimizer, self.streamed)

    def may_hold_state(self, parameters: Any) -> Any:
        """Whether streaming memory, where the optimizer's state lies there, holds that of so many `parameters`."""
        room = self.hardware.device.streaming_bytes
        if not self.streamed or room is None:
            return True
        return parameters * count_state_bytes(self.precision, self.optimizer) <= room.value

    def of(self, method: str) -> Problem:
        """As it is for a method, by which a mixed precision differs."""
        row = resolve_precision(self.precision, METHODS[method])
        if row == self.precision:
            return self
        entering = self.input_bytes * PRECISIONS[row].data / PRECISIONS[self.precision].data
        return replace(self, precision=row, input_bytes=entering)


class Sums:
    """Sums over the units from the first on, so that any stage's figures are a difference; arrays of n + 1."""

    def __init__(self, problem: Problem, samples: int) -> None:
        units, scale = problem.units, PRECISIONS[problem.precision].activation
        passes = [compute_pass_seconds(unit, problem.hardware, problem.precision, samples) for unit in units]
        updates = [problem.update_seconds(unit) for unit in units]
        self.forward = _sums([each.forward for each in passes])
        self.backward = _sums([each.backward for each in passes])
        self.update = _sums(updates)
        self.parameters = _sums([unit.parameters for unit in units])
        self.activations = _sums([unit.activation_bytes for unit in units])
        self.also_kept = _also_kept(units)
        self.number_bytes = units[0].number_bytes
        crossing = [unit.output_bytes * scale / unit.number_bytes for unit in units]
        # bytes of a microbatch that enter a stage which begins at each unit; none leave the last
        self.entering = samples * np.array([problem.input_bytes, *crossing[:-1], 0.0])
        self.blocks = _BlockCosts(problem, problem.blocks, samples) if problem.blocks is not None else None

    def stage(self, first: IntArray, end: IntArray, local: bool = False) -> Unit:
        """A unit of arrays: the stages of the units from `first` to before `end`. `local`: each with its head."""

        def between(sums: FloatArray) -> FloatArray:
            return sums[end] - sums[first]

        parameters: Any = between(self.parameters)
        activations: Any = between(self.activations)
        if self.also_kept is not None:
            activations = activations + self.also_kept[first, end]
        if local:
            assert self.blocks is not None
            parameters, activations = (
                parameters + self.blocks.parameters[end],
                activations + self.blocks.activations[end],
            )
        return Unit("", 0.0, 0.0, parameters, 0.0, activations, self.number_bytes)


class _BlockCosts:
    """Of heads, by the unit before which their block ends, and of what is spared, by the unit with which one begins; arrays of
    n + 1."""

    def __init__(self, problem: Problem, blocks: BlockUnits, samples: int) -> None:
        def seconds(unit: Unit) -> UnitSeconds:
            return compute_pass_seconds(unit, problem.hardware, problem.precision, samples)

        def ends(values: Sequence[float]) -> FloatArray:
            return np.array([0.0, *values, 0.0])

        passes = [seconds(head) for head in blocks.heads]
        self.forward = ends([each.forward for each in passes])
        self.backward = ends([each.backward for each in passes])
        self.update = ends([problem.update_seconds(head) for head in blocks.heads])
        self.parameters = ends([head.parameters for head in blocks.heads])
        self.activations = ends([head.activation_bytes for head in blocks.heads])
        pairs = zip(problem.units[1:], blocks.first[1:])
        self.spared = ends([seconds(unit).backward - seconds(first).backward for unit, first in pairs])


def _sums(values: Sequence[float]) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])


@lru_cache(maxsize=8)
def _also_kept(units: Tuple[Unit, ...]) -> Optional[FloatArray]:
    """Bytes that a stage keeps and units before it too, by its first unit and its end, (n + 1, n + 1); None: nowhere any."""
    found = np.zeros((len(units) + 1, len(units) + 1))
    for i, unit in enumerate(units):
        for back, size in unit.also_kept:
            found[i - back + 1 : i + 1, i + 1 :] += size
    return found if found.any() else None


@lru_cache(maxsize=None)
def _holding(method: str, depth: int, accumulate: int, recompute: bool, lockstep: bool) -> StashCounts:
    return count_stashed(METHODS[method], depth, accumulate, recompute, lockstep)


def held(problem: Problem, asked: Candidate) -> StashCounts:
    """Versions and microbatches that its stages hold. Beyond two a stage, microbatches of an update change neither, except where
    the pipeline holds a whole batch."""
    method = METHODS[asked.method]
    holds_batch = method.pipeline is Pipeline.FILL_DRAIN and not problem.lockstep
    count = asked.gradient_accumulation if holds_batch else min(asked.gradient_accumulation, 2 * asked.depth)
    return _holding(asked.method, asked.depth, count, asked.recompute, problem.lockstep)


class Costing:
    """What the stages of one configuration cost, wherever they are cut."""

    def __init__(
        self,
        problem: Problem,
        asked: Candidate,
        layout: ReplicaLayout,
        sums: Sums,
        messages: Optional[BoundaryTransfers] = None,
    ) -> None:
        self.problem, self.asked, self.layout, self.sums = problem.of(asked.method), asked, layout, sums
        self.kept = held(problem, asked)
        self.onward, self.back = messages or make_transfers(problem.hardware, layout)
        self.local = METHODS[asked.method].structure is not None
        self.work = np.diff(sums.forward) * (2 if asked.recompute else 1) + np.diff(sums.backward)
        if self.local:
            assert sums.blocks is not None, "blocks are planned with the figures of their heads"
            self.work = self.work - sums.blocks.spared[:-1]

    def cut(self) -> Optional[List[int]]:
        """First units of the stages of the cut whose slowest stage is the fastest, within the memory; None where none fits."""
        return find_best_cut(self.work.tolist(), self.asked.depth, self._stage_costs)

    def may_fit(self) -> bool:
        """False where all devices together have too little, if every stage held as little as the one that holds least."""
        kept = self.kept
        fewest = StashCounts(*(np.array([count]) for count in (kept.copies.min(), 0, kept.activations.min())))
        whole = self._memory(0, *self._stages(np.array(0), np.array(len(self.work))), fewest)
        total = float(whole.total) + (self.asked.depth - 1) * float(whole.code)
        return total <= self.problem.memory_bytes * self.asked.depth

    def least_seconds(self, costs: Costs) -> float:
        """Of a batch with stages of these `costs`: neither a stage nor a link is busy for longer than there is time, and no stage
        holds more microbatches at once than it may, each of which is away for the passes of all stages behind (Little's law)."""
        count, flushes = self.asked.gradient_accumulation, METHODS[self.asked.method].flushes
        work = np.add(costs.forward, costs.backward)
        reduce = costs.reduce or (Transfer(),) * len(work)
        messages = ((count, costs.onward), (count, () if self.local else costs.back), (1, reduce))
        busy: Dict[str, float] = {}
        for times, sent in messages:
            for each in sent:
                for link in each.links:
                    busy[link] = busy.get(link, 0.0) + times * each.seconds
        sums = [update + each.seconds + each.latency for update, each in zip(costs.update, reduce)]
        least = [float((count * work + sums).max()) + count * costs.enter, *busy.values()]
        if self.local:  # what is handed on is not waited for
            return max(bound_seconds(self.asked, float(self.work.sum())), *least)
        pairs = zip(costs.onward, costs.back)
        crossing = [one.seconds + one.latency + other.seconds + other.latency for one, other in pairs]
        away = np.cumsum((work + np.array([*crossing, 0.0]))[::-1])[::-1]
        flying = np.maximum(self.kept.inputs, self.kept.activations)
        least.append(count * float((away / flying).max()))
        if flushes:  # what is before a stage happens before it begins and after it ends
            before = np.cumsum([0.0, *(work[:-1] + crossing)])
            least.append(float((before + count * work).max()) + sums[0])
        if not self.problem.lockstep:
            least += [each * (1 - 1e-9) for each in bound_by_reduces(costs, count, flushes, flying)]
        return max(bound_seconds(self.asked, float(work.sum())), *least)

    def least_memory(self) -> Optional[float]:
        """Bytes of the fullest stage's device, cut so that these are least."""

        def costs(first: IntArray, end: IntArray) -> StagePrices:
            stages = self._stages(first, end)
            return lambda k: np.asarray(self._memory(self.asked.depth - k, *stages).total, np.float64)

        starts = find_best_cut([0.0] * len(self.work), self.asked.depth, costs)
        return None if starts is None else max(memory.total for memory in self.memories(starts))

    def _stage_costs(self, first: IntArray, end: IntArray) -> StagePrices:
        seconds, stages = sum(self._seconds(first, end)), self._stages(first, end)
        both = self.problem.lockstep and not self.local  # go together between cycles
        onward, back = ([*(each.seconds for each in sent), 0.0] for sent in (self.onward, self.back))
        leaving = np.add(onward, np.multiply(back, both))

        def of_stage(k: IntArray) -> FloatArray:
            s = self.asked.depth - k
            leaves = self.sums.entering[end] * leaving[s]
            cost = seconds + leaves if self.problem.lockstep else np.maximum(seconds, leaves)
            fits = self._memory(s, *stages).total <= self.problem.memory_bytes
            return np.where(fits & self.problem.may_hold_state(stages[0].parameters), cost, np.inf)

        return of_stage

    def _seconds(self, first: IntArray, end: IntArray) -> Tuple[FloatArray, FloatArray]:
        """Forward and backward of the stages of the units from `first` to before `end`."""
        sums = self.sums
        forward, backward = _differences(sums.forward, first, end), _differences(sums.backward, first, end)
        if self.local:
            assert sums.blocks is not None
            forward = forward + sums.blocks.forward[end]
            backward = backward + sums.blocks.backward[end] - sums.blocks.spared[first]
        return forward, backward + forward if self.asked.recompute else backward

    def _stages(self, first: IntArray, end: IntArray) -> Tuple[Unit, Any]:
        """Those of the units from `first` to before `end`, and the bytes that enter them."""
        return self.sums.stage(first, end, self.local), self.sums.entering[first]

    def _memory(self, s: Any, stages: Unit, entering: Any, kept: Optional[StashCounts] = None) -> StageMemory:
        """Of `stages` (one or many) as the s-th (one or many)."""
        return compute_stage_memory(
            stages,
            entering,
            *(counts[s] for counts in kept or self.kept),
            precision=self.problem.precision,
            samples=self.asked.micro_batch_size,
            optimizer=self.problem.optimizer,
            device=self.problem.hardware.device,
            streamed=self.problem.streamed,
        )

    def memories(self, starts: Sequence[int]) -> List[StageMemory]:
        """Bytes of each stage's device."""
        edges = [*starts, len(self.work)]
        found = [
            self._memory(s, *self._stages(np.array(a), np.array(b))) for s, (a, b) in enumerate(zip(edges, edges[1:]))
        ]
        return [StageMemory(*(int(size) for size in memory)) for memory in found]

    def costs(self, starts: Sequence[int]) -> Costs:
        """For the clock."""
        first, end = np.array(starts), np.array([*starts[1:], len(self.work)])
        sums, asked, hardware = self.sums, self.asked, self.problem.hardware
        forward, backward = self._seconds(first, end)
        update = _differences(sums.update, first, end) + (
            sums.blocks.update[end] if self.local and sums.blocks else 0.0
        )
        sizes = sums.entering[first[1:]]
        owned: Any = sums.stage(first, end, self.local).parameters
        gradients = owned * PRECISIONS[self.problem.precision].gradient
        reduce: Tuple[Transfer, ...] = ()
        if asked.width > 1:
            reduce = tuple(
                make_reduce_transfer(hardware, self.layout, s, float(size)) for s, size in enumerate(gradients)
            )
        return Costs(
            forward.tolist(),
            backward.tolist(),
            update.tolist(),
            onward=tuple(scale_transfer(each, float(size)) for each, size in zip(self.onward, sizes)),
            back=tuple(scale_transfer(each, float(size)) for each, size in zip(self.back, sizes)),
            reduce=reduce,
            lockstep=self.problem.lockstep,
            enter=compute_host_seconds(hardware, self.layout.replicas(0), float(sums.entering[0]))
            if self.problem.lockstep
            else 0.0,
        )


def _differences(sums: FloatArray, first: IntArray, end: IntArray) -> FloatArray:
    found: FloatArray = sums[end] - sums[first]
    return found


@dataclass(frozen=True)
class Prediction:
    """A configuration with its cut and what it would do. `starts`: first units of its stages. `seconds`: of a batch."""

    asked: Candidate
    layout: ReplicaLayout
    starts: Tuple[int, ...]
    costs: Costs
    memory: Tuple[StageMemory, ...]
    seconds: float
    link_busy: Dict[str, float]

    @property
    def samples_per_second(self) -> float:
        """Predicted throughput."""
        return self.asked.global_batch_size / self.seconds

    @property
    def work(self) -> List[float]:
        """Seconds that each stage computes for a microbatch."""
        return [f + b for f, b in zip(self.costs.forward, self.costs.backward)]

    @property
    def utilization(self) -> float:
        """Share of the time in which devices are in passes, on average over the stages."""
        return self.asked.gradient_accumulation * sum(self.work) / (self.asked.depth * self.seconds)


def bound_seconds(asked: Candidate, work: float) -> float:
    """Seconds that a batch takes at least, however the stages are cut, if a microbatch takes `work` on all of them together.

    Stages can at best be busy all the time. Where the pipeline empties, stage s begins when those before it have done a forward,
    and they end a backward after it: T >= w_0 + ... + w_(s-1) + N w_s for every s, which is least where all are equal, with
    w_s = w_0 (1 - 1/N)^s.
    """
    depth, count = asked.depth, asked.gradient_accumulation
    if METHODS[asked.method].flushes:
        return work / (1 - (1 - 1 / count) ** depth)
    return work * count / depth


def make_batches(costing: Costing, starts: Sequence[int]) -> Batches:
    """The updates of a configuration that is cut at `starts`."""
    return Batches(METHODS[costing.asked.method], costing.asked.depth, costing.costs(starts))


def predict_cut(costing: Costing, starts: Sequence[int], batches: Optional[Batches] = None) -> Prediction:
    """What a configuration does that is cut at `starts`, whether it fits or not. `batches`: its updates, as far as looked at."""
    asked, batches = costing.asked, batches or make_batches(costing, starts)
    costs, played = batches.costs, batches.time(asked.gradient_accumulation)
    memory = tuple(costing.memories(starts))
    return Prediction(asked, costing.layout, tuple(starts), costs, memory, played.seconds, played.link_busy)


def remove_transfers(costs: Costs) -> Costs:
    """The same where everything is there at once."""
    return replace(costs, onward=(), back=(), reduce=(), link=0.0, enter=0.0)
