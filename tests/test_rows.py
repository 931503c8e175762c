"""Check rows written by hand, for devices with several stages and for split backwards: proof,
drawing and times."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import SPLIT_PASSES, Action, Kind, list_needs
from ipu_pipe.schedule.clock import Costs, clock, make_slot_costs
from ipu_pipe.schedule.rows import format_text, from_rows
from ipu_pipe.schedule.stretches import LaidOut
from ipu_pipe.schedule.table import Schedule, SlotHolds
from tests.support.runs import list_faults

DOCS = Path(__file__).resolve().parents[1] / "docs" / "schedules.md"
V = [
    "F0@0 F1@0 F0@3 B0@3 F1@3 B1@3 B0@0 B1@0".split(),
    "F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1".split(),
]


def make_zero_bubble_rows(P: int, M: int) -> List[List[str]]:
    """Return the rows of ZB-H1 (Qi et al. 2023): 1F1B, with weight gradients s microbatches
    later on stage s."""
    rows = []
    for s in range(P):
        row = [f"F{m}" for m in range(min(P - s, M))]
        for m in range(M):
            row += [
                f"I{m}",
                *([f"W{m - s}"] if m >= s else []),
                *([f"F{m + P - s}"] if m + P - s < M else []),
            ]
        rows.append(row + [f"W{m}" for m in range(max(M - s, 0), M)])
    return rows


def find_slots(schedule: Schedule) -> Dict[Action, int]:
    """Return the slot of every action, updates included."""
    counts = {
        **dict.fromkeys(schedule.passes, schedule.microbatches),
        Kind.UPDATE: schedule.update_count,
    }
    return {
        Action(kind, index, s): int(slot)
        for kind, count in counts.items()
        for s, row in enumerate(schedule.slots(kind, 0, count))
        for index, slot in enumerate(row)
    }


# --- several stages on a device


def test_a_v_is_drawn_by_device() -> None:
    schedule = from_rows(V, 1, placement=[0, 1, 1, 0])
    text = (
        "slot      0     1     2     3     4     5     6     7     8     9\n"
        "device 0  F0@0  F1@0  .     F0@3  B0@3* F1@3  B1@3* B0@0* .     B1@0*\n"
        "device 1  .     F0@1  F0@2  F1@1  F1@2  B0@2* B0@1* B1@2* B1@1* .\n"
    )
    assert format_text(schedule) == text
    assert format_text(schedule, 3, 5, stages=1) == (
        "slot      3     4\ndevice 0  F0@3  B0@3*\n(slots 3 to 4 of 10, 1 of 2 devices shown)\n"
    )
    assert schedule.max_in_flight().tolist() == [2, 2, 2, 1] and schedule.busy_share() == 0.8
    # F1 of stage 0 and F0 of stage 1
    with pytest.raises(BadInput, match="device 0 has two actions in slot 1"):
        replace(schedule, placement=(0, 0, 1, 1))


def test_two_stages_of_a_device_may_share_a_step_that_holds_both() -> None:
    rows = ["F0@0 F1@0 F0@2 B0@2 F1@2 B0@0 B1@2 B1@0".split(), "F0 B0 F1 B1".split()]
    schedule = from_rows(rows, 1, SlotHolds.BOTH, placement=(0, 1, 0))
    assert format_text(schedule) == (
        "slot      0          1          2          3          4          5          6          7          8\n"
        "device 0  F0@0       F1@0       F0@2 B0@2* .          .          F1@2 B0@0* B1@2*      .          B1@0*\n"
        "device 1  .          F0         .          B0*        F1         .          .          B1*        .\n"
    )
    assert schedule.busy_share() == 12 / (2 * 9 * 2)


@pytest.mark.parametrize("rows, placement, message", [
    ([["F0", "B0@0"]], (0, 0), "rows: device 0: F0: "),
    ([["F0@1", "B0@0"], ["F0@1", "B0"]], (0, 1), "rows: stage 0: F0 on stage 1: belongs to another row"),
    ([["F0@2"], []], (0, 0, 1), "rows: device 0: F0 on stage 2: belongs to another row"),
    ([["F0"]], (0, 1), "rows: placement: stage 1: device 1: there are rows of 1 devices"),
    ([["F0@0"], []], (0, 0), "rows: placement: device 1: has no stage"),
    ([["F0@0", "F0@1", "B0@1"]], (0, 0), "rows: B0 on stage 0: appears 0 times"),
    ([["F0@0", "B0@0", "F0@1", "B0@1"]], (0, 0), "B0 on stage 0 waits for B0 on stage 1, which waits for B0 on stage 0"),
    ([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], (), "B0 on stage 0 waits for B0 on stage 1, which waits for F1"),
    ([["B0", "F0"]], (), "B0 on stage 0 waits for F0 on stage 0, which waits for B0 on stage 0 (before it in its row)"),
    ([["F0", "F0", "B0"]], (), "rows: F0 on stage 0: appears 2 times"),
    ([["F0", "F1", "B1", "B0"]], (), "U0 on stage 0 would come after U1"),
    ([], (), "needs a stage and a microbatch"),
    ([["F0@", "B0"]], (), "rows: stage 0: F0@: must be F, B, I or W and a microbatch"),
    ([["F0", "I0", "W0", "B0"]], (), "rows: B0 on stage 0: appears 1 times"),
    ([["F0", "I0"]], (), "rows: W0 on stage 0: appears 0 times"),
    ([[Action(Kind.RECOMPUTE, 0, 0)]], (), "R0 on stage 0: must be a forward or a backward"),
    ([[Action(Kind.UPDATE, 0, 0)]], (), "rows: stage 0: U0 on stage 0: updates follow from accumulate"),
])  # fmt: skip
def test_rows_that_are_not_a_schedule_are_refused(
    rows: Any, placement: Tuple[int, ...], message: str
) -> None:
    assert message in "\n".join(list_faults(from_rows, rows, 1, placement=placement))


def test_the_example_of_the_page_prints_the_output_on_the_page() -> None:
    text = DOCS.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code is not None
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code.group(1), {})
    assert "\n".join(f"    {line}" for line in output.getvalue().splitlines()) in text


# --- backwards split in two


@pytest.mark.parametrize(("P", "M"), [(2, 4), (3, 7), (4, 4), (4, 8), (6, 13)])
def test_zero_bubble_has_the_papers_bubble_and_1f1bs_memory(P: int, M: int) -> None:
    """The bubble is (P - 1)(F + B - 2W) beside M (F + B), where B is both halves; weights wait
    for their gradients alone."""
    schedule = from_rows(make_zero_bubble_rows(P, M), M)
    assert schedule.passes == SPLIT_PASSES
    assert schedule.slot_count == 3 * M + (P - 1) * (1 + 2 - 2 * 1)
    assert schedule.max_in_flight().tolist() == [P] * P  # microbatches: activations wait for W
    slots = find_slots(schedule)
    for action, slot in slots.items():
        is_update = action.kind is Kind.UPDATE
        weight_gradients = [Action(Kind.WEIGHT_GRADIENT, m, action.stage) for m in range(M)]
        needs = weight_gradients if is_update else list_needs(action, P)
        assert all(slots[need] < slot + is_update for need in needs)
    f, b, w = 3.0, 6.0, 2.0
    times = clock(schedule, Costs([f] * P, [b] * P, [0.5] * P, weight_gradient=[w] * P))
    assert times.finish == M * (f + b) + (P - 1) * (f + b - 2 * w) + 0.5
    assert (
        times.start[Kind.UPDATE].tolist()
        == times.end[Kind.WEIGHT_GRADIENT].max(axis=1)[:, None].tolist()
    )
    units = clock(schedule, make_slot_costs(schedule))
    assert all((units.start[kind] == schedule.slots(kind, 0, M)).all() for kind in SPLIT_PASSES)


def test_split_backwards_are_drawn_and_update_with_the_last_weight_gradient() -> None:
    """An update follows the last weight gradient of any microbatch: on stage 0 that is the first
    microbatch's."""
    schedule = from_rows(["F0 F1 I0 I1 W1 W0".split(), "F0 I0 F1 I1 W0 W1".split()], 2)
    assert format_text(schedule) == (
        "slot     0   1   2   3   4   5   6   7\n"
        "stage 0  F0  F1  .   I0  .   I1  W1  W0*\n"
        "stage 1  .   F0  I0  F1  I1  W0  W1* .\n"
    )
    assert not schedule.in_order and schedule.slots(Kind.UPDATE, 0, 1).tolist() == [[7], [6]]


def test_a_split_schedule_that_cannot_run_is_refused() -> None:
    schedule = from_rows(make_zero_bubble_rows(3, 4), 4)
    part = schedule.stretches[0]
    tables = {kind: table.copy() for kind, table in part.find.tables.items()}
    tables[Kind.INPUT_GRADIENT][0] -= 1
    with pytest.raises(
        BadInput, match="I0 on stage 0 is in slot 4, but needs I0 on stage 1, which is in slot 4"
    ):
        replace(schedule, stretches=(replace(part, find=LaidOut(tables)),))
