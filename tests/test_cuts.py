"""The cuts of the schedule at batches, which are read in windows, equal those of single batches."""

from __future__ import annotations

import numpy as np
import pytest

from ipu_pipe.pipeline.cuts import NARROWEST, WIDEST, Cuts
from ipu_pipe.schedule.actions import Kind
from tests.test_pipeline import CASES, Loop


@pytest.mark.parametrize(
    "name", ["gpipe", "pipedream", "pipemare_warmup", "zbv", "local_greedy", "local_sgd_rounds"]
)
@pytest.mark.parametrize("drain", [None, 6])
def test_cuts_in_windows_are_those_of_single_batches(name: str, drain: int) -> None:
    loop = Loop(CASES[name])
    loop.run(0, 6, drains=False)
    if drain is not None:
        loop.pipe.drain()
    job = loop.pipe._job
    assert job is not None and job.open_table is not None
    schedule, cuts = job.open_table.schedule, Cuts(job)
    margin = len(job.partition) - 1 if job.method.structure is not None else 0
    # in order, at the ends of windows, and back to before the window
    batches = [*range(6, 6 + 5 * NARROWEST), WIDEST * 3 - 1, WIDEST * 3, WIDEST * 3 + 1, 7]
    for batch in batches:
        m = batch * schedule.accumulate
        slot = int(schedule.slots(Kind.FORWARD, m, m + 1)[0, 0])
        assert cuts.find(batch) == slot
        assert cuts.count_left(batch) == int(
            schedule.count_before(Kind.UPDATE, np.array([slot - margin])).min()
        )
    loop.pipe.abort()
