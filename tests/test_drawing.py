"""Schedules and version tables draw themselves in a notebook; each cell is compared with the schedule and the table."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.drawing import MOST_ROWS, MOST_SLOTS
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.rows import format_text
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable


class Page(HTMLParser):
    """The parsed drawing: (text, title) of the passes by row and column, and the text below."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set = set()
        self.rows: List[List[List[Tuple[str, str]]]] = []
        self.below, self._open = "", []
        self.feed(text)
        self.close()
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        # an element without an end
        if tag != "input":
            self._open.append((tag, dict(attributes).get("title", "")))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append([])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if "table" in dict(self._open):
            self.rows[-1][-1].append((data, self._open[-1][1]))
        else:
            self.below += data


def make_version_table(
    method: str, stages: int, microbatches: int, accumulate: int, **args: Any
) -> VersionTable:
    resolved = resolve_method(method, args)
    return VersionTable(make_schedule(resolved, stages, microbatches, accumulate), resolved)


@pytest.mark.parametrize(
    ("method", "accumulate", "args"),
    [
        ("pipedream", 1, {}),
        ("gpipe", 4, {}),
        ("local_greedy", 1, {}),
        ("zbv", 4, {}),
        ("pipelined_backprop", 1, {"split_backward": True, "stages_per_device": 2}),
        ("interleaved_1f1b", 4, {"stages_per_device": 2}),
    ],
)
def test_every_pass_and_update_is_drawn(method: str, accumulate: int, args: Dict[str, Any]) -> None:
    table = make_version_table(method, 4, 8, accumulate, **args)
    schedule = table.schedule
    page = Page(table._repr_html_())
    # no scripts, styles or links
    assert page.tags <= {"div", "table", "tr", "th", "td", "span", "button", "input"}
    devices = sorted(set(schedule.device_of_stage))
    assert len(page.rows) == 1 + len(devices)
    assert [cell[0][0] for cell in page.rows[0]] == ["slot", *map(str, range(schedule.slot_count))]
    forward, backward = table.window(0, 8)
    expected: Dict[Tuple[int, int], List[str]] = {}
    grids = [*schedule.spell_out(0, schedule.slot_count).items()]
    for kind, grid in [*grids, (Kind.UPDATE, schedule.update_grid(0, schedule.slot_count))]:
        read = {Kind.FORWARD: forward, Kind.WEIGHT_GRADIENT: None}.get(kind, backward)
        for stage, slot in np.argwhere(grid >= 0).tolist():
            number = grid[stage, slot]
            title = f"{kind.word} of microbatch {number} on stage {stage}"
            if kind is Kind.UPDATE:
                title = f"update {number} of stage {stage} makes weight version {number + 1}"
            elif read is not None:
                title += f" reads weight version {read[stage, number]}"
            expected.setdefault((schedule.device_of_stage[stage], slot), []).append(title)
    for row, device in zip(page.rows[1:], devices):
        for slot, cell in enumerate(row[1:]):
            assert [title for _, title in cell] == expected.get((device, slot), [""])


def test_a_whole_backward_among_split_ones_takes_two_slots() -> None:
    """The drawing in HTML has the same words as the one in text."""
    table = make_version_table("dualpipe_v", 4, 8, 8)
    text_rows = [line.split()[2:] for line in format_text(table.schedule).splitlines()[1:]]
    rows = Page(table._repr_html_()).rows[1:]
    words = [["".join(text for text, _ in cell) for cell in row[1:]] for row in rows]
    assert words == [[word.replace(".", "\u00b7") for word in row] for row in text_rows]
    assert any("=" in row for row in words)


def test_a_large_schedule_is_cut_with_a_note_and_alone_has_no_versions() -> None:
    schedule = make_version_table("pipedream", MOST_ROWS + 8, 10_000, 1).schedule
    page = Page(schedule._repr_html_())
    assert len(page.rows) == 1 + MOST_ROWS and {len(row) for row in page.rows} == {1 + MOST_SLOTS}
    assert f"{schedule.slot_count - MOST_SLOTS} more slots; 8 more stages" in page.below
    assert "version" not in page.below
    assert "forward of microbatch 0 on stage 0" in [title for _, title in page.rows[1][1]]
