"""Schedules and weight versions in a notebook: a table in HTML and one in plain text.

slot     0    1    2    3     4    5
stage 0  F0   F1   .    B0 *  F2   B1 *      F0 in the colour of forwards; on hover "forward of microbatch 0 ..."
stage 1  .    F0   B0*  F1    B1*  F2        * an update
"""

from __future__ import annotations

import re
from collections import defaultdict
from html import escape, unescape
from typing import Callable, DefaultDict, List, Protocol, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.colours import COLOURS, choose_ink
from ipu_pipe.schedule.stretches import GridArray, IntArray

# of a larger schedule the first ones are drawn, and a line tells how many there are
MOST_SLOTS = 60
MOST_ROWS = 32
MOST_MICROBATCHES = 20

# (first, last) -> the versions that the forwards and the backwards of the microbatches [first,
# last) read, each (P, n)
ReadVersions = Callable[[int, int], Tuple[IntArray, IntArray]]
# (device, slot) -> the spans in it
Cells = DefaultDict[Tuple[int, int], List[str]]

_TAG = re.compile("<[^>]*>")
# The slider fades what comes after its slot, and the button moves it. Where no script may run, as in a
# notebook on a web page of others, the whole table is seen.
_PLAYER = (
    '<div><button type="button" onclick="const s=this.nextElementSibling;clearInterval(s.timer);s.value=0;'
    "s.timer=setInterval(()=>{s.oninput();if(+s.value>=+s.max)clearInterval(s.timer);else s.value++},300)"
    '">play</button> <input type="range" min="0" max="LAST" value="LAST" aria-label="slot" '
    "oninput=\"for(const row of this.parentElement.parentElement.querySelectorAll('tr'))"
    '[...row.cells].forEach((cell,i)=>cell.style.opacity=i>+this.value+1?0.15:1)"></div>'
)


class Drawable(Protocol):
    """The parts of a `Schedule` that a drawing reads; the class itself imports this module."""

    @property
    def name(self) -> str: ...

    @property
    def stages(self) -> int: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def accumulate(self) -> int: ...

    @property
    def slot_count(self) -> int: ...

    @property
    def device_of_stage(self) -> tuple[int, ...]: ...

    def spell_out(self, first_slot: int, last_slot: int) -> dict[Kind, GridArray]: ...

    def update_grid(self, first_slot: int, last_slot: int) -> GridArray: ...

    def find_whole(self, microbatch: IntArray) -> NDArray[np.bool_]: ...


def draw_html(schedule: Drawable, read_versions: ReadVersions | None = None) -> str:
    """Return the first slots of a schedule as an HTML table, a row per device, with a title on each
    pass.

    `read_versions`: the weight versions, for the titles. The colours are written into the elements,
    each with an ink that reads well on it, so that the table needs no style sheet and suits a dark
    page as a light one.
    """
    devices = sorted(set(schedule.device_of_stage))
    slots = range(min(schedule.slot_count, MOST_SLOTS))
    cells = _fill_cells(schedule, len(slots), read_versions)
    row_name = "stage" if len(devices) == schedule.stages else "device"
    rows = {
        f"{row_name} {device}": ["".join(cells[device, slot]) or "&middot;" for slot in slots]
        for device in devices[:MOST_ROWS]
    }
    # slots are equally wide, as they take equally long
    # in letters, as they are read: without tags, and &middot; as one
    width = max(
        (len(unescape(_TAG.sub("", cell))) for row in rows.values() for cell in row), default=1
    )
    lines = [_write_row("th", width, "slot", [str(slot) for slot in slots])]
    lines += [_write_row("td", width, label, contents) for label, contents in rows.items()]
    notes = [_describe(schedule)]
    more_slots = schedule.slot_count - len(slots)
    more_rows = len(devices) - MOST_ROWS
    if more_slots > 0:
        notes.append(f"{more_slots} more slots")
    if more_rows > 0:
        notes.append(f"{more_rows} more {row_name}s")
    return (
        '<div><div style="overflow-x:auto"><table style="border-collapse:collapse;color:inherit;font:12px monospace">'
        + "".join(lines)
        + f"</table></div>{_PLAYER.replace('LAST', str(len(slots) - 1))}"
        + f"<div>{_write_legend(schedule, read_versions is not None)}{escape('; '.join(notes))}</div></div>"
    )


def _fill_cells(schedule: Drawable, end: int, read_versions: ReadVersions | None) -> Cells:
    """Return the passes and updates of the slots before `end`, forwards first and updates last."""
    grids = schedule.spell_out(0, end)
    count = 1 + max(int(grid.max(initial=-1)) for grid in grids.values())  # -1 is an idle slot
    is_whole = schedule.find_whole(np.arange(count))
    versions: dict[Kind, IntArray] = {}
    if read_versions is not None:
        forward, backward = read_versions(0, count)
        # the weight gradient of a split backward reads no weights
        versions = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT_GRADIENT: backward}
    device_of = schedule.device_of_stage
    cells: Cells = defaultdict(list)
    for kind, grid in grids.items():
        for stage, slot in np.argwhere(grid >= 0).tolist():
            m = int(grid[stage, slot])
            suffix = f"@{stage}" if device_of.count(device_of[stage]) > 1 else ""
            drawn = kind
            text = f"{kind.value}{m}{suffix}"
            if kind is not Kind.FORWARD and is_whole[stage, m]:
                # a whole backward takes the slots of both of its halves
                drawn = Kind.BACKWARD
                text = "=" if kind is Kind.WEIGHT_GRADIENT else f"{drawn.value}{m}{suffix}"
            title = f"{drawn.word} of microbatch {m} on stage {stage}"
            if kind in versions:
                title += f" reads weight version {versions[kind][stage, m]}"
            cells[device_of[stage], slot].append(_write_span(drawn.word, text, title))
    updates = schedule.update_grid(0, end)
    for stage, slot in np.argwhere(updates >= 0).tolist():
        k = int(updates[stage, slot])
        title = f"update {k} of stage {stage} makes weight version {k + 1}"
        cells[device_of[stage], slot].append(_write_span(Kind.UPDATE.word, "*", title))
    return cells


def _write_row(tag: str, width: int, label: str, contents: Sequence[str]) -> str:
    # two spans have a padding of 6 pixels each
    style = f"padding:1px;text-align:left;white-space:nowrap;min-width:calc({width}ch + 12px)"
    cell = f'<{tag} style="{style}">'
    row = "".join(f"{cell}{content}</{tag}>" for content in contents)
    return f'<tr><th scope="row" style="white-space:nowrap;text-align:left">{escape(label)}</th>{row}</tr>'


def _write_span(kind: str, text: str, title: str = "") -> str:
    colour = COLOURS[kind][0]
    style = f"background:{colour};color:{choose_ink(colour)};padding:1px 3px"
    return f'<span style="{style}" title="{escape(title)}">{escape(text)}</span>'


def _write_legend(schedule: Drawable, has_versions: bool) -> str:
    kinds = [*schedule.spell_out(0, 1), Kind.UPDATE]
    legend = " ".join(_write_span(kind.word, kind.word) for kind in kinds)
    return f"{legend} {'weight versions on hover; ' if has_versions else ''}"


def _describe(schedule: Drawable) -> str:
    N = schedule.accumulate
    every = "each microbatch" if N == 1 else f"each {N} microbatches"
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, an "
        f"update after {every}"
    )


def format_versions(schedule: Drawable, read_versions: ReadVersions, delays: IntArray) -> str:
    """Return the versions that the forward and the backward of the first microbatches read, a line
    per stage.

    `delays`: the greatest steady lag of each stage, (P,).
    """
    count = min(schedule.microbatches, MOST_MICROBATCHES)
    rows = min(schedule.stages, MOST_ROWS)
    forward, backward = read_versions(0, count)
    table = [
        [f"{f}/{b}" for f, b in zip(*pair)]
        for pair in zip(forward[:rows].tolist(), backward[:rows].tolist())
    ]
    header = [str(m) for m in range(count)]
    width = max(len(cell) for row in [header, *table] for cell in row)
    labels = ["microbatch", *(f"stage {s}" for s in range(rows))]
    ends = ["  delay", *(f"  {delay:>5}" for delay in delays[:rows].tolist())]
    lines = [f"{_describe(schedule)}; weight versions of forward/backward, delay in updates"]
    for label, cells, end in zip(labels, [header, *table], ends):
        lines.append(f"{label:<10}  " + " ".join(f"{cell:>{width}}" for cell in cells) + end)
    if (count, rows) != (schedule.microbatches, schedule.stages):
        lines.append(
            f"({count} of {schedule.microbatches} microbatches, {rows} of {schedule.stages} stages "
            f"shown)"
        )
    return "\n".join(lines)
