"""The player of slots, and plain policies: what a stage does next, given what earlier slots completed.

A policy is what a pipeline *is*, and slow. `timelines` has each pipeline's policy under its drawing, beside its closed form.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipu_pipe.schedule.actions import PASSES, Action, Kind, pass_needs


def play_slots(devices: int, choose: Callable[[int], Sequence[Action]], complete: Callable[[Action, int], None]) -> int:
    """Play slot by slot until no device goes on; return the number of slots.

    choose(device): its actions of this slot. All devices choose before any action completes. complete(action, slot): note it.
    """
    slot = 0
    while True:
        actions = [action for device in range(devices) for action in choose(device)]
        if not actions:
            return slot
        for action in actions:
            complete(action, slot)
        slot += 1


class Sight:
    """What the stage `stage` sees when it chooses: the passes that each stage has done, its own last one, the sizes.

    Every stage takes the microbatches in order, so that counts say all. P `stages`, M `microbatches`, N = `accumulate`
    microbatches per update; `turn` as in Method.
    """

    def __init__(self, stages: int, microbatches: int, accumulate: int, turn: int, local: bool) -> None:
        self.stages, self.microbatches, self.accumulate, self.turn = stages, microbatches, accumulate, turn
        self.stage = 0
        self.done: Dict[Kind, List[int]] = {kind: [0] * stages for kind in PASSES}
        self.last: List[Optional[Kind]] = [None] * stages
        self._needs = {kind: pass_needs(kind, local) for kind in PASSES}  # looked up often

    @property
    def in_flight(self) -> int:
        """Return the number of microbatches between their forward and their backward on this stage."""
        return self.done[Kind.FORWARD][self.stage] - self.done[Kind.BACKWARD][self.stage]

    def can(self, kind: Kind, besides: Optional[Kind] = None) -> bool:
        """Return whether the next pass of `kind` can run. `besides`: the stage does that pass earlier in the same slot."""
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


class PolicySlots(NamedTuple):
    """The slot of every pass, by kind, stage and microbatch, and how many slots there are."""

    slots: Dict[Kind, List[List[int]]]
    length: int


def play_policy(
    policy: Policy, stages: int, microbatches: int, accumulate: int, turn: int = 0, local: bool = False
) -> PolicySlots:
    """Play a policy from an empty pipeline to an empty one. Arguments as in `Sight`."""
    sight = Sight(stages, microbatches, accumulate, turn if stages > 1 else 0, local)
    slots: Dict[Kind, List[List[int]]] = {kind: [[] for _ in range(stages)] for kind in PASSES}

    def choose(stage: int) -> List[Action]:
        sight.stage = stage
        return [Action(kind, sight.done[kind][stage], stage) for kind in policy(sight)]

    def complete(action: Action, slot: int) -> None:
        slots[action.kind][action.stage].append(slot)
        sight.done[action.kind][action.stage] += 1
        sight.last[action.stage] = action.kind

    length = play_slots(stages, choose, complete)
    assert min(sight.done[Kind.BACKWARD]) == microbatches, f"no stage goes on after slot {length}"
    return PolicySlots(slots, length)
