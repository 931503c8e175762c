"""Check the Chrome file against the rules of the Trace Event Format and of Perfetto.

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
from typing import Any, Dict, List

import pytest

from ipu_pipe.trace.chrome import find_arrows, write_chrome
from ipu_pipe.trace.events import KINDS, MEMORY, PAYLOADS, Counter, Event, Events
from ipu_pipe.trace.reading import read_trace
from tests.test_trace import METHODS, build_method_events

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


def read_chrome_file(path: Path) -> Any:
    """Return the content of a Chrome file."""
    return json.loads(gzip.decompress(path.read_bytes()))


def convert_to_nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def check_chrome_file(path: Path, events: int) -> None:
    """Check every rule of the viewers on a file with `events` events."""
    text = gzip.decompress(path.read_bytes()).decode()
    times = re.findall(r'"(?:ts|dur)":([^,}]*)', text)
    assert times and all(
        re.fullmatch(r"\d+\.\d{3}", time) for time in times
    )  # nanoseconds, exactly
    content = json.loads(text)
    assert content.keys() == {"displayTimeUnit", "otherData", "traceEvents"} and content[
        "displayTimeUnit"
    ] in ("ms", "ns")
    records: Dict[str, List[Dict[str, Any]]] = {phase: [] for phase in "MXsfC"}
    for record in content["traceEvents"]:
        records[record["ph"]].append(record)
    assert len(records["X"]) == events
    processes = {r["pid"]: r["args"]["name"] for r in records["M"] if r["name"] == "process_name"}
    threads = {r["tid"]: r["pid"] for r in records["M"] if r["name"] == "thread_name"}
    assert len(threads) == len(
        [r for r in records["M"] if r["name"] == "thread_name"]
    )  # a number belongs to one device
    spans_by_thread: Dict[int, List[Any]] = {tid: [] for tid in threads}
    for r in records["X"]:
        assert processes[r["pid"]] == f"device {r['pid']}" and threads[r["tid"]] == r["pid"]
        assert (
            isinstance(r["name"], str)
            and r["name"]
            and r["cat"] in KINDS
            and isinstance(r["args"]["version"], int)
        )
        begin = convert_to_nanoseconds(r["ts"])
        spans_by_thread[r["tid"]].append((begin, begin + convert_to_nanoseconds(r["dur"])))
    for lane in spans_by_thread.values():
        lane.sort()
        assert all(end <= begin for (_, end), (begin, _) in zip(lane, lane[1:]))
    begins, ends = ({r["id"]: r for r in records[phase]} for phase in "sf")
    assert len(begins) == len(records["s"]) == len(records["f"]) and begins.keys() == ends.keys()
    for number, s in begins.items():
        f = ends[number]
        assert (
            (s["name"], s["cat"]) == (f["name"], f["cat"]) and f["bp"] == "e" and s["ts"] <= f["ts"]
        )
        for r in (s, f):
            assert threads[r["tid"]] == r["pid"]
            assert any(
                begin <= convert_to_nanoseconds(r["ts"]) < end
                for begin, end in spans_by_thread[r["tid"]]
            )
    for r in records["C"]:
        assert r["args"] and all(isinstance(value, (int, float)) for value in r["args"].values())


def test_a_measured_trace_follows_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    write_chrome(
        path,
        MEASURED,
        [Counter(0, "weights (bytes)", 5, 10.0), Counter(1, "loss", 5, 0.1)],
        {"method": "x"},
    )
    check_chrome_file(path, len(MEASURED))
    assert read_chrome_file(path)["otherData"] == {"method": "x"}
    work = {
        (r["cat"], r["pid"], r["ts"]): r
        for r in read_chrome_file(path)["traceEvents"]
        if r["ph"] == "X"
    }
    wait = work["wait", 1, 0.02]
    assert wait["name"] == "wait for device 0" and wait["cname"] == "grey" and wait["dur"] == 0.12
    assert wait["args"] == {
        "stage": 1,
        "microbatch": 0,
        "version": -1,
        "peer": 0,
        "carries": "activations",
    }
    assert (
        wait["tid"] == work["forward", 1, 0.14]["tid"]
    )  # in the row of the passes: each device has one row
    assert work["backward", 0, 0.46]["args"]["version"] == 3
    assert (
        work["send", 0, 0.1]["tid"]
        == work["send", 0, 0.66]["tid"]
        != work["forward", 0, 0.0]["tid"]
    )


@pytest.mark.parametrize("name", ["gpipe", "pipedream", "local_greedy"])
def test_modelled_traces_follow_the_rules(tmp_path: Path, name: str) -> None:
    events, counters = build_method_events(name, {})
    local = METHODS[name].structure is not None
    write_chrome(tmp_path / "t", events, counters, {"modelled": True, "gradients_cross": not local})
    check_chrome_file(tmp_path / "t", len(events))


def list_arrows(events: List[Event], metadata: Dict[str, Any]) -> List[Any]:
    arrows = find_arrows(Events.from_rows(events), metadata)
    columns = arrows.source.tolist(), arrows.target.tolist(), arrows.carries.tolist()
    return sorted((events[s], events[t], PAYLOADS[c]) for s, t, c in zip(*columns))


def test_arrows_lead_from_sends_to_the_passes_that_need_them() -> None:
    arrows = [(MEASURED[1], MEASURED[5], "activations"), (MEASURED[7], MEASURED[9], "gradients")]
    assert list_arrows(MEASURED, {}) == sorted(arrows)


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


def test_results_that_stay_on_a_device_have_arrows_beside_sends() -> None:
    interleaved = [Event(s, s // 2, "forward", 0, 10 * s, 10 * s + 9, 0, 1) for s in range(4)]
    send = Event(1, 0, "send", 0, 19, 20, -1, 1, 1, "activations")
    assert list_arrows([*interleaved, send], {}) == [
        (interleaved[0], interleaved[1], "activations"),
        (send, interleaved[2], "activations"),
        (interleaved[2], interleaved[3], "activations"),
    ]


def test_an_arrow_never_goes_back_in_time_though_clocks_differ(tmp_path: Path) -> None:
    shifts = [45 if event.device == 0 else 0 for event in MEASURED]
    late = [
        e._replace(start_ns=e.start_ns + by, end_ns=e.end_ns + by)
        for e, by in zip(MEASURED, shifts)
    ]
    write_chrome(tmp_path / "t", late, [], {})
    check_chrome_file(tmp_path / "t", len(late))


def test_memory_is_one_counter_a_device_with_all_categories(tmp_path: Path) -> None:
    counters = [
        Counter(0, "gradients (bytes)", 10, 5.0), Counter(0, "weights (bytes)", 0, 7.0), Counter(0, "gradients (bytes)", 30, 0.0),
        Counter(0, "weights (bytes)", 30, 8.0), Counter(0, "gradients (bytes)", 20, 6.5), Counter(1, "weights (bytes)", 10, 1.0),
        Counter(1, 'a "% b', 1, 2),
    ]  # fmt: skip
    write_chrome(tmp_path / "t", MEASURED, counters, {})
    check_chrome_file(tmp_path / "t", len(MEASURED))
    records = [
        (r["name"], r["pid"], r["ts"], r["args"])
        for r in read_chrome_file(tmp_path / "t")["traceEvents"]
        if r["ph"] == "C"
    ]
    assert records == [
        ("memory", 0, 0.0, {"weights (bytes)": 7}),
        ("memory", 0, 0.01, {"weights (bytes)": 7, "gradients (bytes)": 5}),
        ("memory", 0, 0.02, {"gradients (bytes)": 6.5, "weights (bytes)": 7}),
        ("memory", 0, 0.03, {"gradients (bytes)": 0, "weights (bytes)": 8}),
        ("memory", 1, 0.01, {"weights (bytes)": 1}),
        ('a "% b', 1, 0.001, {"value": 2}),
    ]
    assert {"weights", "gradients"} < set(MEMORY)


def test_many_random_events_are_read_back_unchanged(tmp_path: Path) -> None:
    rng = random.Random(0)
    events = []
    for m in range(20_000):  # more than one chunk of the writer
        start = 50 * m
        kind, carries = rng.choice(KINDS), rng.choice(PAYLOADS)
        size, peer, stage, device = (
            rng.choice([None, 0, 9]),
            rng.choice([-1, 0, 3]),
            rng.randrange(-1, 4),
            rng.randrange(4),
        )
        events.append(
            Event(stage, device, kind, m % 500 - 1, start, start + 40, m % 3, size, peer, carries)
        )
    write_chrome(tmp_path / "t", events, [], {})
    # also kinds and payloads that only traces of other tools have
    assert list(read_trace(tmp_path / "t").events.rows()) == events
    assert any(r["ph"] == "s" for r in read_chrome_file(tmp_path / "t")["traceEvents"])
    assert (tmp_path / "t").stat().st_size < 50 * len(
        events
    )  # even random events: a million are below 50 MB
