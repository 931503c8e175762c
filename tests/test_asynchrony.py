"""Randomized PipeDream and LocalSGD: delays, timelines, and the emulator against the papers' algorithms in plain torch."""

from __future__ import annotations

import copy
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.model.stages import partition
from ipu_pipe.refusals import show_in_config
from ipu_pipe.replay.replays import RandomizedReplays, order_updates
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule import delays
from ipu_pipe.schedule.global_history import count_history_delays
from ipu_pipe.schedule.methods import METHODS, Method, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups
from tests.staged_models import MODELS, draw_microbatches, join_stages
from tests.support.runs import assert_same, list_faults

LR, MOMENTUM, DECAY = 0.2, 0.9, 1e-3


def make_momentum_sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


# ---- delays and timelines


@pytest.mark.parametrize("P", range(2, 41))
def test_steady_global_history_delays_are_the_closed_form(P: int) -> None:
    """Check the full matrix tau(a, r) of PipeDream's timeline, and its greatest, mean and least value (Proposition 4.1)."""
    M = 8 * P
    table = VersionTable(make_schedule(METHODS["pipedream"], P, M, 1), METHODS["pipedream"])
    history = count_history_delays(table, 3 * P, 4 * P)
    tau = delays.compute_steady_delays(P)
    assert (history.written[:, None, :] - history.read[None, :, :] == tau[:, :, None]).all()
    assert (
        tau.max()
        == delays.compute_greatest_delay(P)
        == (P * P - P // 2 if P % 2 == 0 else P * P - (P + 1) // 2)
    )
    assert tau.mean() == delays.compute_mean_delay(P) == (P * P - 1) / 2
    assert tau.min() == tau[P - 1, P - 1] == delays.compute_least_delay(P) == (P - 1) // 2
    lags = np.arange(3 * P, 4 * P) - table.forward(3 * P, 4 * P)  # local staleness
    assert (lags == P - 1 - np.arange(P)[:, None]).all()


@pytest.mark.parametrize("P", [2, 3, 8, 16])
def test_timelines_have_the_lengths_of_the_paper(P: int) -> None:
    for K in (1, 2, 5, 30):
        for R in {1, 2, P - 1, P, P + 3}:
            method = resolve_method("local_sgd", {"local_steps": K})
            for rounds in (1, 3):
                M = rounds * R * K
                slots = make_schedule(method, P, M, R).slot_count
                if R >= P:
                    assert slots == 2 * M + 2 * (P - 1) * rounds
                if R <= P:
                    assert slots == rounds * (2 * P * K + 2 * (R - 1))
    assert make_schedule(METHODS["pipedream"], P, 600, 1).slot_count == 2 * 600 + 2 * (P - 1)


def test_a_drain_ends_a_round() -> None:
    schedule = make_schedule(resolve_method("local_sgd", {"local_steps": 5}), 3, 24, 2, drains=[6])
    assert [schedule.get_drain_interval(k) for k in (0, 2, 3, 7, 8, 11)] == [
        (0, 3),
        (0, 3),
        (3, 8),
        (3, 8),
        (8, 12),
        (8, 12),
    ]


# ---- draws


def make_randomized_replays(
    args: Dict[str, Any], P: int = 3, M: int = 40, drains: Sequence[int] = (), seed: int = 4
) -> RandomizedReplays:
    method = resolve_method("randomized_pipedream", args)
    assert method.history is not None
    table = VersionTable(make_schedule(method, P, M, 1, drains), method)
    return RandomizedReplays(table, method.history, 10, seed)


def test_draws_are_a_function_of_seed_and_iteration_alone() -> None:
    whole_run, parts = make_randomized_replays({}, M=3000), make_randomized_replays({}, M=3000)
    one = whole_run.window(0, 9000)
    for first, last in ((5000, 6001), (4095, 4097), (17, 18)):
        some = parts.window(first, last)
        for part, every in zip(some[:4], one[:4]):
            assert part is every is None or (part == every[..., first:last]).all()
        assert (parts.count_updates(first) == one.updates[:, :first].sum(axis=1)).all()
    assert (
        make_randomized_replays({}, M=3000, seed=5).window(0, 90).forward != one.forward[:, :90]
    ).any()


def test_delays_and_draws_are_uniform_within_their_bounds() -> None:
    source = make_randomized_replays({"delay_bound": 7}, M=4000)
    delays = source.list_delays(0, source.count)
    assert (delays[:, :5] <= np.arange(5)).all() and delays.max() == 7
    stages, microbatches = source.list_stages(0, 12000), source.list_microbatches(0, 12000) % 10
    for draws, bins in (*((row, 8) for row in delays[:, 7:]), (stages, 3), (microbatches, 10)):
        counts = np.bincount(draws, minlength=bins)
        expected = counts.sum() / len(counts)
        assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert (
        source.list_microbatches(0, 12000) // 10 == np.arange(12000) // 30
    ).all()  # of the current epoch
    together = np.corrcoef(delays[:, 7:])
    assert abs(together - np.eye(3)).max() < 0.05


def test_no_delay_reaches_beyond_a_drain() -> None:
    source = make_randomized_replays({"delay_bound": 50}, drains=[20])
    delays = source.list_delays(0, 120)
    assert (delays[:, 60:] <= np.arange(60)).all() and delays[:, 59].max() > 10


def test_offsets_are_the_mean_delays_of_each_block() -> None:
    P = 4
    source = make_randomized_replays({"delays": "offsets"}, P=P)
    expected = np.rint(delays.compute_steady_delays(P).mean(axis=0))
    assert (source.list_delays(60, 90) == expected[:, None]).all()
    assert (
        make_randomized_replays({"delays": "offsets", "delay_bound": 5}, P=P)
        .list_delays(60, 61)
        .max()
        == 5
    )


def test_the_schedules_order_is_that_of_its_slots() -> None:
    schedule = make_schedule(METHODS["pipedream"], 3, 4, 1)
    stage, microbatch = order_updates(schedule)
    drawn = [
        (2, 0),
        (1, 0),
        (2, 1),
        (0, 0),
        (2, 2),
        (1, 1),
        (0, 1),
        (2, 3),
        (1, 2),
        (0, 2),
        (1, 3),
        (0, 3),
    ]
    slots = {(s, m): (2 * 3 - 1 - s + 2 * m, s) for s, m in drawn}
    assert list(zip(stage.tolist(), microbatch.tolist())) == sorted(
        slots, key=lambda key: slots[key]
    )


# ---- the emulator


def train_stages_on_emulator(
    modules: List[nn.Module],
    method: Method,
    steps: int,
    data: Sequence[Any],
    drains: Sequence[int] = (),
) -> Emulator:
    model = join_stages(modules)
    part = partition(model, data[0][0])
    R = 1 if method.rounds is None else method.rounds.replicas or len(part)
    schedule = make_schedule(method, len(part), steps * R, R, drains)
    table = VersionTable(schedule, method)
    optimizer = make_momentum_sgd(make_groups(model, part))
    rules = UpdateRules(
        choose_rules({}, method, table.rule_lag(), 1), optimizer, lambda k: LR / (k + 1)
    )
    source = None if method.history is None else RandomizedReplays(table, method.history, 10, 4)
    block_updates = len(part) if method.history is not None else 1
    work = Work(cross_entropy, table, rules, replays=source, block_updates=block_updates)
    emulator = Emulator(work, model, part, data[0], 0, R)
    for _ in range(steps * block_updates):
        emulator.step(data[m * R + r] for m, r in iterate_to_next_update(emulator))
    emulator.close()
    return emulator


def iterate_to_next_update(emulator: Emulator) -> Any:
    """Yield the microbatch and the replica of each replay up to the one that updates."""
    while True:
        replay = emulator.replay
        yield replay.microbatch, replay.replica
        if len(replay.updates):
            return


def make_float64_stages(name: str) -> List[nn.Module]:
    torch.manual_seed(3)
    return [stage.double() for stage in MODELS[name]()]


def make_normed_stages() -> List[nn.Module]:
    torch.manual_seed(3)
    sizes = [(12, 8), (8, 8), (8, 8)]
    stages = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh()) for a, b in sizes]
    return [stage.double() for stage in [*stages, nn.Linear(8, 4)]]


def assert_same_stages(ours: List[nn.Module], theirs: List[nn.Module]) -> None:
    assert_same(join_stages(ours).state_dict(), join_stages(theirs).state_dict())


@pytest.mark.parametrize("model", [*MODELS, "normed"])
@pytest.mark.parametrize("drains", [[], [7, 21]])
def test_with_the_schedules_own_delays_it_is_pipedream_bit_for_bit(
    model: str, drains: List[int]
) -> None:
    """Check weights, velocities and running statistics, with a learning rate that falls (appendix F)."""
    make = make_normed_stages if model == "normed" else lambda: make_float64_stages(model)
    ours, theirs, data = make(), make(), draw_microbatches(30)
    exact = resolve_method("randomized_pipedream", {"order": "schedule", "delays": "schedule"})
    randomized = train_stages_on_emulator(ours, exact, 30, data, drains)
    pipedream = train_stages_on_emulator(theirs, resolve_method("pipedream"), 30, data, drains)
    assert_same_stages(ours, theirs)
    states = [emulator.work.rules.optimizer.state for emulator in (randomized, pipedream)]
    for p, q in zip(join_stages(ours).parameters(), join_stages(theirs).parameters()):
        assert torch.equal(states[0][p]["momentum_buffer"], states[1][q]["momentum_buffer"])


def train_by_algorithm_1(
    modules: List[nn.Module],
    source: RandomizedReplays,
    data: Sequence[Any],
    beta: Optional[float],
    in_order: bool,
) -> None:
    """Train by Algorithm 1 with a copy of every iterate; momentum and decay are those of torch.optim.SGD."""
    parameters = [list(module.parameters()) for module in modules]
    history = [[[p.detach().clone() for p in stage] for stage in parameters]]
    velocity: Dict[Tuple[int, int], torch.Tensor] = {}
    P, net = len(modules), join_stages(modules)
    stages, microbatches = (
        source.list_stages(0, source.count),
        source.list_microbatches(0, source.count),
    )
    delays = source.list_delays(0, source.count)
    for k in range(source.count):
        s = int(stages[k])
        for j in range(P):
            at = k - int(delays[j, k])
            for i, p in enumerate(parameters[j]):
                x = history[at][j][i].clone()
                if beta is not None and at > 0:
                    x.add_(history[at][j][i] - history[at - 1][j][i], alpha=beta)
                p.data = x
        x, y = data[int(microbatches[k])]
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        new = [list(stage) for stage in history[-1]]
        rate = LR / ((int((stages[:k] == s).sum()) if in_order else k // P) + 1)
        for i, p in enumerate(parameters[s]):
            assert p.grad is not None
            g = p.grad.add(history[-1][s][i], alpha=DECAY)
            velocity[s, i] = velocity[s, i].mul(MOMENTUM).add(g) if (s, i) in velocity else g
            new[s][i] = history[-1][s][i].add(velocity[s, i], alpha=-rate)
        history.append(new)
    for j in range(P):
        for i, p in enumerate(parameters[j]):
            p.data = history[-1][j][i]


@pytest.mark.parametrize("model", ["mlp", "residual"])
@pytest.mark.parametrize(
    "args", [{}, {"delay_bound": 0}, {"delay_bound": 5, "nag": 0.7}, {"delays": "offsets"}, {"order": "schedule"}],
    ids=lambda v: "-".join(map(str, v.values())) or "default",
)  # fmt: skip
def test_weights_are_those_of_algorithm_1(args: Dict[str, Any], model: str) -> None:
    ours, theirs, data = (
        make_float64_stages(model),
        make_float64_stages(model),
        draw_microbatches(40),
    )
    emulator = train_stages_on_emulator(
        ours, resolve_method("randomized_pipedream", args), 20, data
    )
    train_by_algorithm_1(
        theirs,
        make_randomized_replays(args, P=len(theirs), M=20),
        data,
        args.get("nag"),
        "order" in args,
    )
    assert emulator.update == 20 * len(theirs)
    for a, b in zip(join_stages(ours).parameters(), join_stages(theirs).parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert args.get("nag") or torch.equal(a, b)


@pytest.mark.parametrize("model", ["mlp", "normed"])
@pytest.mark.parametrize("R, K, drains", [(3, 2, []), (2, 5, [6]), (1, 3, []), (4, 1, [])])
def test_local_sgd_is_replicas_that_train_by_themselves_and_meet(
    R: int, K: int, drains: List[int], model: str
) -> None:
    steps, data = 9, draw_microbatches(9 * R)
    make = make_normed_stages if model == "normed" else lambda: make_float64_stages(model)
    ours, first = make(), make()
    train_stages_on_emulator(
        ours,
        resolve_method("local_sgd", {"replicas": R, "local_steps": K}),
        steps,
        data,
        [d * R for d in drains],
    )
    nets = [join_stages(copy.deepcopy(first)) for _ in range(R)]
    optimizers = [make_momentum_sgd(net.parameters()) for net in nets]
    since = 0
    for h in range(steps):
        for r, (net, optimizer) in enumerate(zip(nets, optimizers)):
            optimizer.param_groups[0]["lr"] = LR / (h + 1)
            x, y = data[h * R + r]
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
        since += 1
        if since == K or h + 1 in drains or h + 1 == steps:
            average_over_nets(nets, optimizers)
            since = 0
    assert_same(join_stages(ours).state_dict(), nets[0].state_dict())


def average_over_nets(nets: List[nn.Module], optimizers: List[torch.optim.Optimizer]) -> None:
    """Set weights, velocities and running statistics to the mean of all."""
    tensors = [
        [*net.parameters(), *(optimizer.state[p]["momentum_buffer"] for p in net.parameters())]
        + [b for b in net.buffers() if b.is_floating_point()]
        for net, optimizer in zip(nets, optimizers)
    ]
    with torch.no_grad():
        for copies in zip(*tensors):
            total = functools.reduce(torch.add, copies)
            for tensor in copies:
                tensor.copy_(total / len(copies))


# ---- refusals


@pytest.mark.parametrize(
    "method, args",
    [
        ("pipedream", {"delay_bound": 4}), ("gpipe", {"replicas": 4}), ("randomized_pipedream", {"delay_bound": -1}),
        ("randomized_pipedream", {"delays": "drawn"}), ("randomized_pipedream", {"delays": "schedule"}),
        ("randomized_pipedream", {"stash": False}), ("local_sgd", {"local_steps": 0}), ("randomized_pipedream", {"nag": 0}),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused_in_one_line(method: str, args: Dict[str, Any]) -> None:
    ((key, value),) = args.items()
    (fault,) = list_faults(ipu_pipe.resolve_method, method, args)
    assert f"method_args.{key}: {show_in_config(value)}: " in fault
