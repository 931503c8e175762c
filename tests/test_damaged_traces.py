"""Damaged and hostile traces: `analyze` reads or refuses them in one line, and never unpacks without a limit."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import random
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.analysis.stages import measure_update_noise
from ipu_pipe.report.page import write_page
from ipu_pipe.trace import store
from ipu_pipe.trace.chrome import write_chrome
from ipu_pipe.trace.events import EVENT_TYPES, Counter, Counters, Event, Events, Trace
from ipu_pipe.trace.reading import read_trace
from tests.test_tools_analyze import write_run_folder
from tests.test_trace_profiler import mark, op, x

ODD: List[Any] = [
    None, True, 0, -1, 3, 1 << 15, 1 << 31, -(1 << 40), 1 << 62, 1 << 64, 10**30, 1e300, 1e-320, float("nan"), float("inf"), 0.5,
    "", "x", "gpipe", [], {}, [0], [0, 0], [7, 9], {"a": 1}, [[]], "\x1b[2J", "\ud800", [10**6],
]  # fmt: skip
METHODS = "gpipe pipedream pipedream_2bw pipemare local_greedy local_sgd randomized_pipedream naive".split()
ARGS: List[Any] = [
    {"hogwild": {"mean": 3}}, {"recompute": {"segments": 10**9}}, {"delay_bound": 10**15}, {"layers": 5}, {"turn": {}},
]  # fmt: skip

Block = Tuple[bytes, int, bytes]  # tag, rows, payload
ROW_BYTES = sum(np.dtype(kind).itemsize for kind in EVENT_TYPES.values())


def read_blocks(path: Path) -> List[Block]:
    """Read the blocks of a trace file."""
    content, blocks = path.read_bytes(), []
    at = len(store.MAGIC)
    while at < len(content):
        tag, rows, size, _ = store.HEAD.unpack_from(content, at)
        at += store.HEAD.size + size
        blocks.append((tag, rows, zlib.decompress(content[at - size : at])))
    return blocks


def write_blocks(path: Path, blocks: List[Block]) -> Path:
    """Write a trace file of these blocks, with right checksums."""
    content = store.MAGIC
    for tag, rows, payload in blocks:
        packed = zlib.compress(payload)
        content += store.HEAD.pack(tag, rows, len(packed), zlib.crc32(packed)) + packed
    path.write_bytes(content)
    return path


def iterate_paths(document: Any, path: Tuple[Any, ...] = ()) -> Iterator[Tuple[Any, ...]]:
    """Yield the path of keys to each value of a JSON document."""
    yield path
    if isinstance(document, (dict, list)):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from iterate_paths(value, (*path, key))


def damage_document(document: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON document with one value replaced by an odd one."""
    document = copy.deepcopy(document)
    *path, key = rng.choice([path for path in iterate_paths(document) if path])
    inside = document
    for step in path:
        inside = inside[step]
    inside[key] = rng.choice(ODD)
    return document


def damage_blocks(blocks: List[Block], rng: random.Random) -> List[Block]:
    """Return the blocks with one of them damaged."""
    blocks = list(blocks)
    place = rng.randrange(len(blocks))
    tag, rows, payload = blocks[place]
    if tag == store.META:
        payload = encode(damage_document(json.loads(payload), rng))
    else:
        begin, size = rng.randrange(len(payload)), rng.choice([1, 2, 4, 8])
        damage = bytes([rng.choice([0, 127, 128, 255])]) * size
        payload = payload[:begin] + damage + payload[begin + size :]
    tag, rows = rng.choice([tag] * 9 + [store.CLOCK]), rng.choice([rows] * 9 + [1 << 31])
    blocks[place] = (tag, rows, payload)
    return blocks


def encode(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def analyze_or_refuse(path: Path) -> bool:
    """Analyze a trace and write its page. Return whether it was read; assert that a refusal has one plain line for each fault."""
    try:
        trace = read_trace(path)
        figures = analyze(trace, str(path))
    except BadInput as error:
        assert all(fault.isprintable() and len(fault) < 600 for fault in error.faults), error.faults
        return False
    json.dumps(figures, allow_nan=False)
    write_page(path.with_name("page.html"), trace, figures)
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("error:invalid value", "error:overflow", "error:divide")
def test_any_damage_is_read_or_refused(tmp_path: Path) -> None:
    """Story: 44 of a thousand damaged traces ended in a traceback, such as a counter with an unknown code of its name."""
    rng, run = random.Random(22), write_run_folder(tmp_path / "run")
    whole = read_trace(run)
    write_chrome(tmp_path / "a.json.gz", whole.events, whole.counters, whole.metadata)
    document = json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))
    blocks, counts = read_blocks(run / "trace" / "rank-0.trace"), [0, 0]
    path = tmp_path / "x.json"
    for _ in range(100):
        damaged = write_blocks(tmp_path / "x.trace", damage_blocks(blocks, rng))
        counts[analyze_or_refuse(damaged)] += 1
        path.write_bytes(encode(damage_document(document, rng)))
        counts[analyze_or_refuse(path)] += 1
    for method, args in itertools.product(METHODS, ARGS):
        odd = {"method": method, "method_args": args, "accumulate": rng.choice([1, 3, 1 << 30])}
        metadata = {**document["otherData"], **odd, "device_of_stage": [0]}
        path.write_bytes(encode({**document, "otherData": metadata}))
        assert analyze_or_refuse(path)
    assert min(counts) > 30


def test_a_damaged_number_of_a_microbatch_takes_no_memory() -> None:
    """Story: one event of microbatch 2,000,000,000 took 16 GB and 38 seconds."""
    numbers = [0, 1, 2, 5_000_000]
    passes = [Event(0, 0, "forward", m, 9 * i, 9 * i, 0, None) for i, m in enumerate(numbers)]
    events = Events.from_rows(passes)
    tracemalloc.start()
    noise = measure_update_noise(events, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert noise == 0 and peak < 1 << 20


NAMELESS = struct.pack("<I", 5) + b'["a"]' + bytes(4) + b"\x05\0" + bytes(16)
DAMAGED: Dict[str, List[Block]] = {
    "a counter without a name": [(store.COUNTERS, 1, NAMELESS)],
    "a kind without a name": [(store.EVENTS, 1, bytes(8) + b"\xff" + bytes(ROW_BYTES - 9))],
    "a clock beyond all times": [
        (store.CLOCK, 1, struct.pack("<qq", 1 << 62, 5)),
        (store.CLOCK, 1, struct.pack("<qq", 0, -(1 << 62))),
    ],
    "deep metadata": [(store.META, 0, b"[" * 100_000)],
    "devices without end": [(store.META, 0, b'{"replicas": 1073741824}')],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run")
    blocks = read_blocks(run / "trace" / "rank-0.trace") + DAMAGED[name]
    assert not analyze_or_refuse(write_blocks(tmp_path / "x.trace", blocks))


# ---- small files that unpack to gigabytes


def test_a_trace_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a run share one limit; a run reads its own file without a limit.

    Story: a file of 26 MB unpacked to 6 GB, which were allocated before any check."""
    monkeypatch.setattr("ipu_pipe.trace.reading.MOST_BYTES", 1 << 20)
    rows = (1 << 20) // ROW_BYTES // 2
    zeros = (store.EVENTS, rows, bytes(rows * ROW_BYTES))
    run = tmp_path / "trace"
    run.mkdir()
    for rank in range(3):
        assert analyze_or_refuse(write_blocks(run / f"rank-{rank}.trace", [zeros]))
    large = write_blocks(tmp_path / "large.trace", [zeros, zeros, zeros])
    one = write_blocks(tmp_path / "block.trace", [(store.EVENTS, 1, bytes(1 << 21))])
    assert not any(map(analyze_or_refuse, (run, large, one)))
    assert len(store.read_store(large).events.start) == 3 * rows


# ---- many devices


def count_calls(devices: int) -> int:
    """Return the number of function calls of an analysis with `devices` devices."""
    rows = []
    for d in range(devices):
        rows.append(Event(d, d, "forward", 0, d, d + 9, 0, 64))
        rows.append(Event(d, d, "send", 0, d + 9, d + 10, 0, 64, d + 1))
    counters = [Counter(d, "weights (bytes)", d, 1.0) for d in range(devices)]
    unit = {"forward_flops": 1.0, "backward_flops": 1.0, "crossing_bytes": 1}
    units = [{"name": str(d), "stage": d, **unit} for d in range(devices)]
    metadata = {"units": units, "stages": devices}
    trace = Trace(Events.from_rows(rows), Counters.from_rows(counters), metadata)
    calls: List[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        analyze(trace, "x")
    finally:
        sys.setprofile(None)
    return calls.count("call") + calls.count("c_call")


def test_an_analysis_is_linear_in_the_devices() -> None:
    """Story: an analysis of 4,000 devices took 14 s, since each stage was compared with every other one."""
    few, more, most = count_calls(50), count_calls(350), count_calls(650)
    assert most - more < 1.05 * (more - few) and np.isfinite(few)


def make_profiler_document(with_device: bool) -> Dict[str, Any]:
    """A rank of a pipeline as PyTorch's profiler writes it, with every kind of record."""
    said = {"Collective name": "send", "In msg nelems": 4, "dtype": "Float", "Dst Rank": "1"}
    said["Concrete Inputs"] = ["", "1"]
    records = [
        mark("Forward 0", 0, 20), op(1, 9, "aten::mm"), op(11, 3, "c10d::send"), mark("gloo:send", 12, 6, **said),
        mark("PP:0B1", 30, 20), op(31, 9, "aten::mm"), mark("Optimizer.step#SGD.step", 60, 9),
        {**op(5, 1), "ph": "B"}, {**op(8, 1), "ph": "E"},
        {"ph": "i", "name": "[memory]", "ts": 5, "args": {"Total Allocated": 8, "Device Type": 0}},
    ]  # fmt: skip
    if with_device:
        records += [x("gemm", 70, 9, **said), x("Forward 1", 69, 20, "gpu_user_annotation")]
    place = {"distributedInfo": {"rank": 0, "world_size": 1}, "host_name": "a"}
    return {**place, "baseTimeNanoseconds": 5, "traceEvents": records}


@pytest.mark.filterwarnings("error:invalid value", "error:overflow", "error:divide")
@pytest.mark.parametrize("with_device", [True, False])
def test_any_damage_of_a_profilers_file_is_read_or_refused(
    with_device: bool, tmp_path: Path
) -> None:
    rng, counts, document = random.Random(41), [0, 0], make_profiler_document(with_device)
    for _ in range(150):
        (tmp_path / "rank0.json").write_bytes(encode(damage_document(document, rng)))
        counts[analyze_or_refuse(tmp_path / "rank0.json")] += 1
    assert counts[1] > 90
