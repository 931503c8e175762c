"""Check the trace file of this library: written events are read, also from a killed run; damaged
files are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import List

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.trace import store
from ipu_pipe.trace.events import KINDS, PAYLOADS, SCHEMA, Counter, Counters, Event, Events
from ipu_pipe.trace.reading import read_trace
from ipu_pipe.trace.store import TraceWriter, read_store


def draw_events(count: int) -> List[Event]:
    rng = random.Random(0)
    return [
        Event(
            rng.randrange(4), rng.randrange(8), rng.choice(KINDS), m, 10**18 + 7 * m, 10**18 + 7 * m + 5, rng.randrange(-1, 9),
            rng.choice([None, 0, 1 << 40]), rng.randrange(-1, 8), rng.choice(PAYLOADS),
        )
        for m in range(count)
    ]  # fmt: skip


def test_written_events_are_read(tmp_path: Path) -> None:
    events, path = draw_events(10_000), tmp_path / "trace" / "rank-0.trace"
    writer = TraceWriter(path, {"method": "gpipe", "stages": 5})
    counters = [Counter(e.device, f"name {n % 3}", e.start_ns, n / 7) for n, e in enumerate(events)]
    writer.write_events(Events.from_rows(events))
    writer.write_counters(Counters.from_rows(counters))
    writer.close()
    trace = read_store(path)
    assert list(trace.events.rows()) == events
    assert [row.value for row in trace.counters.rows()] == [number / 7 for number in range(10_000)]
    assert {row.name for row in trace.counters.rows()} == {"name 0", "name 1", "name 2"}
    assert (trace.metadata, trace.notes) == ({"method": "gpipe", "stages": 5}, ())


def test_times_are_by_the_first_ranks_clock(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    writer = TraceWriter(path, {})
    starts = (0, 100, 150, 200, 1000)
    writer.write_events(
        Events.from_rows(Event(0, 0, "forward", 0, start, start, 0, None) for start in starts)
    )
    writer.synchronize(200, 50)
    writer.synchronize(100, 10)
    writer.close()
    assert read_store(path).events.start.tolist() == [10, 110, 180, 250, 1050]


def test_a_killed_runs_trace_is_read(tmp_path: Path) -> None:
    events, path, rows = draw_events(3 * 512), tmp_path / "a.trace", 512
    writer = TraceWriter(path, {"method": "gpipe"})
    for begin in range(0, len(events), rows):
        writer.write_events(Events.from_rows(events[begin : begin + rows]))
    writer.close()
    whole = path.read_bytes()
    rng = random.Random(1)
    for cut in [
        len(store.MAGIC),
        len(whole) - 1,
        *(rng.randrange(len(store.MAGIC), len(whole)) for _ in range(30)),
    ]:
        path.write_bytes(whole[:cut])
        trace = read_store(path)
        kept_rows = list(trace.events.rows())
        assert len(kept_rows) % rows == 0 and kept_rows == events[: len(kept_rows)]
        # a cut between two blocks cannot be detected
        assert trace.notes or len(kept_rows) in (0, rows, 2 * rows)


def test_another_versions_codes(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    writer = TraceWriter(
        path, {"kinds": ["backward", "forward", "update"], "carried": list(PAYLOADS)}
    )
    writer.write_events(Events.from_rows([Event(0, 0, KINDS[1], 0, 0, 1, 0, None)]))
    writer.close()
    assert [e.kind for e in read_store(path).events.rows()] == ["forward"]
    writer = TraceWriter(path, {"kinds": ["forward", "dream"]})
    writer.close()
    with pytest.raises(BadInput, match="kinds: dream: not known"):
        read_store(path)


def test_a_later_ipu_pipes_traces_are_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.trace"
    TraceWriter(path, {"schema": SCHEMA + 1}).close()
    with pytest.raises(BadInput, match=rf"schema: {SCHEMA + 1}: this version reads up to {SCHEMA}"):
        read_store(path)
    chrome = tmp_path / "trace.json"
    arguments = {"stage": 0, "microbatch": 0, "version": 0}
    event = {
        "ph": "X",
        "name": "F0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 0,
        "dur": 1,
        "args": arguments,
    }
    chrome.write_text(json.dumps({"traceEvents": [event], "otherData": {"schema": SCHEMA + 1}}))
    with pytest.raises(BadInput, match=rf"schema: {SCHEMA + 1}"):
        read_trace(chrome)
