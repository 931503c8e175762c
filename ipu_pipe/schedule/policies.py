"""Plain policies: what a stage does next, knowing what earlier slots completed, played slot by slot.

This is what a pipeline *is*, and slow. `timelines` has each pipeline's policy under its drawing, beside its closed form.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ipu_pipe.schedule.actions import PASSES, Kind, pass_needs


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
        return self.done[Kind.FORWARD][self.stage] - self.done[Kind.BACKWARD][self.stage]

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


class Played(NamedTuple):
    """The slot of every pass, by kind, stage and microbatch, and how many slots there are."""

    slots: Dict[Kind, List[List[int]]]
    length: int


def play(policy: Policy, stages: int, microbatches: int, accumulate: int, turn: int = 0, local: bool = False) -> Played:
    """From an empty pipeline to an empty one, slot by slot; all stages choose before any completes. Arguments as in `Sight`."""
    sight = Sight(stages, microbatches, accumulate, turn if stages > 1 else 0, local)
    slots: Dict[Kind, List[List[int]]] = {kind: [[] for _ in range(stages)] for kind in PASSES}
    slot = 0
    while min(sight.done[Kind.BACKWARD]) < microbatches:
        chosen = []
        for sight.stage in range(stages):
            chosen += [(sight.stage, kind) for kind in policy(sight)]
        assert chosen, f"no stage goes on after slot {slot}"
        for stage, kind in chosen:
            slots[kind][stage].append(slot)
            sight.done[kind][stage] += 1
            sight.last[stage] = kind
        slot += 1
    return Played(slots, slot)
