"""Schedules from rows written by hand: slots are assigned, and a deadlock is refused with its cycle named."""

from __future__ import annotations

import re
from collections import Counter
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import PASSES, SPLIT_PASSES, Action, Kind, needs
from ipu_pipe.schedule.runs import CODE, RUN, Stretch
from ipu_pipe.schedule.table import Schedule, SlotHolds

_CELL = re.compile(r"([FBIW])(\d+)(?:@(\d+))?", re.ASCII)

Row = Sequence[Union[Action, str]]


def from_rows(
    rows: Sequence[Row], accumulate: int, slot_holds: SlotHolds = SlotHolds.ONE, placement: Sequence[int] = ()
) -> Schedule:
    """A schedule from each device's passes in order, `Action`s or cells such as "F0"; no updates.

    `placement`: the device of each stage; without it a stage has the device of its number. "F0@2" is of stage 2; "F0"
    where the device has one stage only. A backward is one pass, "B0", or everywhere two: "I0", what the stage before
    waits for, and "W0". Every action is given the first slot in which it can be done. Raises BadInput where an action
    is missing, double or misplaced, and, where the rows wait for one another, names the cycle.
    """
    placement = tuple(placement) or tuple(range(len(rows)))
    _check_placement(placement, len(rows))
    actions = [_parse_row(device, row, placement) for device, row in enumerate(rows)]
    microbatches, passes = _check_complete(actions, len(placement))
    slots = _earliest_slots(actions, placement, slot_holds is SlotHolds.BOTH)
    runs = np.array(list(_compress(slots, len(placement), microbatches, passes)), RUN)
    part = Stretch(0, 0, 1, max(slots.values()) + 1, microbatches, runs)
    own = () if placement == tuple(range(len(rows))) else placement
    return Schedule(len(placement), microbatches, accumulate, slot_holds, (part,), placement=own)


def _check_placement(placement: Sequence[int], devices: int) -> None:
    faults = [
        f"rows: placement: stage {stage}: device {device}: there are rows of {devices} devices, counted from 0"
        for stage, device in enumerate(placement)
        if not 0 <= device < devices
    ]
    faults += [
        f"rows: placement: device {device}: has no stage" for device in range(devices) if device not in placement
    ]
    if faults:
        raise BadInput(faults)


def _parse_row(device: int, row: Row, placement: Sequence[int]) -> List[Action]:
    """Actions of a row of `Action`s or cells; a cell may hold two ("F5 B2") or none ("")."""
    held = [stage for stage, own in enumerate(placement) if own == device]
    label = f"rows: stage {held[0]}" if len(placement) == len(set(placement)) else f"rows: device {device}"
    actions: List[Action] = []
    for cell in row:
        if isinstance(cell, Action):
            actions.append(cell)
            continue
        for word in cell.split():
            match = _CELL.fullmatch(word)
            if match is None:
                raise BadInput(
                    f"{label}: {word}: must be F, B, I or W and a microbatch, such as F0 or B3, F0@2 on stage 2"
                )
            kind, index, stage = match.groups()
            if stage is None and len(held) > 1:
                raise BadInput(f"{label}: {word}: say of which stage: {' or '.join(f'{word}@{s}' for s in held)}")
            actions.append(Action(Kind(kind), int(index), held[0] if stage is None else int(stage)))
    for action in actions:
        if action.kind is Kind.UPDATE:
            raise BadInput(f"{label}: {action}: updates follow from accumulate and are not written")
        if action.kind not in CODE or action.replica:
            raise BadInput(f"{label}: {action}: must be a forward or a backward of the one replica that rows describe")
        if action.stage not in held:
            raise BadInput(f"{label}: {action}: belongs to another row")
    return actions


def _check_complete(rows: Sequence[Sequence[Action]], stages: int) -> Tuple[int, Tuple[Kind, ...]]:
    """The number of microbatches and their passes, if every stage does each pass once; BadInput otherwise."""
    times = Counter(action for row in rows for action in row)
    microbatches = 1 + max((action.index for action in times), default=-1)
    if microbatches == 0:
        raise BadInput("rows: a schedule needs a stage and a microbatch")
    split = any(action.kind in SPLIT_PASSES[1:] for action in times)
    passes = SPLIT_PASSES if split else PASSES
    faults = [
        f"rows: {action}: appears {times[action]} times: every stage must do it once"
        for action in (Action(kind, m, s) for s in range(stages) for kind in passes for m in range(microbatches))
        if times[action] != 1
    ]
    faults += [
        f"rows: {action}: other backwards are split: split all or none" for action in times if action.kind not in passes
    ]
    if faults:
        raise BadInput(faults)
    return microbatches, passes


def _earliest_slots(rows: Sequence[Sequence[Action]], placement: Sequence[int], both: bool) -> Dict[Action, int]:
    """Each action's first possible slot, the rows' order kept; all devices choose before any completes."""
    slots: Dict[Action, int] = {}
    heads = [0] * len(rows)

    def ready(action: Action, slot: int, beside: Optional[Action] = None) -> bool:
        needed = needs(action, len(placement), 1)
        return all(need == beside or slots.get(need, slot) < slot for need in needed)

    slot = 0
    while any(head < len(row) for head, row in zip(heads, rows)):
        chosen = []
        for head, row in zip(heads, rows):
            first, second = (*row[head : head + 2], None, None)[:2]
            if first is not None and ready(first, slot):
                chosen.append(first)
                pair = both and first.kind is Kind.FORWARD and second is not None and second.kind is not Kind.FORWARD
                if pair and second is not None and ready(second, slot, beside=first):
                    chosen.append(second)
        if not chosen:
            raise BadInput("rows: the schedule cannot run: " + _cycle(rows, placement, heads, slots))
        for action in chosen:
            slots[action] = slot
            heads[placement[action.stage]] += 1
        slot += 1
    return slots


def _cycle(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], heads: Sequence[int], done: Dict[Action, int]
) -> str:
    """Follow what each blocked action waits for until one comes round again."""

    def head_of(action: Action) -> Action:
        device = placement[action.stage]
        return rows[device][heads[device]]

    action = next(row[head] for head, row in zip(heads, rows) if head < len(row))
    chain: List[Action] = []
    while action not in chain:
        chain.append(action)
        head = head_of(action)
        action = head if head != action else next(n for n in needs(action, len(placement), 1) if n not in done)
    cycle = chain[chain.index(action) :] + [action]
    words = str(cycle[0])
    for k, (one, other) in enumerate(zip(cycle, cycle[1:])):
        before = one != head_of(one)
        words += f"{', which' if k else ''} waits for {other}" + " (before it in its row)" * before
    return words


def _compress(
    slots: Dict[Action, int], stages: int, microbatches: int, passes: Sequence[Kind]
) -> Iterator[Tuple[int, ...]]:
    """The rows' slots as runs, each as long as its slots stay affine."""
    for stage in range(stages):
        for kind in passes:
            row = [slots[Action(kind, m, stage)] for m in range(microbatches)]
            first = 0
            while first < microbatches:
                last = first + 1
                step = row[last] - row[first] if last < microbatches else 1
                while last < microbatches and row[last] - row[last - 1] == step:
                    last += 1
                yield stage, CODE[kind], first, last - first, row[first], step
                first = last
