"""Make schedules from rows, written by hand or read from a file, and write schedules as drawings or
CSV.

A row lists a device's passes in order, without slots. Each pass gets the earliest slot in which its
needs are done; rows that deadlock are refused.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import (
    Callable,
    Collection,
    Container,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Union,
)
from typing import Counter as CounterOf

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import read_file
from ipu_pipe.schedule.actions import PASSES, SPLIT_PASSES, Action, Kind, list_needs
from ipu_pipe.schedule.stretches import LaidOut, Stretch
from ipu_pipe.schedule.table import Schedule, SlotHolds, list_stages
from ipu_pipe.text import show

_CELL = re.compile(r"([FBIW])(\d+)(?:@(\d+))?", re.ASCII)

Row = Sequence[Union[Action, str]]


def play_slots(
    devices: int,
    choose: Callable[[int], Sequence[Action]],
    complete: Callable[[Action, int], None],
) -> int:
    """Play slot by slot until no device has an action; return the number of slots.

    choose(device): returns its actions in this slot; all devices choose before any action
    completes. complete(action, slot): records a completed action.
    """
    slot = 0
    while True:
        # what ends in this slot may be needed from the next one on, not before: all choose first
        actions = [action for device in range(devices) for action in choose(device)]
        if not actions:
            return slot
        for action in actions:
            complete(action, slot)
        slot += 1


class DeviceRows(NamedTuple):
    """The passes of each device in order, and the device of each stage. `name`: their file;
    `cells`: action -> row and cell.
    """

    rows: list[list[Action]]
    placement: tuple[int, ...]
    name: str = ""
    cells: Mapping[Action, str] = {}

    def locate(self, action: Action) -> str:
        """Return the beginning of a fault: the file, the row and the cell of an action, or the row
        that lacks it.
        """
        if not self.name:
            return "rows: "
        # the action may be a half of a whole backward in the file
        whole = replace(action, kind=Kind.BACKWARD)
        cell = (
            self.cells.get(action)
            or self.cells.get(whole)
            or f"row {self.placement[action.stage] + 1}"
        )
        return f"{self.name}: {cell}: "


def from_rows(
    rows: Sequence[Row],
    accumulate: int,
    slot_holds: SlotHolds = SlotHolds.ONE,
    placement: Sequence[int] = (),
) -> Schedule:
    """Make a schedule from each device's passes in order, `Action`s or cells such as "F0", without
    updates.

    `placement`: the device of each stage; by default stage s is on device s. "F0@2" is a pass of
    stage 2; "F0" is enough if the device has one stage. A backward is one pass, "B0", or two: "I0",
    for which the previous stage waits, and "W0". If any backward is split, a whole one takes two
    slots. Every action gets the first slot in which it can be done. Raise `BadInput` if an action
    is missing, double or misplaced, or if the rows deadlock; the message names the cycle.
    """
    placement = tuple(placement) or tuple(range(len(rows)))
    devices = range(len(rows))
    faults = [
        f"rows: placement: stage {stage}: device {device}: there are rows of {len(rows)} devices, "
        f"counted from 0"
        for stage, device in enumerate(placement)
        if device not in devices
    ]
    raise_faults(
        faults
        + [f"rows: placement: device {d}: has no stage" for d in devices if d not in placement]
    )
    actions = [_parse_row(device, row, placement) for device, row in enumerate(rows)]
    stretch = lay_out(DeviceRows(actions, placement), slot_holds is SlotHolds.BOTH)
    # the schedule's usual placement is left out, so that equal schedules have equal fields
    shared = () if placement == tuple(range(len(rows))) else placement
    return Schedule(
        len(placement), stretch.microbatches, accumulate, slot_holds, (stretch,), placement=shared
    )


def lay_out(device_rows: DeviceRows, both: bool = False) -> Stretch:
    """Give every action of complete rows the first slot in which it can be done; `both`: as in
    `SlotHolds`.
    """
    rows = device_rows.rows
    placement = device_rows.placement
    microbatches, passes = _require_complete(device_rows)
    whole: set[tuple[int, int]] = set()
    if passes == SPLIT_PASSES:
        whole = {
            (action.stage, action.index)
            for row in rows
            for action in row
            if action.kind is Kind.BACKWARD
        }
        # whole backwards among split ones become both halves, which the slots need to be counted
        # alike
        rows = [[half for action in row for half in _halve(action)] for row in rows]
    # the names of file and cells stay, for the faults
    slots = _find_earliest_slots(device_rows._replace(rows=rows), both, whole)
    slots_by_kind = {
        kind: np.array(
            [
                [slots[Action(kind, m, s)] for m in range(microbatches)]
                for s in range(len(placement))
            ]
        )
        for kind in passes
    }
    is_whole = np.zeros((len(placement), microbatches), np.bool_)
    # reshape keeps two columns when there is none
    is_whole[tuple(np.array(sorted(whole), np.int64).reshape(-1, 2).T)] = True
    find = LaidOut(slots_by_kind)
    marks = is_whole if whole else None
    return Stretch(0, 0, 1, max(slots.values()) + 1, microbatches, find, tuple(passes), marks)


def _halve(action: Action) -> tuple[Action, ...]:
    """Return the two halves of a whole backward, or another action unchanged."""
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return tuple(replace(action, kind=kind) for kind in SPLIT_PASSES[1:])


# A cell of a pass: stage, pass, microbatch.
_CSV_CELL = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII | re.IGNORECASE)
_OVERLAPPED = re.compile(
    r"\(\s*(\d+F\d+)\s*;\s*(\d+[BI]\d+)\s*\)OVERLAP_F_B", re.ASCII | re.IGNORECASE
)
# PyTorch's lowered schedules also say when stages communicate; here that follows from the passes.
_COMMUNICATION = re.compile(
    r"\d+((?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII | re.IGNORECASE
)


def read_csv(name: str) -> DeviceRows:
    """Read rows in PyTorch's format: a line per device of cells such as 0F3 (stage, pass,
    microbatch); empty cells are idle.

    An overlapped pair is a forward and then a backward. A backward beside a weight gradient of the
    same microbatch is the input gradient, as older versions of PyTorch write it. Communication is
    skipped, with a warning. Raise `BadInput`, with row and cell, unless the rows are complete.
    """
    rows: list[list[Action]] = []
    device_of: dict[int, int] = {}
    cell_of: dict[Action, str] = {}
    communication: CounterOf[str] = Counter()
    faults = []
    for device, line in enumerate(_read_lines(name)):
        rows.append([])
        has_passes = False
        for column, cell in enumerate(line):
            where = f"{name}: row {device + 1}, cell {column + 1}: {show(cell)}"
            communicates = _COMMUNICATION.fullmatch(cell)
            if communicates is not None:
                communication[communicates.group(1).upper()] += 1
                continue
            for word in _split_cell(cell):
                has_passes = True
                match = _CSV_CELL.fullmatch(word)
                if match is None:
                    faults.append(
                        f"{where}: must be a stage, F, B, I or W, and a microbatch, such as 0F3, "
                        f"or a pair (1F4;0B2)OVERLAP_F_B"
                    )
                    continue
                action = Action(
                    Kind(match.group(2).upper()),
                    int(match.group(3)),
                    int(match.group(1)),
                )
                # only the first cell decides where a stage is, so that one slip is one fault
                if device_of.setdefault(action.stage, device) != device:
                    faults.append(
                        f"{where}: stage {action.stage} is on the device of row "
                        f"{device_of[action.stage] + 1}"
                    )
                elif action in cell_of:
                    faults.append(f"{where}: already appears in {cell_of[action]}")
                cell_of.setdefault(action, f"row {device + 1}, cell {column + 1}")
                rows[-1].append(action)
        if not has_passes:
            faults.append(f"{name}: row {device + 1}: has no action: every device needs a stage")
    stages = 1 + max(device_of, default=-1)
    faults += [
        f"{name}: stage {stage}: is on no device"
        # a slip such as stage 999999999 must not list as many faults
        for stage in range(min(stages, 10_000))
        if stage not in device_of
    ]
    if faults or not rows:
        raise BadInput(faults or f"{name}: has no rows")
    if communication:
        _warn_of_communication(name, communication)
    # after the last cell, since the other half of a backward may come late
    rows = [[_read_older(action, cell_of) for action in row] for row in rows]
    return DeviceRows(rows, tuple(device_of[stage] for stage in range(stages)), name, cell_of)


def _split_cell(cell: str) -> Sequence[str]:
    """Return the passes of a cell: none, one, or the two of an overlapped pair."""
    pair = _OVERLAPPED.fullmatch(cell)
    if pair is not None:
        return pair.groups()
    return (cell,) if cell else ()


def _read_older(action: Action, actions: Container[Action]) -> Action:
    """Return the input gradient that a B of an older version of PyTorch means, or another action
    unchanged.

    These versions wrote B and W for the halves; a whole backward, today's B, has no W.
    """
    halves = {kind: replace(action, kind=kind) for kind in SPLIT_PASSES[1:]}
    is_older = (
        halves[Kind.WEIGHT_GRADIENT] in actions and halves[Kind.INPUT_GRADIENT] not in actions
    )
    return halves[Kind.INPUT_GRADIENT] if action.kind is Kind.BACKWARD and is_older else action


def _warn_of_communication(name: str, communication: Mapping[str, int]) -> None:
    """Warn that cells are skipped. A file is read several times in a run, and Python shows the same
    warning once.
    """
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(communication.items()))
    warnings.warn(
        f"{name}: skipped cells of communication, which follows from the passes: {counts}",
        stacklevel=2,
    )


# the most bytes of a CSV file: a million actions
MOST_CSV_BYTES = 16 << 20


def _read_lines(name: str) -> list[list[str]]:
    """Return the cells of each line of a CSV file, without spaces; a cell of None is idle, as
    PyTorch prints it.
    """
    try:
        text = read_file(Path(name), MOST_CSV_BYTES).decode("utf-8")
        lines = list(csv.reader(text.splitlines()))
    # csv.Error: such as a cell of more letters than the module allows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    # Windows begins files with a byte order mark, and Python ends lines twice there; an empty line
    # is not a device.
    stripped = [[cell.strip("\ufeff \t") for cell in line] for line in lines]
    return [
        ["" if cell == "None" else cell for cell in line]
        for line in stripped
        if line not in ([], [""])
    ]


def find_split_or_overlapped(name: str) -> str | None:
    """Return file, row and cell of the first split backward or overlapped pair in a file, None if
    it has neither.
    """
    for row, line in enumerate(_read_lines(name)):
        for column, cell in enumerate(line):
            match = _CSV_CELL.fullmatch(cell)
            if _OVERLAPPED.fullmatch(cell) or (
                match is not None and match.group(2).upper() in "IW"
            ):
                return f"{name}: row {row + 1}, cell {column + 1}: {cell}"
    return None


def _parse_row(device: int, row: Row, placement: Sequence[int]) -> list[Action]:
    """Return the actions of a row of `Action`s or cells; a cell may contain two actions ("F5 B2")
    or none ("").
    """
    stages = list_stages(placement, device)
    label = (
        f"rows: stage {stages[0]}"
        if len(placement) == len(set(placement))
        else f"rows: device {device}"
    )
    actions: list[Action] = []
    for cell in row:
        if isinstance(cell, Action):
            actions.append(cell)
            continue
        for word in cell.split():
            match = _CELL.fullmatch(word)
            if match is None:
                raise BadInput(
                    f"{label}: {word}: must be F, B, I or W and a microbatch, such as F0, or F0@2 "
                    f"on stage 2"
                )
            kind, index, stage = match.groups()
            if stage is None and len(stages) > 1:
                raise BadInput(
                    f"{label}: {word}: needs its stage: "
                    f"{' or '.join(f'{word}@{s}' for s in stages)}"
                )
            actions.append(
                Action(Kind(kind), int(index), stages[0] if stage is None else int(stage))
            )
    for action in actions:
        if action.kind is Kind.UPDATE:
            raise BadInput(f"{label}: {action}: updates follow from accumulate and are not written")
        # a recomputation or an average is planned by no row
        if action.kind not in {*PASSES, *SPLIT_PASSES}:
            raise BadInput(f"{label}: {action}: must be a forward or a backward")
        if action.stage not in stages:
            raise BadInput(f"{label}: {action}: belongs to another row")
    return actions


def _require_complete(device_rows: DeviceRows) -> tuple[int, tuple[Kind, ...]]:
    """Return the number of microbatches and their passes. Raise `BadInput` unless every stage does
    each pass once.
    """
    times = Counter(action for row in device_rows.rows for action in row)
    microbatches = 1 + max((action.index for action in times), default=-1)
    if microbatches == 0:
        raise BadInput("rows: a schedule needs a stage and a microbatch")
    faults: list[str] = []
    for stage in range(len(device_rows.placement)):
        for m in range(microbatches):
            is_split = any(Action(kind, m, stage) in times for kind in SPLIT_PASSES[1:])
            expected = {
                kind: int(kind in (SPLIT_PASSES if is_split else PASSES))
                for kind in {*PASSES, *SPLIT_PASSES}
            }
            faults += [
                f"{device_rows.locate(action)}{action}: appears {times[action]} times: every stage "
                f"does it once, whole or split"
                for action, count in (
                    (Action(kind, m, stage), count) for kind, count in expected.items()
                )
                if times[action] != count
            ]
            # a file with a column too few has a fault for each microbatch
            if len(faults) > 20:
                raise BadInput(faults)
    raise_faults(faults)
    return microbatches, SPLIT_PASSES if any(
        action.kind in SPLIT_PASSES[1:] for action in times
    ) else PASSES


def _find_earliest_slots(
    device_rows: DeviceRows, both: bool, whole: Collection[tuple[int, int]]
) -> dict[Action, int]:
    """Return each action's first possible slot in the order of the rows; `both`: as in SlotHolds,
    `whole`: as in `list_needs`.
    """
    rows = device_rows.rows
    placement = device_rows.placement
    slots: dict[Action, int] = {}
    # by row: the index of its next action
    next_index = [0] * len(rows)

    def is_ready(action: Action, beside: Action | None = None) -> bool:
        return all(
            need == beside or need in slots for need in list_needs(action, len(placement), whole)
        )

    def choose(device: int) -> Sequence[Action]:
        begin = next_index[device]
        # a row may end within the pair
        first, second = (*rows[device][begin : begin + 2], None, None)[:2]
        if first is None or not is_ready(first):
            return ()
        pair = (
            both
            and first.kind is Kind.FORWARD
            and second is not None
            and second.kind is not Kind.FORWARD
        )
        return (
            (first, second)
            # the second pass may need the forward in its own slot
            if pair and second is not None and is_ready(second, beside=first)
            else (first,)
        )

    def complete(action: Action, slot: int) -> None:
        slots[action] = slot
        next_index[placement[action.stage]] += 1

    play_slots(len(rows), choose, complete)
    if any(index < len(row) for index, row in zip(next_index, rows)):
        # a message that says only "deadlock" leaves the reader with thousands of cells
        cycle = _find_cycle(rows, placement, next_index, slots)
        raise BadInput(
            f"{device_rows.locate(cycle[0][0])}the schedule cannot run: {_describe_cycle(cycle)}"
        )
    return slots


def _find_cycle(
    rows: Sequence[Sequence[Action]],
    placement: Sequence[int],
    next_index: Sequence[int],
    done: dict[Action, int],
) -> list[tuple[Action, bool]]:
    """Follow the waits of blocked actions until one repeats; return each action and whether it
    waits for its own row.
    """

    def get_next(action: Action) -> Action:
        """Return the next action in the row of `action`."""
        device = placement[action.stage]
        return rows[device][next_index[device]]

    action = next(row[index] for index, row in zip(next_index, rows) if index < len(row))
    chain: list[Action] = []
    while action not in chain:
        chain.append(action)
        earlier = get_next(action)
        # without `whole`: a second half follows its first at once, and never blocks
        needs = list_needs(action, len(placement))
        # the next action of a row waits for a need, any other for its row
        action = earlier if earlier != action else next(need for need in needs if need not in done)
    return [
        (waiting, waiting != get_next(waiting))
        for waiting in [*chain[chain.index(action) :], action]
    ]


def _describe_cycle(cycle: Sequence[tuple[Action, bool]]) -> str:
    """Say what each action of a cycle waits for."""
    text = str(cycle[0][0])
    for k, ((_, waits_for_row), (other, _)) in enumerate(zip(cycle, cycle[1:])):
        text += (
            f"{', which' if k else ''} waits for {other}"
            + " (before it in its row)" * waits_for_row
        )
    return text


# ---- schedules as text: the papers' drawings, and CSV for PyTorch's pipelining


def format_text(
    schedule: Schedule, first_slot: int = 0, last_slot: int | None = None, stages: int | None = None
) -> str:
    """Draw the slots [first_slot, last_slot) as papers do: a row per stage, a column per slot.

    F3 is the forward of microbatch 3, B3 its backward (I3 and W3 its halves; = is the second slot
    of a whole backward among split ones), B3* is a pass after which the stage is updated, and . is
    an idle slot. If a device has several stages, there is a row per device, and F3@2 is a pass of
    stage 2. `stages`: draw only the first rows. The last line tells what is left out.
    """
    end = schedule.slot_count if last_slot is None else min(last_slot, schedule.slot_count)
    stages_of = _group_stages(schedule)
    row_name = "stage" if len(stages_of) == schedule.stages else "device"
    shown = len(stages_of) if stages is None else min(stages, len(stages_of))
    rows = [[str(slot) for slot in range(first_slot, end)]]
    rows += [_draw_row(schedule, row, first_slot, end) for row in list(stages_of.values())[:shown]]
    labels = ["slot", *(f"{row_name} {row}" for row in list(stages_of)[:shown])]
    label_width = max(map(len, labels))
    width = max((len(cell) for row in rows for cell in row), default=1)
    lines = [
        f"{label:<{label_width}}  " + " ".join(f"{cell:<{width}}" for cell in row)
        for label, row in zip(labels, rows)
    ]
    if (first_slot, end, shown) != (0, schedule.slot_count, len(stages_of)):
        lines.append(
            f"(slots {first_slot} to {end - 1} of {schedule.slot_count}, {shown} of "
            f"{len(stages_of)} {row_name}s shown)"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _group_stages(schedule: Schedule) -> dict[int, list[int]]:
    """Return the stages of each row: a row per device, or a row per stage if no device has
    several.
    """
    devices = schedule.device_of_stage
    if len(set(devices)) == schedule.stages:
        return {stage: [stage] for stage in range(schedule.stages)}
    return {device: list_stages(devices, device) for device in sorted(set(devices))}


def _draw_row(schedule: Schedule, stages: Sequence[int], first_slot: int, end: int) -> list[str]:
    """Return the cells [first_slot, end) of a device with these `stages`, forwards first."""
    columns = []
    for stage in stages:
        suffix = f"@{stage}" if len(stages) > 1 else ""
        updates = schedule.update_grid(first_slot, end, slice(stage, stage + 1))[0] >= 0
        cells = (
            [word + suffix for word in (cell or "").split()]
            for cell in schedule.cells(stage, first_slot, end)
        )
        second_slots = _find_second_slots(schedule, stage, first_slot, end)
        columns.append(
            [
                "=" * bool(is_second) + " ".join(cell) + "*" * bool(updated)
                for is_second, cell, updated in zip(second_slots, cells, updates)
            ]
        )
    # a device's two passes of a slot are drawn in the order in which they run
    slots = (
        sorted(filter(None, cells), key=lambda cell: cell[0] != "F") for cells in zip(*columns)
    )
    return [" ".join(cells) or "." for cells in slots]


def _find_second_slots(
    schedule: Schedule, stage: int, first_slot: int, end: int
) -> NDArray[np.bool_]:
    """Return which slots are the second one of a whole backward among split ones, (slots,)."""
    if Kind.WEIGHT_GRADIENT not in schedule.passes:
        return np.zeros(end - first_slot, np.bool_)
    grid = schedule.spell_out(first_slot, end, slice(stage, stage + 1))[Kind.WEIGHT_GRADIENT][0]
    # an idle slot's -1 reads the last microbatch, which the first condition leaves out
    return np.asarray((grid >= 0) & schedule.is_whole[stage][grid])


def format_csv(schedule: Schedule) -> Iterator[str]:
    """Yield the lines that torch.distributed.pipelining reads: a row per device of cells such as
    0F3; idle cells are empty.

    A cell is stage, kind, microbatch. PyTorch's schedules have no slots with two actions and no
    updates: the caller updates when the pipeline is empty. Raise `BadInput` for slots with two
    passes, and for microbatches in flight across an update.
    """
    if schedule.slot_holds is not SlotHolds.ONE:
        raise BadInput(
            "format: csv: PyTorch's schedules hold one action per slot; this one has steps that "
            "hold both"
        )
    if any(stretch.microbatches > schedule.accumulate for stretch in schedule.stretches):
        raise BadInput(
            "format: csv: PyTorch's schedules have no updates between microbatches; only methods "
            "that flush can be written"
        )
    return _write_rows(schedule)


def _write_rows(schedule: Schedule) -> Iterator[str]:
    for stages in _group_stages(schedule).values():
        of_stages = (
            [f"{stage}{cell}" if cell else "" for cell in schedule.cells(stage)] for stage in stages
        )
        text = io.StringIO()
        # stages of a device never run in one slot, so that at most one cell is not empty
        csv.writer(text, lineterminator="\n").writerow("".join(cells) for cells in zip(*of_stages))
        yield text.getvalue()
