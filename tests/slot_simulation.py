"""The rules of the pipelines played out slot by slot: what the closed forms are tested against."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

from ipu_pipe.schedule.methods import METHODS, Pipeline
from ipu_pipe.schedule.policies import play_policy
from ipu_pipe.schedule.timelines import PIPELINES

Slots = Dict[Tuple[int, str, int], int]
# Methods with a policy for each stage; the others give each device an order of passes (see test_orders).
PLAYED = {name: method for name, method in METHODS.items() if method.order is None}
# How many microbatches go through between an empty pipeline and an empty one, as a function of N; the others never empty.
EMPTIES = {
    Pipeline.SEQUENTIAL: lambda accumulate: 1,
    Pipeline.FILL_DRAIN: lambda accumulate: accumulate,
    Pipeline.ONE_F_ONE_B_FLUSH: lambda accumulate: accumulate,
    Pipeline.LOCAL_SGD: lambda accumulate: 5 * accumulate,  # local steps of a round
}


class Simulated(NamedTuple):
    slots: Slots  # (stage, "F" or "B", microbatch) -> slot
    length: int
    updates: List[List[Tuple[int, int]]]  # per stage (slot, k), in order


def simulate(pipeline: Pipeline, stages: int, microbatches: int, accumulate: int, turn: int = 0) -> Simulated:
    """Play `pipeline` from the first microbatch to the last."""
    timeline = PIPELINES[pipeline]
    batch = EMPTIES[pipeline](accumulate) if pipeline in EMPTIES else microbatches
    slots: Slots = {}
    length = 0
    for first in range(0, microbatches, batch):
        played = play_policy(timeline.policy, stages, min(batch, microbatches - first), accumulate, turn, timeline.local)
        for kind, rows in played.slots.items():
            for s, row in enumerate(rows):
                slots.update({(s, kind.value, first + m): slot + length for m, slot in enumerate(row)})
        length += played.length
    return Simulated(slots, length, [_updates(slots, s, microbatches, accumulate) for s in range(stages)])


def _updates(slots: Slots, stage: int, microbatches: int, accumulate: int) -> List[Tuple[int, int]]:
    batches = [range(k * accumulate, (k + 1) * accumulate) for k in range(microbatches // accumulate)]
    return [(max(slots[stage, "B", m] for m in batch), k) for k, batch in enumerate(batches)]
