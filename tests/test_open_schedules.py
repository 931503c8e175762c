"""Test schedules without a known end: nothing before a drain may depend on what follows it."""

from __future__ import annotations

import numpy as np
import pytest

from ipu_pipe.replay.replays import order_updates
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import compute_busy_share
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule, open_schedule
from ipu_pipe.schedule.versions import VersionTable

UPDATES = 24
# rows come from a file, which has an end
OPEN_METHODS = sorted(set(METHODS) - {"rows"})


def choose_accumulate(name: str, stages: int) -> int:
    if name == "local_sgd":
        return stages
    is_large = METHODS[name].flushes or name == "pipedream_2bw"
    return stages if is_large else 2


@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("name", OPEN_METHODS)
def test_versions_before_a_drain_do_not_depend_on_what_follows(name: str, stages: int) -> None:
    method, accumulate = resolve_method(name), choose_accumulate(name, stages)
    drains = [5, 5 + UPDATES]
    open_end = open_schedule(method, stages, accumulate, drains)
    closed = make_schedule(method, stages, drains[-1] * accumulate, accumulate, [5 * accumulate])
    for table in (
        VersionTable(open_end, method, 0),
        VersionTable(open_schedule(method, stages, accumulate, [5]), method, 0),
    ):
        expected = VersionTable(closed, method, 0).window(0, drains[-1] * accumulate)
        for versions, same in zip(table.window(0, drains[-1] * accumulate), expected):
            assert (versions == same).all()


@pytest.mark.parametrize("name", ["zbv", "zb_h1", "dualpipe_v"])
def test_whole_backwards_of_some_microbatches_are_those_of_all(name: str) -> None:
    schedule = make_schedule(resolve_method(name), 4, 24, 8)
    index = np.array([3, 9, 22])
    assert (schedule.find_whole(index, slice(1, 3)) == schedule.is_whole[1:3][:, index]).all()


def test_block_updates_are_ordered_as_far_as_they_are_needed() -> None:
    method = resolve_method("pipedream")
    closed, open_end = make_schedule(method, 4, 200, 1), open_schedule(method, 4, 1)
    for count in (1, 7, 100, 333):
        for part, whole in zip(order_updates(open_end, count), order_updates(closed)):
            assert len(part) >= count
            assert (part[:count] == whole[:count]).all()


def test_an_open_schedule_is_small() -> None:
    schedule = open_schedule(resolve_method("local_overlapping"), 5, 3, [10, 20, 30])
    assert schedule.slots(Kind.FORWARD, 3_000_000, 3_000_001).shape == (5, 1)


def test_the_busy_share_of_an_open_schedule_needs_no_array_of_its_updates() -> None:
    """Story: on processes that hold several stages each, `trace=True` asked for 8 TiB."""
    schedule = open_schedule(resolve_method("pipedream", {}), 4, 2)
    assert compute_busy_share(schedule, (0, 0, 1, 1)) == pytest.approx(1, abs=1e-6)
