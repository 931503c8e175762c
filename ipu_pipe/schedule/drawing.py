"""Schedules as text: drawn as the papers do, and as the CSV that PyTorch's pipelining reads."""

from __future__ import annotations

import csv
import io
from typing import Iterator, Optional

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.table import Schedule


def format_text(
    schedule: Schedule, first_slot: int = 0, last_slot: Optional[int] = None, stages: Optional[int] = None
) -> str:
    """The timeline as papers draw it: a row a stage, a column a slot, of the slots [first_slot, last_slot).

    F3 is the forward of microbatch 3, B3 its backward, B3* a backward after which the stage is updated, . an idle slot.
    `stages`: print only the first so many. What is left out is said in the last line.
    """
    end = schedule.slot_count if last_slot is None else min(last_slot, schedule.slot_count)
    shown = schedule.stages if stages is None else min(stages, schedule.stages)
    updates = schedule.update_grid(first_slot, end, slice(0, shown)) >= 0
    rows = [[str(slot) for slot in range(first_slot, end)]]
    for stage in range(shown):
        cells = schedule.cells(stage, first_slot, end)
        rows.append([(cell or ".") + "*" * bool(mark) for cell, mark in zip(cells, updates[stage])])
    labels = ["slot", *(f"stage {stage}" for stage in range(shown))]
    label_width, width = max(map(len, labels)), max((len(cell) for row in rows for cell in row), default=1)
    lines = [
        f"{label:<{label_width}}  " + " ".join(f"{cell:<{width}}" for cell in row) for label, row in zip(labels, rows)
    ]
    if (first_slot, end, shown) != (0, schedule.slot_count, schedule.stages):
        lines.append(
            f"(slots {first_slot} to {end - 1} of {schedule.slot_count}, {shown} of {schedule.stages} stages shown)"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def format_csv(schedule: Schedule) -> Iterator[str]:
    """Rows of cells such as 0F3 (stage, kind, microbatch), empty where idle: what torch.distributed.pipelining reads.

    Its schedules know neither slots that hold two actions nor updates: the caller updates when the pipeline is empty.
    Raises BadInput, with the reason, for steps that hold both and where microbatches are in flight across an update.
    """
    if schedule.slot_holds != "one":
        raise BadInput("format: csv: PyTorch's schedules hold one action a slot; this one has steps that hold both")
    if any(part.microbatches > schedule.accumulate for part in schedule.parts):
        raise BadInput(
            "format: csv: PyTorch's schedules have no updates between microbatches; only methods that flush"
            " (naive, gpipe, pipedream_flush) can be written"
        )
    return _csv_rows(schedule)


def _csv_rows(schedule: Schedule) -> Iterator[str]:
    for stage in range(schedule.stages):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(
            f"{stage}{cell}" if cell else "" for cell in schedule.cells(stage)
        )
        yield text.getvalue()
