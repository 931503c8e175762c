"""The cuts of the schedule at batches, which are read in windows, equal those of single batches."""

from __future__ import annotations

import numpy as np
import pytest

from ipu_pipe.pipeline.flow import NARROWEST, WIDEST
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
    job, flow = loop.pipe._job, loop.pipe._flow
    schedule = flow.table.schedule
    margin = len(job.partition) - 1 if job.method.structure is not None else 0
    # in order, at the ends of windows, and back to before the window
    batches = [*range(6, 6 + 5 * NARROWEST), WIDEST * 3 - 1, WIDEST * 3, WIDEST * 3 + 1, 7]
    for batch in batches:
        m = batch * schedule.accumulate
        slot = int(schedule.slots(Kind.FORWARD, m, m + 1)[0, 0])
        assert flow.find_cut(batch) == slot
        updates = schedule.count_before(Kind.UPDATE, np.array([slot - margin]))
        assert flow.count_left(batch) == updates.min()
    loop.pipe.abort()


@pytest.mark.parametrize("name", ["pipedream", "pipemare_warmup", "local_sgd"])
def test_a_drain_is_planned_without_those_before_the_last(name: str) -> None:
    """The schedule stays small: it has the stretches of the last two drains, not all of them."""
    loop = Loop(CASES[name])
    sizes = []
    for k in range(14):
        loop.run(k, k + 1, drains=False)
        if k in (2, 3, 5, 9, 10, 13):
            loop.pipe.drain()
            sizes.append(len(loop.pipe._flow.table.schedule.stretches))
    assert max(sizes) <= 5
    loop.close()
