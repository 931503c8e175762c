"""Files of PyTorch's profiler as they come: odd times, odd JSON, ranges that name passes, messages and the waits in them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.trace import json_records
from ipu_pipe.trace.reading import read_trace
from tests.support.runs import list_faults

EPOCH = 1708722576381804  # microseconds since 1970


def x(
    name: str, ts: Any, dur: Any, cat: str = "kernel", tid: int = 7, **args: Any
) -> Dict[str, Any]:
    place = {"pid": 0, "tid": tid, "ts": ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, **place, "args": args}


def op(ts: int, dur: int, name: str = "op") -> Dict[str, Any]:
    return x(name, ts, dur, "cpu_op")


def mark(name: str, ts: int, dur: int, **args: Any) -> Dict[str, Any]:
    return x(name, ts, dur, "user_annotation", **args)


# 24 us of compute and 12 of messages in 39
BASE = [x("gemm", 100 + 10 * i, 6) for i in range(4)]
BASE += [x("ncclDevKernel_SendRecv", 106 + 10 * i, 3) for i in range(4)]


def write(
    path: Path, records: Sequence[Dict[str, Any]], rank: int = 0, size: int = 1, **keys: Any
) -> Path:
    info = {"rank": rank, "world_size": size}
    path.write_text(json.dumps({"distributedInfo": info, **keys, "traceEvents": list(records)}))
    return path


def figures(path: Path, **options: Any) -> Dict[str, Any]:
    return analyze(read_trace(path, **options), str(path))


def pack_records(records: Sequence[Dict[str, Any]]) -> bytes:
    """Return a file of these records."""
    return json.dumps({"traceEvents": list(records)}).encode()


def shift(by: float) -> List[Dict[str, Any]]:
    return [{**e, "ts": e["ts"] + by} for e in BASE]


PAIRS = [
    record
    for e in BASE
    for record in ({**e, "ph": "B"}, {"ph": "E", "pid": 0, "tid": 7, "ts": e["ts"] + e["dur"]})
]
AS_TEXT = [{**e, "ts": str(e["ts"]), "dur": str(e["dur"])} for e in shift(EPOCH)]
ODD = [
    x("negative", 150, -3),
    {"ph": "X", "cat": "kernel", "name": "no duration", "pid": 0, "tid": 7, "ts": 150},
    x("a word as time", "soon", 3),
    x("an object as time", {}, 3),
    x("times of zero", 0.0, 0.0),
    x("not a number", float("nan"), 3),
    x("beyond all times", 1e300, 3),
    x("beyond all times, as text", "9" * 16, 3),
    x("longer than all times", 1, 10**30),
]
TEXT = pack_records(BASE)
# files that are read as BASE, and parts of the notes
SAME = {
    # Story: 23 of 31 public files were refused, because their times count from 1970.
    "since 1970": (pack_records(shift(EPOCH)), ""),
    "with fractions": (pack_records(shift(10**12 + 0.125)), ""),
    "text, and torch 1's categories": (pack_records([{**e, "cat": "Kernel"} for e in AS_TEXT]), ""),
    "begins and ends": (
        pack_records([*PAIRS, {**BASE[0], "ph": "B", "ts": 139}]),
        "a begin has no end",
    ),
    "odd times": (
        pack_records([*shift(700_000_000), *ODD]),
        "ts is 0; dur is missing; dur is negative; dur is not a number; 5 of 17 'kernel' records",
    ),
    # Story: one kernel of 10 s among kernels of 6 us made a device busy all of the time.
    "a damaged duration": (pack_records([{**BASE[0], "dur": 10_000_000}, *BASE[1:]]), "run over"),
    # what viewers read
    "mark": (b"\xef\xbb\xbf" + TEXT, ""),
    "control": (TEXT.replace(b"gemm", b"ge\x01mm"), ""),
    "endless": (json.dumps(BASE).encode()[:-1] + b",\n", "breaks off"),
    "cut": (TEXT[:-2], "breaks off"),
    "cut in a record": (TEXT[:-2] + b', {"ph": "X"', "breaks off"),
    # a stream that was flushed and not closed
    "cut gz": (gzip.compress(TEXT, 0)[:-8], "breaks off"),
}


@pytest.mark.parametrize("kind", SAME)
def test_times_and_json_of_all_kinds_are_read(kind: str, tmp_path: Path) -> None:
    content, told = SAME[kind]
    (tmp_path / "a.json").write_bytes(content)
    found = figures(tmp_path / "a.json")
    (device,) = found["devices"]
    times = [found["span_ns"], device["busy_ns"], device["communication_ns"]]
    assert times == [39_000, 24_000, 9_000]
    notes = "".join(found["notes"])
    assert all(part in notes for part in told.split("; "))
    assert ("breaks off" in notes) == (told == "breaks off")


# kernels of every library that communicates
NAMES = [
    "oneccl_allreduce_ring", "void ccl::allreduce_small<float>", "xccl:all_reduce", "hcom_allReduce__123", "HcclAllReduce",
    "ncclDevKernel_AllReduce", "mscclpp_allreduce", "ucc:allreduce", "MPI_Allreduce",
]  # fmt: skip
MESSAGES = [x(name, 20 + 3 * i, 3) for i, name in enumerate(NAMES)]
OVERLAPS = ((100, 10), (105, 10), (101, 2))
HOST = x("op", 90, 50, "cpu_op")
EACH_TENTH = [x("gemm", 10 * i, 6) for i in range(40)]
# records of one file, the busy and communicating microseconds of its devices, and part of a note
BUSY: Dict[str, Any] = {
    # Operations of the host are nested; kernels of a stream follow one another, so that one which
    # runs over the next one's start is damaged.
    "nested": ([x("", *at, "cpu_op") for at in OVERLAPS], [(15, 0)], "1 of 3 records overlap"),
    "run over": ([x("", *at) for at in OVERLAPS], [(13, 0)], "1 of 3 records run over"),
    "another track": ([x("", 0, 9, "cpu_op"), x("", 5, 9, "cpu_op", tid=8)], [(14, 0)], ""),
    # Story: oneCCL's kernels counted as compute.
    "libraries": ([x("gemm", 0, 6), *MESSAGES, x("occlusion", 50, 6)], [(12, 3 * len(NAMES))], ""),
    "accelerator": ([x("dma", 100, 5, "mtia_ccp_events"), HOST], [(5, 0)], ""),
    "host": ([HOST], [(50, 0)], "no kernels"),
    # Story: two GPUs of a process were one device. One kernel on a third one is a touch, which is
    # taken for the first one's, which computes at that time.
    "several devices": (
        [*EACH_TENTH, *({**e, "pid": 1} for e in EACH_TENTH[::2]), {**x("touch", 2, 1), "pid": 2}],
        [(240, 0), (120, 0)],
        "several devices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUSY)
def test_devices_compute_and_communicate(kind: str, tmp_path: Path) -> None:
    records, times, told = BUSY[kind]
    found = figures(write(tmp_path / "a.json", records))
    of_devices = [(row["busy_ns"], row["communication_ns"]) for row in found["devices"]]
    assert of_devices == [(1000 * busy, 1000 * sent) for busy, sent in times]
    assert told in "".join(found["notes"])


def test_a_long_time_keeps_its_nanoseconds(tmp_path: Path) -> None:
    """A float64 of microseconds since 1970 has steps of 250 ns."""
    text = json.dumps({"traceEvents": [x("gemm", "A", 1), x("gemm", "B", 1)]})
    text = text.replace('"A"', f"{EPOCH}.001").replace('"B"', f"{EPOCH + 4}.006")
    (tmp_path / "a.json").write_text(text)
    assert figures(tmp_path / "a.json")["span_ns"] == 5005


def test_a_profilers_records_of_a_gpu(tmp_path: Path) -> None:
    """If a trace has kernels, the host's operations are not counted as work of the device."""
    records = [
        {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
        op(0, 99, "aten::mm"),
        x("gemm", 1.5, 2.25),
        x("ncclDevKernel_AllReduce_Sum_f32", 5, 1),
        x("Memcpy HtoD (Pinned -> Device)", 6, 1, "gpu_memcpy"),
        x("Memcpy DtoD (Device -> Device)", 7, 1, "gpu_memcpy"),
        x("forward", 0, 50, "python_function"),
        x("all", 0, 99, "Trace"),
    ]
    events = read_trace(write(tmp_path / "a.json", records, 3)).events.rows()
    assert [(e.device, e.kind, e.start_ns, e.end_ns) for e in events] == [
        (3, "compute", 1500, 3750), (3, "collective", 5000, 6000), (3, "recv", 6000, 7000), (3, "compute", 7000, 8000),
    ]  # fmt: skip


def test_a_trace_of_the_installed_profiler_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(tmp_path / "a.json"))
    kinds = [event.kind for event in read_trace(tmp_path / "a.json").events.rows()]
    assert len(kinds) >= 3 and {*kinds} == {"compute"}


def test_memory_records_are_counters(tmp_path: Path) -> None:
    moments = [
        {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": t, "args": {"Total Allocated": n, "Device Type": 0}}
        for t, n in ((10, 64), (20, 4096), (30, 8))
    ]  # fmt: skip
    found = figures(write(tmp_path / "a.json", [x("op", 0, 40, "cpu_op"), *moments]))
    (row,) = found["memory"]
    assert (row["peak_bytes"], row["at_ns"]) == (4096, 20_000)


def test_calls_inside_calls_are_one_message(tmp_path: Path) -> None:
    """Story: a run of NCCL whose kernels were not recorded had each message three times."""
    said = {"Collective name": "send", "Dst Rank": "3"}
    records = [
        op(0, 10),
        op(10, 6, "c10d::send"),
        x("record_param_comms", 11, 4, "cpu_op", **said),
        mark("nccl:send 0->3", 12, 20, **{"Input Dims": [[5]], "Input type": ["float"]}),
        mark("another range", 0, 60),
        op(40, 10),
    ]
    trace = read_trace(write(tmp_path / "a.json", records))
    (event,) = trace.events.select(trace.events.is_kind("send")).rows()
    assert (event.peer, event.bytes, event.start_ns, event.end_ns) == (3, 20, 10_000, 32_000)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 19, 64, 1 << 16])
def test_pieces_of_any_size_are_the_same_text(piece: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Names with ends of objects, keys around the records, and numbers that a piece divides."""
    records = [
        {**e, "args": {"x": [{"}": "},"}, {}], "y": i}, "name": "\u00e9}, {" * (i % 3)}
        for i, e in enumerate(BASE)
    ]
    # each number is divided before and after its point and exponent by some size of pieces
    numbers = {
        f"n{i}" * i: number for i in range(1, 9) for number in [(12.5, 1e300, 1.5e-7)[i % 3]]
    }
    keys = {"before": {"a": [{}, {}]}, "number": 1234567, "text": "},]", **numbers}
    text = json.dumps(
        {**keys, "traceEvents": records, "after": [{"b": {}}, {}], "last": 12.5}, ensure_ascii=False
    )
    (tmp_path / "a.json").write_text(text)
    monkeypatch.setattr(json_records, "PIECE", piece)
    taken: List[Dict[str, Any]] = []
    parsed = json_records.parse_records(tmp_path / "a.json", taken.append, 1 << 20)
    assert taken == records and parsed.cut_at == -1
    assert parsed.keys == {**keys, "after": [{"b": {}}, {}], "last": 12.5}


BOMBS = {
    "spaces": b'{"traceEvents": [' + b" " * (1 << 23),
    "a text": b'{"traceEvents": [], "x": "' + b"x" * (1 << 20),
    "a record": b'{"traceEvents": [{"ph": "X", "name": "' + b"x" * (1 << 20),
    "a list": b'{"x": [' + b"[]," * (1 << 19),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_unpacks_to_much_takes_little_memory(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Story: a file of 3 MB took 2.15 GB before it was refused."""
    monkeypatch.setattr("ipu_pipe.trace.reading.MOST_TEXT", 1 << 22)
    monkeypatch.setattr(json_records, "MOST_VALUE", 1 << 18)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(BOMBS[name], 1))
    tracemalloc.start()
    (fault,) = list_faults(read_trace, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "MiB" in fault and fault.count(str(path)) == 1
    assert peak < 300 << 16


# ---- faults of a folder


@pytest.mark.parametrize(
    ("of", "rank", "late", "faults"),
    [
        (4, 1, 0, ["different runs", "rank1.json of 4 ranks"]),
        (2, 1, 1000, ["different runs", "rank0.json ends before"]),
        (2, 0, 0, ["are all of rank 0"]),
    ],
)
def test_ranks_of_different_runs(
    of: int, rank: int, late: int, faults: List[str], tmp_path: Path
) -> None:
    write(tmp_path / "rank0.json", BASE, 0, 2)
    write(tmp_path / "rank1.json", shift(late), rank, of)
    (fault,) = list_faults(read_trace, tmp_path)
    assert all(word in fault for word in faults)


# ---- passes


def test_hosts_whose_clocks_cannot_be_compared(tmp_path: Path) -> None:
    """Messages go one way, so that no offset can be estimated."""
    first, second = [op(0, 50), mark("gloo:send", 55, 5)], [mark("gloo:recv", 0, 60), op(60, 9)]
    write(tmp_path / "rank0.json", first, 0, 2, host_name="a")
    write(tmp_path / "rank1.json", second, 1, 2, host_name="b")
    found = figures(tmp_path)
    assert not found["devices"][1]["waits_for"]
    assert any("not known" in note and "clocks" in note for note in found["notes"])


def test_two_replicas_of_a_pipeline_are_told_apart(tmp_path: Path) -> None:
    """Ranks 0 and 1, and ranks 2 and 3, are pipelines: rank 1 sends no activations on."""
    first: List[Dict[str, Any]] = []
    last: List[Dict[str, Any]] = []
    grad = "autograd::engine::evaluate_function: Mm"
    for at, back in ((0, 400), (100, 500)):
        first += [op(at, 50), mark("gloo:send", at + 50, 10)]
        first += [mark("gloo:recv", back, 80), op(back + 80, 10, grad)]
        last += [mark("gloo:recv", at + 40, 20), op(at + 60, 20)]
        last += [op(back, 60, grad), mark("gloo:send", back + 60, 20)]
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json", last if rank % 2 else first, rank, 4)
    found = figures(tmp_path)
    assert [(row["index"], row["devices"]) for row in found["stages"]] == [(0, [0, 2]), (1, [1, 3])]
    assert {(row["src"], row["dst"]) for row in found["links"]} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert any("inferred" in note for note in found["notes"])


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_long_file_says_how_far_it_is_read(suffix: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_records, "REPORTED", 1 << 18)
    text = json.dumps(
        {"traceEvents": [x(f"gemm {i * 7919 % 9973}", 10 * i, 6) for i in range(6000)]}
    )
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix == "json.gz" else text.encode())
    lines: List[str] = []
    read_trace(path, (), lines.append)
    shares = [int(line.split("% read")[0].rpartition(" ")[2]) for line in lines]
    assert len(lines) == len(text) // (1 << 18) > 1
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 100
