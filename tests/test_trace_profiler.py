"""Files of PyTorch's profiler as they come: odd times, odd JSON, ranges that name passes, messages and the waits in them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch

from ipu_pipe.errors import BadInput
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


def check_base(path: Path) -> List[str]:
    """Assert the figures of BASE and return the notes."""
    found = figures(path)
    (device,) = found["devices"]
    times = [found["span_ns"], device["busy_ns"], device["communication_ns"]]
    assert times == [39_000, 24_000, 9_000]
    return list(found["notes"])


def shift(by: float) -> List[Dict[str, Any]]:
    return [{**e, "ts": e["ts"] + by} for e in BASE]


PAIRS = [
    record
    for e in BASE
    for record in ({**e, "ph": "B"}, {"ph": "E", "pid": 0, "tid": 7, "ts": e["ts"] + e["dur"]})
]
AS_TEXT = [{**e, "ts": str(e["ts"]), "dur": str(e["dur"])} for e in shift(EPOCH)]
# records that are read as BASE, and part of a note
SAME: Dict[str, Any] = {
    "since 1970": (shift(EPOCH), ""),
    "with fractions": (shift(10**12 + 0.125), ""),
    "text, and torch 1's categories": ([{**e, "cat": "Kernel"} for e in AS_TEXT], ""),
    "begins and ends": ([*PAIRS, {**BASE[0], "ph": "B", "ts": 139}], "a begin has no end"),
}
for kind, odd in {
    "negative": x("gemm", 150, -3),
    "no duration": {k: v for k, v in x("gemm", 150, 3).items() if k != "dur"},
    "a word as time": x("gemm", "soon", 3),
    "an object as time": x("gemm", {}, 3),
    "times of zero": x("gemm", 0.0, 0.0),
    "not a number": x("gemm", float("nan"), 3),
    "beyond all times": x("gemm", 1e300, 3),
    "beyond all times, as text": x("gemm", "9" * 16, 3),
    "longer than all times": x("gemm", 1, 10**30),
}.items():
    SAME[kind] = ([*shift(700_000_000), odd, odd], "2 of 10 ")


@pytest.mark.parametrize("kind", SAME)
def test_times_of_all_kinds_are_read_and_what_has_none_is_counted(
    kind: str, tmp_path: Path
) -> None:
    """Story: 23 of 31 public files were refused, because their times count from 1970."""
    records, told = SAME[kind]
    notes = check_base(write(tmp_path / "a.json", records))
    assert not told or any(told in note for note in notes)


def test_a_long_time_keeps_its_nanoseconds(tmp_path: Path) -> None:
    """A float64 of microseconds since 1970 has steps of 250 ns."""
    text = json.dumps({"traceEvents": [x("gemm", "A", 1), x("gemm", "B", 1)]})
    text = text.replace('"A"', f"{EPOCH}.001").replace('"B"', f"{EPOCH + 4}.006")
    (tmp_path / "a.json").write_text(text)
    assert figures(tmp_path / "a.json")["span_ns"] == 5005


@pytest.mark.parametrize(
    "category, busy, note", [("cpu_op", 22, "1 of 4 records overlap"), ("kernel", 20, "1 of 4 records run over")]
)  # fmt: skip
def test_overlaps_on_one_track_are_clipped(
    category: str, busy: int, note: str, tmp_path: Path
) -> None:
    """Operations of the host are nested; kernels of a stream follow one another, so that one which
    runs over the next one's start is damaged."""
    times = (100, 10), (105, 10), (101, 2)
    records = [x(str(at), at, dur, category) for at, dur in times]
    records += [x("other track", 112, 10, category, tid=8)]
    found = figures(write(tmp_path / "a.json", records))
    assert found["devices"][0]["busy_ns"] == busy * 1000
    assert any(note in text for text in found["notes"])


def test_a_damaged_duration_does_not_fill_the_trace(tmp_path: Path) -> None:
    """Story: one kernel of 10 s among kernels of 6 us made a device busy all of the time."""
    records = [{**e, "dur": 10_000_000} if i == 1 else e for i, e in enumerate(BASE)]
    found = figures(write(tmp_path / "a.json", records))
    assert found["devices"][0]["busy_ns"] == 24_000
    # nor does a file that breaks off within a record end in a traceback
    text = json.dumps({"traceEvents": BASE})
    (tmp_path / "b.json").write_text(text[: text.index('{"ph": "X"', len(text) // 2)])
    assert any("breaks off" in note for note in figures(tmp_path / "b.json")["notes"])


NAMES = [
    "oneccl_allreduce_ring", "void ccl::allreduce_small<float>", "xccl:all_reduce", "hcom_allReduce__123", "HcclAllReduce",
    "ncclDevKernel_AllReduce", "mscclpp_allreduce", "ucc:allreduce", "MPI_Allreduce",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_every_library_communicate(name: str, tmp_path: Path) -> None:
    """Story: oneCCL's kernels counted as compute."""
    records = [x("gemm", 0, 6), x(name, 6, 3), x("occlusion", 9, 6)]
    (device,) = figures(write(tmp_path / "a.json", records))["devices"]
    assert (device["busy_ns"], device["communication_ns"]) == (12_000, 3000)


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


def test_devices_of_one_process_are_devices(tmp_path: Path) -> None:
    """Story: two GPUs of a process were one device. One kernel on a third one is a touch."""
    records = [x("gemm", 10 * i, 6, tid=7) for i in range(40)]
    records += [{**x("gemm", 10 * i, 3, tid=7), "pid": 1} for i in range(40)]
    records += [{**x("touch", 2, 1, tid=7), "pid": 2}]
    found = figures(write(tmp_path / "a.json", records))
    # the kernel on the third one is taken for the first one's, which computes at that time
    assert [row["busy_ns"] for row in found["devices"]] == [240_000, 120_000]
    assert any("several devices" in note for note in found["notes"])


TEXT = json.dumps({"traceEvents": BASE}).encode()
# what viewers read as BASE, and whether the file breaks off
VIEWED = {
    "mark": (b"\xef\xbb\xbf" + TEXT, False),
    "control": (TEXT.replace(b"gemm", b"ge\x01mm"), False),
    "endless": (json.dumps(BASE).encode()[:-1] + b",\n", True),
    "cut": (TEXT[:-2], True),
    # a stream that was flushed and not closed
    "cut gz": (gzip.compress(TEXT, 0)[:-8], True),
}


@pytest.mark.parametrize("kind", VIEWED)
def test_json_that_viewers_read(kind: str, tmp_path: Path) -> None:
    content, breaks_off = VIEWED[kind]
    (tmp_path / "a.json").write_bytes(content)
    assert any("breaks off" in note for note in check_base(tmp_path / "a.json")) == breaks_off


def test_an_accelerators_records(tmp_path: Path) -> None:
    records = [x("dma", 100, 5, "mtia_ccp_events"), x("op", 90, 50, "cpu_op")]
    found = figures(write(tmp_path / "a.json", records))
    assert found["span_ns"] == found["devices"][0]["busy_ns"] == 5000
    hosts = figures(write(tmp_path / "b.json", records[1:]))
    assert any("no kernels" in note for note in hosts["notes"])


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


def test_a_chakra_trace_is_refused_by_its_name(tmp_path: Path) -> None:
    graph = {"schema": "1.1.1-chakra", "pid": 1, "nodes": [{"id": 1}]}
    (tmp_path / "a.json").write_text(json.dumps(graph))
    (fault,) = list_faults(read_trace, tmp_path / "a.json")
    assert "Chakra" in fault and "torch.profiler" in fault


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


def test_one_rank_of_several_says_so(tmp_path: Path) -> None:
    found = figures(write(tmp_path / "rank1.json", BASE, 1, 4))
    assert any("1 of 4 ranks" in note for note in found["notes"])
    assert "all 4 ranks" in found["bottleneck"]["do"]
    far = figures(write(tmp_path / "a.json", [x("gemm", 0, 5), x("gemm", 100, 5)]))
    assert "host" in far["bottleneck"]["do"]


# ---- passes


def write_two_ranks(folder: Path) -> Path:
    """Two ranks of one host: rank 1 computes until 200, and rank 0 waits for it from 60 on.

    rank 0    F0 0-50   recv 60 ................. 230  B0 230-280
    rank 1    recv 10 - 70   F0 70-100  B0 100-200  send 205-230
    """
    folder.mkdir()
    keys = {"size": 2, "host_name": "one"}
    write(folder / "rank0.json", [
        mark("Forward 0", 0, 58), op(0, 50), mark("gloo:send", 55, 15),
        mark("Backward 0", 59, 230), mark("gloo:recv", 60, 170), op(230, 50),
    ], 0, **keys)  # fmt: skip
    write(folder / "rank1.json", [
        mark("Forward 0", 5, 97), mark("gloo:recv", 10, 60), op(70, 30),
        mark("Backward 0", 102, 130), op(103, 97), mark("gloo:send", 205, 25),
    ], 1, **keys)  # fmt: skip
    return folder


def test_waiting_is_not_communication(tmp_path: Path) -> None:
    """Story: rank 0 waited for rank 1's compute, and was told to send less."""
    found = figures(write_two_ranks(tmp_path / "run"))
    first, second = found["devices"]
    # ready to receive at 60, and rank 1 computes until 200; from then on the message is on its way
    # (its own message takes until 70)
    assert first["waits_for"] == {"1": 130_000} and second["waits_for"].get("0", 0) == 0
    assert first["communication_ns"] == 20_000 + 30_000
    worst = found["bottleneck"]
    assert (worst["what"], worst["stage"], worst["device"]) == ("stage", 1, 1)
    times = [(s["forward_ns"], s["backward_ns"]) for s in found["stages"]]
    assert times == [(50_000, 50_000), (30_000, 97_000)]
    links = [(link["src"], link["dst"], link["carries"]) for link in found["links"]]
    assert links == [(0, 1, "activations"), (1, 0, "gradients")]


def test_hosts_whose_clocks_cannot_be_compared(tmp_path: Path) -> None:
    """Messages go one way, so that no offset can be estimated."""
    first, second = [op(0, 50), mark("gloo:send", 55, 5)], [mark("gloo:recv", 0, 60), op(60, 9)]
    write(tmp_path / "rank0.json", first, 0, 2, host_name="a")
    write(tmp_path / "rank1.json", second, 1, 2, host_name="b")
    found = figures(tmp_path)
    assert not found["devices"][1]["waits_for"]
    assert any("not known" in note and "clocks" in note for note in found["notes"])


def test_names_of_the_multi_stage_runtime(tmp_path: Path) -> None:
    """A rank with stages 0 and 2 of two updates with two microbatches."""
    actions = "0F0 0F1 2F0 2I0 2F1 2W0 0B0".split()
    records: List[Dict[str, Any]] = []
    for place, action in enumerate(2 * actions):
        records += [mark(f"PP:{action}", 10 * place, 10), op(10 * place + 1, 5)]
    trace = read_trace(write(tmp_path / "a.json", records))
    kinds = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}
    rows = [(e.stage, e.kind, e.microbatch) for e in trace.events.rows()]
    assert rows[:7] == [(int(a[0]), kinds[a[1]], int(a[2])) for a in actions]
    assert rows[7] == (0, "forward", 2) and trace.metadata["accumulate"] == 2


def test_a_pattern_names_the_users_ranges(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [mark("stage1/fwd/mb3", 0, 10), op(1, 5)])
    pattern = r"stage(?P<stage>\d+)/(?P<kind>\w+)/mb(?P<microbatch>\d+)"
    (event,) = read_trace(path, passes=pattern).events.rows()
    assert (event.stage, event.kind, event.microbatch) == (1, "forward", 3)
    for wrong in ("(", "no groups"):
        with pytest.raises(BadInput):
            read_trace(path, passes=wrong)


def test_nccl_kernels_wait_for_each_other(tmp_path: Path) -> None:
    """Rank 0 sends to rank 4 of another node of the mesh, which computes until 200."""
    said = {"In msg nelems": 10, "dtype": "BFloat16"}
    to, of = (
        {"Collective name": "send", "Dst Rank": "4"},
        {"Collective name": "recv", "Src Rank": "0"},
    )
    send = x("ncclDevKernel_SendRecv", 50, 160, **said, **to)
    recv = x("ncclDevKernel_SendRecv", 200, 10, **said, **of)
    write(tmp_path / "rank0.json", [x("gemm", 0, 50), send, x("gemm", 210, 5)], 0, 2)
    write(tmp_path / "rank4.json", [x("gemm", 0, 200), recv, x("gemm", 210, 5)], 4, 2)
    found = figures(tmp_path)
    assert found["devices"][0]["waits_for"] == {"4": 150_000}
    assert [d["communication_ns"] for d in found["devices"]] == [10_000, 10_000]
    assert [(row["src"], row["dst"], row["bytes"]) for row in found["links"]] == [(0, 4, 20)]


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
