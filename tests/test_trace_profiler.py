"""Files of PyTorch's profiler as they come: odd times, odd JSON, ranges that name passes, messages and the waits in them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.trace import json_records
from ipu_pipe.trace.reading import read_trace
from tests.support.runs import list_faults
from tests.support.slow import mark_slow

EPOCH = 1708722576381804  # microseconds since 1970


def x(
    name: str, ts: Any, dur: Any, cat: str = "kernel", tid: int = 7, **args: Any
) -> Dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


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


def is_base(path: Path, busy: int = 24, communication: int = 9, span: int = 39) -> List[str]:
    """Assert the figures of BASE (us) and return the notes."""
    found = figures(path)
    (device,) = found["devices"]
    times = [found["span_ns"], device["busy_ns"], device["communication_ns"]]
    assert times == [1000 * span, 1000 * busy, 1000 * communication]
    return list(found["notes"])


@pytest.mark.parametrize("shift", [0, EPOCH, float(EPOCH) + 0.25, 10**12 + 0.125])
def test_times_since_1970_are_read(shift: float, tmp_path: Path) -> None:
    """Story: 23 of 31 public files were refused, because their times count from 1970."""
    moved = [{**e, "ts": e["ts"] + shift} for e in BASE]
    is_base(write(tmp_path / "a.json", moved))


def test_a_long_time_keeps_its_nanoseconds(tmp_path: Path) -> None:
    """A float64 of microseconds since 1970 has steps of 250 ns."""
    text = json.dumps({"traceEvents": [x("gemm", "A", 1), x("gemm", "B", 1)]})
    text = text.replace('"A"', f"{EPOCH}.001").replace('"B"', f"{EPOCH + 4}.006")
    (tmp_path / "a.json").write_text(text)
    assert figures(tmp_path / "a.json")["span_ns"] == 5005


def test_times_as_text_and_torch_1_categories(tmp_path: Path) -> None:
    records = [
        {**e, "ts": str(e["ts"] + EPOCH), "dur": str(e["dur"]), "cat": "Kernel"} for e in BASE
    ]
    is_base(write(tmp_path / "a.json", records))


def test_pairs_of_begins_and_ends(tmp_path: Path) -> None:
    records = []
    for e in BASE:
        records += [{**e, "ph": "B"}, {"ph": "E", "pid": 0, "tid": 7, "ts": e["ts"] + e["dur"]}]
    notes = is_base(write(tmp_path / "a.json", [*records, {**BASE[0], "ph": "B", "ts": 139}]))
    assert any("a begin has no end" in note for note in notes)


ODD_RECORDS = {
    "negative": [x("gemm", 150, -3)],
    "no duration": [{k: v for k, v in x("gemm", 150, 3).items() if k != "dur"}],
    "a word as time": [x("gemm", "soon", 3)],
    "an object as time": [x("gemm", {}, 3)],
    "times of zero": [x("gemm", 0.0, 0.0)] * 4,
    "not a number": [x("gemm", float("nan"), 3)],
    "beyond all times": [x("gemm", 1e300, 3), x("gemm", 9 * 10**15, 3), x("gemm", "9" * 16, 3)],
    "longer than all times": [x("gemm", 1, 10**30)],
}


@pytest.mark.parametrize("name", ODD_RECORDS)
def test_records_without_a_usable_time_are_counted(name: str, tmp_path: Path) -> None:
    far = [{**e, "ts": e["ts"] + 700_000_000} for e in BASE]
    notes = is_base(write(tmp_path / "a.json", [*far, *ODD_RECORDS[name]]))
    count = len(ODD_RECORDS[name])
    assert any(f"{count} of {8 + count} " in note and "not read" in note for note in notes)


@pytest.mark.parametrize(
    "category, busy, note", [("cpu_op", 22, "1 of 4 records overlap"), ("kernel", 20, "1 of 4 records run over")]
)  # fmt: skip
def test_overlaps_on_one_track_are_clipped(
    category: str, busy: int, note: str, tmp_path: Path
) -> None:
    """Operations of the host are nested; kernels of a stream follow one another, so that one which
    runs over the next one's start is damaged."""
    records = [
        x("a", 100, 10, category),
        x("b", 105, 10, category),
        x("inside", 101, 2, category),
        x("other track", 112, 10, category, tid=8),
    ]
    found = figures(write(tmp_path / "a.json", records))
    assert found["devices"][0]["busy_ns"] == busy * 1000
    assert any(note in text for text in found["notes"])


def test_a_damaged_duration_does_not_fill_the_trace(tmp_path: Path) -> None:
    """Story: one kernel of 10 s among kernels of 6 us made a device busy all of the time."""
    is_base_with_long = [{**e, "dur": 10_000_000} if i == 1 else e for i, e in enumerate(BASE)]
    found = figures(write(tmp_path / "a.json", is_base_with_long))
    assert found["devices"][0]["busy_ns"] == 24_000


NAMES = [
    "oneccl_allreduce_ring", "void ccl::allreduce_small<float>", "xccl:all_reduce", "hcom_allReduce__123", "HcclAllReduce",
    "ncclDevKernel_AllReduce", "mscclpp_allreduce", "ucc:allreduce", "MPI_Allreduce",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_every_library_communicate(name: str, tmp_path: Path) -> None:
    """Story: oneCCL's kernels counted as compute."""
    found = figures(
        write(tmp_path / "a.json", [x("gemm", 0, 6), x(name, 6, 3), x("occlusion", 9, 6)])
    )
    (device,) = found["devices"]
    assert (device["busy_ns"], device["communication_ns"]) == (12_000, 3000)


def test_devices_of_one_process_are_devices(tmp_path: Path) -> None:
    """Story: two GPUs of a process were one device. One kernel on a third one is a touch."""
    records = [x("gemm", 10 * i, 6, tid=7) for i in range(40)]
    records += [{**x("gemm", 10 * i, 3, tid=7), "pid": 1} for i in range(40)]
    records += [{**x("touch", 2, 1, tid=7), "pid": 2}]
    found = figures(write(tmp_path / "a.json", records))
    # the kernel on the third one is taken for the first one's, which computes at that time
    assert [row["busy_ns"] for row in found["devices"]] == [240_000, 120_000]
    assert any("several devices" in note for note in found["notes"])


@pytest.mark.parametrize("kind", ["mark", "control", "endless", "cut", "cut gz", "cut records"])
def test_json_that_viewers_read(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", BASE)
    text = path.read_text()
    whole = json.dumps(BASE)
    if kind == "mark":
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    elif kind == "control":
        path.write_text(text.replace("gemm", "ge\x01mm"))
    elif kind == "endless":
        path.write_text(whole[:-1] + ",\n")
    elif kind == "cut":
        path.write_text(text[:-2])
    elif kind == "cut gz":
        path = tmp_path / "a.json.gz"
        # a stream that was flushed and not closed
        path.write_bytes(gzip.compress(text.encode(), 0)[:-8])
    else:
        path.write_text(text[: text.index('{"ph": "X"', len(text) // 2)])
        assert any("breaks off" in note for note in figures(path)["notes"])
        return
    notes = is_base(path)
    assert any("breaks off" in note for note in notes) == (kind in ("endless", "cut", "cut gz"))


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
    records = [
        x("op", 0, 10, "cpu_op"),
        x("c10d::send", 10, 6, "cpu_op"),
        x("record_param_comms", 11, 4, "cpu_op", **{"Collective name": "send", "Dst Rank": "3"}),
        x("nccl:send 0->3", 12, 20, "user_annotation", **{"Input Dims": [[5]], "Input type": ["float"]}),
        x("another range", 0, 60, "user_annotation"),
        x("op", 40, 10, "cpu_op"),
    ]  # fmt: skip
    trace = read_trace(write(tmp_path / "a.json", records))
    (event,) = trace.events.select(trace.events.is_kind("send")).rows()
    assert (event.peer, event.bytes, event.start_ns, event.end_ns) == (3, 20, 10_000, 32_000)


def test_a_chakra_trace_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps({"schema": "1.1.1-chakra", "pid": 1, "nodes": [{"id": 1}]})
    )
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
    "spaces": b'{"traceEvents": [' + b" " * (1 << 27),
    "a text": b'{"traceEvents": [], "x": "' + b"x" * (1 << 24),
    "a record": b'{"traceEvents": [{"ph": "X", "name": "' + b"x" * (1 << 24),
    "a list": b'{"x": [' + b"[]," * (1 << 23),
}


@pytest.mark.parametrize("name", mark_slow(BOMBS, lambda name: name == "spaces"))
def test_a_file_that_unpacks_to_much_takes_little_memory(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Story: a file of 3 MB took 2.15 GB before it was refused."""
    monkeypatch.setattr("ipu_pipe.trace.reading.MOST_TEXT", 1 << 26)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(BOMBS[name], 1))
    tracemalloc.start()
    (fault,) = list_faults(read_trace, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "MiB" in fault and fault.count(str(path)) == 1
    assert peak < 300 << 20


# ---- faults of a folder


def test_ranks_of_different_runs(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", BASE, 0, 2)
    write(tmp_path / "rank1.json", BASE, 1, 4)
    (fault,) = list_faults(read_trace, tmp_path)
    assert "different runs" in fault and "rank1.json of 4 ranks" in fault


def test_ranks_that_ran_one_after_the_other(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", BASE, 0, 2)
    write(tmp_path / "rank1.json", [{**e, "ts": e["ts"] + 1000} for e in BASE], 1, 2)
    (fault,) = list_faults(read_trace, tmp_path)
    assert "different runs" in fault and "rank0.json ends before" in fault


def test_one_rank_of_several_says_so(tmp_path: Path) -> None:
    found = figures(write(tmp_path / "rank1.json", BASE, 1, 4))
    assert any("1 of 4 ranks" in note for note in found["notes"])
    assert "all 4 ranks" in found["bottleneck"]["do"]
    far = figures(write(tmp_path / "a.json", [x("gemm", 0, 5), x("gemm", 100, 5)]))
    assert "host" in far["bottleneck"]["do"]


def test_faults_name_the_event_and_its_key(tmp_path: Path) -> None:
    row = {
        "ph": "X",
        "cat": "forward",
        "pid": 0,
        "ts": 1,
        "dur": 1,
        "args": {"stage": 0, "microbatch": 0, "version": 0},
    }
    for changes, word in (
        ({"ts": "x"}, "ts"),
        ({"args": {"stage": 0}}, "microbatch"),
        ({"pid": 1.5}, "pid"),
    ):
        (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [row, {**row, **changes}]}))
        (fault,) = list_faults(read_trace, tmp_path / "a.json")
        assert "event 1" in fault and word in fault and "Error" not in fault


# ---- passes


def write_two_ranks(folder: Path, **keys: Any) -> Path:
    """Two ranks of one host: rank 1 computes until 200, and rank 0 waits for it from 60 on.

    rank 0    F0 0-50   recv 60 ................. 230  B0 230-280
    rank 1    recv 10 - 70   F0 70-100  B0 100-200  send 205-230
    """
    folder.mkdir()
    hosts = {"size": 2, "host_name": "one", **keys}
    write(folder / "rank0.json", [
        x("Forward 0", 0, 58, "user_annotation"), x("op", 0, 50, "cpu_op"), x("gloo:send", 55, 15, "user_annotation"),
        x("Backward 0", 59, 230, "user_annotation"), x("gloo:recv", 60, 170, "user_annotation"), x("op", 230, 50, "cpu_op"),
    ], 0, **hosts)  # fmt: skip
    write(folder / "rank1.json", [
        x("Forward 0", 5, 97, "user_annotation"), x("gloo:recv", 10, 60, "user_annotation"), x("op", 70, 30, "cpu_op"),
        x("Backward 0", 102, 130, "user_annotation"), x("op", 103, 97, "cpu_op"), x("gloo:send", 205, 25, "user_annotation"),
    ], 1, **{**hosts, "host_name": keys.get("other", "one")})  # fmt: skip
    return folder


def test_waiting_is_not_communication(tmp_path: Path) -> None:
    """Story: rank 0 waited for rank 1's compute, and was told to send less."""
    found = figures(write_two_ranks(tmp_path / "run"))
    first, second = found["devices"]
    # ready to receive at 60, and rank 1 computes until 200; from then on the message is on its way
    # (its own message takes until 70)
    assert first["waits_for"] == {"1": 130_000}
    assert first["communication_ns"] == 20_000 + 30_000
    assert second["waits_for"].get("0", 0) == 0
    assert (
        found["bottleneck"]["what"],
        found["bottleneck"]["stage"],
        found["bottleneck"]["device"],
    ) == ("stage", 1, 1)
    assert [(s["forward_ns"], s["backward_ns"]) for s in found["stages"]] == [
        (50_000, 50_000),
        (30_000, 97_000),
    ]
    assert [(link["src"], link["dst"], link["carries"]) for link in found["links"]] == [
        (0, 1, "activations"), (1, 0, "gradients"),
    ]  # fmt: skip


def test_hosts_whose_clocks_cannot_be_compared(tmp_path: Path) -> None:
    found = figures(write_two_ranks(tmp_path / "run", other="two"))
    # messages go both ways, so the offset is estimated
    assert found["devices"][0]["waits_for"]
    run = tmp_path / "one way"
    run.mkdir()
    write(
        run / "rank0.json",
        [x("op", 0, 50, "cpu_op"), x("gloo:send", 55, 5, "user_annotation")],
        0,
        2,
        host_name="a",
    )
    write(
        run / "rank1.json",
        [x("gloo:recv", 0, 60, "user_annotation"), x("op", 60, 9, "cpu_op")],
        1,
        2,
        host_name="b",
    )
    found = figures(run)
    assert not found["devices"][1]["waits_for"]
    assert any("not known" in note and "clocks" in note for note in found["notes"])


def test_clocks_of_hosts_are_compared_by_messages(tmp_path: Path) -> None:
    """Rank 1's clock is a second ahead: with the offset its waits are those of one clock."""
    run = write_two_ranks(tmp_path / "run", other="two")
    content = json.loads((run / "rank1.json").read_text())
    for record in content["traceEvents"]:
        record["ts"] += 1_000_000
    (run / "rank1.json").write_text(json.dumps(content))
    found = figures(run)
    assert found["span_ns"] < 400_000
    waited = found["devices"][0]["waits_for"]["1"]
    assert 100_000 < waited < 160_000 and found["bottleneck"]["stage"] == 1


def test_names_of_the_multi_stage_runtime(tmp_path: Path) -> None:
    """A rank with stages 0 and 2 of two updates with two microbatches."""
    records: List[Dict[str, Any]] = []
    time = 0
    for _ in range(2):
        for action in ("0F0", "0F1", "2F0", "2I0", "2F1", "2W0", "0B0"):
            records += [
                x(f"PP:{action}", time, 10, "user_annotation"),
                x("op", time + 1, 5, "cpu_op"),
            ]
            time += 10
    trace = read_trace(write(tmp_path / "a.json", records))
    rows = [(e.stage, e.kind, e.microbatch) for e in trace.events.rows()]
    assert rows[:7] == [
        (0, "forward", 0), (0, "forward", 1), (2, "forward", 0), (2, "input gradient", 0), (2, "forward", 1),
        (2, "weight gradient", 0), (0, "backward", 0),
    ]  # fmt: skip
    assert rows[7] == (0, "forward", 2) and trace.metadata["accumulate"] == 2


def test_a_pattern_names_the_users_ranges(tmp_path: Path) -> None:
    records = [x("stage1/fwd/mb3", 0, 10, "user_annotation"), x("op", 1, 5, "cpu_op")]
    path = write(tmp_path / "a.json", records)
    (event,) = read_trace(
        path, passes=r"stage(?P<stage>\d+)/(?P<kind>\w+)/mb(?P<microbatch>\d+)"
    ).events.rows()
    assert (event.stage, event.kind, event.microbatch) == (1, "forward", 3)
    for wrong in ("(", "no groups"):
        with pytest.raises(BadInput):
            read_trace(path, passes=wrong)


def test_nccl_metadata_names_peers_and_sizes(tmp_path: Path) -> None:
    said = {"Collective name": "send", "In msg nelems": 10, "dtype": "BFloat16", "Dst Rank": "1"}
    records = [x("gemm", 0, 5), x("ncclDevKernel_SendRecv", 5, 5, **said)]
    _, event = read_trace(write(tmp_path / "a.json", records)).events.rows()
    assert (event.kind, event.peer, event.bytes) == ("send", 1, 20)


def test_nccl_kernels_wait_for_each_other(tmp_path: Path) -> None:
    """Rank 0 sends to rank 4 of another node of the mesh, which computes until 200."""
    said = {"In msg nelems": 10, "dtype": "Float"}
    send = x(
        "ncclDevKernel_SendRecv", 50, 160, **said, **{"Collective name": "send", "Dst Rank": "4"}
    )
    recv = x(
        "ncclDevKernel_SendRecv", 200, 10, **said, **{"Collective name": "recv", "Src Rank": "0"}
    )
    write(tmp_path / "rank0.json", [x("gemm", 0, 50), send, x("gemm", 210, 5)], 0, 2)
    write(tmp_path / "rank4.json", [x("gemm", 0, 200), recv, x("gemm", 210, 5)], 4, 2)
    found = figures(tmp_path)
    assert found["devices"][0]["waits_for"] == {"4": 150_000}
    assert [d["communication_ns"] for d in found["devices"]] == [10_000, 10_000]
    assert [(row["src"], row["dst"], row["bytes"]) for row in found["links"]] == [(0, 4, 40)]


def test_two_replicas_of_a_pipeline_are_told_apart(tmp_path: Path) -> None:
    """Ranks 0 and 1, and ranks 2 and 3, are pipelines: rank 1 sends no activations on."""
    for first in (0, 2):
        for m in range(2):
            at = 100 * m
            back = 400 + 100 * m
            op = {"cat": "cpu_op"}
            ann = {"cat": "user_annotation"}
            grad = "autograd::engine::evaluate_function: Mm"
            start = [
                x("op", at, 50, **op), x("gloo:send", at + 50, 10, **ann), x("gloo:recv", back, 80, **ann),
                x(grad, back + 80, 10, **op),
            ]  # fmt: skip
            end = [
                x("gloo:recv", at + 40, 20, **ann), x("op", at + 60, 20, **op), x(grad, back, 60, **op),
                x("gloo:send", back + 60, 20, **ann),
            ]  # fmt: skip
            for rank, records in ((first, start), (first + 1, end)):
                path = tmp_path / f"rank{rank}.json"
                before = json.loads(path.read_text())["traceEvents"] if path.exists() else []
                write(path, [*before, *records], rank, 4)
    found = figures(tmp_path)
    assert [(row["index"], row["devices"]) for row in found["stages"]] == [(0, [0, 2]), (1, [1, 3])]
    assert {(row["src"], row["dst"]) for row in found["links"]} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert any("inferred" in note for note in found["notes"])


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_long_file_says_how_far_it_is_read(suffix: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_records, "REPORTED", 1 << 18)
    records = [x(f"gemm {i * 7919 % 9973}", 10 * i, 6) for i in range(6000)]
    path = write(tmp_path / "a.json", records)
    if suffix == "json.gz":
        (tmp_path / "a.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    lines: List[str] = []
    read_trace(tmp_path / f"a.{suffix}", (), lines.append)
    shares = [int(line.split("% read")[0].rpartition(" ")[2]) for line in lines]
    assert len(lines) == path.stat().st_size // (1 << 18) > 1
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 100
