"""Replays from other sources than a schedule: the emulator runs them as they are stated, and refuses impossible ones."""

from __future__ import annotations

import copy
import functools
from typing import Any, List, NamedTuple, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.model.stages import partition
from ipu_pipe.replay.replays import ReplayPlan, ReplayWindow, TableReplays, Views
from ipu_pipe.replay.weights import OverwritingStore, SwappingStore
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.table import IntArray
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups
from tests.literal_replay import LiteralStage
from tests.staged_models import MODELS, draw_microbatches, join_stages
from tests.support.runs import assert_same, list_faults
from tests.test_asynchrony import iterate_to_next_update

SGD = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3)
cross_entropy = nn.functional.cross_entropy


class StatedReplay(NamedTuple):
    """A replay: its microbatch, the versions that the stages' forwards and backwards read, and the stages that it updates."""

    microbatch: int
    forward: List[int]
    backward: List[int]
    updates: List[int]


class ListedReplays:
    """A source that is a list of replays. `reach`: the greatest age of a version, in replays."""

    def __init__(self, replays: List[StatedReplay], reach: int, stashes: bool = False) -> None:
        self.replays, self.count, self.reach, self.stashes = replays, len(replays), reach, stashes

    def count_updates(self, number: int) -> IntArray:
        return np.zeros(len(self.replays[0].forward), np.int64)

    def window(self, first: int, last: int) -> ReplayWindow:
        chosen = self.replays[first:last]
        stages = range(len(self.replays[0].forward))
        backward = None if self.stashes else np.array([r.backward for r in chosen]).T
        return ReplayWindow(
            np.array([r.microbatch for r in chosen]), np.zeros(len(chosen), np.int64),
            np.array([r.forward for r in chosen]).T, backward, None,
            np.array([[s in r.updates for r in chosen] for s in stages]),
        )  # fmt: skip


def draw_replays(
    stages: int, count: int, bound: int, stashes: bool, every: int = 1
) -> List[StatedReplay]:
    """Draw replays as randomized PipeDream does: the delay with which each stage is read, and one stage to update.

    Only the last one of `every` replays updates.
    """
    generator = np.random.default_rng(5)
    history = [[0] * stages]  # updates of the stages before each replay
    replays = []
    for number in range(count):
        now = history[-1]
        late = generator.integers(0, min(bound, number) + 1, stages)
        forward = [history[number - int(d)][s] for s, d in enumerate(late)]
        updates = [int(generator.integers(stages))] if (number + 1) % every == 0 else []
        replays.append(
            StatedReplay(
                int(generator.integers(12)), forward, forward if stashes else list(now), updates
            )
        )
        history.append([n + (s in updates) for s, n in enumerate(now)])
    return replays


def replay_in_plain_torch(
    modules: List[nn.Module], replays: List[StatedReplay], data: list
) -> None:  # type: ignore[type-arg]
    """Run the replays in plain torch, each stage by itself with all its old weights."""
    stages = [LiteralStage(module, SGD) for module in modules]
    for replay in replays:
        x, y = data[replay.microbatch]
        inputs: Tuple[torch.Tensor, ...] = (x,)
        for stage, version in zip(stages, replay.forward):
            inputs = stage.forward(replay.microbatch, inputs, version)
        gradients: list = [None]  # type: ignore[type-arg]
        for s, stage in reversed(list(enumerate(stages))):
            outputs = (
                (cross_entropy(inputs[0], y),)
                if stage is stages[-1]
                else stage.in_flight[replay.microbatch][2]
            )
            newest = replay.backward[s] == stage.version
            assert newest or replay.backward[s] == replay.forward[s]
            gradients = stage.backward(replay.microbatch, outputs, gradients, newest)
        if replay.updates:
            for s, stage in enumerate(stages):
                if s in replay.updates:
                    stage.update()
                stage.module.zero_grad(set_to_none=True)


def emulate_replays(modules: List[nn.Module], source: ListedReplays, data: list) -> Emulator:  # type: ignore[type-arg]
    model = join_stages(modules)
    part = partition(model, data[0][0])
    method = resolve_method("pipelined_backprop", {"stash": source.stashes})
    table = VersionTable(make_schedule(method, len(part), source.count, 1), method)
    optimizer = SGD(make_groups(model, part))
    rules = UpdateRules(choose_rules({}, method, table.rule_lag(), 1), optimizer, lambda k: 0.2)
    emulator = Emulator(Work(cross_entropy, table, rules, replays=source), model, part, data[0])
    for _ in range(sum(1 for replay in source.replays if replay.updates)):
        emulator.step(data[microbatch] for microbatch, _ in iterate_to_next_update(emulator))
    emulator.close()
    return emulator


@pytest.mark.parametrize("model, stashes, every, count", [
    ("mlp", False, 1, 530),  # more than one window
    ("residual", True, 3, 60),
])  # fmt: skip
def test_updates_of_single_stages_are_those_of_the_literal_replay(
    model: str, stashes: bool, every: int, count: int
) -> None:
    torch.manual_seed(3)
    modules = [stage.double() for stage in MODELS[model]()]
    twin, data = copy.deepcopy(modules), draw_microbatches(12)
    replays = draw_replays(len(modules), count, 7, stashes, every)
    emulator = emulate_replays(modules, ListedReplays(replays, 7, stashes), data)
    replay_in_plain_torch(twin, replays, data)
    assert_same(join_stages(modules).state_dict(), join_stages(twin).state_dict())
    assert [int(p.item()) for p in emulator._plan.count_updates(len(replays) - 1)] == [
        sum(s in r.updates for r in replays[:-1]) for s in range(len(modules))
    ]


@pytest.mark.parametrize("kind", [OverwritingStore, SwappingStore])
def test_a_read_of_weights_that_were_not_stashed_is_refused(kind: Any) -> None:
    store = kind([[nn.Parameter(torch.ones(2))]], [3])
    with pytest.raises(AssertionError, match="was not stashed"):
        store.load(Views(np.array([1]), np.array([0])))


def make_replay_plan(replays: List[StatedReplay], reach: int = 3) -> ReplayPlan:
    weights = [nn.Parameter(torch.zeros(1)) for _ in replays[0].forward]
    optimizer = SGD([{"params": [weight], "stage": s} for s, weight in enumerate(weights)])
    method = resolve_method("pipelined_backprop")
    rules = UpdateRules(
        choose_rules({}, method, np.zeros(len(weights)), 1), optimizer, lambda k: 0.1
    )
    return ReplayPlan(ListedReplays(replays, reach), rules)


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
    (1, StatedReplay(2, [0, 1], [0, 1], []), "replay 2: backward of microbatch 3, stage 0: version 1: must be from 0 to 0"),
])  # fmt: skip
def test_a_read_of_a_version_that_no_earlier_replay_has_made_is_refused_in_one_line(
    number: int, wrong: StatedReplay, message: str
) -> None:
    good, replays = make_replay_plan(list(GOOD)), list(GOOD)
    assert [good.replay(i).updates.tolist() for i in range(3)] == [[1], [0], [0, 1]]
    replays[number] = wrong
    assert list_faults(lambda: make_replay_plan(replays).replay(0)) == [
        f"{message}, the updates that earlier replays have made"
    ]


def test_a_planned_order_reads_within_its_reach() -> None:
    """With room for more activations than in 1F1B, reads may be older."""
    method = resolve_method("pipedream", {"split_backward": True, "activation_limit": 4.0})
    table = VersionTable(make_schedule(method, 4, 64, 1), method)
    optimizer = SGD([{"params": [nn.Parameter(torch.zeros(1))], "stage": s} for s in range(4)])
    reads = ReplayPlan(
        TableReplays(table),
        UpdateRules(choose_rules({}, method, np.zeros(4), 1), optimizer, lambda k: 0.1),
    )
    assert max(m - int(reads.replay(m).forward.versions.min()) for m in range(64)) > 2 * (4 + 1 + 1)


def test_a_version_older_than_the_source_stated_is_refused() -> None:
    late = [StatedReplay(m, [max(m - 2, 0)], [m], [0]) for m in range(9)]
    assert make_replay_plan(late, reach=2).replay(0).microbatch == 0
    (fault,) = list_faults(lambda: make_replay_plan(late, reach=1).replay(0))
    assert fault.startswith(
        "replay 2: forward of microbatch 2, stage 0: version 0: must be from 1 to 2"
    )


@pytest.mark.parametrize("own", [[0], [0, 1, 2], [2]])
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
