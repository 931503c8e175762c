"""Schedules from rows written by hand: actions get the earliest possible slots, and a deadlock is refused with its cycle."""

from __future__ import annotations

import re
from collections import Counter
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import PASSES, SPLIT_PASSES, Action, Kind, needs
from ipu_pipe.schedule.policies import play_slots
from ipu_pipe.schedule.runs import CODE, RUN, Stretch
from ipu_pipe.schedule.table import Schedule, SlotHolds

_CELL = re.compile(r"([FBIW])(\d+)(?:@(\d+))?", re.ASCII)

Row = Sequence[Union[Action, str]]


def from_rows(
    rows: Sequence[Row], accumulate: int, slot_holds: SlotHolds = SlotHolds.ONE, placement: Sequence[int] = ()
) -> Schedule:
    """Make a schedule from each device's passes in order, `Action`s or cells such as "F0", without updates.

    `placement`: the device of each stage; without it stage s is on device s. "F0@2" is of stage 2; "F0" is enough where the
    device has one stage. A backward is one pass, "B0", or everywhere two: "I0", which the previous stage waits for, and "W0".
    Every action is given the first slot in which it can be done. Raises BadInput where an action is missing, double or
    misplaced, and, where the rows wait for one another, names the cycle.
    """
    placement = tuple(placement) or tuple(range(len(rows)))
    _check_placement(placement, len(rows))
    actions = [_parse_row(device, row, placement) for device, row in enumerate(rows)]
    microbatches, passes = _check_complete(actions, len(placement))
    slots = _find_earliest_slots(actions, placement, slot_holds is SlotHolds.BOTH)
    runs = np.array(list(_compress(slots, len(placement), microbatches, passes)), RUN)
    stretch = Stretch(0, 0, 1, max(slots.values()) + 1, microbatches, runs)
    stated = () if placement == tuple(range(len(rows))) else placement
    return Schedule(len(placement), microbatches, accumulate, slot_holds, (stretch,), placement=stated)


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
    """Return the actions of a row of `Action`s or cells; a cell may hold two ("F5 B2") or none ("")."""
    stages = [stage for stage, other in enumerate(placement) if other == device]
    label = f"rows: stage {stages[0]}" if len(placement) == len(set(placement)) else f"rows: device {device}"
    actions: List[Action] = []
    for cell in row:
        if isinstance(cell, Action):
            actions.append(cell)
            continue
        for word in cell.split():
            match = _CELL.fullmatch(word)
            if match is None:
                raise BadInput(
                    f"{label}: {word}: must be F, B, I or W and a microbatch, such as F0, or F0@2 on stage 2"
                )
            kind, index, stage = match.groups()
            if stage is None and len(stages) > 1:
                raise BadInput(f"{label}: {word}: needs its stage: {' or '.join(f'{word}@{s}' for s in stages)}")
            actions.append(Action(Kind(kind), int(index), stages[0] if stage is None else int(stage)))
    for action in actions:
        if action.kind is Kind.UPDATE:
            raise BadInput(f"{label}: {action}: updates follow from accumulate and are not written")
        if action.kind not in CODE or action.replica:
            raise BadInput(f"{label}: {action}: must be a forward or a backward of replica 0")
        if action.stage not in stages:
            raise BadInput(f"{label}: {action}: belongs to another row")
    return actions


def _check_complete(rows: Sequence[Sequence[Action]], stages: int) -> Tuple[int, Tuple[Kind, ...]]:
    """Return the number of microbatches and their passes; raise BadInput unless every stage does each pass once."""
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


def _find_earliest_slots(rows: Sequence[Sequence[Action]], placement: Sequence[int], both: bool) -> Dict[Action, int]:
    """Return each action's first possible slot in the order of the rows; `both`: as in SlotHolds."""
    slots: Dict[Action, int] = {}
    heads = [0] * len(rows)

    def is_ready(action: Action, beside: Optional[Action] = None) -> bool:
        return all(need == beside or need in slots for need in needs(action, len(placement), 1))

    def choose(device: int) -> Sequence[Action]:
        first, second = (*rows[device][heads[device] : heads[device] + 2], None, None)[:2]
        if first is None or not is_ready(first):
            return ()
        pair = both and first.kind is Kind.FORWARD and second is not None and second.kind is not Kind.FORWARD
        return (first, second) if pair and second is not None and is_ready(second, beside=first) else (first,)

    def complete(action: Action, slot: int) -> None:
        slots[action] = slot
        heads[placement[action.stage]] += 1

    play_slots(len(rows), choose, complete)
    if any(head < len(row) for head, row in zip(heads, rows)):
        raise BadInput("rows: the schedule cannot run: " + _describe_cycle(rows, placement, heads, slots))
    return slots


def _describe_cycle(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], heads: Sequence[int], done: Dict[Action, int]
) -> str:
    """Follow what each blocked action waits for until one comes round again."""

    def get_head(action: Action) -> Action:
        device = placement[action.stage]
        return rows[device][heads[device]]

    action = next(row[head] for head, row in zip(heads, rows) if head < len(row))
    chain: List[Action] = []
    while action not in chain:
        chain.append(action)
        head = get_head(action)
        action = head if head != action else next(n for n in needs(action, len(placement), 1) if n not in done)
    cycle = chain[chain.index(action) :] + [action]
    words = str(cycle[0])
    for k, (one, other) in enumerate(zip(cycle, cycle[1:])):
        in_row = one != get_head(one)
        words += f"{', which' if k else ''} waits for {other}" + " (before it in its row)" * in_row
    return words


def _compress(
    slots: Dict[Action, int], stages: int, microbatches: int, passes: Sequence[Kind]
) -> Iterator[Tuple[int, ...]]:
    """Yield the rows' slots as runs (dtype RUN), each as long as its slots stay affine."""
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
