"""The glossary of actions: what a stage can do, and the one place that says what must precede what.

Schedules, messages between processes, traces and the clock take their letters, words and order from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Collection, Dict, List, NamedTuple, Tuple


class Kind(Enum):
    """What a stage can do, in the order in which it does them within a slot; the value is the letter that is printed."""

    FORWARD = "F"
    RECOMPUTE = "R"  # repeats the forward, for the activations that a backward needs
    BACKWARD = "B"  # both gradients at once
    INPUT_GRADIENT = "I"  # first half of a split backward; the previous stage waits for it
    WEIGHT_GRADIENT = "W"  # second half; only the update waits for it
    UPDATE = "U"
    AVERAGE = "A"  # averages the weights over the replicas

    # Enum's own hash is a Python function, which the clock's tables would call a million times
    __hash__ = object.__hash__

    def __init__(self, letter: str) -> None:
        self.word = self.name.lower().replace("_", " ")  # the name that traces show


# The passes of every microbatch on every stage. The last of them completes it there: its activations are freed, and the update
# no longer waits for it.
PASSES = (Kind.FORWARD, Kind.BACKWARD)
SPLIT_PASSES = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Action:
    """One planned action: the `kind` of microbatch `index` (for an update or average: update `index`) on `stage`."""

    kind: Kind
    index: int
    stage: int
    replica: int = 0

    def __str__(self) -> str:
        where = f" of replica {self.replica}" if self.replica else ""
        return f"{self.kind.value}{self.index} on stage {self.stage}{where}"


class Need(NamedTuple):
    """A pass needs the `kind` of the same microbatch on stage + `offset`."""

    kind: Kind
    offset: int


# What a pass needs of the same microbatch, if that stage exists.
_NEEDS: Dict[Kind, Tuple[Need, ...]] = {
    Kind.FORWARD: (Need(Kind.FORWARD, -1),),
    Kind.RECOMPUTE: (Need(Kind.FORWARD, 0), Need(Kind.RECOMPUTE, -1)),
    Kind.BACKWARD: (Need(Kind.FORWARD, 0), Need(Kind.BACKWARD, +1)),
    Kind.INPUT_GRADIENT: (Need(Kind.FORWARD, 0), Need(Kind.INPUT_GRADIENT, +1)),
    Kind.WEIGHT_GRADIENT: (Need(Kind.INPUT_GRADIENT, 0),),
}


def get_pass_needs(kind: Kind, local: bool = False, head: bool = False) -> Tuple[Need, ...]:
    """Return what any pass of `kind` needs.

    `local`: each stage has its own loss, so that none needs a later stage's pass. `head`: the stage is the first of a segment of
    recomputation, starts from the input that it kept and needs no other stage's recomputation.
    """
    return tuple(
        need
        for need in _NEEDS[kind]
        if not (need.offset > 0 and local) and not (need == Need(Kind.RECOMPUTE, -1) and head)
    )


def list_needs(
    action: Action,
    stages: int,
    accumulate: int,
    local: bool = False,
    replicas: int = 1,
    passes: Tuple[Kind, ...] = PASSES,
    heads: Collection[int] = (),
    whole: Collection[Tuple[int, int]] = (),
) -> List[Action]:
    """Return what must be done before `action`, on P `stages` with N = `accumulate` microbatches per update.

    Rows ask for the needs of passes alone; with the rest this is the reference that tests compare all schedules with.

    `local` as in `get_pass_needs`; `passes` of every microbatch, PASSES or SPLIT_PASSES; `heads`: the first stages of the
    segments of recomputation. `whole`: the (stage, microbatch) whose two halves are one backward, which passes its gradient on
    at its end.

    All must be done in earlier slots, except that an update comes in the slot of its batch's last pass, and that
    a stage whose slot holds two passes does the forward first.
    """
    if action.kind is Kind.AVERAGE:
        return [Action(Kind.UPDATE, action.index, action.stage, replica) for replica in range(replicas)]
    if action.kind is Kind.UPDATE:
        batch = range(action.index * accumulate, (action.index + 1) * accumulate)
        return [Action(passes[-1], microbatch, action.stage, action.replica) for microbatch in batch]
    before = []
    for kind, offset in get_pass_needs(action.kind, local, action.stage in heads):
        stage = action.stage + offset
        if 0 <= stage < stages:
            ends_later = kind is Kind.INPUT_GRADIENT and offset > 0 and (stage, action.index) in whole
            before.append(Action(Kind.WEIGHT_GRADIENT if ends_later else kind, action.index, stage, action.replica))
    return before
