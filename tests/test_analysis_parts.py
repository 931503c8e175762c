"""The parts of devices' time are exact for known idle times, and equal a count of every nanosecond."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Set, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_pipe.report.analysis.devices import find_span, measure_devices, measure_union
from ipu_pipe.report.run_trace import build_modelled_events
from ipu_pipe.schedule.clock import clock, make_slot_costs
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, OUTSIDE, WAIT, Event, Events
from tests.slot_simulation import PLAYED

EventFields = Tuple[int, str, int, int, int]  # device, kind, start, end, peer


def make_events(*fields: EventFields) -> Events:
    return Events.from_rows(
        Event(d, d, kind, 0, start, end, 0, None, peer) for d, kind, start, end, peer in fields
    )


PARTS = ("busy_ns", "wait_ns", "communication_ns", "ramp_up_ns", "ramp_down_ns", "idle_ns")


def measure_rows(*fields: EventFields, devices: Sequence[int] = ()) -> List[Dict[str, Any]]:
    events = make_events(*fields)
    return measure_devices(events, devices, find_span(events))[0]


def sum_parts(row: Dict[str, Any]) -> int:
    return sum(row[part] for part in PARTS)


def test_a_device_that_waits() -> None:
    """Device 0 computes in [10, 20) and [50, 70), sends in [20, 26), waits for 1 in [26, 40), and evaluates in [42, 47)."""
    rows = measure_rows(
        (0, "backward", 50, 70, -1), (0, "forward", 10, 20, -1), (0, "send", 20, 26, 1), (0, WAIT, 26, 40, 1),
        (0, "evaluate", 42, 47, -1), (1, "forward", 0, 100, -1),
    )  # fmt: skip
    assert rows[0] == {
        "index": 0, "stages": [0], "busy_ns": 30, "busy_ns_by_stage": {"0": 30},
            "wait_ns": 14, "communication_ns": 6, "ramp_up_ns": 10, "ramp_down_ns": 30,
        "idle_ns": 10, "waits_for": {"1": 14}, "idle_in": {"evaluate": 5, "checkpoint": 0, "pause": 0, "host": 5},
        "outside_ns": 5, "data_ns": 0, "utilization": 30 / 95,
    }  # fmt: skip
    assert rows[1]["busy_ns"] == sum_parts(rows[1]) == 100 and rows[1]["waits_for"] == {}


def test_overlapping_times_are_counted_once() -> None:
    """Compute hides messages, messages hide waits, waits hide evaluations, and of two waits the earlier one counts."""
    rows = measure_rows(
        (0, "forward", 0, 10, -1), (0, "forward", 5, 15, -1), (0, "backward", 90, 100, -1), (0, "backward", 95, 95, -1),
        (0, "recv", 10, 25, 1), (0, "send", 12, 20, 1), (0, WAIT, 20, 50, 2), (0, WAIT, 18, 40, 1), (0, WAIT, 45, 60, 3),
        (0, "pause", 30, 70, -1), (0, "checkpoint", 65, 80, -1),
    )  # fmt: skip
    (row,) = rows
    assert (row["busy_ns"], row["communication_ns"], row["wait_ns"], row["outside_ns"]) == (
        25,
        10,
        35,
        20,
    )
    assert row["waits_for"] == {"1": 15, "2": 10, "3": 10}
    assert row["idle_in"] == {"evaluate": 0, "checkpoint": 15, "pause": 5, "host": 10}


def test_a_wait_within_a_wait() -> None:
    (row,) = measure_rows(
        (0, WAIT, 12, 15, 2),
        (0, WAIT, 10, 20, 1),
        (0, "forward", 0, 5, -1),
        (0, "forward", 30, 35, -1),
    )
    assert row["waits_for"] == {"1": 10} and row["wait_ns"] == 10 and row["idle_ns"] == 15


def test_ramps_are_all_the_time_before_and_after_compute() -> None:
    (row,) = measure_rows((0, WAIT, 0, 20, 1), (0, "update", 20, 20, -1), (0, "recv", 20, 30, 1), (0, "forward", 25, 40, -1),
                    (0, WAIT, 35, 60, 1), (0, "evaluate", 60, 75, -1))  # fmt: skip
    assert [row[key] for key in PARTS] == [15, 0, 5, 20, 35, 0] and row["outside_ns"] == 15


def test_devices_without_compute_or_without_events() -> None:
    rows = measure_rows((0, "forward", 0, 50, -1), (3, WAIT, 10, 30, 0), devices=[0, 1, 3])
    assert [row["index"] for row in rows] == [0, 1, 3]
    assert (rows[1]["idle_ns"], sum_parts(rows[1]), rows[1]["stages"]) == (50, 50, [])
    assert (rows[2]["wait_ns"], rows[2]["idle_ns"], rows[2]["ramp_up_ns"]) == (20, 30, 0)


def test_an_instant_alone() -> None:
    (row,) = measure_rows((0, "forward", 7, 7, -1))
    assert sum_parts(row) == row["busy_ns"] == 0 and row["utilization"] is None


KIND_CHOICES = ["forward", "update", "send", "recv", WAIT, WAIT, WAIT, WAIT, *OUTSIDE]
event_lists = st.lists(
    st.tuples(
        st.integers(0, 1), st.sampled_from(KIND_CHOICES), st.integers(0, 30), st.integers(0, 25), st.integers(-1, 2),
    ).map(lambda e: (e[0], e[1], e[2], e[2] + e[3], e[4])),
    min_size=1, max_size=12,
)  # fmt: skip


def count_nanoseconds(
    fields: Sequence[EventFields], device: int, span: Tuple[int, int]
) -> Dict[str, Any]:
    """Count the nanoseconds of a device by its state in each of them."""
    of_device = [e for e in fields if e[0] == device]
    computes = [e for e in of_device if e[1] in COMPUTE]
    begin = min((e[2] for e in computes), default=span[0])
    last = max((e[3] for e in computes), default=span[1])
    counts: Dict[str, Any] = {
        "waits_for": {},
        "idle_in": dict.fromkeys((*OUTSIDE, "host"), 0),
        "outside_ns": 0,
    }
    for part in ("busy", "communication", "wait", "ramp_up", "ramp_down", "idle"):
        counts[f"{part}_ns"] = 0
    for t in range(*span):
        at: Set[str] = {e[1] for e in of_device if e[2] <= t < e[3]}
        outside = [kind for kind in OUTSIDE if kind in at]
        if not begin <= t < last:
            counts["ramp_up_ns" if t < begin else "ramp_down_ns"] += 1
            counts["outside_ns"] += bool(outside)
        elif at & {*COMPUTE}:
            counts["busy_ns"] += 1
        elif at & {*COMMUNICATION}:
            counts["communication_ns"] += 1
        elif WAIT in at:
            first = min(
                (e for e in of_device if e[1] == WAIT and e[2] <= t < e[3]), key=lambda e: e[2]
            )
            counts["wait_ns"] += 1
            peer = str(first[4]) if first[4] >= 0 else "unknown"
            counts["waits_for"][peer] = counts["waits_for"].get(peer, 0) + 1
        else:
            counts["idle_ns"] += 1
            counts["idle_in"][outside[0] if outside else "host"] += 1
            counts["outside_ns"] += bool(outside)
    return counts


@settings(max_examples=300, deadline=None)
@given(event_lists)
def test_parts_add_up_and_equal_a_count_of_every_nanosecond(fields: List[EventFields]) -> None:
    events = make_events(*fields)
    span = find_span(events)
    rows, overlap = measure_devices(events, [0, 1, 2], span)
    messages_ns = hidden_ns = 0
    for row in rows:
        assert sum_parts(row) == span[1] - span[0]
        expected = count_nanoseconds(fields, row["index"], span)
        assert {key: row[key] for key in expected} == expected
        messages = {
            t
            for e in fields
            if e[0] == row["index"] and e[1] in COMMUNICATION
            for t in range(e[2], e[3])
        }
        passes = {
            t for e in fields if e[0] == row["index"] and e[1] in COMPUTE for t in range(e[2], e[3])
        }
        messages_ns, hidden_ns = messages_ns + len(messages), hidden_ns + len(messages & passes)
    assert (overlap["communication_ns"], overlap["hidden_ns"]) == (messages_ns, hidden_ns)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_a_union_is_a_set_of_moments(intervals: List[Tuple[int, int]]) -> None:
    start = np.array([s for s, _ in intervals], np.int64)
    length_of_union = measure_union(
        start, start + np.array([length for _, length in intervals], np.int64)
    )
    assert length_of_union == len({t for s, length in intervals for t in range(s, s + length)})


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize(
    "stages, accumulate, batches", [(1, 1, 3), (2, 2, 3), (4, 4, 3), (5, 8, 2)]
)
def test_parts_of_every_methods_slots(
    name: str, stages: int, accumulate: int, batches: int
) -> None:
    """With slots of equal time each device has the bubble of the schedule."""
    method = METHODS[name]
    schedule = make_schedule(method, stages, accumulate * batches, accumulate)
    table = VersionTable(schedule, method)
    count = accumulate * batches
    times, versions = (
        clock(schedule, make_slot_costs(schedule)),
        (table.forward(0, count), table.backward(0, count)),
    )
    events, _ = build_modelled_events(times, versions, 1000.0, schedule.device_of_stage)
    rows, _ = measure_devices(events, [], find_span(events))
    span, busy = 1000 * schedule.slot_count, 2 * count * 1000 // schedule.slot_capacity
    assert [(row["busy_ns"], sum_parts(row)) for row in rows] == [(busy, span)] * stages
    assert busy / span == pytest.approx(schedule.busy_share(), abs=1e-12)
    if name == "gpipe":  # (P - 1) / (N + P - 1), Huang et al. 2019, section 2.3
        assert 1 - busy / span == pytest.approx((stages - 1) / (accumulate + stages - 1))
