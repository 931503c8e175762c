"""Predict a configuration on a hardware description: the costs of its stages, its cut, the time of a batch, its memory.

All figures are predicted: times from `hardware.unit_costs` (or from measured units) by the clock (`plan.batches`), memory from
`hardware.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.hardware.description import Hardware, compute_host_seconds
from ipu_pipe.hardware.memory import KeptCounts, StageMemory, compute_stage_memory, count_kept
from ipu_pipe.hardware.precision import PRECISIONS, resolve_precision
from ipu_pipe.hardware.unit_costs import Unit, compute_pass_seconds, compute_update_seconds, count_state_bytes
from ipu_pipe.model.balance import FloatArray, IntArray, StagePrices, find_best_cut
from ipu_pipe.plan.batches import Batches, bound_by_costs, sum_loads
from ipu_pipe.plan.blocks import BlockUnits
from ipu_pipe.plan.candidates import (
    BoundaryTransfers,
    Candidate,
    ReplicaLayout,
    list_layouts,
    make_reduce_transfer,
    make_transfers,
    scale_transfer,
)
from ipu_pipe.schedule.clock import Costs, Transfer
from ipu_pipe.schedule.methods import METHODS, Method, Pipeline


@dataclass(frozen=True)
class Problem:
    """A planning problem.

    units: the model's units in order. input_bytes: bytes of a sample's input. memory_bytes: usable bytes of each device of
    `hardware`. moments: copies of the weights in the optimizer's state. blocks: costs for methods that train blocks by their own
    losses. streamed: the optimizer's state is in streaming memory (PopTorch's tensor_locations.optimizer.on_chip false).
    """

    units: Tuple[Unit, ...]
    input_bytes: float
    hardware: Hardware
    memory_bytes: float
    precision: str
    moments: int
    blocks: Optional[BlockUnits] = None
    streamed: bool = False

    @property
    def lockstep(self) -> bool:
        """Return whether stages begin their cycles together."""
        return self.hardware.lockstep

    def get_update_seconds(self, unit: Unit) -> float:
        """Return the seconds of an update of the unit's weights."""
        return compute_update_seconds(unit, self.hardware, self.precision, self.moments, self.streamed)

    def fits_streaming(self, parameters: Any) -> Any:
        """Return whether the optimizer's state of `parameters` fits streaming memory; True if it is not streamed."""
        room = self.hardware.device.streaming_bytes
        if not self.streamed or room is None:
            return True
        return parameters * count_state_bytes(self.precision, self.moments) <= room.value

    def resolve(self, method: str) -> Problem:
        """Return the problem for a method, by which a mixed precision differs."""
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
        self.forward = _accumulate([seconds.forward for seconds in passes])
        self.backward = _accumulate([seconds.backward for seconds in passes])
        self.update = _accumulate([problem.get_update_seconds(unit) for unit in units])
        self.parameters = _accumulate([unit.parameters for unit in units])
        self.activations = _accumulate([unit.activation_bytes for unit in units])
        self.also_kept = _sum_also_kept(units)
        self.number_bytes = units[0].number_bytes
        crossing = [unit.output_bytes * scale / unit.number_bytes for unit in units]
        # bytes of a microbatch that enter a stage which begins at each unit; none leave the last
        self.entering = samples * np.array([problem.input_bytes, *crossing[:-1], 0.0])
        self.blocks = _BlockCosts(problem, problem.blocks, samples) if problem.blocks is not None else None

    def make_stage(self, first: IntArray, end: IntArray, local: bool = False) -> Unit:
        """Return a unit of arrays: the stages of the units from `first` to before `end`. `local`: each with its head."""
        parameters: Any = self.parameters[end] - self.parameters[first]
        activations: Any = self.activations[end] - self.activations[first]
        if self.also_kept is not None:
            activations = activations + self.also_kept[first, end]
        if local:
            assert self.blocks is not None
            parameters = parameters + self.blocks.parameters[end]
            activations = activations + self.blocks.activations[end]
        return Unit("", 0.0, 0.0, parameters, 0.0, activations, self.number_bytes)


class _BlockCosts:
    """The costs of heads by the unit before which their block ends, and the spared costs by the first unit of a block; arrays of
    n + 1."""

    def __init__(self, problem: Problem, blocks: BlockUnits, samples: int) -> None:
        def pad(values: Sequence[float]) -> FloatArray:
            return np.array([0.0, *values, 0.0])

        def time(unit: Unit) -> Tuple[float, float]:
            return compute_pass_seconds(unit, problem.hardware, problem.precision, samples)

        self.forward = pad([time(head)[0] for head in blocks.heads])
        self.backward = pad([time(head)[1] for head in blocks.heads])
        self.update = pad([problem.get_update_seconds(head) for head in blocks.heads])
        self.parameters = pad([head.parameters for head in blocks.heads])
        self.activations = pad([head.activation_bytes for head in blocks.heads])
        pairs = zip(problem.units[1:], blocks.first[1:])
        self.spared = pad([time(unit)[1] - time(first)[1] for unit, first in pairs])


def _accumulate(values: Sequence[float]) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])


@lru_cache(maxsize=8)
def _sum_also_kept(units: Tuple[Unit, ...]) -> Optional[FloatArray]:
    """Return the bytes that a stage and units before it both keep, by first unit and its end, (n + 1, n + 1); None if none."""
    sums = np.zeros((len(units) + 1, len(units) + 1))
    for i, unit in enumerate(units):
        for back, size in unit.also_kept:
            sums[i - back + 1 : i + 1, i + 1 :] += size
    return sums if sums.any() else None


@lru_cache(maxsize=None)
def _count_kept(method: Method, stages: int, accumulate: int, recompute: bool, lockstep: bool) -> KeptCounts:
    return count_kept(method, stages, accumulate, recompute, lockstep)


def _count_candidate(problem: Problem, asked: Candidate) -> KeptCounts:
    """Return the versions and microbatches that the stages keep."""
    # more than 2 P microbatches per update change nothing, unless the pipeline holds a whole batch
    holds_batch = asked.row.pipeline is Pipeline.FILL_DRAIN and not problem.lockstep
    count = asked.gradient_accumulation if holds_batch else min(asked.gradient_accumulation, 2 * asked.depth)
    return _count_kept(asked.row, asked.stages, count, asked.recompute, problem.lockstep)


class Costing:
    """The costs of one configuration's stages for any cut."""

    def __init__(
        self,
        problem: Problem,
        asked: Candidate,
        layout: ReplicaLayout,
        sums: Sums,
        transfers: Optional[BoundaryTransfers] = None,
    ) -> None:
        self.problem, self.asked, self.layout, self.sums = problem.resolve(asked.method), asked, layout, sums
        self.stashed = _count_candidate(problem, asked)
        self.onward, self.back = transfers or make_transfers(problem.hardware, layout)
        self.local = asked.row.structure is not None
        self.limit = problem.memory_bytes
        self.work = np.diff(sums.forward) * (2 if asked.recompute else 1) + np.diff(sums.backward)
        if self.local:
            assert sums.blocks is not None, "blocks are planned with the figures of their heads"
            self.work = self.work - sums.blocks.spared[:-1]

    # ---- cuts

    def cut(self) -> Optional[List[int]]:
        """Return the first units of the stages of the fastest cut that fits the memory, None if none fits.

        Each stage may first use all memory of its device; if the stages of a device do not fit together, each gets an equal
        share.
        """
        for share in {1: None, self.asked.stages_per_device: None}:
            self.limit = self.problem.memory_bytes / share
            starts = find_best_cut(self.work.tolist(), self.asked.stages, self._price_stages)
            if starts is None or self.asked.stages_per_device == 1:
                return starts
            if max(memory.total for memory in self.memories(starts)) <= self.problem.memory_bytes:
                return starts
        return None

    def may_fit(self) -> bool:
        """Return False if all devices together have too little memory even for the least stash."""
        stashed = self.stashed
        fewest = KeptCounts(*(np.array([count]) for count in (stashed.copies.min(), 0, stashed.activations.min())))
        first, end = np.array(0), np.array(len(self.work))
        whole = self._compute_memory(0, self.sums.make_stage(first, end, self.local), self.sums.entering[first], fewest)
        total = float(whole.total) + (self.asked.depth - 1) * float(whole.code)
        return total <= self.problem.memory_bytes * self.asked.depth

    def least_seconds(self, costs: Costs) -> float:
        """Return a lower bound of a batch with stages of these `costs` (see plan.batches)."""
        in_flight = np.maximum(self.stashed.inputs, self.stashed.activations)
        return bound_by_costs(self.asked, costs, in_flight, self.local, float(self.work.sum()))

    def least_memory(self) -> Optional[float]:
        """Return the least possible bytes of the fullest stage's device, None if there are too few units."""

        def price(first: IntArray, end: IntArray) -> StagePrices:
            stages, entering = self.sums.make_stage(first, end, self.local), self.sums.entering[first]
            return lambda k: np.asarray(self._compute_memory(self.asked.stages - k, stages, entering).total, np.float64)

        starts = find_best_cut([0.0] * len(self.work), self.asked.stages, price)
        return None if starts is None else max(memory.total for memory in self.memories(starts))

    def _price_stages(self, first: IntArray, end: IntArray) -> StagePrices:
        seconds = sum(self._compute_seconds(first, end))
        stages, entering = self.sums.make_stage(first, end, self.local), self.sums.entering[first]
        # activations and gradients are exchanged together between cycles
        both = self.problem.lockstep and not self.local
        onward, back = ([*(transfer.seconds for transfer in sent), 0.0] for sent in (self.onward, self.back))
        per_byte = np.add(onward, np.multiply(back, both))

        def price(k: IntArray) -> FloatArray:
            s = self.asked.stages - k
            leaving = self.sums.entering[end] * per_byte[s]
            cost = seconds + leaving if self.problem.lockstep else np.maximum(seconds, leaving)
            fits = self._compute_memory(s, stages, entering).total <= self.limit
            return np.where(fits & self.problem.fits_streaming(stages.parameters), cost, np.inf)

        return price

    # ---- figures of stages, of one or of many at once

    def _compute_seconds(self, first: IntArray, end: IntArray) -> Tuple[FloatArray, FloatArray]:
        """Return forward and backward of the stages of the units from `first` to before `end`."""
        sums = self.sums
        forward: FloatArray = sums.forward[end] - sums.forward[first]
        backward: FloatArray = sums.backward[end] - sums.backward[first]
        if self.local:
            assert sums.blocks is not None
            forward = forward + sums.blocks.forward[end]
            backward = backward + sums.blocks.backward[end] - sums.blocks.spared[first]
        return forward, backward + forward if self.asked.recompute else backward

    def _compute_memory(
        self, s: Any, stages: Unit, entering: Any, stashed: Optional[KeptCounts] = None
    ) -> StageMemory:
        """Return the memory of `stages` as the s-th."""
        return compute_stage_memory(
            stages,
            entering,
            (stashed or self.stashed).select(s),
            precision=self.problem.precision,
            samples=self.asked.micro_batch_size,
            moments=self.problem.moments,
            device=self.problem.hardware.device,
            streamed=self.problem.streamed,
        )

    def memories(self, starts: Sequence[int]) -> List[StageMemory]:
        """Return the bytes of each device."""
        of_devices: Dict[int, List[StageMemory]] = {}
        for s, (a, b) in enumerate(zip(starts, [*starts[1:], len(self.work)])):
            stage = self.sums.make_stage(np.array(a), np.array(b), self.local)
            memory = self._compute_memory(s, stage, self.sums.entering[a])
            of_devices.setdefault(self.asked.placement[s], []).append(memory)
        return [
            StageMemory(*(int(sum(sizes)) for sizes in zip(*memories)))._replace(code=int(memories[0].code))
            for _, memories in sorted(of_devices.items())
        ]

    def costs(self, starts: Sequence[int]) -> Costs:
        """Return the costs of the stages that begin at `starts`, for the clock."""
        first, end = np.array(starts), np.array([*starts[1:], len(self.work)])
        sums, asked, hardware = self.sums, self.asked, self.problem.hardware
        forward, backward = self._compute_seconds(first, end)
        # each gradient of a matrix product costs as much as the product; recomputation comes before the first of them
        split = self.asked.row.order is not None
        weights = ((backward - forward * asked.recompute) / 2).tolist() if split else ()
        heads = sums.blocks.update[end] if self.local and sums.blocks else 0.0
        update = sums.update[end] - sums.update[first] + heads
        sizes = sums.entering[first[1:]]
        parameters: Any = sums.make_stage(first, end, self.local).parameters
        gradients = parameters * PRECISIONS[self.problem.precision].gradient
        reduce: Tuple[Transfer, ...] = ()
        if asked.width > 1:
            reduce = tuple(
                make_reduce_transfer(hardware, self.layout, s, float(size)) for s, size in enumerate(gradients)
            )
        enter = 0.0
        if self.problem.lockstep:
            enter = compute_host_seconds(hardware, self.layout.list_replicas(0), float(sums.entering[0]))
        return Costs(
            forward.tolist(),
            backward.tolist(),
            update.tolist(),
            onward=tuple(scale_transfer(one, float(size)) for one, size in zip(self.onward, sizes)),
            back=tuple(scale_transfer(one, float(size)) for one, size in zip(self.back, sizes)),
            weight_gradient=weights,
            reduce=reduce,
            lockstep=self.problem.lockstep,
            enter=enter,
        )


@dataclass(frozen=True)
class Prediction:
    """A predicted configuration. `starts`: the first units of its stages; `memory`: the memory of its devices; `seconds`: the
    time of a batch; `link_busy`: the seconds in which each link is busy during it."""

    asked: Candidate
    layout: ReplicaLayout
    starts: Tuple[int, ...]
    costs: Costs
    memory: Tuple[StageMemory, ...]
    seconds: float
    link_busy: Dict[str, float]

    @property
    def samples_per_second(self) -> float:
        """Return the predicted throughput."""
        return self.asked.global_batch_size / self.seconds

    @property
    def work(self) -> List[float]:
        """Return the seconds that each stage computes for a microbatch."""
        return [f + b for f, b in zip(self.costs.forward, self.costs.backward)]

    @property
    def loads(self) -> List[float]:
        """Return the seconds that each device computes for a microbatch."""
        return [float(load) for load in sum_loads(np.array(self.work), self.asked.row)]

    @property
    def utilization(self) -> float:
        """Return the share of the time in which devices are in passes, on average over the stages."""
        return self.asked.gradient_accumulation * sum(self.work) / (self.asked.depth * self.seconds)


def make_batches(costing: Costing, starts: Sequence[int]) -> Batches:
    """Return the updates of a configuration that is cut at `starts`."""
    return Batches(costing.asked.row, costing.asked.stages, costing.costs(starts))


def predict_cut(costing: Costing, starts: Sequence[int], batches: Optional[Batches] = None) -> Prediction:
    """Predict a configuration that is cut at `starts`, whether it fits or not. `batches`: its updates, as far as played."""
    asked, batches = costing.asked, batches or make_batches(costing, starts)
    time = batches.time(asked.gradient_accumulation)
    memory = tuple(costing.memories(starts))
    return Prediction(asked, costing.layout, tuple(starts), batches.costs, memory, time.seconds, time.link_busy)


def predict_fastest(problem: Problem, asked: Candidate, starts: Sequence[int]) -> Prediction:
    """Return the prediction for the fastest layout of a candidate that is cut at `starts`."""
    sums = Sums(problem.resolve(asked.method), asked.micro_batch_size)
    layouts = list_layouts(asked.depth, asked.width, asked.placement)
    predictions = [predict_cut(Costing(problem, asked, layout, sums), starts) for layout in layouts]
    return max(predictions, key=lambda prediction: prediction.samples_per_second)


def remove_transfers(costs: Costs) -> Costs:
    """Return the costs if every message arrived at once."""
    return replace(costs, onward=(), back=(), reduce=(), link=0.0, enter=0.0)
