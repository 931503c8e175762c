"""The glossary of actions: the kinds of actions of a stage, and the actions that each one needs.

Schedules, messages between processes, traces and the clock take their letters, words and order from
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Collection, NamedTuple


class Kind(Enum):
    """The kinds of actions in their order within a slot; the value is the letter in drawings.

    RECOMPUTE repeats a forward for the activations that its backward needs. BACKWARD computes both
    gradients. INPUT_GRADIENT is the first half of a split backward, for which the previous stage
    waits; WEIGHT_GRADIENT is the second half, for which only the update waits. AVERAGE averages
    over the replicas: the weights in a method with rounds (LocalSGD), otherwise the gradients.
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    UPDATE = "U"
    AVERAGE = "A"

    # Enum's own hash is a Python function, which the clock's tables would call a million times
    __hash__ = object.__hash__

    def __init__(self, letter: str) -> None:
        # the name in traces
        self.word = self.name.lower().replace("_", " ")


# The passes of every microbatch on every stage. The last one completes the microbatch there: its
# activations are freed, and the update no longer waits for it.
PASSES = (Kind.FORWARD, Kind.BACKWARD)
SPLIT_PASSES = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Action:
    """One planned action: the `kind` of microbatch `index` (for an update or average: update
    `index`) on `stage`.
    """

    kind: Kind
    index: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index} on stage {self.stage}"


class Need(NamedTuple):
    """A need of a pass: the `kind` of the same microbatch on stage + `offset`."""

    kind: Kind
    offset: int


# kind of a pass -> its needs, if those stages exist
_NEEDS: dict[Kind, tuple[Need, ...]] = {
    Kind.FORWARD: (Need(Kind.FORWARD, -1),),
    Kind.RECOMPUTE: (Need(Kind.FORWARD, 0), Need(Kind.RECOMPUTE, -1)),
    Kind.BACKWARD: (Need(Kind.FORWARD, 0), Need(Kind.BACKWARD, +1)),
    Kind.INPUT_GRADIENT: (Need(Kind.FORWARD, 0), Need(Kind.INPUT_GRADIENT, +1)),
    Kind.WEIGHT_GRADIENT: (Need(Kind.INPUT_GRADIENT, 0),),
}


def get_pass_needs(
    kind: Kind, local: bool = False, begins_segment: bool = False
) -> tuple[Need, ...]:
    """Return the needs of a pass of `kind`.

    `local`: each stage has its own loss, so no stage needs a later stage's pass. `begins_segment`:
    the stage is the first of a segment of recomputation; it starts from its stored input and needs
    no other stage's recomputation.
    """
    return tuple(
        need
        for need in _NEEDS[kind]
        if not (need.offset > 0 and local)
        and not (need == Need(Kind.RECOMPUTE, -1) and begins_segment)
    )


def list_needs(
    action: Action, stages: int, whole: Collection[tuple[int, int]] = ()
) -> list[Action]:
    """Return the passes that a pass needs, on P `stages`.

    All are in earlier slots, except that in a slot with two passes the forward comes first. An
    update is in the slot of the last pass of its batch. `whole`: the (stage, microbatch) pairs
    whose two halves are one backward, which sends its gradient at its end.
    """
    needs = []
    for kind, offset in get_pass_needs(action.kind):
        stage = action.stage + offset
        if 0 <= stage < stages:
            ends_later = (
                kind is Kind.INPUT_GRADIENT and offset > 0 and (stage, action.index) in whole
            )
            needs.append(Action(Kind.WEIGHT_GRADIENT if ends_later else kind, action.index, stage))
    return needs
