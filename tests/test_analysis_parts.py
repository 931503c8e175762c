"""The parts of devices' time are exact for known idle times, and equal a count of every nanosecond."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ipu_pipe.report.analysis.devices import find_span, measure_devices, measure_union
from ipu_pipe.trace.events import COMMUNICATION, COMPUTE, OUTSIDE, WAIT, Event, Events

EventFields = Tuple[int, str, int, int, int]  # device, kind, start, end, peer


PARTS = ("busy_ns", "wait_ns", "communication_ns", "ramp_up_ns", "ramp_down_ns", "idle_ns")


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
    states: Counter[str] = Counter()
    waits_for: Counter[str] = Counter()
    idle_in = dict.fromkeys((*OUTSIDE, "host"), 0)
    for t in range(*span):
        now = [e for e in of_device if e[2] <= t < e[3]]
        at = {e[1] for e in now}
        outside = [kind for kind in OUTSIDE if kind in at]
        if not begin <= t < last:
            state = "ramp_up" if t < begin else "ramp_down"
        elif at & {*COMPUTE}:
            state = "busy"
        elif at & {*COMMUNICATION}:
            state = "communication"
        elif WAIT in at:
            state = "wait"
            peer = min((e for e in now if e[1] == WAIT), key=lambda e: e[2])[4]
            waits_for[str(peer) if peer >= 0 else "unknown"] += 1
        else:
            state = "idle"
            idle_in[outside[0] if outside else "host"] += 1
        states[f"{state}_ns"] += 1
        states["outside_ns"] += bool(outside) and state in ("ramp_up", "ramp_down", "idle")
    numbers = {part: states[part] for part in (*PARTS, "outside_ns")}
    training = span[1] - span[0] - states["outside_ns"]
    utilization = states["busy_ns"] / training if training else None
    return {**numbers, "waits_for": waits_for, "idle_in": idle_in, "utilization": utilization}


OVERLAPPING: List[EventFields] = [
    (0, "forward", 0, 10, -1), (0, "forward", 5, 15, -1), (0, "backward", 90, 100, -1), (0, "backward", 95, 95, -1),
    (0, "recv", 10, 25, 1), (0, "send", 12, 20, 1), (0, WAIT, 20, 50, 2), (0, WAIT, 18, 40, 1), (0, WAIT, 22, 24, 3),
    (0, WAIT, 45, 60, 3),
    (0, "pause", 30, 70, -1), (0, "checkpoint", 65, 80, -1),
]  # fmt: skip


def check_parts(fields: List[EventFields]) -> None:
    """Check the parts of all devices' times.

    Compute hides messages, messages hide waits, waits hide evaluations, and of two waits the
    earlier one counts.
    """
    rows = [Event(d, d, kind, 0, begin, end, 0, None, peer) for d, kind, begin, end, peer in fields]
    events = Events.from_rows(rows)
    span = find_span(events)
    rows, overlap = measure_devices(events, [0, 1, 2], span)
    communication = hidden = 0
    for row in rows:
        assert sum(row[part] for part in PARTS) == span[1] - span[0]
        expected = count_nanoseconds(fields, row["index"], span)
        assert {key: row[key] for key in expected} == expected
        messages, passes = (
            {t for e in fields if e[0] == row["index"] and e[1] in kinds for t in range(e[2], e[3])}
            for kinds in (COMMUNICATION, COMPUTE)
        )
        communication, hidden = communication + len(messages), hidden + len(messages & passes)
    assert (overlap["communication_ns"], overlap["hidden_ns"]) == (communication, hidden)


def test_parts_of_events_that_overlap() -> None:
    check_parts(OVERLAPPING)


@settings(max_examples=100)
@given(event_lists)
@example([(0, "forward", 7, 7, -1)])
def test_parts_add_up_and_equal_a_count_of_every_nanosecond(fields: List[EventFields]) -> None:
    check_parts(fields)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_a_union_is_a_set_of_moments(intervals: List[Tuple[int, int]]) -> None:
    start, length = np.array(intervals, np.int64).reshape(-1, 2).T
    moments = {t for first, count in intervals for t in range(first, first + count)}
    assert measure_union(start, start + length) == len(moments)
