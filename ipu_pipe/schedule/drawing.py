"""Schedules as text: drawn as the papers do, and as the CSV that PyTorch's pipelining reads."""

from __future__ import annotations

import csv
import io
from typing import Dict, Iterator, List, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.table import Schedule, SlotHolds


def format_text(
    schedule: Schedule, first_slot: int = 0, last_slot: Optional[int] = None, stages: Optional[int] = None
) -> str:
    """Draw the slots [first_slot, last_slot) as papers do: a row per stage, a column per slot.

    F3 is the forward of microbatch 3, B3 its backward (I3 and W3 its halves; = the second slot of a whole one where others are
    split), B3* a pass after which the stage is updated, . an idle slot. Where a device has several stages there is a row per
    device, and F3@2 is of stage 2. `stages`: print only the first of these rows. The last line
    says what is left out.
    """
    end = schedule.slot_count if last_slot is None else min(last_slot, schedule.slot_count)
    stages_of = _group_stages(schedule)
    what = "stage" if len(stages_of) == schedule.stages else "device"
    shown = len(stages_of) if stages is None else min(stages, len(stages_of))
    rows = [[str(slot) for slot in range(first_slot, end)]]
    rows += [_draw_row(schedule, row, first_slot, end) for row in list(stages_of.values())[:shown]]
    labels = ["slot", *(f"{what} {row}" for row in list(stages_of)[:shown])]
    label_width, width = max(map(len, labels)), max((len(cell) for row in rows for cell in row), default=1)
    lines = [
        f"{label:<{label_width}}  " + " ".join(f"{cell:<{width}}" for cell in row) for label, row in zip(labels, rows)
    ]
    if (first_slot, end, shown) != (0, schedule.slot_count, len(stages_of)):
        lines.append(
            f"(slots {first_slot} to {end - 1} of {schedule.slot_count}, {shown} of {len(stages_of)} {what}s shown)"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _group_stages(schedule: Schedule) -> Dict[int, List[int]]:
    """Return the stages of each row: of each device, or, where none has several, of each stage."""
    devices = schedule.device_of_stage
    if len(set(devices)) == schedule.stages:
        return {stage: [stage] for stage in range(schedule.stages)}
    return {device: [s for s, other in enumerate(devices) if other == device] for device in sorted(set(devices))}


def _draw_row(schedule: Schedule, stages: Sequence[int], first_slot: int, end: int) -> List[str]:
    """Return the cells [first_slot, end) of a device with these `stages`, forwards first."""
    columns = []
    for stage in stages:
        where = f"@{stage}" if len(stages) > 1 else ""
        updates = schedule.update_grid(first_slot, end, slice(stage, stage + 1))[0] >= 0
        cells = ([word + where for word in (cell or "").split()] for cell in schedule.cells(stage, first_slot, end))
        rest = _find_second_slots(schedule, stage, first_slot, end)
        columns.append(
            ["=" * bool(second) + " ".join(cell) + "*" * bool(mark) for second, cell, mark in zip(rest, cells, updates)]
        )
    slots = (sorted(filter(None, cells), key=lambda cell: cell[0] != "F") for cells in zip(*columns))
    return [" ".join(cells) or "." for cells in slots]


def _find_second_slots(schedule: Schedule, stage: int, first_slot: int, end: int) -> NDArray[np.bool_]:
    """Return which of the slots are the second one of a whole backward, where others are split."""
    if Kind.WEIGHT_GRADIENT not in schedule.passes:
        return np.zeros(end - first_slot, np.bool_)
    grid = schedule.spell_out(first_slot, end, slice(stage, stage + 1))[Kind.WEIGHT_GRADIENT][0]
    return np.asarray((grid >= 0) & schedule.is_whole[stage][grid])


def format_csv(schedule: Schedule) -> Iterator[str]:
    """Yield the lines that torch.distributed.pipelining reads: a row per device of cells such as 0F3, empty where idle.

    A cell is stage, kind, microbatch. PyTorch's schedules have neither slots that hold two actions nor updates: the caller
    updates when the pipeline is empty. Raises BadInput for steps that hold both passes and for microbatches in flight across an
    update.
    """
    if schedule.slot_holds is not SlotHolds.ONE:
        raise BadInput("format: csv: PyTorch's schedules hold one action per slot; this one has steps that hold both")
    if any(stretch.microbatches > schedule.accumulate for stretch in schedule.stretches):
        raise BadInput(
            "format: csv: PyTorch's schedules have no updates between microbatches; only methods that flush can be written"
        )
    return _write_rows(schedule)


def _write_rows(schedule: Schedule) -> Iterator[str]:
    for stages in _group_stages(schedule).values():
        of_stages = ([f"{stage}{cell}" if cell else "" for cell in schedule.cells(stage)] for stage in stages)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow("".join(cells) for cells in zip(*of_stages))
        yield text.getvalue()
