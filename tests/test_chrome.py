"""Check modelled traces, and the Chrome file against the rules of the Trace Event Format and of Perfetto.

Perfetto drops events that overlap on one thread, ties an arrow's ends to the events around them, and identifies
threads by number.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest

from ipu_pipe.errors import RunFault
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.trace.chrome import find_arrows, write_chrome
from ipu_pipe.trace.events import KINDS, PAYLOADS, Counter, Counters, Event, Events, Trace
from ipu_pipe.trace.reading import merge_traces, read_trace
from tests.slot_simulation import PLAYED
from tests.support.modelled import PlayedMethod, play_method

# Two devices, each of which waits for results of the other.
#     device 0   F0 F1 [wait] B0            sends F0's result, then F1's
#     device 1 [wait] F0 B0                 sends B0's
MEASURED = [
    Event(0, 0, "forward", 0, 0, 100, 0, 64),
    Event(0, 0, "send", 0, 100, 130, -1, 64, 1, "activations"),
    Event(0, 0, "forward", 1, 110, 200, 0, 64),
    Event(0, 0, "send", 1, 200, 250, -1, 64, 1, "activations"),
    Event(1, 1, "wait", 0, 20, 140, -1, None, 0, "activations"),
    Event(1, 1, "forward", 0, 140, 240, 0, None),
    Event(1, 1, "backward", 0, 240, 440, 0, 64),
    Event(1, 1, "send", 0, 440, 450, -1, 64, 0, "gradients"),
    Event(0, 0, "wait", 0, 200, 460, -1, None, 1, "gradients"),
    Event(0, 0, "backward", 0, 460, 660, 3, None),
    Event(0, 0, "send", -1, 660, 670, -1, 8, 1, "norms"),
    Event(0, 0, "update", 0, 670, 680, 1, None),
]


def check_chrome_file(path: Path, events: int) -> None:
    """Check every rule of the viewers on a file with `events` events."""
    text = gzip.decompress(path.read_bytes()).decode()
    # nanoseconds, exactly
    assert all(
        re.fullmatch(r"\d+\.\d{3}", time) for time in re.findall(r'"(?:ts|dur)":([^,}]*)', text)
    )
    assert json.loads(text)["displayTimeUnit"] in ("ms", "ns")
    records = {phase: list_records(path, phase) for phase in "MXsfC"}
    assert len(records["X"]) == events
    named = [(r["tid"], r["pid"]) for r in records["M"] if r["name"] == "thread_name"]
    threads = dict(named)
    assert len(threads) == len(named)  # a number belongs to one device
    spans: Dict[int, List[Tuple[int, int]]] = {tid: [] for tid in threads}
    for r in records["X"]:
        assert threads[r["tid"]] == r["pid"]
        begin = round(1000 * r["ts"])
        spans[r["tid"]].append((begin, begin + round(1000 * r["dur"])))
    for lane in spans.values():
        lane.sort()
        assert all(end <= begin for (_, end), (begin, _) in zip(lane, lane[1:]))
    begins, ends = ({r["id"]: r for r in records[phase]} for phase in "sf")
    assert len(begins) == len(records["s"]) == len(records["f"]) and begins.keys() == ends.keys()
    for number, s in begins.items():
        f = ends[number]
        assert (s["name"], s["cat"], f["bp"]) == (f["name"], f["cat"], "e") and s["ts"] <= f["ts"]
        for r in (s, f):
            time = round(1000 * r["ts"])
            assert threads[r["tid"]] == r["pid"]
            assert any(begin <= time < end for begin, end in spans[r["tid"]])
    for r in records["C"]:
        assert r["args"] and all(isinstance(value, (int, float)) for value in r["args"].values())


def list_arrows(events: List[Event], metadata: Dict[str, Any]) -> List[Any]:
    arrows = find_arrows(Events.from_rows(events), metadata)
    columns = arrows.source.tolist(), arrows.target.tolist(), arrows.carries.tolist()
    return sorted((events[s], events[t], PAYLOADS[c]) for s, t, c in zip(*columns))


def test_arrows_lead_from_sends_to_the_passes_that_need_them() -> None:
    arrows = [(MEASURED[1], MEASURED[5], "activations"), (MEASURED[7], MEASURED[9], "gradients")]
    assert list_arrows(MEASURED, {}) == sorted(arrows)
    # results that stay on a device have arrows beside sends
    passes = [Event(s, s // 2, "forward", 0, 10 * s, 10 * s + 9, 0, 1) for s in range(4)]
    send = Event(1, 0, "send", 0, 19, 20, -1, 1, 1, "activations")
    sources = [passes[0], send, passes[2]]
    arrows = [(source, target, "activations") for source, target in zip(sources, passes[1:])]
    assert list_arrows([*passes, send], {}) == arrows


def test_a_message_for_no_pass_leads_to_the_receive_or_to_the_wait() -> None:
    send = Event(0, 0, "send", 3, 0, 10, -1, 8, 1, "norms")
    wait = Event(1, 1, "wait", 3, 2, 12, -1, None, 0, "norms")
    from_another = [
        Event(2, 1, "wait", 3, 1, 12, -1, None, 2, "norms"),
        Event(1, 2, "wait", 3, 1, 12, -1, None, 0, "norms"),
    ]
    receive = Event(1, 1, "recv", 3, 3, 12, -1, None, 0, "norms")
    assert list_arrows([send, *from_another, wait], {}) == [(send, wait, "norms")]
    assert list_arrows([send, *from_another, wait, receive], {}) == [(send, receive, "norms")]
    assert list_arrows([send, *from_another], {}) == []


def test_without_sends_arrows_lead_from_pass_to_pass_of_one_replica() -> None:
    every = itertools.product(range(2), repeat=3)
    passes = [Event(s, 2 * r + s, "forward", m, m + s, m + s + 1, 0, 1) for r, s, m in every]
    arrows = list_arrows(passes, {"device_of_stage": [0, 1]})
    assert len(arrows) == 4
    for s, t, _ in arrows:
        assert (t.stage, t.microbatch, t.device) == (s.stage + 1, s.microbatch, s.device + 1)
    assert (
        list_arrows([p._replace(kind="backward") for p in passes], {"gradients_cross": False}) == []
    )


@pytest.mark.parametrize("late", [0, 45])
def test_an_arrow_never_goes_back_in_time_though_clocks_differ(late: int, tmp_path: Path) -> None:
    shifts = [late * (event.device == 0) for event in MEASURED]
    events = [
        e._replace(start_ns=e.start_ns + by, end_ns=e.end_ns + by)
        for e, by in zip(MEASURED, shifts)
    ]
    write_chrome(tmp_path / "t", events, [], {})
    check_chrome_file(tmp_path / "t", len(events))


def test_memory_is_one_counter_a_device_with_all_categories(tmp_path: Path) -> None:
    weights, gradients = "weights (bytes)", "gradients (bytes)"
    counters = [
        Counter(0, gradients, 10, 5.0), Counter(0, weights, 0, 7.0), Counter(0, gradients, 30, 0.0),
        Counter(0, weights, 30, 8.0), Counter(1, weights, 10, 1.0), Counter(1, 'a "% b', 1, 2),
    ]  # fmt: skip
    write_chrome(tmp_path / "t", MEASURED, counters, {})
    check_chrome_file(tmp_path / "t", len(MEASURED))
    records = [(r["name"], r["pid"], r["ts"], r["args"]) for r in list_records(tmp_path / "t", "C")]
    assert records == [
        ("memory", 0, 0.0, {weights: 7}),
        ("memory", 0, 0.01, {weights: 7, gradients: 5}),
        ("memory", 0, 0.03, {gradients: 0, weights: 8}),
        ("memory", 1, 0.01, {weights: 1}),
        ('a "% b', 1, 0.001, {"value": 2}),
    ]


def test_many_random_events_are_read_back_unchanged(tmp_path: Path) -> None:
    """Check also kinds and payloads that only traces of other tools have."""
    rng = random.Random(0)
    events = []
    for m in range(20_000):  # more than one chunk of the writer
        place = rng.randrange(-1, 4), rng.randrange(4), rng.choice(KINDS)
        said = rng.choice([None, 0, 9]), rng.choice([-1, 0, 3]), rng.choice(PAYLOADS)
        events.append(Event(*place, m % 500 - 1, 50 * m, 50 * m + 40, m % 3, *said))
    write_chrome(tmp_path / "t", events, [], {})
    assert list(read_trace(tmp_path / "t").events.rows()) == events
    assert list_records(tmp_path / "t", "s")
    # even random events: a million are below 50 MB
    assert (tmp_path / "t").stat().st_size < 50 * len(events)


def read_chrome_file(path: Path) -> Any:
    """Return the content of a Chrome file."""
    return json.loads(gzip.decompress(path.read_bytes()))


def list_records(path: Path, phase: str) -> List[Dict[str, Any]]:
    return [r for r in read_chrome_file(path)["traceEvents"] if r["ph"] == phase]


# ---- modelled events


def check_counters(played: PlayedMethod, devices: Sequence[int]) -> None:
    """Check that at the end of each pass the counters are the microbatches in flight on a device."""
    steps = {"forward": 1, "backward": -1, "weight gradient": -1}
    for device in set(devices):
        changes = [(e.end_ns, steps.get(e.kind, 0)) for e in played.rows if e.device == device]
        counts = {c.time_ns: c.value for c in played.counters.rows() if c.device == device}
        value: float = 0
        for moment in sorted({end for end, _ in changes} | counts.keys()):
            value = counts.get(moment, value)
            in_flight = sum(step for end, step in changes if end <= moment)
            assert value == in_flight, (device, moment)
        assert value == 0 and max(counts.values()) > 0


ROWS: List[Tuple[str, Dict[str, Any]]] = [
    *((name, {}) for name in PLAYED),
    ("pipedream", {"schedule": "dataflow", "turn": 0}),
    ("pipedream", {"schedule": "dataflow", "turn": 1}),
]


@pytest.mark.parametrize(("name", "args"), ROWS)
def test_on_every_schedule_a_device_does_one_thing_at_a_time_and_results_go_forward_in_time(
    name: str, args: Dict[str, Any], tmp_path: Path
) -> None:
    """Slots are of 999 ns, so that halves are rounded."""
    batch = 1 if name == "naive" else 4
    played = play_method(name, 4, 12, batch, unit_ns=999.0, args=args)
    local = METHODS[name].structure is not None
    work = [e for e in played.rows if e.kind not in ("wait", "send")]
    passes = {(e.kind, e.stage, e.microbatch): e for e in work if e.kind != "update"}
    assert len(passes) == 2 * 4 * 12 and all(e.start_ns < e.end_ns for e in passes.values())
    # two passes share a slot: 499.5 ns each, to the nearest nanosecond
    if name == "pipelined_backprop":
        assert passes["forward", 0, 0][4:6] == (0, 500)
    for stage in range(4):
        updates = [e[3:7] for e in work if e[:3] == (stage, stage, "update")]
        ends = [passes["backward", stage, batch * k + batch - 1].end_ns for k in range(12 // batch)]
        assert updates == [(k, end, end, k + 1) for k, end in enumerate(ends)]
    check_counters(played, range(4))
    for m in range(12):
        chain = [passes["forward", s, m] for s in range(4)]
        chain += [] if local else [passes["backward", s, m] for s in (3, 2, 1, 0)]
        assert all(one.end_ns <= other.start_ns for one, other in zip(chain, chain[1:]))
    metadata = {"gradients_cross": not local, "modelled": local}
    write_chrome(tmp_path / "t", work, [*played.counters.rows()], metadata)
    check_chrome_file(tmp_path / "t", len(work))
    assert len(list_records(tmp_path / "t", "s")) == (1 if local else 2) * 3 * 12
    marks = {r["args"].get("modelled", False) for r in list_records(tmp_path / "t", "X")}
    assert marks == {local} and read_chrome_file(tmp_path / "t")["otherData"] == metadata


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("gpipe", [0, 0, 1]),
        ("gpipe", [0, 1, 0]),
        ("zb_h1", [0, 1, 2]),
        ("dualpipe_v", [0, 1, 1, 0]),
    ],
)
def test_counters_are_of_all_stages_of_a_device(name: str, devices: List[int]) -> None:
    """A split backward is in flight until its weight gradient."""
    check_counters(play_method(name, len(devices), 8, 4, device_of_stage=devices), devices)


# ---- the file


# the names that the file gives them, and events of two devices; stages 0 and 3 are of one device
NAMES = "F0@0, F0@3, send 0@0, recv 0, wait for device 0, wait, F0, B0, U0, evaluate, recompute 0, W0, average 0"
MIXED = [
    Event(0, 0, "forward", 0, 1, 1_001, 0, 12),
    Event(3, 0, "forward", 0, 2_000, 2_001, 0, None),
    Event(0, 0, "send", 0, 500, 2_345_678_901, 0, 12),
    Event(1, 4, "recv", 0, 2_500, 2_600, -1, None),
    Event(1, 4, "wait", 0, 2_500, 2_540, -1, None, 0, "activations"),
    Event(1, 4, "wait", -1, 2_540, 2_550, -1, None),
    Event(1, 4, "forward", 0, 2_600, 3_600, 3, None),
    Event(1, 4, "backward", 0, 3_600, 5_600, 4, 12),
    Event(1, 4, "update", 0, 5_600, 5_600, 1, None),
    Event(-1, 4, "evaluate", -1, 9_000, 9_500, -1, None),
    Event(1, 4, "recompute", 0, 9_900, 9_910, 4, None),
    Event(1, 4, "weight gradient", 0, 9_920, 9_930, 4, None),
    Event(1, 4, "average", 0, 9_930, 9_940, 4, None),
]


def test_events_in_the_file(tmp_path: Path) -> None:
    """Story: a device with stages 0 and 3 showed two passes named F0."""
    write_chrome(tmp_path / "t", MIXED, [Counter(0, "loss", 1, float("nan"))], {})
    work = list_records(tmp_path / "t", "X")
    assert work[0] == {
        "ph": "X", "pid": 0, "tid": 0, "name": "F0@0", "cat": "forward", "ts": 0.001, "dur": 1.0,
        "args": {"stage": 0, "microbatch": 0, "version": 0, "bytes": 12},
    }  # fmt: skip
    assert [r["name"] for r in work] == NAMES.split(", ")
    wait = {"stage": 1, "microbatch": 0, "version": -1, "peer": 0, "carries": "activations"}
    assert (work[4]["args"], work[4]["cname"]) == (wait, "grey")
    assert work[8]["args"] == {"stage": 1, "k": 0, "version": 1}
    # threads: those of messages follow those of passes and waits
    messages = ("send", "recv", "average")
    assert [r["tid"] for r in work] == [e.device + 5 * (e.kind in messages) for e in MIXED]
    tracks = {
        (r["pid"], r["tid"], r["args"].get("name")) for r in list_records(tmp_path / "t", "M")
    }
    assert tracks - {(0, 0, None), (4, 4, None)} == {
        (0, 0, "device 0"), (0, 0, "compute, stages 0, 3"), (0, 5, "communication"),
        (4, 4, "device 4"), (4, 4, "compute, stage 1"), (4, 9, "communication"),
    }  # fmt: skip
    # a counter that is no number is null
    assert list_records(tmp_path / "t", "C")[0]["args"]["value"] is None
    assert np.isnan(read_trace(tmp_path / "t").counters.value).all()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    write_chrome(path, MIXED, [], {})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_chrome(path, MIXED, [Counter(0, "odd", 0, object())], {})  # type: ignore[arg-type]
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(RunFault, match="nowhere/t: "):
        write_chrome(tmp_path / "nowhere" / "t", [], [], {})


def test_a_merged_trace_is_modelled_if_a_part_is() -> None:
    def merge(*metadata: Dict[str, Any]) -> Trace:
        none = Events.from_rows([]), Counters.from_rows([])
        parts = [Trace(*none, keys, (f"note {n}",)) for n, keys in enumerate(metadata)]
        return merge_traces(parts)

    assert merge({"modelled": False}, {"modelled": True}).metadata == {"modelled": True}
    merged = merge({"modelled": False, "rank": 0}, {"rank": 1})
    assert merged.metadata == {"modelled": False, "rank": 0}
    assert merged.notes == ("note 0", "note 1")
