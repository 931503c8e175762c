"""Check traces: the events of a schedule, and their records in the Chrome file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest

from ipu_pipe.errors import RunFault
from ipu_pipe.report.run_trace import build_modelled_events
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Times, clock, make_slot_costs
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace import chrome as trace
from ipu_pipe.trace.events import Counter, Counters, Event, Events, Trace
from ipu_pipe.trace.reading import merge_traces, read_trace
from tests.slot_simulation import PLAYED

# GPipe, 3 stages, 2 microbatches an update, 2 updates:
#     slot      0  1  2  3  4  5  6  7 |  8  9
#     stage 0  F0 F1             B0 B1 | F2 F3 ...
#     stage 1     F0 F1       B0 B1    |    F2 ...
#     stage 2        F0 F1 B0 B1       |
FORWARD = np.array([[0, 1, 8, 9], [1, 2, 9, 10], [2, 3, 10, 11]])
BACKWARD = np.array([[6, 7, 14, 15], [5, 6, 13, 14], [4, 5, 12, 13]])
VERSIONS = np.array([[0, 0, 1, 1]] * 3)


def build_gpipe_events(**changes: Any) -> Tuple[List[Event], List[Counter]]:
    schedule = make_schedule(METHODS["gpipe"], 3, 4, 2)
    assert (schedule.slots(Kind.FORWARD, 0, 4) == FORWARD).all()
    assert (schedule.slots(Kind.BACKWARD, 0, 4) == BACKWARD).all()
    arguments: Dict[str, Any] = {
        "times": clock(schedule, make_slot_costs(schedule)),
        "versions": (VERSIONS, VERSIONS + 10),
        "unit_ns": 1000.0,
        "device_of_stage": [0, 1, 2],
        "boundary_bytes": [70, 80],
    }  # fmt: skip
    return select_work(*build_modelled_events(**{**arguments, **changes}))


def select_work(events: Events, counters: Counters) -> Tuple[List[Event], List[Counter]]:
    """Return passes and updates by stage, without waits and messages, and the counters."""
    rows = [event for event in events.rows() if event.kind not in ("wait", "send")]
    return sorted(rows, key=lambda e: e.stage), list(counters.rows())


def read_chrome(path: Path) -> Tuple[List[Event], List[Counter], Dict[str, Any]]:
    """Return the events, counters and metadata that the library reads from a Chrome file."""
    result = read_trace(path)
    return list(result.events.rows()), list(result.counters.rows()), result.metadata


def make_slot_times(forward: np.ndarray, backward: np.ndarray, accumulate: int) -> Times:
    """Return the times of passes of one unit each that begin in these slots."""
    start = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.UPDATE: backward[:, accumulate - 1 :: accumulate] + 1,
    }
    return Times(start, {kind: slots + (kind is not Kind.UPDATE) for kind, slots in start.items()})


def read_chrome_json(path: Path) -> Dict[str, Any]:
    content: Dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()).decode())
    return content


def list_records(path: Path, phase: str) -> List[Dict[str, Any]]:
    return [r for r in read_chrome_json(path)["traceEvents"] if r["ph"] == phase]


# ---- modelled events


def test_events_of_a_schedule() -> None:
    events, _ = build_gpipe_events()
    assert len(events) == 2 * 12 + 3 * 2
    assert Event(0, 0, "forward", 3, 9000, 10000, 1, 70) in events  # sends activations to stage 1
    assert Event(1, 1, "backward", 1, 6000, 7000, 10, 70) in events  # sends gradients to stage 0
    assert Event(1, 1, "forward", 0, 1000, 2000, 0, 80) in events
    assert Event(2, 2, "forward", 0, 2000, 3000, 0, None) in events
    assert Event(0, 0, "backward", 0, 6000, 7000, 10, None) in events
    updates = [e for e in events if e.kind == "update"]
    assert updates[:2] == [
        Event(0, 0, "update", k, 8000 * (k + 1), 8000 * (k + 1), k + 1, None) for k in (0, 1)
    ]
    assert {e.start_ns for e in updates if e.stage == 2} == {6000, 14000}


def count_in_flight(
    forward: np.ndarray, backward: np.ndarray, stages: Sequence[int], slot: int
) -> int:
    """Count the microbatches of `stages` whose forward, but not backward, has begun before
    `slot`."""
    return sum(
        int(f < slot) - int(b < slot)
        for s in stages
        for f, b in zip(forward[s].tolist(), backward[s].tolist())
    )


@pytest.mark.parametrize("devices", [[0, 1, 2], [0, 0, 1], [5, 5, 5], [0, 1, 0]])
def test_counters_are_the_microbatches_in_flight_on_a_device(devices: List[int]) -> None:
    _, counters = build_gpipe_events(device_of_stage=devices)
    for device in set(devices):
        counts = {c.time_ns: c.value for c in counters if c.device == device}
        assert len(counts) == sum(c.device == device for c in counters)  # one value for each time
        stages = [s for s in range(3) if devices[s] == device]
        value = 0.0
        for slot in range(17):
            value = counts.get(1000 * slot, value)
            assert value == count_in_flight(FORWARD, BACKWARD, stages, slot), (device, slot)
        assert value == 0


# ---- all schedules


def build_method_events(
    name: str, args: Dict[str, Any], microbatches: int = 12
) -> Tuple[List[Event], List[Counter]]:
    """Return the events and counters of a modelled run: 4 stages, 4 microbatches an update,
    slots of 999 ns, so halves are rounded."""
    accumulate = 1 if name == "naive" else 4
    method = resolve_method(name, args)
    schedule = make_schedule(method, 4, microbatches, accumulate)
    table = VersionTable(schedule, method)
    return select_work(*build_modelled_events(
        clock(schedule, make_slot_costs(schedule)), (table.forward(0, microbatches), table.backward(0, microbatches)),
        unit_ns=999.0, device_of_stage=[0, 1, 2, 3],
    ))  # fmt: skip


BOTH: List[Tuple[str, Dict[str, Any]]] = [
    ("pipedream", {"schedule": "dataflow", "turn": 0}),
    ("pipedream", {"schedule": "dataflow", "turn": 1}),
]


@pytest.mark.parametrize(("name", "args"), [*((name, {}) for name in PLAYED), *BOTH])
def test_on_every_schedule_a_device_does_one_thing_at_a_time_and_results_go_forward_in_time(
    name: str, args: Dict[str, Any], tmp_path: Path
) -> None:
    events, counters = build_method_events(name, args)
    local = METHODS[name].structure is not None
    passes = {(e.kind, e.stage, e.microbatch): e for e in events if e.kind != "update"}
    assert len(passes) == 2 * 4 * 12 and all(e.start_ns < e.end_ns for e in passes.values())
    # two passes share a slot: 499.5 ns each, to the nearest nanosecond
    if name == "pipelined_backprop":
        first = passes["forward", 0, 0]
        assert (first.start_ns, first.end_ns) == (0, 500)
    for stage in range(4):
        spans = sorted((e.start_ns, e.end_ns) for e in passes.values() if e.stage == stage)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
        value: float = 0
        counts = {c.time_ns: c.value for c in counters if c.device == stage}
        moments = sorted({t for times in spans for t in times})
        for moment in moments:
            value = counts.get(moment, value)
            finished_counts = [sum(e.end_ns <= moment for (k, s, _), e in passes.items() if (k, s) == (kind, stage))
                    for kind in ("forward", "backward")]  # fmt: skip
            assert value == finished_counts[0] - finished_counts[1]
        assert value == 0 and max(counts.values()) > 0
        batch = 1 if name == "naive" else 4
        assert [
            (e.microbatch, e.version, e.start_ns, e.end_ns)
            for e in events
            if e[:3] == (stage, stage, "update")
        ] == [
            (k, k + 1, *[passes["backward", stage, batch * (k + 1) - 1].end_ns] * 2)
            for k in range(12 // batch)
        ]
    for m in range(12):
        chain = [passes["forward", s, m] for s in range(4)]
        chain += [] if local else [passes["backward", s, m] for s in (3, 2, 1, 0)]
        assert all(one.end_ns <= other.start_ns for one, other in zip(chain, chain[1:]))
    trace.write_chrome(tmp_path / "t", events, counters, {"gradients_cross": not local})
    starts, ends = (
        {r["id"]: r["ts"] for r in list_records(tmp_path / "t", phase)} for phase in "sf"
    )
    assert len(starts) == (1 if local else 2) * 3 * 12 and starts.keys() == ends.keys()
    assert all(starts[i] < ends[i] for i in starts)


# ---- the file


MIXED = [
    Event(0, 0, "forward", 0, 1, 1_001, 0, 12),
    Event(0, 0, "send", 0, 500, 2_345_678_901, 0, 12),
    Event(1, 1, "recv", 0, 2_500, 2_600, -1, None),
    Event(1, 1, "wait", -1, 2_500, 2_550, -1, None),
    Event(1, 1, "forward", 0, 2_600, 3_600, 3, None),
    Event(1, 1, "backward", 0, 3_600, 5_600, 4, 12),
    Event(1, 1, "update", 0, 5_600, 5_600, 1, None),
    Event(0, 0, "backward", 0, 6_000, 8_000, 0, None),
    Event(-1, 1, "evaluate", -1, 9_000, 9_500, -1, None),
    Event(-1, 0, "checkpoint", -1, 9_500, 9_900, -1, None),
    Event(1, 1, "recompute", 0, 9_900, 9_910, 4, None),
    Event(1, 1, "input gradient", 0, 9_910, 9_920, 4, None),
    Event(1, 1, "weight gradient", 0, 9_920, 9_930, 4, None),
    Event(1, 1, "average", 0, 9_930, 9_940, 4, None),
    Event(-1, 1, "pause", -1, 9_940, 9_950, -1, None),
]


def test_a_counter_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    trace.write_chrome(
        tmp_path / "t", build_gpipe_events()[0], [Counter(0, "loss", 1, float("nan"))], {}
    )
    assert list_records(tmp_path / "t", "C")[0]["args"]["value"] is None
    _, (counter,), _ = read_chrome(tmp_path / "t")
    assert counter.value != counter.value


def test_modelled_times_are_marked(tmp_path: Path) -> None:
    events, counters = build_gpipe_events()
    for is_modelled in (True, False):
        trace.write_chrome(tmp_path / "t", events, counters, {"modelled": is_modelled})
        assert read_chrome_json(tmp_path / "t")["otherData"] == {"modelled": is_modelled}
        assert all(
            r["args"].get("modelled", False) is is_modelled
            for r in list_records(tmp_path / "t", "X")
        )


def test_events_in_the_file(tmp_path: Path) -> None:
    trace.write_chrome(tmp_path / "t", MIXED, [], {})
    work = list_records(tmp_path / "t", "X")
    assert work[0] == {
        "ph": "X", "pid": 0, "tid": 0, "name": "F0", "cat": "forward", "ts": 0.001, "dur": 1.0,
        "args": {"stage": 0, "microbatch": 0, "version": 0, "bytes": 12},
    }  # fmt: skip
    assert [r["name"] for r in work] == [
        "F0", "send 0", "recv 0", "wait", "F0", "B0", "U0", "B0", "evaluate", "checkpoint",
        "recompute 0", "I0", "W0", "average 0", "pause",
    ]  # fmt: skip
    assert work[6]["args"] == {"stage": 1, "k": 0, "version": 1}
    computing, communicating = {0: 0, 1: 1}, {0: 2, 1: 3}  # threads by device
    kinds = ("send", "recv", "average")
    assert [r["tid"] for r in work] == [
        (communicating if e.kind in kinds else computing)[e.device] for e in MIXED
    ]


def test_devices_and_tracks_have_names(tmp_path: Path) -> None:
    slots = 4 * np.arange(4)[None] + [[0], [1], [0]]
    events, _ = build_gpipe_events(
        times=make_slot_times(slots, slots + 2, 2),
        versions=(slots, slots),
        device_of_stage=[0, 0, 4],
    )
    trace.write_chrome(tmp_path / "t", [*events, Event(2, 4, "recv", 0, 0, 1, -1, None)], [], {})
    names = [
        (r["pid"], r["tid"], r["name"], r["args"].get("name"))
        for r in list_records(tmp_path / "t", "M")
    ]
    assert [n for n in names if n[2] != "process_sort_index"] == [
        (0, 0, "process_name", "device 0"),
        (0, 0, "thread_name", "compute, stages 0, 1"),
        (4, 4, "process_name", "device 4"),
        (4, 4, "thread_name", "compute, stage 2"),
        (4, 9, "thread_name", "communication"),
    ]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    trace.write_chrome(path, MIXED, [], {})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        trace.write_chrome(path, MIXED, [Counter(0, "odd", 0, object())], {})  # type: ignore[arg-type]
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(
        RunFault, match="nowhere/t: the trace cannot be written: No such file or directory"
    ):
        trace.write_chrome(tmp_path / "nowhere" / "t", [], [], {})


def make_trace_part(device: int, **metadata: Any) -> Trace:
    return Trace(
        Events.from_rows(e for e in MIXED if e.device == device),
        Counters.from_rows([]),
        metadata,
        (f"note {device}",),
    )


def test_a_merged_trace_is_modelled_if_a_part_is() -> None:
    assert merge_traces(
        [make_trace_part(0, modelled=False), make_trace_part(1, modelled=True)]
    ).metadata == {"modelled": True}
    merged = merge_traces([make_trace_part(0, modelled=False, rank=0), make_trace_part(1, rank=1)])
    assert merged.metadata == {"modelled": False, "rank": 0} and merged.notes == (
        "note 0",
        "note 1",
    )


def test_passes_of_a_device_with_several_stages_are_named_by_them(tmp_path: Path) -> None:
    """Story: a device with stages 0 and 3 showed two passes named F0."""
    events = [
        Event(stage, device, "forward", 0, 10 * stage, 10 * stage + 5, -1, None)
        for stage, device in ((0, 0), (1, 1), (3, 0))
    ]
    trace.write_chrome(tmp_path / "t", events, [], {})
    assert [r["name"] for r in list_records(tmp_path / "t", "X")] == ["F0@0", "F0", "F0@3"]
