"""Schedules from rows, written by hand or read from a file: actions get the earliest possible slots, a deadlock is refused."""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Callable, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import PASSES, SPLIT_PASSES, Action, Kind, list_needs
from ipu_pipe.schedule.runs import CODE, RUN, Stretch, compress_slots
from ipu_pipe.schedule.table import Schedule, SlotHolds
from ipu_pipe.text import show

_CELL = re.compile(r"([FBIW])(\d+)(?:@(\d+))?", re.ASCII)

Row = Sequence[Union[Action, str]]


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


class DeviceRows(NamedTuple):
    """The passes of each device in order, and the device of each stage. `name`: of their file; `cells`: where it has each."""

    rows: List[List[Action]]
    placement: Tuple[int, ...]
    name: str = ""
    cells: Mapping[Action, str] = {}

    def locate(self, action: Action) -> str:
        """Return the beginning of a fault: the file, the row and the cell of an action, or the row that lacks it."""
        if not self.name:
            return "rows: "
        # an action may be one half of it
        whole = replace(action, kind=Kind.BACKWARD)
        cell = self.cells.get(action) or self.cells.get(whole) or f"row {self.placement[action.stage] + 1}"
        return f"{self.name}: {cell}: "


def from_rows(
    rows: Sequence[Row], accumulate: int, slot_holds: SlotHolds = SlotHolds.ONE, placement: Sequence[int] = ()
) -> Schedule:
    """Make a schedule from each device's passes in order, `Action`s or cells such as "F0", without updates.

    `placement`: the device of each stage; without it stage s is on device s. "F0@2" is of stage 2; "F0" is enough where the
    device has one stage. A backward is one pass, "B0", or two: "I0", which the previous stage waits for, and "W0". Where any
    backward is split, a whole one takes two slots. Every action is given the first slot in which it can be done. Raises BadInput
    where an action is missing, double or misplaced, and, where the rows wait for one another, names the cycle.
    """
    placement = tuple(placement) or tuple(range(len(rows)))
    _check_placement(placement, len(rows))
    actions = [_parse_row(device, row, placement) for device, row in enumerate(rows)]
    stretch = lay_out(DeviceRows(actions, placement), slot_holds is SlotHolds.BOTH)
    stated = () if placement == tuple(range(len(rows))) else placement
    return Schedule(len(placement), stretch.microbatches, accumulate, slot_holds, (stretch,), placement=stated)


def lay_out(device_rows: DeviceRows, both: bool = False) -> Stretch:
    """Give every action of complete rows the first slot in which it can be done; `both`: as in SlotHolds."""
    rows, placement = device_rows.rows, device_rows.placement
    microbatches, passes = _check_complete(device_rows)
    whole: Set[Tuple[int, int]] = set()
    if passes == SPLIT_PASSES:
        whole = {(action.stage, action.index) for row in rows for action in row if action.kind is Kind.BACKWARD}
        rows = [[part for action in row for part in _halve(action)] for row in rows]
    slots = _find_earliest_slots(device_rows._replace(rows=rows), both, whole)
    table = {
        kind: np.array([[slots[Action(kind, m, s)] for m in range(microbatches)] for s in range(len(placement))])
        for kind in passes
    }
    runs = np.array(list(compress_slots(table)), RUN)
    is_whole = np.zeros((len(placement), microbatches), np.bool_)
    is_whole[tuple(np.array(sorted(whole), np.int64).reshape(-1, 2).T)] = True
    return Stretch(0, 0, 1, max(slots.values()) + 1, microbatches, runs, is_whole if whole else None)


def _halve(action: Action) -> Tuple[Action, ...]:
    """Return the two halves of a whole backward; any other action is its own."""
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return tuple(replace(action, kind=kind) for kind in SPLIT_PASSES[1:])


_CSV_CELL = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_OVERLAPPED = re.compile(r"\((\d+F\d+);(\d+[BI]\d+)\)OVERLAP_F_B", re.ASCII)


def read_csv(name: str) -> DeviceRows:
    """Read rows in PyTorch's format: a line per device of cells such as 0F3 (stage, pass, microbatch), empty where it is idle.

    An overlapped pair is a forward and then a backward. Raise `BadInput`, with row and cell, unless the rows are complete.
    """
    lines = _read_lines(name)
    rows: List[List[Action]] = []
    device_of: Dict[int, int] = {}
    places: Dict[Action, str] = {}
    faults = []
    for device, line in enumerate(lines):
        rows.append([])
        for column, cell in enumerate(line):
            where = f"{name}: row {device + 1}, cell {column + 1}: {show(cell)}"
            pair = _OVERLAPPED.fullmatch(cell.strip())
            for word in pair.groups() if pair else (cell.strip(),) if cell.strip() else ():
                match = _CSV_CELL.fullmatch(word)
                if match is None:
                    faults.append(
                        f"{where}: must be a stage, F, B, I or W, and a microbatch, such as 0F3, or a pair (1F4;0B2)OVERLAP_F_B"
                    )
                    continue
                action = Action(Kind(match.group(2)), int(match.group(3)), int(match.group(1)))
                if device_of.setdefault(action.stage, device) != device:
                    faults.append(
                        f"{where}: stage {action.stage} is on the device of row {device_of[action.stage] + 1}"
                    )
                elif action in places:
                    faults.append(f"{where}: is done already in {places[action]}")
                places.setdefault(action, f"row {device + 1}, cell {column + 1}")
                rows[-1].append(action)
        if not any(cell.strip() for cell in line):
            faults.append(f"{name}: row {device + 1}: has no action: every device needs a stage")
    stages = 1 + max(device_of, default=-1)
    faults += [
        f"{name}: stage {stage}: is on no device" for stage in range(min(stages, 10_000)) if stage not in device_of
    ]
    if faults or not rows:
        raise BadInput(faults or f"{name}: has no rows")
    return DeviceRows(rows, tuple(device_of[stage] for stage in range(stages)), name, places)


def _read_lines(name: str) -> List[List[str]]:
    try:
        return list(csv.reader(Path(name).read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def find_split_or_overlapped(name: str) -> Optional[str]:
    """Return file, row and cell of the first half of a backward, or the first overlapped pair, of a file; None without one."""
    for row, line in enumerate(_read_lines(name)):
        for column, cell in enumerate(line):
            match = _CSV_CELL.fullmatch(cell.strip())
            if _OVERLAPPED.fullmatch(cell.strip()) or (match is not None and match.group(2) in "IW"):
                return f"{name}: row {row + 1}, cell {column + 1}: {cell.strip()}"
    return None


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


def _check_complete(device_rows: DeviceRows) -> Tuple[int, Tuple[Kind, ...]]:
    """Return the number of microbatches and their passes; raise BadInput unless every stage does each pass once."""
    times = Counter(action for row in device_rows.rows for action in row)
    microbatches = 1 + max((action.index for action in times), default=-1)
    if microbatches == 0:
        raise BadInput("rows: a schedule needs a stage and a microbatch")
    faults: List[str] = []
    for stage in range(len(device_rows.placement)):
        for m in range(microbatches):
            is_split = any(Action(kind, m, stage) in times for kind in SPLIT_PASSES[1:])
            expected = {kind: int(kind in (SPLIT_PASSES if is_split else PASSES)) for kind in CODE}
            faults += [
                f"{device_rows.locate(action)}{action}: appears {times[action]} times: every stage does it once, whole or split"
                for action, count in ((Action(kind, m, stage), count) for kind, count in expected.items())
                if times[action] != count
            ]
            if len(faults) > 20:
                raise BadInput(faults)
    if faults:
        raise BadInput(faults)
    return microbatches, SPLIT_PASSES if any(action.kind in SPLIT_PASSES[1:] for action in times) else PASSES


def _find_earliest_slots(
    device_rows: DeviceRows, both: bool, whole: Collection[Tuple[int, int]]
) -> Dict[Action, int]:
    """Return each action's first possible slot in the order of the rows; `both`: as in SlotHolds, `whole`: as in `list_needs`."""
    rows, placement = device_rows.rows, device_rows.placement
    slots: Dict[Action, int] = {}
    heads = [0] * len(rows)

    def is_ready(action: Action, beside: Optional[Action] = None) -> bool:
        return all(need == beside or need in slots for need in list_needs(action, len(placement), 1, whole=whole))

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
        cycle = _find_cycle(rows, placement, heads, slots)
        raise BadInput(f"{device_rows.locate(cycle[0][0])}the schedule cannot run: {_describe_cycle(cycle)}")
    return slots


def _find_cycle(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], heads: Sequence[int], done: Dict[Action, int]
) -> List[Tuple[Action, bool]]:
    """Follow what each blocked action waits for until one comes round again; each with whether it waits for its own row."""

    def get_head(action: Action) -> Action:
        device = placement[action.stage]
        return rows[device][heads[device]]

    action = next(row[head] for head, row in zip(heads, rows) if head < len(row))
    chain: List[Action] = []
    while action not in chain:
        chain.append(action)
        head = get_head(action)
        action = head if head != action else next(n for n in list_needs(action, len(placement), 1) if n not in done)
    return [(one, one != get_head(one)) for one in [*chain[chain.index(action) :], action]]


def _describe_cycle(cycle: Sequence[Tuple[Action, bool]]) -> str:
    words = str(cycle[0][0])
    for k, ((_, in_row), (other, _)) in enumerate(zip(cycle, cycle[1:])):
        words += f"{', which' if k else ''} waits for {other}" + " (before it in its row)" * in_row
    return words
