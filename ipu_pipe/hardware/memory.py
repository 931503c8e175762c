"""The memory formula: bytes of each kind on a stage's device, by method. Runs are reported and
configurations planned with it.

    weights        one version, the newest
    versions       older versions that are still read
    gradients      one sum of the trained weights' gradients
    optimizer      its moments, and the master copy of a mixed precision
    accumulators   state of update rules (PipeMare's T2, ...)
    activations    `inputs` microbatches of which only the stage's input is kept, `activations` of which all is
    code           the program and its exchange, on devices that hold them in the same memory

How many microbatches: without recomputation all in flight; with it the inputs of all in flight, and
the activations of the one that is recomputed (Narayanan et al. 2021, section 3.1); by segments of
stages see `schedule.versions`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Sequence

import numpy as np

from ipu_pipe.hardware.description import Device
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.unit_costs import Unit, count_state_bytes
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.methods import Method, Timeline
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import (
    KeptMicrobatches,
    VersionTable,
    count_kept_by_segments,
    count_weight_copies,
)

# of one category: the sum of all seven is still an int64
MOST_BYTES = 2.0**59


class StageMemory(NamedTuple):
    """Bytes of each kind on a stage's device, or arrays with those of many stages."""

    weights: Any
    versions: Any
    gradients: Any
    optimizer: Any
    accumulators: Any
    activations: Any
    code: Any = 0

    @property
    def total(self) -> Any:
        """Return the sum of all kinds."""
        return sum(self)

    def round_down(self) -> "StageMemory":
        """Return whole bytes."""
        return StageMemory(
            *(
                np.floor(np.minimum(size, MOST_BYTES)).astype(np.int64)
                if isinstance(size, np.ndarray)
                else int(size)
                for size in self
            )
        )


class KeptCounts(NamedTuple):
    """The weight versions (`copies`, newest included) and `KeptMicrobatches` of a stage, or as
    arrays (P,) of all stages.
    """

    copies: Any
    inputs: Any
    activations: Any

    def select(self, s: Any) -> "KeptCounts":
        """Return the entry of stage s, or of several stages."""
        return KeptCounts(*(counts[s] for counts in self))


def count_kept_microbatches(
    in_flight: Sequence[float],
    recompute: bool,
    segments: int | None,
    turn: int,
    splits: bool = False,
) -> KeptMicrobatches:
    """Return which data each stage keeps of its `in_flight` (P,) microbatches.

    `recompute`: every stage recomputes from its input. Otherwise `segments`: the method recomputes
    by this number of segments of stages, 0 for the square root of P (None: it does not recompute).
    `turn`: as in `Method`. `splits`: weight gradients are computed later, which keeps what a
    backward has recomputed; at most all in flight wait for it.
    """
    counts = np.asarray(in_flight)
    if recompute:
        # the one that is recomputed
        return KeptMicrobatches(counts, counts if splits else np.ones_like(counts))
    if segments is not None and len(counts) > 1:
        return count_kept_by_segments(counts.tolist(), segments, turn)
    return KeptMicrobatches(np.zeros_like(counts), counts)


def make_lockstep_schedule(
    method: Method, stages: int, microbatches: int, accumulate: int
) -> Schedule:
    """Return the schedule of a method on hardware whose pipelines go in lock-step: PopTorch's.

    A pipeline that flushes does, in each cycle, a forward and a backward on every stage and drains
    before each update: N + 2P - 2 cycles, 2(P-1-s) + 1 microbatches in flight on stage s, as PopART
    stores them. Others keep their own timeline. Source: PopART, branch sdk-release-3.4
    (willow/src/transforms/pipeline.cpp). Not run on hardware.
    """
    if not method.flushes or method.pipeline is Timeline.SEQUENTIAL:
        return make_schedule(method, stages, microbatches, accumulate)
    in_cycles = replace(method, pipeline=Timeline.DATAFLOW, turn=0)
    return make_schedule(
        in_cycles, stages, microbatches, accumulate, range(0, microbatches, accumulate)
    )


def count_kept(
    method: Method, stages: int, accumulate: int, recompute: bool, lockstep: bool
) -> KeptCounts:
    """Return the most that each stage keeps with N = `accumulate` microbatches per update, the
    start-up included.

    `lockstep`: on the timeline of PopTorch, which recomputes on all stages but the last.
    """
    # a pipeline that never drains is followed until well after its start-up
    batches = 1 if method.flushes else -(-4 * (stages + accumulate) // accumulate)
    make = make_lockstep_schedule if lockstep else make_schedule
    schedule = make(method, stages, batches * accumulate, accumulate)
    in_flight: Sequence[float] = schedule.max_in_flight().tolist()
    # stages of one device have their peaks at different times
    if method.order is not None:
        counts = schedule.count_at_peak(method.order.weight_share)
        # a fraction is a microbatch of which only the weight gradient's part is left; an input is
        # kept whole
        in_flight = np.ceil(counts).tolist() if recompute else counts
    splits = schedule.passes == SPLIT_PASSES
    microbatches = count_kept_microbatches(
        in_flight, recompute, method.segments, method.turn, splits
    )
    if recompute and lockstep:
        # the last stage's backward follows its forward at once, while the activations are still
        # there
        microbatches.inputs[-1] = 0
    return KeptCounts(count_weight_copies(VersionTable(schedule, method)), *microbatches)


class StageSizes(NamedTuple):
    """Sizes in bytes from which the memory of a stage follows.

    `weights`: of one version; `frozen`: of weights that have only one version. `gradients`,
    `optimizer`, `accumulators`: of all sums and state. `saved`: all that one microbatch leaves for
    its backward; `entering`: its input.
    """

    weights: Any
    gradients: Any
    optimizer: Any
    accumulators: Any
    saved: Any
    entering: Any
    code: float = 0.0
    frozen: Any = 0


def sum_stage_bytes(counts: KeptCounts, sizes: StageSizes) -> StageMemory:
    """Return the memory of a stage's device by kind, in whole bytes. This is the only memory
    formula of the library.
    """
    return StageMemory(
        weights=sizes.weights + sizes.frozen,
        # the newest is among the weights
        versions=sizes.weights * (counts.copies - 1),
        gradients=sizes.gradients,
        optimizer=sizes.optimizer,
        accumulators=sizes.accumulators,
        activations=counts.inputs * sizes.entering + counts.activations * sizes.saved,
        code=sizes.code,
    ).round_down()


def compute_stage_memory(
    unit: Unit,
    entering: float,
    counts: KeptCounts,
    *,
    precision: str,
    samples: int,
    moments: int,
    device: Device | None = None,
    streamed: bool = False,
) -> StageMemory:
    """Return the memory of the device of stage `unit` with microbatches of `samples`, without the
    state of update rules.

    `entering`: bytes that come in with a microbatch. `moments`: of the optimizer. `device`: whose
    share of code is charged, and padding. `streamed`: the optimizer's state is in streaming memory.
    """
    bytes_per_number = PRECISIONS[precision]
    parameters = unit.parameters
    saved = samples * unit.activation_bytes * bytes_per_number.activation / unit.number_bytes
    if device is not None and device.activation_padding is not None:
        saved = saved * device.activation_padding.value
    sizes = StageSizes(
        weights=parameters * bytes_per_number.weight,
        gradients=parameters * bytes_per_number.gradient,
        optimizer=0 if streamed else parameters * count_state_bytes(precision, moments),
        accumulators=0,
        # autocast keeps a cast copy of the weights with every microbatch's activations
        saved=saved + parameters * bytes_per_number.cast,
        entering=entering,
        code=device.code_bytes if device is not None else 0.0,
    )
    return sum_stage_bytes(counts, sizes)
