"""Recomputation by segments of stages (PipeMare, appendix A): where segments begin and end, and when they recompute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.runs import ALL_STAGES, IntArray
from ipu_pipe.schedule.table import Schedule


def segment_ends(stages: int, segments: int) -> IntArray:
    """The last stage of each stage's segment (P,): `segments` consecutive ones as equal as possible, longer ones first.

    0 stands for as many as the square root of P, rounded (PipeMare's optimum). Raises BadInput for more than P.
    """
    segments = segments or max(round(stages**0.5), 1)
    if not 1 <= segments <= stages:
        raise BadInput(f"method_args.recompute.segments: {segments}: must be from 1 to the number of stages, {stages}")
    lengths = [len(part) for part in np.array_split(np.arange(stages), segments)]
    return np.repeat(np.cumsum(lengths) - 1, lengths)


def segment_heads(ends: IntArray) -> NDArray[np.bool_]:
    """Whether each stage is the first one of its segment, which keeps the input; `ends`: of each stage's segment."""
    return np.concatenate([[True], ends[1:] != ends[:-1]])


def recompute_slots(schedule: Schedule, method: Method, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
    """The slots (P, last - first) in which the activations of the microbatches [first, last) are recomputed.

    A segment's recomputation runs forward through it, one stage a step, and ends with the step in which its last stage
    turns a microbatch around: stage s of a segment that ends with stage z recomputes 2 (z - s) + turn steps before its
    own backward.
    """
    assert method.segments is not None
    begins = np.arange(schedule.stages)[stages]
    ends = segment_ends(schedule.stages, method.segments)[stages]
    turn = method.turn if schedule.stages > 1 else 0
    backward = schedule.slots(Kind.BACKWARD, first, last, slice(int(ends[0]), int(ends[-1]) + 1))
    return np.asarray(backward[ends - ends[0]] - turn - (ends - begins)[:, None])
