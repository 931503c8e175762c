"""Check which traces are read, and the messages about files that are not traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import pytest
import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.trace.chrome import write_chrome
from ipu_pipe.trace.events import Counter, Counters, Event, Events
from ipu_pipe.trace.reading import read_trace
from ipu_pipe.trace.store import TraceWriter
from tests.support.runs import list_faults

EVENTS = [
    Event(d, d, "forward", m, 100 * m, 100 * m + 50, 0, None) for m in range(3) for d in (0, 1)
]


def write_trace(
    path: Path, events: Sequence[Event], counters: Sequence[Counter] = (), **metadata: Any
) -> Path:
    writer = TraceWriter(path, metadata)
    writer.write_events(Events.from_rows(events))
    writer.write_counters(Counters.from_rows(counters))
    writer.close()
    return path


# ---- ours


def test_a_run_of_several_ranks_is_one_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        of_rank = [event for event in EVENTS if event.device == rank]
        counter = Counter(rank, f"of {rank}", 5, 1.5)
        write_trace(
            tmp_path / "trace" / f"rank-{rank}.trace", of_rank, [counter], method="gpipe", rank=rank
        )
    write_chrome(tmp_path / "trace.json.gz", EVENTS[:1], [], {})  # the .trace files take precedence
    for path in (tmp_path, tmp_path / "trace"):
        trace = read_trace(path)
        assert sorted(trace.events.rows()) == sorted(EVENTS)
        assert list(trace.counters.rows()) == [
            Counter(0, "of 0", 5, 1.5),
            Counter(1, "of 1", 5, 1.5),
        ]
        assert trace.metadata == {"method": "gpipe", "rank": 0}
    assert len(read_trace(tmp_path / "trace" / "rank-1.trace").events.start) == 3


@pytest.mark.parametrize("name", ["trace.json.gz", "plain.json"])
def test_our_chrome_json_is_read(tmp_path: Path, name: str) -> None:
    waits = [
        Event(1, 1, "wait", 0, 0, 40, -1, None, 0, "activations"),
        Event(0, 0, "send", 0, 10, 20, -1, 64, 1, "activations"),
    ]
    write_chrome(
        tmp_path / "trace.json.gz",
        [*EVENTS, *waits],
        [Counter(0, "weights", 7, 2.5)],
        {"method": "gpipe"},
    )
    if name == "plain.json":
        (tmp_path / name).write_bytes(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    trace = read_trace(tmp_path if name == "trace.json.gz" else tmp_path / name)
    assert [event[:8] for event in trace.events.rows()] == [
        event[:8] for event in [*EVENTS, *waits]
    ]
    assert list(trace.counters.rows()) == [Counter(0, "weights", 7, 2.5)] and trace.metadata == {
        "method": "gpipe"
    }


# ---- PyTorch's profiler


def write_kineto(
    path: Path, records: Sequence[Dict[str, Any]], rank: Optional[int] = None, **keys: Any
) -> Path:
    info = (
        {}
        if rank is None
        else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    )
    path.write_text(json.dumps({"schemaVersion": 1, **info, "traceEvents": list(records), **keys}))
    return path


def make_record(category: str, name: str, ts: float, dur: float) -> Dict[str, Any]:
    place_and_time = {"pid": 9, "tid": 1, "ts": ts, "dur": dur}
    return {"ph": "X", "cat": category, "name": name, **place_and_time, "args": {"External id": 1}}


def read_kinds(path: Path) -> List[Any]:
    return [
        (event.device, event.kind, event.start_ns, event.end_ns)
        for event in read_trace(path).events.rows()
    ]


def test_a_profilers_records_of_a_gpu(tmp_path: Path) -> None:
    """If a trace has kernels, the host's operations are not counted as work of the device."""
    write_kineto(
        tmp_path / "a.json",
        [
            {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
            make_record("cpu_op", "aten::mm", 0, 99),
            make_record("kernel", "gemm", 1.5, 2.25),
            make_record("kernel", "ncclDevKernel_SendRecv(x)", 4, 1),
            make_record("kernel", "ncclDevKernel_AllReduce_Sum_f32", 5, 1),
            make_record("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 6, 1),
            make_record("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 1),
            make_record("python_function", "forward", 0, 50),
            make_record("Trace", "all", 0, 99),
        ],
        rank=3,
        baseTimeNanoseconds=10**18,
    )
    assert read_kinds(tmp_path / "a.json") == [
        (3, "compute", 1500, 3750), (3, "collective", 4000, 5000), (3, "collective", 5000, 6000), (3, "recv", 6000, 7000),
        (3, "compute", 7000, 8000),
    ]  # fmt: skip


def test_a_profilers_records_of_cpus_in_a_folder(tmp_path: Path) -> None:
    for rank, base in ((1, 10**18 + 500), (0, 10**18)):
        records = [
            make_record("cpu_op", "aten::mm", 1, 2),
            make_record("user_annotation", "gloo:send" if rank == 0 else "gloo:recv", 3, 1),
            make_record("user_annotation", "ProfilerStep#3", 0, 50),
            make_record("cpu_op", "c10d::allreduce_", 5, 1),
        ]
        write_kineto(
            tmp_path / f"trace_rank{rank}.json",
            records,
            rank=None if rank else 0,
            baseTimeNanoseconds=base,
        )
    # rank 1 computes until 3500: until then rank 0's message waits for it
    assert sorted(read_kinds(tmp_path)) == [
        (0, "collective", 5000, 6000), (0, "forward", 1000, 3000), (0, "send", 3500, 4000), (0, "wait", 3000, 3500),
        (1, "collective", 5500, 6500), (1, "compute", 1500, 3500), (1, "recv", 3500, 4500),
    ]  # fmt: skip
    assert "microbatches, versions and waits" in read_trace(tmp_path).notes[0]


def test_a_trace_of_the_installed_profiler_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(tmp_path / "a.json"))
    trace = read_trace(tmp_path / "a.json")
    assert len(trace.events.start) >= 3 and {event.kind for event in trace.events.rows()} == {
        "compute"
    }


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    for name in "ab":
        write_kineto(tmp_path / f"{name}.json", [make_record("kernel", "gemm", 0, 1)], rank=1)
    with pytest.raises(BadInput, match="are all of rank 1"):
        read_trace(tmp_path)


# ---- files that are not traces


def write_unreadable_files(tmp_path: Path) -> Dict[str, Path]:
    """Write files and folders that cannot be analyzed, and return their paths by name."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("x: 1")
    (run / "summary.json").write_text("{}")
    (tmp_path / "empty folder").mkdir()
    trace_content = write_trace(tmp_path / "whole.trace", EVENTS).read_bytes()
    write_chrome(tmp_path / "whole.json.gz", EVENTS, [], {})
    gzip_content = (tmp_path / "whole.json.gz").read_bytes()
    text = gzip.decompress(gzip_content)
    record = {
        "ph": "X",
        "cat": "forward",
        "pid": 0,
        "ts": 1,
        "dur": 1,
        "args": {"stage": 0, "microbatch": 0, "version": 0},
    }

    def make_chrome_content(**changes: Any) -> bytes:
        return json.dumps({"traceEvents": [{**record, **changes}]}).encode()

    contents = {
        "empty": b"", "empty.trace": b"", "a picture.png": b"\x89PNG\r\n", "words": b"hello", "zeros.trace": bytes(100),
        "damaged.trace": trace_content[:-9] + b"\0" + trace_content[-8:], "cut.json.gz": gzip_content[:-40],
        "cut.json": text[:-40], "half.json": text[: len(text) // 2], "list.json": b"[]", "null.json": b"null",
        "number.json": b"[3]",
        "other.json": b'{"a": 1}', "none.json": b'{"traceEvents": []}', "not json": b'{"traceEvents": [}',
        "foreign.json": b'{"traceEvents": [{"ph": "X", "cat": "browser", "name": "a", "ts": 0, "dur": 1}]}',
        "no time.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "dur": 1}]}',
        "odd time.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "x", "dur": 1}]}',
        "deep.json": b'{"traceEvents": ' + b"[" * 100_000,
        "long number.json": b'{"traceEvents": [' + b"9" * 10_000 + b"]}",
        "negative.json": make_chrome_content(dur=-5), "no device.json": make_chrome_content(pid=-1),
        "far.json": make_chrome_content(ts=1e300), "nan.json": make_chrome_content(ts=float("nan")),
        "stage.json": make_chrome_content(args={"stage": "x", "microbatch": 0, "version": 0}),
        "large.json": make_chrome_content(pid=1 << 40),
        "metadata.json": b'{"otherData": [], "traceEvents": []}', "kind.json": make_chrome_content(cat="cpu_op"),
        "no text.json.gz": gzip.compress(b"\xff\xfe"), "flipped.json.gz": gzip_content[:40] + bytes(9) + gzip_content[49:],
    }  # fmt: skip
    result = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        result[name] = tmp_path / name
    write_trace(tmp_path / "nothing.trace", [])
    write_trace(tmp_path / "backwards.trace", [Event(0, 0, "forward", 0, 9, 3, 0, None)])
    result.update(
        {
            name: tmp_path / name
            for name in ("nothing.trace", "backwards.trace", "run", "empty folder", "not there")
        }
    )
    return result


def test_a_file_that_is_not_a_trace_is_one_line(tmp_path: Path) -> None:
    paths = write_unreadable_files(tmp_path)
    for name, path in paths.items():
        (fault,) = list_faults(read_trace, path)
        assert fault.startswith(f"{path}: ") and len(fault) < 400 + len(str(path)), (name, fault)
    assert len(paths) > 30
