"""The methods' pipelines as plain policies: what a stage does next, knowing what earlier slots completed.

This is what a pipeline *is*. Played slot by slot it is slow: ipu_pipe.schedule.timelines draws each pipeline and gives its
closed form, which is tested to be the same.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ipu_pipe.schedule.actions import Kind, pass_needs
from ipu_pipe.schedule.methods import Pipeline
from ipu_pipe.schedule.runs import PASSES

FORWARD, BACKWARD = PASSES


class Sight:
    """What stage `stage` sees when it chooses: the passes that each stage has done, its own last one, the sizes.

    Every stage takes the microbatches in order, so that counts say all. P `stages`, M `microbatches`, N = `accumulate`
    microbatches an update; `turn` as in Method.
    """

    def __init__(self, stages: int, microbatches: int, accumulate: int, turn: int, local: bool) -> None:
        self.stages, self.microbatches, self.accumulate, self.turn = stages, microbatches, accumulate, turn
        self.stage = 0
        self.done: Dict[Kind, List[int]] = {kind: [0] * stages for kind in PASSES}
        self.last: List[Optional[Kind]] = [None] * stages
        self._needs = {kind: pass_needs(kind, local) for kind in PASSES}  # looked up often

    @property
    def in_flight(self) -> int:
        """Microbatches between their forward and their backward on this stage."""
        return self.done[FORWARD][self.stage] - self.done[BACKWARD][self.stage]

    def can(self, kind: Kind, besides: Optional[Kind] = None) -> bool:
        """Whether what the next pass of `kind` needs is done. `besides`: this stage does that pass earlier in the slot."""
        microbatch = self.done[kind][self.stage]
        if microbatch == self.microbatches:
            return False
        for need, offset in self._needs[kind]:
            stage = self.stage + offset
            if 0 <= stage < self.stages:
                done = self.done[need][stage] + (offset == 0 and need is besides)
                if done <= microbatch:
                    return False
        return True


# The passes that the stage does in this slot, in order.
Policy = Callable[[Sight], Tuple[Kind, ...]]


def _one_of(sight: Sight, forward: bool, backward: bool) -> Tuple[Kind, ...]:
    """A backward as soon as there is one, but forwards and backwards in turn where both are ready."""
    if forward and backward:
        return (FORWARD,) if sight.last[sight.stage] is BACKWARD else (BACKWARD,)
    return (FORWARD,) if forward else (BACKWARD,) if backward else ()


def sequential(sight: Sight) -> Tuple[Kind, ...]:
    """The first stage lets a microbatch in when none is under way."""
    enters = sight.stage > 0 or sight.in_flight < 1
    return _one_of(sight, sight.can(FORWARD) and enters, sight.can(BACKWARD))


def fill_drain(sight: Sight) -> Tuple[Kind, ...]:
    """No backward before all forwards of the batch."""
    filled = sight.done[FORWARD][sight.stage] == sight.microbatches
    return _one_of(sight, sight.can(FORWARD), sight.can(BACKWARD) and filled)


def capped_1f1b(sight: Sight) -> Tuple[Kind, ...]:
    """Stage s holds at most P-s microbatches."""
    fits = sight.in_flight < sight.stages - sight.stage
    return _one_of(sight, sight.can(FORWARD) and fits, sight.can(BACKWARD))


def pipedream_1f1b(sight: Sight) -> Tuple[Kind, ...]:
    """The first stage holds at most P microbatches, the others what comes."""
    fits = sight.stage > 0 or sight.in_flight < sight.stages
    return _one_of(sight, sight.can(FORWARD) and fits, sight.can(BACKWARD))


def dataflow(sight: Sight) -> Tuple[Kind, ...]:
    """Every step a forward of what arrived and a backward of what came back; the last stage turns around, in the same step
    (turn 0) or in the next one (turn 1)."""
    forward = sight.can(FORWARD)
    backward = sight.can(BACKWARD, besides=FORWARD if forward and sight.turn == 0 else None)
    return (FORWARD,) * forward + (BACKWARD,) * backward


def local(sight: Sight) -> Tuple[Kind, ...]:
    """Every step a forward of what arrived and, from the stage's own loss, its backward."""
    return PASSES if sight.can(FORWARD) else ()


def local_shared(sight: Sight) -> Tuple[Kind, ...]:
    """As `local`, but a stage begins a batch only when the next stage, whose gradient it must have, is through the last."""
    microbatch, following = sight.done[FORWARD][sight.stage], sight.stage + 1
    begins = microbatch % sight.accumulate == 0 and following < sight.stages
    waits = begins and sight.done[BACKWARD][following] < microbatch
    return () if waits else local(sight)


POLICIES: Dict[Pipeline, Policy] = {
    Pipeline.SEQUENTIAL: sequential,
    Pipeline.FILL_DRAIN: fill_drain,
    Pipeline.ONE_F_ONE_B_FLUSH: capped_1f1b,
    Pipeline.ONE_F_ONE_B: pipedream_1f1b,
    Pipeline.ONE_F_ONE_B_CAPPED: capped_1f1b,
    Pipeline.DATAFLOW: dataflow,
    Pipeline.LOCAL: local,
    Pipeline.LOCAL_SHARED: local_shared,
}
LOCAL = (Pipeline.LOCAL, Pipeline.LOCAL_SHARED)


class Played(NamedTuple):
    """The slot of every pass, by kind, stage and microbatch, and how many slots there are."""

    slots: Dict[Kind, List[List[int]]]
    length: int


def play(pipeline: Pipeline, stages: int, microbatches: int, accumulate: int, turn: int = 0) -> Played:
    """`pipeline` from an empty one to an empty one, slot by slot; all stages choose before any completes."""
    sight = Sight(stages, microbatches, accumulate, turn if stages > 1 else 0, pipeline in LOCAL)
    slots: Dict[Kind, List[List[int]]] = {kind: [[] for _ in range(stages)] for kind in PASSES}
    policy, slot = POLICIES[pipeline], 0
    while min(sight.done[BACKWARD]) < microbatches:
        chosen = []
        for sight.stage in range(stages):
            chosen += [(sight.stage, kind) for kind in policy(sight)]
        assert chosen, f"{pipeline.value}: no stage goes on after slot {slot}"
        for stage, kind in chosen:
            slots[kind][stage].append(slot)
            sight.done[kind][stage] += 1
            sight.last[stage] = kind
        slot += 1
    return Played(slots, slot)
