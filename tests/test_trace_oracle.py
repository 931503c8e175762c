"""HolisticTraceAnalysis judges the figures of profilers' traces, in an environment of its own: `make oracle`.

HTA_PYTHON is its interpreter, HTA_FILES a folder of its public files (its tests/data). Without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.report.analysis.devices import find_span, measure_union
from ipu_pipe.trace.events import COMPUTE
from ipu_pipe.trace.reading import read_trace
from tests.test_trace_profiler import write, x

HTA = os.environ.get("HTA_PYTHON", "")
FILES = os.environ.get("HTA_FILES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HTA, reason="HTA_PYTHON is not set: see the head of the file"),
]

SCRIPT = """
import json, logging, sys, warnings
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
found = {}
for path in sys.argv[2:]:
    try:
        trace = TraceAnalysis(trace_files={0: path}, trace_dir="", include_last_profiler_step=True)
        row = trace.get_temporal_breakdown(visualize=False).iloc[0]
        found[path] = {key: float(row[key + "_time(us)"]) for key in ("idle", "compute", "non_compute", "kernel")}
        found[path]["overlap"] = float(trace.get_comm_comp_overlap(visualize=False).iloc[0, 1])
    except Exception as error:
        found.setdefault(path, {})["error"] = repr(error)
json.dump(found, open(sys.argv[1], "w"))
"""


def ask_hta(paths: List[Path], folder: Path) -> Dict[str, Any]:
    subprocess.run(
        [HTA, "-c", SCRIPT, str(folder / "hta.json"), *map(str, paths)],
        check=True,
        timeout=900,
        capture_output=True,
    )
    answer: Dict[str, Any] = json.loads((folder / "hta.json").read_text())
    return answer


def measure(path: Path) -> Dict[str, float]:
    """Return our figures of one rank, in microseconds and percent."""
    events = read_trace(path).events
    begin, end = find_span(events)
    compute = events.select(events.is_kind(*COMPUTE))
    messages = events.select(~events.is_kind(*COMPUTE))
    all_ns, compute_ns, message_ns = (
        measure_union(e.start, e.end) for e in (events, compute, messages)
    )
    return {
        "idle": (end - begin - all_ns) / 1000,
        "compute": compute_ns / 1000,
        "non_compute": (all_ns - compute_ns) / 1000,
        "kernel": (end - begin) / 1000,
        "overlap": 100 * (compute_ns + message_ns - all_ns) / message_ns
        if message_ns
        else float("nan"),
    }


def make_file(path: Path, seed: int) -> Path:
    """Write a GPU's trace: kernels that compute on one stream and messages on another one, in whole microseconds."""
    rng = random.Random(seed)
    records: List[Dict[str, Any]] = []
    messages = ["ncclDevKernel_AllReduce_Sum_f32", "ncclDevKernel_SendRecv"]
    for stream, names in ((7, ["gemm", "relu"]), (20, messages)):
        at = rng.randrange(50)
        for number in range(60):
            at += rng.randrange(30)
            length = rng.randrange(1, 40)
            ids = {"correlation": 1000 * stream + number, "External id": number}
            args = {"stream": stream, "device": 0, **ids}
            launch = x("cudaLaunchKernel", at - 1, 1, "cuda_runtime", 1, **ids)
            records.append(x(rng.choice(names), at, length, tid=stream, **args))
            records.append({**launch, "pid": 99})
            at += length
    return write(path, records, schemaVersion=1)


def test_times_are_those_of_holistic_trace_analysis(tmp_path: Path) -> None:
    paths = [make_file(tmp_path / f"rank-0-{seed}.json", seed) for seed in range(5)]
    judged = ask_hta(paths, tmp_path)
    for path in paths:
        ours, theirs = measure(path), judged[str(path)]
        assert "error" not in theirs
        assert ours.pop("overlap") == pytest.approx(theirs["overlap"], abs=0.006)
        assert ours == {key: theirs[key] for key in ours}


# what differs in its public files, by a part of the name: ours counts kernels and copies of the device alone
EXPLAINED = (
    # HTA counts records of cudaStreamSynchronize on the device's stream (cuda_sync)
    "alexnet", "simple_add", "event_sync",
    # HTA cuts times with nanoseconds to whole microseconds, each kernel by itself
    "mtia", "nccl_data", "ns_resolution", "amd",
    # HTA counts an operation of the host that names a stream
    "triton",
    # HTA leaves out kernels whose launch is not in the file
    "trace_compare", "negative_queue", "trace_diff+test",
)  # fmt: skip


@pytest.mark.skipif(not FILES, reason="HTA_FILES is not set")
def test_its_public_files_are_read(tmp_path: Path) -> None:
    """Story: 23 of its 31 files were refused for times that count from 1970."""
    paths = sorted(
        path
        for path in Path(FILES).rglob("*")
        if path.name.endswith((".json", ".json.gz")) and path.stat().st_size > 500
    )
    judged = ask_hta(paths, tmp_path)
    refused = []
    for path in paths:
        try:
            ours = measure(path)
        except BadInput:
            refused.append(path.name)
            continue
        theirs = judged[str(path)]
        if "idle" in theirs and not any(part in str(path) for part in EXPLAINED):
            assert all(abs(ours[key] - theirs[key]) <= 1 for key in ("idle", "kernel")), path
    # an execution graph, which has no times
    assert [name for name in refused if "simple_add_et" not in name] == []
