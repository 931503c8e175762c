"""The glossary of actions: what a stage can do, and the one place that says what must precede what.

Schedules, messages between processes, traces and the clock take their letters, words and order from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Dict, List, NamedTuple, Tuple


class Kind(Enum):
    """What a stage can do, in the order in which it does them within a slot; the value is the letter that is printed."""

    FORWARD = "F"
    RECOMPUTE = "R"  # the forward again, for the activations that a backward needs
    BACKWARD = "B"  # both gradients at once
    INPUT_GRADIENT = "I"  # a backward's first half: what the stage before waits for
    WEIGHT_GRADIENT = "W"  # and its second half, for which only the update waits
    UPDATE = "U"
    AVERAGE = "A"  # of the weights, over the replicas

    @property
    def word(self) -> str:
        """As traces name it: a recomputation is shown as the forward that it is."""
        return "forward" if self is Kind.RECOMPUTE else self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Action:
    """One planned thing: the `kind` of microbatch `index` (for an update or average: update `index`) on `stage`."""

    kind: Kind
    index: int
    stage: int
    replica: int = 0

    def __str__(self) -> str:
        where = f" of replica {self.replica}" if self.replica else ""
        return f"{self.kind.value}{self.index} on stage {self.stage}{where}"


class Need(NamedTuple):
    """A pass needs the `kind` of the same microbatch, so many stages on (-1: the stage before)."""

    kind: Kind
    offset: int


# What a pass needs of the same microbatch. Stages that are not there need not be waited for. The first stage of a segment
# of recomputation starts from the input that it kept, and needs no other's.
_NEEDS: Dict[Kind, Tuple[Need, ...]] = {
    Kind.FORWARD: (Need(Kind.FORWARD, -1),),
    Kind.RECOMPUTE: (Need(Kind.FORWARD, 0), Need(Kind.RECOMPUTE, -1)),
    Kind.BACKWARD: (Need(Kind.FORWARD, 0), Need(Kind.BACKWARD, +1)),
    Kind.INPUT_GRADIENT: (Need(Kind.FORWARD, 0), Need(Kind.INPUT_GRADIENT, +1)),
    Kind.WEIGHT_GRADIENT: (Need(Kind.INPUT_GRADIENT, 0),),
}


def pass_needs(kind: Kind, local: bool = False) -> Tuple[Need, ...]:
    """What any pass of `kind` needs. `local`: none needs a later stage's, because each stage has a loss of its own."""
    return tuple(need for need in _NEEDS[kind] if need.offset <= 0 or not local)


def needs(action: Action, stages: int, accumulate: int, local: bool = False, replicas: int = 1) -> List[Action]:
    """What must be done before `action` can be, on P `stages` with N = `accumulate` microbatches an update.

    Everything must be done in earlier slots, except that an update comes in the slot of its batch's last backward, and
    that a stage whose slot holds both passes does the forward before the backward.
    """
    if action.kind is Kind.AVERAGE:
        return [Action(Kind.UPDATE, action.index, action.stage, replica) for replica in range(replicas)]
    if action.kind is Kind.UPDATE:
        batch = range(action.index * accumulate, (action.index + 1) * accumulate)
        return [Action(Kind.BACKWARD, microbatch, action.stage, action.replica) for microbatch in batch]
    return [
        Action(need.kind, action.index, action.stage + need.offset, action.replica)
        for need in pass_needs(action.kind, local)
        if 0 <= action.stage + need.offset < stages
    ]
