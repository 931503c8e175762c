"""Test modelled traces, where no device has a clock: measured passes of stages are placed by the
clock of the schedule.

The training is the same as without.
"""

from __future__ import annotations

import copy
import itertools
import time
from asyncio import CancelledError
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.backends.emulator import engine
from ipu_pipe.backends.interface import DeviceTimes, Report
from ipu_pipe.config.load import load_config
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.report.position import Position
from ipu_pipe.report.run_trace import (
    choose_stage_costs,
    compute_modelled_rates,
    select_updates,
)
from ipu_pipe.report.summary import compute_busy_shares
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.clock import Costs, clock, time_updates
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.trace.store import read_store
from tests.support.modelled import play_method
from tests.support.models import Composed
from tests.support.runs import DIGITS, assert_same, read_summary, read_trace_file

SHORT = [
    "steps=6", "log.tensorboard=false", "gradient_accumulation=4", "micro_batch_size=8", "evaluate={every: 0, subset: 32}",
    "backend.threads=1", "stages=null",
]  # fmt: skip


def load_modelled_config(*pairs: str) -> Any:
    return load_config(DIGITS, [*SHORT, *pairs])


def make_slow_layer(seconds: float) -> nn.Module:
    """Return a layer that sleeps `seconds` in the forward, and again in the backward."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        time.sleep(seconds)
        y = m.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(seconds))
        return y

    return Composed(forward, inner=nn.Linear(16, 16))


def make_model_of_parts(*parts: nn.Module) -> nn.Module:
    """Return a model with one stage per part, with running statistics and dropout."""
    torch.manual_seed(0)
    first = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)]
    return nn.Sequential(
        *first,
        *map(ipu_pipe.begin_stage, parts),
        nn.ReLU(),
        ipu_pipe.begin_stage(nn.Linear(16, 10)),
    )


# ---- events


COSTS = Costs([3, 11, 5, 4], [7, 2, 13, 8], [1, 2, 3, 1], weight_gradient=[3, 1, 6, 2])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((name, {}) for name in ("gpipe", "pipedream", "pipelined_backprop", "naive")),
        *((name, {}) for name in ("local_greedy", "zb_h1", "zbv", "dualpipe_v")),
        ("interleaved_1f1b", {"stages_per_device": 2}),
    ],
)
def test_passes_and_waits_fill_the_time_of_a_device(name: str, args: Dict[str, Any]) -> None:
    """Each stage has all of its passes, whole or in halves, each of its time."""
    accumulate = 1 if name == "naive" else 4
    local = METHODS[name].structure is not None
    keys = {"args": args, "gradients_cross": not local, "boundary_bytes": [100, 200, 300]}
    played = play_method(name, 4, 12, accumulate, COSTS, **keys)
    halves = zip(COSTS.backward, COSTS.weight_gradient)
    takes = {
        "forward": COSTS.forward,
        "backward": COSTS.backward,
        "input gradient": [whole - part for whole, part in halves],
        "weight gradient": COSTS.weight_gradient,
        "update": COSTS.update,
    }
    work = [e for e in played.rows if e.kind in takes]
    assert all(e.end_ns - e.start_ns == takes[e.kind][e.stage] for e in work)
    done = Counter((e.kind, e.stage, e.microbatch) for e in work)
    for place in itertools.product(range(4), range(12)):
        forward, whole, half, other_half, _ = (done[(kind, *place)] for kind in takes)
        assert forward == whole + half == 1 and half == other_half
    assert sum(e.kind == "update" for e in work) == 4 * 12 // accumulate
    devices = set(played.schedule.device_of_stage)
    sends = [e for e in played.rows if e.kind == "send"]
    assert all(e.device != e.peer for e in sends)
    assert len(devices) < 4 or sum(e.bytes for e in sends) == 12 * 600 * (1 if local else 2)
    has_halves = len(played.schedule.passes) > 2
    ends = {(e.kind, e.device, e.microbatch, e.end_ns) for e in work}
    for device in devices:
        here = [e for e in played.rows if e.device == device and e.kind != "send"]
        assert here[0].start_ns == 0
        for wait, then in zip(here, here[1:]):
            assert wait.end_ns == then.start_ns
            if wait.kind == "wait" and not has_halves:  # ends when the peer's pass does
                kind = {"activations": "forward", "gradients": "backward"}[wait.carries]
                assert (kind, wait.peer, wait.microbatch, wait.end_ns) in ends and then.kind == kind


def test_only_the_window_is_recorded_with_pauses_between() -> None:
    played = play_method("pipedream", 2, 24, 2, Costs([3, 5], [7, 2], [1, 1]))
    window = list(select_updates(played.events, 2, range(2, 9, 3)).rows())
    batch = {"update": 1}
    expected = [e for e in played.rows if e.microbatch // batch.get(e.kind, 2) in (2, 5, 8)]
    assert sorted(e for e in window if e.kind != "pause") == sorted(expected)
    for device in range(2):
        of_device = [e for e in window if e.device == device and e.kind != "send"]
        assert all(a.end_ns == b.start_ns for a, b in zip(of_device, of_device[1:]))
        assert sum(e.kind == "pause" for e in of_device) >= 2


# ---- times of stages


def test_a_slow_stage_is_visible_in_the_trace(tmp_path: Path) -> None:
    """One stage sleeps 10 ms a pass, another 1 ms: the trace has both times, and shows for which
    device the others wait."""
    model = make_model_of_parts(make_slow_layer(0.001), make_slow_layer(0.01))
    config = load_modelled_config("method=pipedream", "steps=2")
    report = train(config, tmp_path / "run", model=model, quiet=True)
    trace = read_store(tmp_path / "run" / "trace" / "modelled.trace")
    assert read_trace_file(tmp_path / "run")["otherData"] == trace.metadata
    assert trace.metadata["modelled"] is True
    rows = list(trace.events.rows())
    durations = {(e.kind, e.stage): e.end_ns - e.start_ns for e in rows if e.microbatch == 1}
    has_backward_times = hasattr(torch._C._autograd, "_get_sequence_nr")  # torch 2.0 does not
    for kind in ("forward", "backward") if has_backward_times else ("forward",):
        assert durations[kind, 1] >= 1e6 and durations[kind, 2] >= 10e6
        assert max(durations[kind, 0], durations[kind, 1]) < durations[kind, 2]
    late = [e for e in rows if e.kind == "wait" and e.device == 3 and e.microbatch > 0]
    assert {e.peer for e in late} == {2} and report["utilization"] is None
    assert 0.2 < report["modelled_utilization"] < 0.6 < report["planned_utilization"]
    assert report["modelled_samples_per_second"] < 8 / 0.02


@pytest.mark.parametrize(
    "pairs", [("method=local_greedy", "gradient_accumulation=1"), ("optimizer.momentum=0.9",)]
)
def test_profiling_leaves_nothing_behind(pairs: Tuple[str, ...]) -> None:
    """Weights, statistics, gradients, modes, optimizer and random state are bitwise the same."""
    job = build(load_modelled_config(*pairs), model=make_model_of_parts(nn.Linear(16, 16)))
    for p in job.model.parameters():
        p.grad = torch.ones_like(p)
    job.optimizer.step()
    job.model.eval()
    before, state = copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.optimizer.state_dict())
    random, gradients = torch.get_rng_state(), [p.grad for p in job.model.parameters()]
    result = engine.time_stages(job)
    counts = {len(passes) for passes in (result.forward, result.backward, result.update)}
    assert counts == {len(job.partition)} and min(result.forward) > 0
    assert_same(before, job.model.state_dict())
    assert torch.equal(random, torch.get_rng_state()) and not job.model.training
    assert all(a is b for a, b in zip(gradients, [p.grad for p in job.model.parameters()]))
    torch.testing.assert_close(job.optimizer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("error", [CancelledError("no"), SystemExit("no")])
def test_the_numbers_of_a_run_are_those_without_a_profile(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without times the costs are by FLOPs, and take as long as a microbatch took.

    Story: what is no Exception ended a run whose training was done with a traceback."""

    def fail(*_: Any) -> None:
        raise error

    def train_weights(name: str) -> Dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net = make_model_of_parts(nn.Linear(16, 16))
        train(load_modelled_config("method=pipemare"), tmp_path / name, model=net, quiet=True)
        return dict(net.state_dict())

    with_profile = train_weights("a")
    monkeypatch.setattr(engine, "time_passes", fail)
    assert_same(with_profile, train_weights("b"))
    summary = read_summary(tmp_path / "b")
    assert summary["modelled_utilization"] is None and summary["planned_utilization"] > 0
    reason = read_store(tmp_path / "b" / "trace" / "modelled.trace").metadata["why_modelled"]
    assert f"({type(error).__name__}: no)" in reason
    job = build(load_modelled_config("method=gpipe"))
    position = Position(seconds=10.0, timed_updates=5)
    costs = choose_stage_costs(job, StageSeconds((), (), (), "why"), position).costs
    assert sum(costs.forward) + sum(costs.backward) == pytest.approx(10 / 5 / 4)
    shares = np.array(costs.forward) / sum(costs.forward)
    flops = np.array(job.footprint.forward_flops)
    assert shares == pytest.approx(flops / flops.sum())


def test_profiling_makes_no_extra_step_of_a_users_optimizer(tmp_path: Path) -> None:
    made: List[Any] = []
    steps: List[Any] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(self)
            return super().step(closure)

    def make(groups: Any) -> Counting:
        made.append(Counting(groups, lr=0.01))
        return made[-1]

    train(load_modelled_config(), tmp_path / "run", optimizer=make, quiet=True)
    # steps on a small copy, which ask what it shares between parameters, are no steps of it
    assert sum(step in made for step in steps) == 6


# ---- busy shares


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "pipemare"])
def test_the_modelled_share_of_equal_stages_is_the_planned_one(method: str) -> None:
    """Where a slot has two passes, the clock need not wait for the end of the slot, so the modelled
    share may be greater."""
    warmup = ["method_args={warmup: {epochs: 0.05}}"] * (method == "pipemare")
    job = build(load_modelled_config(f"method={method}", "stages=4", "steps=9", *warmup))
    share = compute_modelled_rates(job, Costs([1.0] * 4, [1.0] * 4, [0.0] * 4)).utilization
    planned = job.compute_planned_utilization()
    assert planned * (1 - 1e-9) <= share
    assert share < 1 if warmup else share <= planned * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpipe", "pipedream", "pipedream_2bw"])
def test_the_estimated_time_of_a_long_run_equals_the_simulated_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule(METHODS[name], 4, 1200, 3 if name == "gpipe" else 4)
    whole = clock(schedule, COSTS).finish
    for most, error in ((40_000, 0), (300, 0.01)):
        monkeypatch.setattr("ipu_pipe.schedule.clock.MOST_SIMULATED", most)
        assert time_updates(schedule, COSTS)[-1] == pytest.approx(whole, rel=error)


def test_measured_shares_are_of_all_devices_time() -> None:
    job: Any = SimpleNamespace(compute_planned_utilization=lambda: 0.9)
    times = [DeviceTimes(10, 80, 10, 100), DeviceTimes(90, 5, 5, 100)]
    shares = compute_busy_shares(job, Report([], [], None, [], times=times), None)
    keys = ("utilization", "bubble_fraction", "planned_utilization", "modelled_utilization")
    assert [shares[key] for key in keys] == [0.5, 0.5, 0.9, None]
    assert compute_busy_shares(job, Report([], [], None, None), None)["utilization"] is None
