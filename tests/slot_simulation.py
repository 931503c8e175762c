"""Play the rules of the pipelines slot by slot: the reference for the tests of the closed forms."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ipu_pipe.schedule.actions import PASSES, Action, Kind, get_pass_needs
from ipu_pipe.schedule.methods import METHODS, Timeline
from ipu_pipe.schedule.rows import play_slots
from ipu_pipe.schedule.timelines import PIPELINES

FORWARD, BACKWARD = PASSES
Slots = Dict[Tuple[int, str, int], int]
# Methods with a policy for each stage; the others give each device an order of passes (see test_orders).
PLAYED = {name: method for name, method in METHODS.items() if method.order is None}
# How many microbatches go through between an empty pipeline and an empty one, as a function of N; the others never empty.
EMPTIES = {
    Timeline.SEQUENTIAL: lambda accumulate: 1,
    Timeline.FILL_DRAIN: lambda accumulate: accumulate,
    Timeline.ONE_F_ONE_B_FLUSH: lambda accumulate: accumulate,
    Timeline.LOCAL_SGD: lambda accumulate: 5 * accumulate,  # local steps of a round
}


class Simulated(NamedTuple):
    slots: Slots  # (stage, "F" or "B", microbatch) -> slot
    length: int
    updates: List[List[Tuple[int, int]]]  # per stage (slot, k), in order


def simulate(
    pipeline: Timeline, stages: int, microbatches: int, accumulate: int, turn: int = 0
) -> Simulated:
    """Play `pipeline` from the first microbatch to the last."""
    batch = EMPTIES[pipeline](accumulate) if pipeline in EMPTIES else microbatches
    slots: Slots = {}
    length = 0
    for first in range(0, microbatches, batch):
        count = min(batch, microbatches - first)
        sight = Sight(stages, count, accumulate, turn, PIPELINES[pipeline].local)
        played = play_policy(POLICIES[pipeline], sight)
        for (s, kind, m), slot in played.slots.items():
            slots[s, kind, first + m] = slot + length
        length += played.length
    updates = [_find_update_slots(slots, s, microbatches, accumulate) for s in range(stages)]
    return Simulated(slots, length, updates)


def _find_update_slots(
    slots: Slots, stage: int, microbatches: int, accumulate: int
) -> List[Tuple[int, int]]:
    ends = [
        max(slots[stage, "B", k * accumulate + i] for i in range(accumulate))
        for k in range(microbatches // accumulate)
    ]
    return [(slot, k) for k, slot in enumerate(ends)]


# --- plain policies: the next passes of a stage after those of earlier slots


class Sight:
    """The view of the stage `stage` when it chooses: the passes that each stage has done, its own
    last one, the sizes.

    Every stage takes the microbatches in order, so that counts suffice. P `stages`, M
    `microbatches`, N = `accumulate` microbatches per update; `turn` as in Method.
    """

    def __init__(
        self, stages: int, microbatches: int, accumulate: int, turn: int, local: bool
    ) -> None:
        self.stages, self.microbatches, self.accumulate = stages, microbatches, accumulate
        self.turn = turn if stages > 1 else 0
        self.stage = 0
        self.done: Dict[Kind, List[int]] = {kind: [0] * stages for kind in PASSES}
        self.last: List[Optional[Kind]] = [None] * stages
        self._needs = {kind: get_pass_needs(kind, local) for kind in PASSES}  # looked up often

    @property
    def in_flight(self) -> int:
        """Return the number of microbatches between their forward and their backward on this stage."""
        return self.done[Kind.FORWARD][self.stage] - self.done[Kind.BACKWARD][self.stage]

    def can(self, kind: Kind, besides: Optional[Kind] = None) -> bool:
        """Return whether the next pass of `kind` can run. `besides`: the stage does that pass earlier in the same slot."""
        microbatch = self.done[kind][self.stage]
        for need, offset in self._needs[kind]:
            stage = self.stage + offset
            is_done_before = offset == 0 and need is besides
            if 0 <= stage < self.stages and self.done[need][stage] + is_done_before <= microbatch:
                return False
        return microbatch < self.microbatches


# The passes that the stage does in this slot, in order.
Policy = Callable[[Sight], Tuple[Kind, ...]]


class PolicySlots(NamedTuple):
    """The slot of every pass, and the number of slots."""

    slots: Slots
    length: int


def play_policy(policy: Policy, sight: Sight) -> PolicySlots:
    """Play a policy from an empty pipeline to an empty one."""
    slots: Slots = {}

    def choose_actions(stage: int) -> List[Action]:
        sight.stage = stage
        return [Action(kind, sight.done[kind][stage], stage) for kind in policy(sight)]

    def complete(action: Action, slot: int) -> None:
        slots[action.stage, action.kind.value, action.index] = slot
        sight.done[action.kind][action.stage] += 1
        sight.last[action.stage] = action.kind

    length = play_slots(sight.stages, choose_actions, complete)
    assert min(sight.done[BACKWARD]) == sight.microbatches, f"no stage goes on after slot {length}"
    return PolicySlots(slots, length)


def _choose_one(sight: Sight, forward: bool, backward: bool) -> Tuple[Kind, ...]:
    """Choose a backward as soon as there is one, but forwards and backwards in turn where both are ready."""
    if forward and backward:
        return (FORWARD,) if sight.last[sight.stage] is BACKWARD else (BACKWARD,)
    return (FORWARD,) if forward else (BACKWARD,) if backward else ()


def choose_sequential(sight: Sight) -> Tuple[Kind, ...]:
    """Choose a forward at stage 0 only if no microbatch is in flight."""
    enters = sight.stage > 0 or sight.in_flight < 1
    return _choose_one(sight, sight.can(FORWARD) and enters, sight.can(BACKWARD))


def choose_fill_drain(sight: Sight) -> Tuple[Kind, ...]:
    """Choose all forwards of the batch, then all backwards in the order of the forwards."""
    filled = sight.done[FORWARD][sight.stage] == sight.microbatches
    return _choose_one(sight, sight.can(FORWARD), sight.can(BACKWARD) and filled)


def choose_capped_1f1b(sight: Sight) -> Tuple[Kind, ...]:
    """Choose passes with at most P-s microbatches in flight on stage s."""
    fits = sight.in_flight < sight.stages - sight.stage
    return _choose_one(sight, sight.can(FORWARD) and fits, sight.can(BACKWARD))


def choose_pipedream_1f1b(sight: Sight, fits: bool = True) -> Tuple[Kind, ...]:
    """Choose passes with at most P microbatches in flight, counted at stage 0 only, so that
    stage 1 runs ahead (F2)."""
    fits = fits and (sight.stage > 0 or sight.in_flight < sight.stages)
    return _choose_one(sight, sight.can(FORWARD) and fits, sight.can(BACKWARD))


def choose_local_sgd(sight: Sight) -> Tuple[Kind, ...]:
    """Choose as `choose_pipedream_1f1b` over the steps of a round, R replicas (N here) in turn:
    a replica's next step waits for its previous one."""
    previous = sight.done[FORWARD][sight.stage] - sight.accumulate  # this replica's previous step
    return choose_pipedream_1f1b(sight, sight.done[BACKWARD][sight.stage] > previous)


def choose_dataflow(sight: Sight) -> Tuple[Kind, ...]:
    """Choose in every step a forward of the arrived activation and a backward of the arrived
    gradient."""
    forward = sight.can(FORWARD)
    backward = sight.can(BACKWARD, besides=FORWARD if forward and sight.turn == 0 else None)
    return (FORWARD,) * forward + (BACKWARD,) * backward


def choose_local(sight: Sight) -> Tuple[Kind, ...]:
    """Choose in every step a forward of the arrived activation and, at once, its backward from
    the stage's own loss."""
    return PASSES if sight.can(FORWARD) else ()


def choose_local_shared(sight: Sight) -> Tuple[Kind, ...]:
    """Choose as `choose_local`, but begin a batch only when the next stage has finished the
    previous one."""
    microbatch, following = sight.done[FORWARD][sight.stage], sight.stage + 1
    begins = microbatch % sight.accumulate == 0 and following < sight.stages
    waits = begins and sight.done[BACKWARD][following] < microbatch
    return () if waits else choose_local(sight)


POLICIES: Dict[Timeline, Policy] = {
    Timeline.SEQUENTIAL: choose_sequential,
    Timeline.FILL_DRAIN: choose_fill_drain,
    Timeline.ONE_F_ONE_B_FLUSH: choose_capped_1f1b,
    Timeline.ONE_F_ONE_B: choose_pipedream_1f1b,
    Timeline.ONE_F_ONE_B_CAPPED: choose_capped_1f1b,
    Timeline.LOCAL_SGD: choose_local_sgd,
    Timeline.DATAFLOW: choose_dataflow,
    Timeline.LOCAL: choose_local,
    Timeline.LOCAL_SHARED: choose_local_shared,
}
