"""Randomized PipeDream, LocalSGD and DiLoCo: delays, timelines, the papers' algorithms in plain torch, runs, refusals."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.backends.emulator.engine import EmulatorEngine
from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.cli import schedule as schedule_command
from ipu_pipe.config.load import configure
from ipu_pipe.model.stages import partition
from ipu_pipe.replay import replays
from ipu_pipe.replay.replays import RandomizedReplays, order_updates
from ipu_pipe.replay.replicas import IndependentReplicas
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule import delays
from ipu_pipe.schedule.global_history import count_history_delays
from ipu_pipe.schedule.methods import METHODS, Method, Outer, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tests.literal_replay import average_nets
from tests.staged_models import draw_microbatches, join_stages
from tests.support.emulating import iterate_to_next_update, make_emulator
from tests.support.flows import train_updates
from tests.support.models import Composed
from tests.support.runs import ROOT, assert_same, assert_same_weights, list_faults
from tests.test_emulator_exact import OPTIMIZERS, make_seeded_stages

LR, MOMENTUM, DECAY = 0.2, 0.9, 1e-3


make_momentum_sgd = OPTIMIZERS["sgd"]


# ---- delays and timelines


@pytest.mark.parametrize("P", [*range(2, 10), 17, 40])
def test_steady_global_history_delays_are_the_closed_form(P: int) -> None:
    """Check the full matrix tau(a, r) of PipeDream's timeline, and its greatest, mean and least value (Proposition 4.1)."""
    table = VersionTable(make_schedule(METHODS["pipedream"], P, 8 * P, 1), METHODS["pipedream"])
    history = count_history_delays(table, 3 * P, 4 * P)
    tau = delays.compute_steady_delays(P)
    assert (history.written[:, None, :] - history.read[None, :, :] == tau[:, :, None]).all()
    assert tau.max() == delays.compute_greatest_delay(P) == P * P - (P + P % 2) // 2
    assert tau.mean() == delays.compute_mean_delay(P) == (P * P - 1) / 2
    assert tau.min() == tau[P - 1, P - 1] == delays.compute_least_delay(P) == (P - 1) // 2


@pytest.mark.parametrize("P", [2, 3, 8])
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


# ---- draws


def make_randomized_replays(
    args: Dict[str, Any], P: int = 3, M: int = 40, drains: Sequence[int] = (), seed: int = 4
) -> RandomizedReplays:
    method = resolve_method("randomized_pipedream", args)
    table = VersionTable(make_schedule(method, P, M, 1, drains), method)
    assert method.history is not None
    return RandomizedReplays(table, method.history, 10, seed)


def test_draws_are_a_function_of_seed_and_iteration_alone() -> None:
    whole_run, parts = make_randomized_replays({}, M=3000), make_randomized_replays({}, M=3000)
    one = whole_run.window(0, 9000)
    for first, last in ((5000, 6001), (4095, 4097), (17, 18)):
        some = parts.window(first, last)
        for part, every in zip(some[:4], one[:4]):
            assert part is every is None or (part == every[..., first:last]).all()
        assert (parts.count_updates(first) == one.updates[:, :first].sum(axis=1)).all()
    other = make_randomized_replays({}, M=3000, seed=5).window(0, 90)
    assert (other.forward != one.forward[:, :90]).any()


def test_delays_and_draws_are_uniform_within_their_bounds() -> None:
    """No delay reaches beyond a drain; offsets are the mean delays of each block."""
    source = make_randomized_replays({"delay_bound": 7}, M=4000)
    drawn = source.list_delays(0, source.count)
    assert (drawn[:, :5] <= np.arange(5)).all() and drawn.max() == 7
    stages, microbatches = source.list_stages(0, 12000), source.list_microbatches(0, 12000)
    for draws, bins in (*((row, 8) for row in drawn[:, 7:]), (stages, 3), (microbatches % 10, 10)):
        counts = np.bincount(draws, minlength=bins)
        expected = counts.sum() / len(counts)
        assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert (microbatches // 10 == np.arange(12000) // 30).all()  # of the current epoch
    assert abs(np.corrcoef(drawn[:, 7:]) - np.eye(3)).max() < 0.05
    drained = make_randomized_replays({"delay_bound": 50}, drains=[20]).list_delays(0, 120)
    assert (drained[:, 60:] <= np.arange(60)).all() and drained[:, 59].max() > 10
    offsets = make_randomized_replays({"delays": "offsets"}, P=4).list_delays(60, 90)
    assert (offsets == np.rint(delays.compute_steady_delays(4).mean(axis=0))[:, None]).all()
    bounded = make_randomized_replays({"delays": "offsets", "delay_bound": 5}, P=4)
    assert bounded.list_delays(60, 61).max() == 5


def test_the_schedules_order_is_that_of_its_slots() -> None:
    stage, microbatch = order_updates(make_schedule(METHODS["pipedream"], 3, 4, 1))
    updates = [(5 - s + 2 * m, s, m) for s in range(3) for m in range(4)]
    assert list(zip(stage.tolist(), microbatch.tolist())) == [(s, m) for _, s, m in sorted(updates)]


# ---- the emulator


def train_stages_on_emulator(
    modules: List[nn.Module],
    method: Method,
    steps: int,
    data: Sequence[Any],
    drains: Sequence[int] = (),
    rate: Callable[[int], float] = lambda k: LR / (k + 1),
    watch: Callable[[], None] = lambda: None,
    make_optimizer: Callable[..., Any] = make_momentum_sgd,
    loss: Any = cross_entropy,
) -> Emulator:
    """Train by SGD with momentum, at a rate that falls. `watch` is called after each update."""
    model = join_stages(modules)
    part = partition(model, data[0][0])
    R = 1 if method.rounds is None else method.rounds.replicas or len(part)
    schedule = make_schedule(method, len(part), steps * R, R, [drain * R for drain in drains])
    table, source, block_updates = VersionTable(schedule, method), None, 1
    if method.history is not None:
        source, block_updates = RandomizedReplays(table, method.history, 10, 4), len(part)
    emulator = make_emulator(
        model, part, table, data[0], make_optimizer, loss, {}, rate, source, block_updates, R
    )
    for _ in range(steps * block_updates):
        emulator.step(data[m * R + r] for m, r in iterate_to_next_update(emulator))
        watch()
    emulator.close()
    return emulator


def make_float64_stages(name: str) -> List[nn.Module]:
    if name != "normed":
        return make_seeded_stages(name)
    torch.manual_seed(3)
    sizes = [(12, 8), (8, 8), (8, 8)]
    stages = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh()) for a, b in sizes]
    return [stage.double() for stage in [*stages, nn.Linear(8, 4)]]


def assert_same_stages(ours: List[nn.Module], theirs: List[nn.Module]) -> None:
    assert_same(join_stages(ours).state_dict(), join_stages(theirs).state_dict())


@pytest.mark.parametrize("model, drains", [("normed", [7, 21]), ("mlp", []), ("residual", [7, 21])])
def test_with_the_schedules_own_delays_it_is_pipedream_bit_for_bit(
    model: str, drains: List[int]
) -> None:
    """Check weights, velocities and running statistics, with a learning rate that falls (appendix F)."""
    ours, theirs = make_float64_stages(model), make_float64_stages(model)
    data = draw_microbatches(30)
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
    net, count = join_stages(modules), source.count
    parameters = list(net.parameters())
    stage_of = [s for s, module in enumerate(modules) for _ in module.parameters()]
    history = [[p.detach().clone() for p in parameters]]
    velocity: Dict[int, torch.Tensor] = {}
    stages, delays = source.list_stages(0, count), source.list_delays(0, count)
    microbatches = source.list_microbatches(0, count)
    for k in range(count):
        for i, p in enumerate(parameters):
            at = k - int(delays[stage_of[i], k])
            p.data = history[at][i].clone()
            if beta is not None and at > 0:
                p.data.add_(history[at][i] - history[at - 1][i], alpha=beta)
        x, y = data[int(microbatches[k])]
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        s, new = int(stages[k]), list(history[-1])
        rate = LR / ((int((stages[:k] == s).sum()) if in_order else k // len(modules)) + 1)
        for i, p in enumerate(parameters):
            if stage_of[i] == s:
                g = p.grad.add(new[i], alpha=DECAY)  # type: ignore[union-attr]
                velocity[i] = velocity[i].mul(MOMENTUM).add(g) if i in velocity else g
                new[i] = new[i].add(velocity[i], alpha=-rate)
        history.append(new)
    for p, value in zip(parameters, history[-1]):
        p.data = value


@pytest.mark.parametrize("model", ["mlp", "residual"])
@pytest.mark.parametrize(
    "args", [{}, {"delay_bound": 0}, {"delay_bound": 5, "nag": 0.7}, {"delays": "offsets"}, {"order": "schedule"}],
    ids=lambda v: "-".join(map(str, v.values())) or "default",
)  # fmt: skip
def test_weights_are_those_of_algorithm_1(
    args: Dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays are read ahead in windows, here in short ones."""
    monkeypatch.setattr(replays, "WINDOW", 8)
    ours, theirs = make_float64_stages(model), make_float64_stages(model)
    data, method = draw_microbatches(40), resolve_method("randomized_pipedream", args)
    emulator = train_stages_on_emulator(ours, method, 20, data)
    source = make_randomized_replays(args, P=len(theirs), M=20)
    train_by_algorithm_1(theirs, source, data, args.get("nag"), "order" in args)
    assert emulator.update == 20 * len(theirs)
    for a, b in zip(join_stages(ours).parameters(), join_stages(theirs).parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert args.get("nag") or torch.equal(a, b)


def step_net(net: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(net(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("model", ["mlp", "normed"])
@pytest.mark.parametrize("R, K, drains", [(3, 2, []), (2, 5, [6]), (1, 3, []), (4, 1, [])])
def test_local_sgd_is_replicas_that_train_by_themselves_and_meet(
    R: int, K: int, drains: List[int], model: str
) -> None:
    steps, data = 9, draw_microbatches(9 * R)
    ours, first = make_float64_stages(model), make_float64_stages(model)
    method = resolve_method("local_sgd", {"replicas": R, "local_steps": K})
    train_stages_on_emulator(ours, method, steps, data, drains)
    nets = [join_stages(copy.deepcopy(first)) for _ in range(R)]
    optimizers = [make_momentum_sgd(net.parameters()) for net in nets]
    since = 0
    for h in range(steps):
        for r, (net, optimizer) in enumerate(zip(nets, optimizers)):
            optimizer.param_groups[0]["lr"] = LR / (h + 1)
            step_net(net, optimizer, *data[h * R + r])
        since += 1
        if since == K or h + 1 in drains or h + 1 == steps:
            average_nets(nets, optimizers)
            since = 0
    assert_same(join_stages(ours).state_dict(), nets[0].state_dict())


def test_replicas_of_local_sgd_that_used_other_weights_average_what_they_have() -> None:
    """Story: Adam has no state of a weight that a replica has not used; the end of the round was a KeyError."""
    torch.manual_seed(0)
    heads = {name: nn.Linear(3, 2) for name in ("left", "right")}
    model = Composed(
        lambda m, x: (m.left if float(x.detach().sum()) < 0 else m.right)(torch.tanh(m.stem(x))),
        stem=nn.Linear(3, 3),
        **heads,
    ).double()
    nets = [copy.deepcopy(model) for _ in range(2)]
    ours, *optimizers = (torch.optim.Adam(net.parameters(), lr=0.1) for net in (model, *nets))
    args = {"replicas": 2, "local_steps": 2}
    keys: Dict[str, Any] = {"stages": 1, "microbatches": 1, "method_args": args}
    with ipu_pipe.Pipeline(model, cross_entropy, ours, "local_sgd", **keys) as pipe:
        for k, signs in enumerate([(-1, 1), (-1, 1), (1, -1), (1, 1), (-1, 1), (-1, -1)]):
            xs = [torch.rand(4, 3, dtype=torch.float64) * sign for sign in signs]
            ys = [torch.randint(0, 2, (4,)) for _ in signs]
            pipe.step(torch.cat(xs), torch.cat(ys))
            for arguments in zip(nets, optimizers, xs, ys):
                step_net(*arguments)
            if k % 2:
                average_nets(nets, optimizers)
    assert_same(model.state_dict(), nets[0].state_dict())


# ---- outer optimizers

OUTER = {
    "lr": 0.7,
    "momentum": 0.9,
    "nesterov": True,
    "fragments": 1,
    "offset": 0,
    "delay": 0,
    "mix": 0.0,
}

# Weights before each local step that pytorch/torchft records for two fragments of one weight each, at commit 73dafea in
# test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.*.json: two replicas, gradients of 2, first weights 1,
# plain SGD within at rate 1 and outside at rate 2, synchronization every 6 steps. By (delay, mix), of both fragments.
TORCHFT = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21],
    ),
}  # fmt: skip


@pytest.mark.parametrize("delay, mix", list(TORCHFT))
def test_weights_are_those_that_torchft_recorded(delay: int, mix: float) -> None:
    steps = 9
    # the gradient of w is 2
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    modules = [Composed(lambda m, x: x + 2 * m.w, w=w) for w in weights]
    plain = {"lr": 2.0, "momentum": 0.0, "nesterov": False, "fragments": 2}
    outer = {**OUTER, **plain, "delay": delay, "mix": mix}
    method = resolve_method("local_sgd", {"replicas": 2, "local_steps": 6, "outer": outer})
    history: List[List[float]] = [[1.0], [1.0]]

    def watch() -> None:
        for of_fragment, w in zip(history, weights):
            of_fragment.append(float(w.detach()))

    data = [(torch.zeros(1, 1), torch.zeros(1))] * 2 * steps
    make_sgd = functools.partial(torch.optim.SGD, lr=1.0)
    rate, loss = lambda k: 1.0, lambda output, y: output.mean()  # noqa: E731
    train_stages_on_emulator(modules, method, steps, data, (), rate, watch, make_sgd, loss)
    assert tuple(history) == TORCHFT[delay, mix]


ARGUMENTS: List[Dict[str, Any]] = [
    {},
    {"delay": 1, "mix": 0.25, "nesterov": False},
    {"fragments": 2, "offset": 1, "delay": 1, "mix": 0.5},
    {"fragments": "per_stage"},
]


@pytest.mark.parametrize("outer", ARGUMENTS, ids=str)
@pytest.mark.parametrize("drains", [[], [5]])
def test_the_weights_are_those_of_the_papers_loop(outer: Dict[str, Any], drains: List[int]) -> None:
    """Replicas have their own optimizers; torch.optim.SGD steps a fragment of the shared weights when a round ends."""
    R, steps, data = 3, 18, draw_microbatches(54)
    settings: Dict[str, Any] = {**OUTER, **outer}
    ours, first = make_float64_stages("mlp"), make_float64_stages("mlp")
    P = len(first)
    F = P if settings["fragments"] == "per_stage" else settings["fragments"]
    H = 2 * F if F > 1 else 3
    method = resolve_method("local_sgd", {"replicas": R, "local_steps": H, "outer": settings})
    train_stages_on_emulator(ours, method, steps, data, drains)
    nets = [join_stages(copy.deepcopy(first)) for _ in range(R)]
    inner = [make_momentum_sgd(net.parameters()) for net in nets]
    shared = join_stages(copy.deepcopy(first))
    names = ("lr", "momentum", "nesterov")
    step_outer = torch.optim.SGD(shared.parameters(), **{name: settings[name] for name in names})

    def select_fragment(net: nn.Sequential, turn: int) -> List[nn.Parameter]:
        return [p for s in range(P) if s * F // P == turn for p in net[s].parameters()]

    begin = 0
    while begin < steps:
        end = min([begin + H // F, steps, *[d for d in drains if d > begin]])
        turn = ((end - 1) // (H // F) + settings["offset"]) % F
        fragment = select_fragment(shared, turn)
        sent = max(end - 1 - settings["delay"], begin - 1)
        deltas: Dict[int, List[torch.Tensor]] = {}
        for h in range(begin, end):
            for r, (net, optimizer) in enumerate(zip(nets, inner)):
                optimizer.param_groups[0]["lr"] = LR / (h + 1)
                step_net(net, optimizer, *data[h * R + r])
                if h == sent or (h == end - 1 and r not in deltas):
                    pairs = zip(fragment, select_fragment(net, turn))
                    deltas[r] = [a.detach() - b.detach() for a, b in pairs]
        step_outer.zero_grad()
        for p, *of_replicas in zip(fragment, *deltas.values()):
            p.grad = sum(of_replicas) / R
        step_outer.step()
        for net in nets:
            for p, new in zip(select_fragment(net, turn), fragment):
                p.data = torch.lerp(new.detach(), p.data, settings["mix"])
        begin = end
    assert_same(join_stages(ours).state_dict(), nets[0].state_dict())


def test_an_optimizers_own_entries_stay() -> None:
    """Story: `outer_velocity` of a user's optimizer was deleted at each checkpoint."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    state = optimizer.state[weight]
    state.update({"outer_velocity": torch.ones(1), "replicas": 2})
    with IndependentReplicas(nn.Module(), [weight], optimizer, 2, Outer(), [0]).export_replicas():
        assert {"replica1.weight", "replica1.replicas", "outer.weight"} < set(state)
    assert list(state) == ["outer_velocity", "replicas"]


# ---- runs


def make_digits_config(method: str, args: Dict[str, Any] = {}, **keys: Any) -> Any:
    return configure(**{
        "model": {"entry": "models.mlp:mlp"}, "data": {"name": "digits"}, "method": method, "method_args": args,
        "optimizer": {"lr": 0.02, "momentum": 0.9}, "steps": 8, "backend": {"threads": 1}, "evaluate": {"every": 0},
        "log": {"tensorboard": False}, "checkpoint": {"every": 4, "keep": 9}, **keys,
    })  # fmt: skip


@pytest.fixture(autouse=True)
def change_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


STREAMING = {"fragments": 2, "delay": 1, "mix": 0.5}
ADAMW = {"optimizer": {"name": "adamw", "lr": 0.01}}


@pytest.mark.slow
@pytest.mark.parametrize("method, args, keys", [
    ("local_sgd", {"replicas": 2, "local_steps": 30}, {}),
    ("randomized_pipedream", {"delay_bound": 6, "nag": 0.5}, {}),
    ("local_sgd", {"replicas": 3, "local_steps": 4, "outer": {}}, {}),
    ("local_sgd", {"replicas": 3, "local_steps": 4, "outer": STREAMING}, ADAMW),
])  # fmt: skip
def test_a_resumed_run_ends_with_the_same_numbers(
    method: str, args: Dict[str, Any], keys: Dict[str, Any], tmp_path: Path
) -> None:
    config = make_digits_config(method, args, **keys)
    whole = train(config, tmp_path / "whole", quiet=True)
    train(config, tmp_path / "again", quiet=True)
    again = train(config, tmp_path / "again", resume_from=4, quiet=True)
    assert again["final"] == whole["final"] and again["steps"] == 8
    assert_same_weights(tmp_path / "whole", tmp_path / "again")
    if args.get("local_steps") == 4 and not keys:
        # where a round ends at the checkpoint, none changes a bit
        once = make_digits_config(method, args, checkpoint={"every": 8})
        train(once, tmp_path / "once", quiet=True)
        assert_same_weights(tmp_path / "whole", tmp_path / "once")
    if "outer" in args:
        # three replicas' moments, the outer optimizer's weights and velocity; Adam's step counts are not planned
        job, moments = build(config), 2 if keys else 1
        counts = 3 * 4 * len(list(job.model.parameters())) if keys else 0
        planned = sum(row["optimizer_bytes"] for row in build_memory_table(job))
        assert planned == (3 * moments + 2) * 4 * whole["model"]["parameters"]
        assert sum(stage["optimizer_bytes"] for stage in whole["stages"]) == planned + counts


def test_a_step_of_randomized_updates_has_the_mean_of_their_losses() -> None:
    """At a rate of 0, with a single microbatch, all of them are the same."""
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    config = make_digits_config("randomized_pipedream", optimizer={"lr": 0.0})
    job = build(config, data=ipu_pipe.from_loader([(x, y)] * 3, [(x, y)]))
    flow, results = train_updates(job, 2)
    assert isinstance(flow.engine, EmulatorEngine) and len(job.partition) > 1
    expected = float(cross_entropy(job.model(x), y))
    flow.engine.close()
    assert [result.loss for result in results] == [pytest.approx(expected)] * 2


def test_the_number_of_replicas_is_that_of_the_stages_and_stays(tmp_path: Path) -> None:
    summary = train(make_digits_config("local_sgd"), tmp_path, quiet=True)
    assert summary["model"]["stages"] == 5 and summary["samples"] == 8 * 5 * 8
    assert [stage["weight_copies"] for stage in summary["stages"]] == [5] * 5
    assert [stage["forward_delay"] for stage in summary["stages"]] == [0] * 5
    other = make_digits_config("local_sgd", steps=9, stages=2)
    longer = train(other, tmp_path, resume=True, quiet=True)
    assert longer["batch"]["global_batch_size"] == 5 * 8 and longer["model"]["stages"] == 2


@pytest.mark.parametrize("args, lags", [
    ({"delay_bound": 5}, [5] * 5),  # all five updates in between may be of one stage
    ({"delay_bound": 5, "order": "schedule"}, [1] * 5),
    ({"order": "schedule", "delays": "schedule"}, [4, 3, 2, 1, 0]),
])  # fmt: skip
def test_randomized_pipedream_holds_as_many_versions_as_its_bound(
    args: Dict[str, Any], lags: List[int]
) -> None:
    table = build(make_digits_config("randomized_pipedream", args)).table
    assert table.greatest_lag().tolist() == lags


# ---- refusals

RPD = "randomized_pipedream"


@pytest.mark.parametrize("method, args, keys, place", [
    ("pipedream", {"delay_bound": 4}, {}, "delay_bound: 4: "),
    (RPD, {"delay_bound": -1}, {}, "configure: method_args.delay_bound: -1: "), (RPD, {"delays": "drawn"}, {}, "delays: drawn: "),
    (RPD, {"delays": "schedule"}, {}, "delays: schedule: "), (RPD, {"stash": False}, {}, "stash: false: "),
    (RPD, {"nag": 0}, {}, "nag: 0"), ("local_sgd", {"local_steps": 0}, {}, "local_steps: 0: "),
    (RPD, {}, {"gradient_accumulation": 2}, "gradient_accumulation: 2: randomized_pipedream updates single"),
    (RPD, {"t1": {}}, {}, "method_args.t1: not with randomized_pipedream"),
    ("local_sgd", {}, {"replicas": 2}, "replicas: 2: local_sgd has replicas that step by themselves"),
    ("local_sgd", {}, {"clip": {"norm": 1.0, "scope": "global"}}, "clip.scope: global: local_sgd "),
    ("local_sgd", {"local_steps": 4, "outer": {}}, {"steps": 9}, "method_args.outer: "),
    ("local_sgd", {"local_steps": 4, "outer": {"fragments": 3}}, {}, "method_args.local_steps: 4: "),
    ("local_sgd", {"local_steps": 9, "outer": {"fragments": 9}}, {"steps": 9}, "method_args.outer.fragments: 9: "),
    ("local_sgd", {"local_steps": 5, "outer": {"fragments": 2, "delay": 2}}, {}, "method_args.local_steps: 5: "),
    ("local_sgd", {"local_steps": 4, "outer": {"fragments": 2, "delay": 2}}, {}, "method_args.outer.delay: 2: "),
    ("local_sgd", {"local_steps": 4, "outer": {"offset": 1}}, {}, "method_args.outer.offset: 1: "),
    ("local_sgd", {"outer": {"mix": 1.5}}, {}, "method_args.outer.mix: 1.5: "),
    ("local_sgd", {"outer": {"momentum": 0}}, {}, "method_args.outer.nesterov: "),
    ("local_sgd", {"outer": {"fragments": 0}}, {}, "method_args.outer.fragments: 0: "),
    ("pipedream", {"outer": {}}, {}, "method_args.outer: "),
])  # fmt: skip
def test_settings_without_meaning_for_a_method_are_refused(
    method: str, args: Any, keys: Any, place: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    faults = list_faults(lambda: train(make_digits_config(method, args, **keys), out, quiet=True))
    assert any(place in fault for fault in faults), faults
    assert not out.exists()


def test_a_method_without_a_timeline_has_no_schedule_to_print() -> None:
    command = ["randomized_pipedream", "--stages", "4", "--microbatches", "8"]
    assert "randomized_pipedream: has no timeline" in list_faults(schedule_command.main, command)[0]
