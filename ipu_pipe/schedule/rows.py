"""Schedules from rows written by hand: slots are assigned, and a deadlock is refused with its cycle named."""

from __future__ import annotations

from collections import Counter
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Action, Kind, needs
from ipu_pipe.schedule.runs import CODE, PASSES, RUN, Part
from ipu_pipe.schedule.table import Schedule


def from_rows(rows: Sequence[Sequence[Union[Action, str]]], accumulate: int, slot_holds: str = "one") -> Schedule:
    """A schedule from each stage's forwards and backwards in order, `Action`s or cells such as "F0"; no updates.

    Every action is given the first slot in which it can be done. Raises BadInput where an action is missing, double
    or misplaced, and, where the rows wait for one another, names the cycle.
    """
    actions = [_parse_row(stage, row) for stage, row in enumerate(rows)]
    microbatches = _check_complete(actions)
    slots = _earliest_slots(actions, slot_holds == "both")
    runs = np.array(list(_compress(slots, len(actions), microbatches)), RUN)
    part = Part(0, 0, 1, max(slots.values()) + 1, microbatches, runs)
    return Schedule(len(actions), microbatches, accumulate, slot_holds, (part,))


def _parse_row(stage: int, row: Sequence[Union[Action, str]]) -> List[Action]:
    """Actions of a row of `Action`s or cells; a cell may hold two ("F5 B2") or none ("")."""
    actions: List[Action] = []
    for cell in row:
        if isinstance(cell, Action):
            actions.append(cell)
            continue
        for word in cell.split():
            if word[0] not in ("F", "B") or not word[1:].isdecimal():
                raise BadInput(f"rows: stage {stage}: {word}: must be F or B and a microbatch, such as F0 or B3")
            actions.append(Action(Kind(word[0]), int(word[1:]), stage))
    for action in actions:
        if action.kind is Kind.UPDATE:
            raise BadInput(f"rows: stage {stage}: {action}: updates follow from accumulate and are not written")
        if action.stage != stage:
            raise BadInput(f"rows: stage {stage}: {action}: belongs to another row")
    return actions


def _check_complete(rows: Sequence[Sequence[Action]]) -> int:
    """The number of microbatches, if every stage does each one's forward and backward once; BadInput otherwise."""
    microbatches = 1 + max((action.index for row in rows for action in row), default=-1)
    if microbatches == 0:
        raise BadInput("rows: a schedule needs a stage and a microbatch")
    faults = []
    for stage, row in enumerate(rows):
        times = Counter(row)
        for action in (Action(kind, m, stage) for kind in PASSES for m in range(microbatches)):
            if times[action] != 1:
                faults.append(f"rows: {action}: appears {times[action]} times: every stage must do it once")
    if faults:
        raise BadInput(faults)
    return microbatches


def _earliest_slots(rows: Sequence[Sequence[Action]], both: bool) -> Dict[Action, int]:
    """Each action's first possible slot, the rows' order kept; all stages choose before any completes."""
    slots: Dict[Action, int] = {}
    heads = [0] * len(rows)

    def ready(action: Action, slot: int, beside: Optional[Action] = None) -> bool:
        needed = needs(action, len(rows), 1)
        return all(need == beside or slots.get(need, slot) < slot for need in needed)

    slot = 0
    while any(head < len(row) for head, row in zip(heads, rows)):
        chosen = []
        for head, row in zip(heads, rows):
            first, second = (*row[head : head + 2], None, None)[:2]
            if first is not None and ready(first, slot):
                chosen.append(first)
                pair = both and first.kind is Kind.FORWARD and second is not None and second.kind is Kind.BACKWARD
                if pair and second is not None and ready(second, slot, beside=first):
                    chosen.append(second)
        if not chosen:
            raise BadInput("rows: the schedule cannot run: " + _cycle(rows, heads, slots))
        for action in chosen:
            slots[action] = slot
            heads[action.stage] += 1
        slot += 1
    return slots


def _cycle(rows: Sequence[Sequence[Action]], heads: Sequence[int], done: Dict[Action, int]) -> str:
    """Follow what each blocked action waits for until one comes round again."""
    action = next(row[head] for head, row in zip(heads, rows) if head < len(row))
    chain: List[Action] = []
    while action not in chain:
        chain.append(action)
        head = rows[action.stage][heads[action.stage]]
        action = head if head != action else next(n for n in needs(action, len(rows), 1) if n not in done)
    cycle = chain[chain.index(action) :] + [action]
    words = str(cycle[0])
    for k, (one, other) in enumerate(zip(cycle, cycle[1:])):
        before = one != rows[one.stage][heads[one.stage]]
        words += f"{', which' if k else ''} waits for {other}" + " (before it in its row)" * before
    return words


def _compress(slots: Dict[Action, int], stages: int, microbatches: int) -> Iterator[Tuple[int, ...]]:
    """The rows' slots as runs, each as long as its slots stay affine."""
    for stage in range(stages):
        for kind in PASSES:
            row = [slots[Action(kind, m, stage)] for m in range(microbatches)]
            first = 0
            while first < microbatches:
                last = first + 1
                step = row[last] - row[first] if last < microbatches else 1
                while last < microbatches and row[last] - row[last - 1] == step:
                    last += 1
                yield stage, CODE[kind], first, last - first, row[first], step
                first = last
