"""Replays from other sources than a schedule: the emulator runs them as they are stated, and refuses impossible ones."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe.replay.replays import ReplayPlan, ReplayWindow, TableReplays, Views
from ipu_pipe.replay.weights import OverwritingStore, SwappingStore
from ipu_pipe.schedule.methods import Method, resolve_method
from ipu_pipe.schedule.table import IntArray
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tests.support.emulating import make_rules
from tests.support.runs import list_faults
from tests.test_emulator_exact import OPTIMIZERS


class StatedReplay(NamedTuple):
    """A replay: its microbatch, the versions that the stages' forwards and backwards read, and the stages that it updates."""

    microbatch: int
    forward: List[int]
    backward: List[int]
    updates: List[int]


class ListedReplays:
    """A source that is a list of replays. `reach`: the greatest age of a version, in replays."""

    def __init__(self, replays: List[StatedReplay], reach: int) -> None:
        self.replays, self.count, self.reach = replays, len(replays), reach

    def count_updates(self, number: int) -> IntArray:
        return np.zeros(len(self.replays[0].forward), np.int64)

    def window(self, first: int, last: int) -> ReplayWindow:
        chosen = self.replays[first:last]
        stages = range(len(self.replays[0].forward))
        return ReplayWindow(
            np.array([r.microbatch for r in chosen]), np.zeros(len(chosen), np.int64),
            np.array([r.forward for r in chosen]).T, np.array([r.backward for r in chosen]).T, None,
            np.array([[s in r.updates for r in chosen] for s in stages]),
        )  # fmt: skip


@pytest.mark.parametrize("kind", [OverwritingStore, SwappingStore])
def test_a_read_of_weights_that_were_not_stashed_is_refused(kind: Any) -> None:
    store = kind([[nn.Parameter(torch.ones(2))]], [3])
    with pytest.raises(AssertionError, match="was not stashed"):
        store.load(Views(np.array([1]), np.array([0])))


def make_replay_plan(replays: List[StatedReplay], reach: int = 3) -> ReplayPlan:
    stages = len(replays[0].forward)
    return plan_replays(ListedReplays(replays, reach), resolve_method("pipelined_backprop"), stages)


def plan_replays(source: Any, method: Method, stages: int) -> ReplayPlan:
    """Plan the replays of a source for stages of one weight."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "stage": s} for s in range(stages)]
    return ReplayPlan(source, make_rules(OPTIMIZERS["sgd"](groups), method, np.zeros(stages)))


GOOD = [
    StatedReplay(4, [0, 0], [0, 0], [1]),
    StatedReplay(2, [0, 1], [0, 1], [0]),
    StatedReplay(3, [0, 1], [1, 1], [0, 1]),
]


@pytest.mark.parametrize("number, wrong, message", [
    (1, StatedReplay(2, [0, 2], [0, 2], [0]), "replay 1: forward of microbatch 2, stage 1: version 2: must be from 0 to 1"),
    (2, StatedReplay(3, [0, 1], [2, 1], []), "replay 2: backward of microbatch 3, stage 0: version 2: must be from 0 to 1"),
    (2, StatedReplay(3, [1, 1], [0, 1], []), "replay 2: backward of microbatch 3, stage 0: version 0: must be from 1 to 1"),
    (0, StatedReplay(4, [0, -1], [0, 0], [1]), "replay 0: forward of microbatch 4, stage 1: version -1: must be from 0 to 0"),
])  # fmt: skip
def test_a_read_of_a_version_that_no_earlier_replay_has_made_is_refused_in_one_line(
    number: int, wrong: StatedReplay, message: str
) -> None:
    good, replays = make_replay_plan(GOOD), list(GOOD)
    assert [good.replay(i).updates.tolist() for i in range(3)] == [[1], [0], [0, 1]]
    replays[number] = wrong
    (fault,) = list_faults(make_replay_plan(replays).replay, 0)
    assert fault.startswith(message)


def test_a_planned_order_reads_within_its_reach() -> None:
    """With room for more activations than in 1F1B, reads may be older."""
    method = resolve_method("pipedream", {"split_backward": True, "activation_limit": 4.0})
    table = VersionTable(make_schedule(method, 4, 64, 1), method)
    reads = plan_replays(TableReplays(table), method, 4)
    assert max(m - int(reads.replay(m).forward.versions.min()) for m in range(64)) > 2 * (4 + 1 + 1)


def test_a_version_older_than_the_source_stated_is_refused() -> None:
    late = [StatedReplay(m, [max(m - 2, 0)], [m], [0]) for m in range(9)]
    assert make_replay_plan(late, reach=2).replay(0).microbatch == 0
    (fault,) = list_faults(make_replay_plan(late, reach=1).replay, 0)
    assert fault.startswith(
        "replay 2: forward of microbatch 2, stage 0: version 0: must be from 1 to 2"
    )


@pytest.mark.parametrize("own", [[0], [0, 1, 2]])
def test_a_schedules_replays_take_turns_by_replica_and_update_when_a_batch_is_full(
    own: List[int],
) -> None:
    method = resolve_method("pipemare")
    table = VersionTable(make_schedule(method, 3, 1300, 2), method)
    source, width = TableReplays(table, own), len(own)
    window = source.window(1, source.count)
    numbers = np.arange(1, source.count)
    columns, turn = numbers // width, numbers % width
    assert (window.microbatch == columns).all() and (window.replica == np.array(own)[turn]).all()
    assert (window.updates == ((columns + 1) % 2 == 0) & (turn == width - 1)).all()
    assert (window.forward == table.forward(0, 1300)[:, columns]).all()
    assert source.count_updates(7 * 2 * width).tolist() == [7, 7, 7]
