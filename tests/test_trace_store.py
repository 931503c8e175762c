"""Check which traces are read: this library's, also from a killed run, and the messages about files that are none."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any, Iterator, List, Sequence

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.trace import store
from ipu_pipe.trace.chrome import write_chrome
from ipu_pipe.trace.events import KINDS, PAYLOADS, SCHEMA, Counter, Counters, Event, Events
from ipu_pipe.trace.reading import read_trace
from ipu_pipe.trace.store import TraceWriter, read_store
from tests.support.runs import list_faults


def draw_events(count: int) -> List[Event]:
    rng = random.Random(0)
    return [
        Event(
            rng.randrange(4), rng.randrange(8), rng.choice(KINDS), m, 10**18 + 7 * m, 10**18 + 7 * m + 5, rng.randrange(-1, 9),
            rng.choice([None, 0, 1 << 40]), rng.randrange(-1, 8), rng.choice(PAYLOADS),
        )
        for m in range(count)
    ]  # fmt: skip


def write_trace(
    path: Path, events: Sequence[Event], counters: Sequence[Counter] = (), **metadata: Any
) -> Path:
    writer = TraceWriter(path, metadata)
    writer.write_events(Events.from_rows(events))
    writer.write_counters(Counters.from_rows(counters))
    writer.close()
    return path


def test_written_events_are_read(tmp_path: Path) -> None:
    events = draw_events(10_000)
    counters = [Counter(e.device, f"name {n % 3}", e.start_ns, n / 7) for n, e in enumerate(events)]
    trace = read_store(write_trace(tmp_path / "new" / "0.trace", events, counters, stages=5))
    assert (list(trace.events.rows()), list(trace.counters.rows())) == (events, counters)
    assert (trace.metadata, trace.notes) == ({"stages": 5}, ())


def test_times_are_by_the_first_ranks_clock(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a.trace", {})
    starts = (0, 100, 150, 200, 1000)
    events = (Event(0, 0, "forward", 0, start, start, 0, None) for start in starts)
    writer.write_events(Events.from_rows(events))
    writer.synchronize(200, 50)
    writer.synchronize(100, 10)
    writer.close()
    assert read_store(tmp_path / "a.trace").events.start.tolist() == [10, 110, 180, 250, 1050]


def test_a_killed_runs_trace_is_read(tmp_path: Path) -> None:
    events, path, rows = draw_events(3 * 512), tmp_path / "a.trace", 512
    writer = TraceWriter(path, {"method": "gpipe"})
    for begin in range(0, len(events), rows):
        writer.write_events(Events.from_rows(events[begin : begin + rows]))
    writer.close()
    whole = path.read_bytes()
    first, end, rng = len(store.MAGIC), len(whole), random.Random(1)
    for cut in [first, end - 1, *(rng.randrange(first, end) for _ in range(30))]:
        path.write_bytes(whole[:cut])
        trace = read_store(path)
        kept = list(trace.events.rows())
        assert len(kept) % rows == 0 and kept == events[: len(kept)]
        # a cut between two blocks cannot be detected
        assert trace.notes or len(kept) in (0, rows, 2 * rows)


def test_another_versions_codes(tmp_path: Path) -> None:
    path, event = tmp_path / "a.trace", Event(0, 0, KINDS[1], 0, 0, 1, 0, None)
    codes = {"kinds": ["backward", "forward", "update"], "carried": list(PAYLOADS)}
    trace = read_store(write_trace(path, [event], **codes))
    assert [e.kind for e in trace.events.rows()] == ["forward"]
    with pytest.raises(BadInput, match="kinds: dream: not known"):
        read_store(write_trace(path, [], kinds=["forward", "dream"]))


def test_a_later_ipu_pipes_traces_are_refused_in_a_line(tmp_path: Path) -> None:
    fault = rf"schema: {SCHEMA + 1}: this version reads up to {SCHEMA}"
    write_chrome(tmp_path / "t.json.gz", EVENTS, [], {"schema": SCHEMA + 1})
    for path in (write_trace(tmp_path / "0.trace", [], schema=SCHEMA + 1), tmp_path / "t.json.gz"):
        with pytest.raises(BadInput, match=fault):
            read_trace(path)


EVENTS = [
    Event(d, d, "forward", m, 100 * m, 100 * m + 50, 0, None) for m in range(3) for d in (0, 1)
]


def test_a_run_of_several_ranks_is_one_trace(tmp_path: Path) -> None:
    counters, folder = [Counter(rank, f"of {rank}", 5, 1.5) for rank in (0, 1)], tmp_path / "trace"
    for rank in (0, 1):
        of_rank = [event for event in EVENTS if event.device == rank]
        path = folder / f"rank-{rank}.trace"
        write_trace(path, of_rank, counters[rank : rank + 1], method="gpipe", rank=rank)
    write_chrome(tmp_path / "trace.json.gz", EVENTS[:1], [], {})  # the .trace files take precedence
    for path in (tmp_path, folder):
        trace = read_trace(path)
        assert sorted(trace.events.rows()) == sorted(EVENTS)
        assert list(trace.counters.rows()) == counters
        assert trace.metadata == {"method": "gpipe", "rank": 0}
    assert len(read_trace(folder / "rank-1.trace").events.start) == 3
    # without them the Chrome file is read, also unpacked
    other, plain = tmp_path / "other", tmp_path / "plain.json"
    other.mkdir()
    write_chrome(other / "trace.json.gz", EVENTS, counters, {"method": "gpipe"})
    plain.write_bytes(gzip.decompress((other / "trace.json.gz").read_bytes()))
    for path in (other, plain):
        trace = read_trace(path)
        assert (list(trace.events.rows()), list(trace.counters.rows())) == (EVENTS, counters)
        assert trace.metadata == {"method": "gpipe"}


# ---- files that are not traces


FORWARD = {"stage": 0, "microbatch": 0, "version": 0}


def make_chrome_content(**changes: Any) -> bytes:
    record = {"ph": "X", "cat": "forward", "pid": 0, "ts": 1, "dur": 1, "args": FORWARD, **changes}
    return json.dumps({"traceEvents": [record]}).encode()


def write_unreadable_files(folder: Path) -> Iterator[Path]:
    """Write files and folders that cannot be analyzed, and yield their paths."""
    for name in ("run", "empty folder"):
        (folder / name).mkdir()
        yield folder / name
    (folder / "run" / "summary.json").write_text("{}")
    whole = write_trace(folder / "whole.trace", EVENTS).read_bytes()
    write_chrome(folder / "whole.json.gz", EVENTS, [], {})
    packed = (folder / "whole.json.gz").read_bytes()
    text = gzip.decompress(packed)
    contents = {
        "empty": b"", "empty.trace": b"", "a picture.png": b"\x89PNG\r\n", "zeros.trace": bytes(100),
        "damaged.trace": whole[:-9] + b"\0" + whole[-8:], "cut.json.gz": packed[:-40], "half.json": text[: len(text) // 2],
        "null.json": b"null", "number.json": b"[3]", "other.json": b'{"a": 1}',
        "none.json": b'{"traceEvents": []}', "not json": b'{"traceEvents": [}',
        "foreign.json": b'{"traceEvents": [{"ph": "X", "cat": "browser", "name": "a", "ts": 0, "dur": 1}]}',
        "odd time.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "x", "dur": 1}]}',
        "deep.json": b'{"traceEvents": ' + b"[" * 100_000,
        "long number.json": b'{"traceEvents": [' + b"9" * 10_000 + b"]}",
        "negative.json": make_chrome_content(dur=-5), "no device.json": make_chrome_content(pid=-1),
        "far.json": make_chrome_content(ts=1e300), "large.json": make_chrome_content(pid=1 << 40),
        "metadata.json": b'{"otherData": [], "traceEvents": []}', "kind.json": make_chrome_content(cat="cpu_op"),
        "no text.json.gz": gzip.compress(b"\xff\xfe"), "flipped.json.gz": packed[:40] + bytes(9) + packed[49:],
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name
    yield write_trace(folder / "nothing.trace", [])
    yield write_trace(folder / "backwards.trace", [Event(0, 0, "forward", 0, 9, 3, 0, None)])
    yield folder / "not there"


def test_a_file_that_is_not_a_trace_is_one_line(tmp_path: Path) -> None:
    for path in write_unreadable_files(tmp_path):
        (fault,) = list_faults(read_trace, path)
        assert fault.startswith(f"{path}: ") and len(fault) < 400 + len(str(path)), fault


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"ts": "x"}, "ts"),
        ({"ts": float("nan")}, "ts"),
        ({"args": {"stage": 0}}, "microbatch"),
        ({"args": {**FORWARD, "stage": "x"}}, "stage"),
        ({"pid": 1.5}, "pid"),
    ],
)
def test_faults_name_the_event_and_its_key(change: Any, key: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(make_chrome_content(**change))
    (fault,) = list_faults(read_trace, tmp_path / "a.json")
    assert "event 0" in fault and key in fault and "Error" not in fault
