"""Schedules as text: drawn as the papers do, and as the CSV that PyTorch's pipelining reads."""

from __future__ import annotations

import csv
import io
from typing import Dict, Iterator, List, Optional, Sequence

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.table import Schedule, SlotHolds


def format_text(
    schedule: Schedule, first_slot: int = 0, last_slot: Optional[int] = None, stages: Optional[int] = None
) -> str:
    """The timeline as papers draw it: a row a stage, a column a slot, of the slots [first_slot, last_slot).

    F3 is the forward of microbatch 3, B3 its backward (I3 and W3 its halves), B3* a pass after which the stage is updated,
    . an idle slot. Where a device holds several stages there is a row a device, and F3@2 is of stage 2. `stages`: print only
    the first so many rows. What is left out is said in the last line.
    """
    end = schedule.slot_count if last_slot is None else min(last_slot, schedule.slot_count)
    held = _rows(schedule)
    what = "stage" if len(held) == schedule.stages else "device"
    shown = len(held) if stages is None else min(stages, len(held))
    rows = [[str(slot) for slot in range(first_slot, end)]]
    rows += [_row(schedule, row, first_slot, end) for row in list(held.values())[:shown]]
    labels = ["slot", *(f"{what} {row}" for row in list(held)[:shown])]
    label_width, width = max(map(len, labels)), max((len(cell) for row in rows for cell in row), default=1)
    lines = [
        f"{label:<{label_width}}  " + " ".join(f"{cell:<{width}}" for cell in row) for label, row in zip(labels, rows)
    ]
    if (first_slot, end, shown) != (0, schedule.slot_count, len(held)):
        lines.append(
            f"(slots {first_slot} to {end - 1} of {schedule.slot_count}, {shown} of {len(held)} {what}s shown)"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _rows(schedule: Schedule) -> Dict[int, List[int]]:
    """The stages of each device, or, where none has several, each stage."""
    devices = schedule.device_of_stage
    if len(set(devices)) == schedule.stages:
        return {stage: [stage] for stage in range(schedule.stages)}
    return {device: [s for s, own in enumerate(devices) if own == device] for device in sorted(set(devices))}


def _row(schedule: Schedule, held: Sequence[int], first_slot: int, end: int) -> List[str]:
    """A device's slots [first_slot, end), of the stages `held` there."""
    columns = []
    for stage in held:
        where = f"@{stage}" if len(held) > 1 else ""
        updates = schedule.update_grid(first_slot, end, slice(stage, stage + 1))[0] >= 0
        cells = ([word + where for word in (cell or "").split()] for cell in schedule.cells(stage, first_slot, end))
        columns.append([" ".join(cell) + "*" * bool(mark) for cell, mark in zip(cells, updates)])
    slots = (sorted(filter(None, cells), key=lambda cell: cell[0] != "F") for cells in zip(*columns))  # forwards first
    return [" ".join(cells) or "." for cells in slots]


def format_csv(schedule: Schedule) -> Iterator[str]:
    """A row a device of cells such as 0F3 (stage, kind, microbatch), empty where idle: what torch.distributed.pipelining reads.

    Its schedules know neither slots that hold two actions nor updates: the caller updates when the pipeline is empty.
    Raises BadInput, with the reason, for steps that hold both and where microbatches are in flight across an update.
    """
    if schedule.slot_holds is not SlotHolds.ONE:
        raise BadInput("format: csv: PyTorch's schedules hold one action a slot; this one has steps that hold both")
    if any(part.microbatches > schedule.accumulate for part in schedule.parts):
        raise BadInput(
            "format: csv: PyTorch's schedules have no updates between microbatches; only methods that flush"
            " (naive, gpipe, pipedream_flush) can be written"
        )
    return _csv_rows(schedule)


def _csv_rows(schedule: Schedule) -> Iterator[str]:
    for held in _rows(schedule).values():
        of_stages = ([f"{stage}{cell}" if cell else "" for cell in schedule.cells(stage)] for stage in held)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow("".join(cells) for cells in zip(*of_stages))
        yield text.getvalue()
