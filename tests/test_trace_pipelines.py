"""The bottleneck that was built into a pipeline of torch.distributed.pipelining is the one that its profiler's traces name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.trace.reading import read_trace
from tests.support.profiled_pipelines import MICROBATCHES, UPDATES, make_traces
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow

pytestmark = [
    needs_processes,
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6),
        reason="its schedules do not name their passes",
    ),
]

# schedule, ranks, units of each stage's compute, milliseconds of each message; what, device, stage
CASES: Dict[str, Tuple[Any, ...]] = {
    "1F1B": ("Schedule1F1B", 2, [2, 8], 0, "stage", 1, 1),
    "GPipe": ("ScheduleGPipe", 2, [2, 8], 0, "stage", 1, 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2, [2, 2, 2, 8], 0, "stage", 1, 3),
    "zero bubble": ("ScheduleInterleavedZeroBubble", 2, [2, 2, 2, 8], 0, "stage", 1, 3),
    "zero bubble V": ("ScheduleZBVZeroBubble", 2, [2, 2, 2, 8], 0, "stage", 0, 3),
    "1F1B on 4 ranks": ("Schedule1F1B", 4, [2, 2, 8, 2], 0, "stage", 2, 2),
    "slow link": ("Schedule1F1B", 2, [1, 1], 60, "communication", None, None),
}


@pytest.mark.parametrize("name", mark_slow(CASES, lambda name: name == "1F1B"))
def test_the_bottleneck_that_was_built_in_is_named(name: str, tmp_path: Path) -> None:
    schedule, ranks, units, slow_link, what, device, stage = CASES[name]
    folder = make_traces(tmp_path / "traces", schedule, ranks, units, slow_link)
    found = analyze(read_trace(folder), name)
    worst = found["bottleneck"]
    if what == "communication":
        assert worst["what"] in ("communication", "link")
        return
    assert (worst["what"], worst["device"], worst["stage"]) == (what, device, stage)
    # every pass is found, whoever named it
    assert [row["microbatches"] for row in found["stages"]] == [MICROBATCHES * UPDATES] * len(units)
    slowest = max(found["stages"], key=lambda row: row["busy_ns_per_microbatch"])
    assert slowest["index"] == stage
    # the others wait for it most of their idle time
    for row in found["devices"]:
        others = sum(ns for who, ns in row["waits_for"].items() if who != str(device))
        if row["index"] != device and ranks == 2:
            assert row["waits_for"][str(device)] > others
