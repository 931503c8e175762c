"""Recomputation by segments of stages (PipeMare, appendix A): which stages recompute, when, and what they keep meanwhile.

segments        0 0 0 1 1 1         two segments of three stages
heads           x . . x . .         the first stage keeps its inputs and needs no other stage's recomputation
recomputes      5 3 1 5 3 1         steps before its own backward (turn 1): 2 (last stage of the segment - s) + turn
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.runs import ALL_STAGES, IntArray
from ipu_pipe.schedule.table import Schedule


class KeptMicrobatches(NamedTuple):
    """Microbatches (P,) of which a stage keeps its input only, and of which it keeps all activations."""

    inputs: IntArray
    activations: IntArray


def find_segment_ends(stages: int, segments: int) -> IntArray:
    """Return the last stage of each stage's segment (P,): `segments` of nearly equal length, longer ones first.

    0 means the square root of P, rounded (PipeMare's optimum). Raises BadInput for more segments than stages.
    """
    segments = segments or max(round(stages**0.5), 1)
    if not 1 <= segments <= stages:
        raise BadInput(f"method_args.recompute.segments: {segments}: must be from 1 to the number of stages, {stages}")
    lengths = [len(part) for part in np.array_split(np.arange(stages), segments)]
    return np.repeat(np.cumsum(lengths) - 1, lengths)


def find_segment_heads(ends: IntArray) -> NDArray[np.bool_]:
    """Return whether each stage (P,) is the first of its segment, from the `ends` of `find_segment_ends`."""
    return np.concatenate([[True], ends[1:] != ends[:-1]])


def recompute_slots(schedule: Schedule, method: Method, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
    """Return the slots (P, last - first) in which the activations of the microbatches [first, last) are recomputed.

    A segment's recomputation runs forward through it, one stage per step, and ends with the step in which its last stage turns
    a microbatch around: stage s of a segment that ends with stage z recomputes 2 (z - s) + turn steps before its own backward.
    """
    assert method.segments is not None
    begins = np.arange(schedule.stages)[stages]
    ends = find_segment_ends(schedule.stages, method.segments)[stages]
    turn = method.turn if schedule.stages > 1 else 0
    backward = schedule.slots(Kind.BACKWARD, first, last, slice(int(ends[0]), int(ends[-1]) + 1))
    return np.asarray(backward[ends - ends[0]] - turn - (ends - begins)[:, None])


def count_kept_by_segments(in_flight: Sequence[int], segments: int, turn: int) -> KeptMicrobatches:
    """Return what the dataflow schedule keeps with recomputation by segments, if `in_flight` (P,) microbatches are in flight.

    Counted as `Schedule.max_in_flight` counts. Stage s of a segment that ends with stage z recomputes 2(z-s) + `turn` steps
    before its own backward, and both of these steps count: 2(z-s) + `turn` + 1 microbatches' activations, or all that are in
    flight. The head of a segment keeps the inputs of the others until it recomputes them. PipeMare's appendix A.3 leaves out
    the turn and the microbatch that a step itself works on: turn + 1 fewer on every stage.
    """
    flying = np.asarray(in_flight, np.int64)
    ends = find_segment_ends(len(flying), segments)
    window = 2 * (ends - np.arange(len(flying))) + (turn if len(flying) > 1 else 0) + 1
    activations = np.minimum(flying, window)
    return KeptMicrobatches(np.where(find_segment_heads(ends), flying - activations, 0), activations)
