"""What a stage's device holds, by method: the one place with the formulas. Reports print it for a run, the planner asks for it.

    weights        one version, the newest
    versions       older ones that are alive
    gradients      one sum of the trained weights' gradients
    optimizer      its moments, and the master copy of a mixed precision
    accumulators   what rules keep beside (PipeMare's T2, ...)
    activations    `inputs` microbatches of which the stage's input alone is kept, `activations` of which all is
    code           the program and its exchange, on devices that hold them in the same memory

How many microbatches: without recomputation all in flight; with it the inputs of all in flight, and the activations of the one
that is recomputed (Narayanan et al. 2021, section 3.1); by segments see `schedule.figures.held`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Optional, Sequence

import numpy as np

from ipu_pipe.hardware.description import Device
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.times import state_bytes
from ipu_pipe.hardware.units import Unit
from ipu_pipe.schedule import figures
from ipu_pipe.schedule.copies import weight_copies
from ipu_pipe.schedule.figures import Held
from ipu_pipe.schedule.methods import Method, Pipeline
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable

MOST_BYTES = 2.0**59  # of one kind; a sum of all seven kinds is still an int64


class StageMemory(NamedTuple):
    """Bytes of each kind on a stage's device."""

    weights: int
    versions: int
    gradients: int
    optimizer: int
    accumulators: int
    activations: int
    code: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Holding(NamedTuple):
    """What the stages of a pipeline hold (P,): versions of their weights, newest included, and microbatches as in `Held`."""

    copies: IntArray
    inputs: IntArray
    activations: IntArray


def held_microbatches(in_flight: Sequence[int], recompute: bool, segments: Optional[int] = None, turn: int = 0) -> Held:
    """Microbatches (P,) of which each stage keeps the input alone, and of which all, if so many are in flight there.

    `recompute`: every stage recomputes; `segments`: the method's own recomputation does, as many consecutive stages as there are
    in each (None: no such).
    """
    flying = np.asarray(in_flight, np.int64)
    if recompute:
        return Held(flying, np.ones_like(flying))
    if segments is not None and len(flying) > 1:
        return figures.held(in_flight, segments, turn)
    return Held(np.zeros_like(flying), flying)


def lockstep_schedule(method: Method, stages: int, microbatches: int, accumulate: int) -> Schedule:
    """The timeline of a method on hardware whose pipelines go in lock-step: PopTorch's.

    A pipeline that flushes does, in each cycle, a forward and a backward on every stage and is empty before each update:
    N + 2P - 2 cycles, 2(P-1-s) + 1 microbatches in flight on stage s, PopART's stash. Others keep their own timeline.
    Source: PopART, branch sdk-release-3.4 (willow/src/transforms/pipeline.cpp). Not run on hardware.
    """
    if not method.flushes or method.pipeline is Pipeline.SEQUENTIAL:
        return make_schedule(method, stages, microbatches, accumulate)
    merged = replace(method, pipeline=Pipeline.DATAFLOW, turn=0)
    return make_schedule(merged, stages, microbatches, accumulate, range(0, microbatches, accumulate))


def holding(method: Method, stages: int, accumulate: int, recompute: bool, lockstep: bool = False) -> Holding:
    """What each stage holds at most with N = `accumulate` microbatches an update, the start-up included. `lockstep`: on the
    timeline of PopTorch, which recomputes on all stages but the last."""
    batches = 1 if method.flushes else -(-4 * (stages + accumulate) // accumulate)
    make = lockstep_schedule if lockstep else make_schedule
    schedule = make(method, stages, batches * accumulate, accumulate)
    kept = held_microbatches(schedule.max_in_flight().tolist(), recompute, method.segments, method.turn)
    if recompute and lockstep:
        kept.inputs[-1] = 0
    return Holding(weight_copies(VersionTable(schedule, method)), *kept)


def stage_bytes(
    *,
    weights: float,
    copies: int,
    gradients: float,
    optimizer: float,
    accumulators: float,
    saved: float,
    entering: float,
    inputs: int,
    activations: int,
    code: float = 0.0,
) -> StageMemory:
    """From the bytes of one version, of the sums of gradients, of state, and of one microbatch: `saved` all that it leaves,
    `entering` its input."""
    older, held = weights * (copies - 1), inputs * entering + activations * saved
    return StageMemory(*map(_whole, (weights, older, gradients, optimizer, accumulators, held, code)))


def _whole(size: Any) -> Any:
    """Round down to whole bytes, of one stage or of an array of stages; more than an int64 holds is MOST_BYTES."""
    return np.floor(np.minimum(size, MOST_BYTES)).astype(np.int64) if isinstance(size, np.ndarray) else int(size)


def stage_memory(
    unit: Unit,
    entering: float,
    copies: int,
    inputs: int,
    activations: int,
    *,
    precision: str,
    samples: int,
    optimizer: str,
    device: Optional[Device] = None,
    accumulators: int = 0,
    trained: bool = True,
    streamed: bool = False,
) -> StageMemory:
    """Of a stage that `unit` is (see `units.joined`), with microbatches of `samples` and a row of `holding`.

    `entering`: bytes of what comes in with a microbatch (`times.boundary_bytes` of the stage before). `optimizer`: of
    times.MOMENTS. `accumulators`: copies of the weights that rules keep. `device`: whose share of code is charged. Not
    `trained`: it has weights and hands activations on, nothing else. `streamed`: the optimizer's state lies in streaming memory.
    """
    sizes, count = PRECISIONS[precision], unit.parameters
    learns = count if trained else 0
    return stage_bytes(
        weights=count * sizes.weight,
        copies=copies,
        gradients=learns * sizes.gradient,
        optimizer=0 if streamed else learns * state_bytes(precision, optimizer),
        accumulators=learns * accumulators * sizes.weight,
        saved=samples * unit.activation_bytes * sizes.activation / unit.number_bytes + learns * sizes.cast
        if trained
        else 0.0,
        entering=entering,
        inputs=inputs,
        activations=activations,
        code=device.code_bytes if device is not None else 0.0,
    )
