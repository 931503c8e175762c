"""Test modelled traces, where no device has a clock: measured passes of stages are placed by the
clock of the schedule.

The training is the same as without.
"""

from __future__ import annotations

import copy
import time
from asyncio import CancelledError
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
    build_modelled_events,
    choose_stage_costs,
    compute_modelled_rates,
    select_updates,
)
from ipu_pipe.report.summary import compute_busy_shares
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import KINDS, Event, Events
from ipu_pipe.trace.store import read_store
from tests.support.models import Composed
from tests.support.runs import DIGITS, read_summary, read_trace_file

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


def list_events(*arguments: Any, **more: Any) -> List[Event]:
    return list(build_events(*arguments, **more).rows())


def build_events(
    method: str, costs: Costs, stages: int, microbatches: int, accumulate: int, **more: Any
) -> Events:
    schedule = make_schedule(METHODS[method], stages, microbatches, accumulate)
    table = VersionTable(schedule, METHODS[method])
    versions = table.forward(0, microbatches), table.backward(0, microbatches)
    arguments = {
        "device_of_stage": range(stages),
        "boundary_bytes": [100 * (s + 1) for s in range(stages - 1)],
        **more,
    }
    result, _ = build_modelled_events(clock(schedule, costs), versions, 1.0, **arguments)
    return result


# ---- events


def test_a_gap_is_a_wait_for_the_device_of_the_last_input() -> None:
    """Check GPipe with forwards of 10 and 30 and backwards of 20 and 60.

    device 0   F0 F1 wait for B0 ........... B0  wait B1      0-10 10-20 20-130 130-150 150-190 190-210
    device 1      F0 ... F1 ... B0 ... B1                     10-40 40-70 70-130 130-190
    """
    events = list_events("gpipe", Costs([10, 30], [20, 60], [0, 0]), 2, 2, 2)
    waits = [e for e in events if e.kind == "wait"]
    assert waits == [
        Event(0, 0, "wait", 0, 20, 130, -1, None, 1, "gradients"),
        Event(0, 0, "wait", 1, 150, 190, -1, None, 1, "gradients"),
        Event(1, 1, "wait", 0, 0, 10, -1, None, 0, "activations"),
    ]
    sends = [e for e in events if e.kind == "send"]
    assert sends[0] == Event(0, 0, "send", 0, 10, 10, -1, 100, 1, "activations")
    assert (
        sends[-1] == Event(1, 1, "send", 1, 190, 190, -1, 100, 0, "gradients") and len(sends) == 4
    )


@pytest.mark.parametrize(
    "name", ["gpipe", "pipedream", "pipemare", "pipelined_backprop", "naive", "local_greedy"]
)
def test_passes_and_waits_fill_the_time_of_a_device(name: str) -> None:
    accumulate = 1 if name == "naive" else 4
    local = METHODS[name].structure is not None
    costs = Costs([3, 11, 5], [7, 2, 13], [1, 2, 3])
    events = list_events(name, costs, 3, 12, accumulate, gradients_cross=not local)
    for device in range(3):
        of_device = [e for e in events if e.device == device and e.kind != "send"]
        assert of_device[0].start_ns == 0 and all(
            a.end_ns == b.start_ns for a, b in zip(of_device, of_device[1:])
        )
        for wait, following in zip(of_device, of_device[1:]):
            if wait.kind == "wait":  # ends when the peer's pass does
                kind = {"activations": "forward", "gradients": "backward"}[wait.carries]
                awaited = [
                    e
                    for e in events
                    if (e.kind, e.device, e.microbatch) == (kind, wait.peer, wait.microbatch)
                ]
                assert [e.end_ns for e in awaited] == [wait.end_ns] and following.kind == kind
        busy = sum(e.end_ns - e.start_ns for e in of_device if e.kind != "wait")
        assert (
            busy
            == 12 * (costs.forward[device] + costs.backward[device])
            + 12 // accumulate * costs.update[device]
        )
    sent = sum(e.bytes or 0 for e in events if e.kind == "send")
    assert sent == 12 * (100 + 200) * (1 if local else 2)


def test_neighbours_on_one_device_send_nothing() -> None:
    events = list_events(
        "gpipe", Costs([1] * 3, [1] * 3, [0] * 3), 3, 4, 4, device_of_stage=[0, 0, 1]
    )
    assert {(e.device, e.peer) for e in events if e.kind == "send"} == {(0, 1), (1, 0)}
    assert {(e.device, e.peer) for e in events if e.kind == "wait"} <= {(0, 1), (1, 0)}


@pytest.mark.parametrize("name", ["zb_h1", "zbv", "dualpipe_v", "interleaved_1f1b"])
def test_halves_of_backwards_are_events_and_whole_ones_are_backwards(name: str) -> None:
    method = resolve_method(name, {"stages_per_device": 2} if name == "interleaved_1f1b" else {})
    schedule = make_schedule(method, 4, 4, 4)
    table = VersionTable(schedule, method)
    costs = Costs([3, 11, 5, 4], [7, 2, 13, 8], [1, 2, 3, 1], weight_gradient=[3, 1, 6, 2])
    result = list(build_modelled_events(
        clock(schedule, costs), (table.forward(0, 4), table.backward(0, 4)), 1.0, schedule.device_of_stage, [100] * 3,
        is_whole=schedule.is_whole if len(schedule.passes) > 2 else None,
    )[0].rows())  # fmt: skip
    whole = schedule.is_whole if len(schedule.passes) > 2 else np.ones((4, 4), np.bool_)
    for stage in range(4):
        by_kind = {
            kind: [e for e in result if (e.stage, e.kind) == (stage, kind)] for kind in KINDS
        }
        assert (
            sorted(e.microbatch for e in by_kind["backward"])
            == np.flatnonzero(whole[stage]).tolist()
        )
        assert {e.end_ns - e.start_ns for e in by_kind["backward"]} <= {costs.backward[stage]}
        for kind, takes in (("input gradient", costs.backward[stage] - costs.weight_gradient[stage]),
                            ("weight gradient", costs.weight_gradient[stage])):  # fmt: skip
            assert (
                sorted(e.microbatch for e in by_kind[kind])
                == np.flatnonzero(~whole[stage]).tolist()
            )
            assert {e.end_ns - e.start_ns for e in by_kind[kind]} <= {takes}
    for device in set(schedule.device_of_stage):
        here = [e for e in result if e.device == device and e.kind != "send"]
        assert here[0].start_ns == 0 and all(a.end_ns == b.start_ns for a, b in zip(here, here[1:]))
        stages = [s for s in range(4) if schedule.device_of_stage[s] == device]
        busy = sum(e.end_ns - e.start_ns for e in here if e.kind != "wait")
        assert busy == sum(
            4 * (costs.forward[s] + costs.backward[s]) + costs.update[s] for s in stages
        )


def test_only_the_window_is_recorded_with_pauses_between() -> None:
    whole = list_events("pipedream", Costs([3, 5], [7, 2], [1, 1]), 2, 24, 2)
    all_events = build_events("pipedream", Costs([3, 5], [7, 2], [1, 1]), 2, 24, 2)
    window = list(select_updates(all_events, 2, range(2, 9, 3)).rows())
    updates = {2, 5, 8}
    expected = [
        e for e in whole if (e.microbatch if e.kind == "update" else e.microbatch // 2) in updates
    ]
    key = lambda e: (e.device, e.start_ns, e.end_ns, e.kind)  # noqa: E731
    assert sorted((e for e in window if e.kind != "pause"), key=key) == sorted(expected, key=key)
    for device in range(2):
        of_device = [e for e in window if e.device == device and e.kind != "send"]
        assert all(a.end_ns == b.start_ns for a, b in zip(of_device, of_device[1:]))
        assert sum(e.kind == "pause" for e in of_device) >= 2


# ---- times of stages


def test_a_slow_stage_is_visible_in_the_trace(tmp_path: Path) -> None:
    """One stage sleeps 10 ms a pass, another 1 ms: the trace has both times, and shows for which
    device the others wait."""
    report = train(
        load_modelled_config("method=pipedream", "steps=2"),
        tmp_path / "run",
        model=make_model_of_parts(make_slow_layer(0.001), make_slow_layer(0.01)),
        quiet=True,
    )
    trace = read_store(tmp_path / "run" / "trace" / "modelled.trace")
    other_data = read_trace_file(tmp_path / "run")["otherData"]
    assert trace.metadata["modelled"] is other_data["modelled"] is True
    assert "measured on this machine" in other_data["why_modelled"]
    rows = list(trace.events.rows())
    durations = {(e.kind, e.stage): e.end_ns - e.start_ns for e in rows if e.microbatch == 1}
    has_backward_times = hasattr(torch._C._autograd, "_get_sequence_nr")  # torch 2.0 does not
    for kind in ("forward", "backward") if has_backward_times else ("forward",):
        assert durations[kind, 1] >= 1e6 and durations[kind, 2] >= 10e6
        assert max(durations[kind, 0], durations[kind, 1]) < durations[kind, 2]
    late = [e for e in rows if e.kind == "wait" and e.device == 3 and e.microbatch > 0]
    assert {e.peer for e in late} == {2}
    assert (
        report["utilization"] is None
        and 0.2 < report["modelled_utilization"] < 0.6 < report["planned_utilization"]
    )
    assert report["modelled_samples_per_second"] < 8 / 0.02


@pytest.mark.parametrize(
    "pairs", [(), ("method=local_greedy", "gradient_accumulation=1"), ("optimizer.momentum=0.9",)]
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
    assert (
        len(result.forward) == len(result.backward) == len(result.update) == len(job.partition)
        and min(result.forward) > 0
    )
    assert all(torch.equal(a, b) for a, b in zip(before.values(), job.model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state()) and not job.model.training
    assert all(a is b for a, b in zip(gradients, [p.grad for p in job.model.parameters()]))
    after = job.optimizer.state_dict()
    assert (
        after["param_groups"] == state["param_groups"]
        and after["state"].keys() == state["state"].keys()
    )
    for key, entries in state["state"].items():
        assert all(
            torch.equal(a, b)
            for a, b in zip(entries.values(), after["state"][key].values())
            if a is not None
        )


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), CancelledError("no"), SystemExit("no")])
def test_the_numbers_of_a_run_are_those_without_a_profile(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: what is no Exception ended a run whose training was done with a traceback."""

    def fail(*_: Any) -> None:
        raise error

    def train_weights(name: str) -> Dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net = make_model_of_parts(nn.Linear(16, 16))
        train(load_modelled_config("method=pipemare"), tmp_path / name, model=net, quiet=True)
        return dict(net.state_dict())

    with_profile = train_weights("a")
    monkeypatch.setattr(engine, "time_passes", fail)
    without = train_weights("b")
    assert all(torch.equal(with_profile[key], without[key]) for key in without)
    summary = read_summary(tmp_path / "b")
    assert summary["modelled_utilization"] is None and summary["planned_utilization"] > 0
    reason = read_store(tmp_path / "b" / "trace" / "modelled.trace").metadata["why_modelled"]
    assert "FLOPs" in reason and f"could not be timed ({type(error).__name__}: no)" in reason


def test_profiling_makes_no_extra_step_of_a_users_optimizer(tmp_path: Path) -> None:
    made: List[Any] = []
    steps: List[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            # steps on a small copy, which ask what it shares between parameters, are no steps of it
            if any(self is optimizer for optimizer in made):
                steps.append(1)
            return super().step(closure)

    def make(groups: Any) -> Counting:
        made.append(Counting(groups, lr=0.01))
        return made[-1]

    train(load_modelled_config(), tmp_path / "run", optimizer=make, quiet=True)
    assert len(steps) == 6


def test_costs_by_flops_take_as_long_as_a_microbatch_took() -> None:
    job = build(load_modelled_config("method=gpipe"))
    position = Position(seconds=10.0, timed_updates=5)
    stage_costs = choose_stage_costs(job, StageSeconds((), (), (), "why"), position)
    assert not stage_costs.are_measured and "since why" in stage_costs.origin
    assert sum(stage_costs.costs.forward) + sum(stage_costs.costs.backward) == pytest.approx(
        10 / 5 / 4
    )
    shares = np.array(stage_costs.costs.forward) / sum(stage_costs.costs.forward)
    assert shares == pytest.approx(
        np.array(job.footprint.forward_flops) / sum(job.footprint.forward_flops)
    )


# ---- busy shares


def test_the_modelled_share_of_equal_stages_is_the_planned_one() -> None:
    """Where a slot has two passes, the clock need not wait for the end of the slot, so the modelled
    share may be greater."""
    ones = Costs([1.0] * 4, [1.0] * 4, [0.0] * 4)
    for method, *more in (
        ("gpipe",),
        ("pipedream",),
        ("pipemare", "method_args={warmup: {epochs: 0.05}}"),
    ):
        job = build(load_modelled_config(f"method={method}", "stages=4", "steps=9", *more))
        share, planned = (
            compute_modelled_rates(job, ones).utilization,
            job.compute_planned_utilization(),
        )
        assert planned * (1 - 1e-9) <= share
        assert share < 1 if method == "pipemare" else share <= planned * (1 + 1e-9)


def test_the_estimated_time_of_a_long_run_equals_the_simulated_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ipu_pipe.schedule import clock as module

    costs = Costs([3, 11, 5], [7, 2, 13], [1, 2, 3])
    for name in ("gpipe", "pipedream", "pipedream_2bw"):
        schedule = make_schedule(METHODS[name], 3, 1200, 3)
        whole = clock(schedule, costs).finish
        monkeypatch.setattr(module, "MOST_SIMULATED", 40_000)
        assert module.time_updates(schedule, costs)[-1] == whole
        monkeypatch.setattr(module, "MOST_SIMULATED", 300)
        assert module.time_updates(schedule, costs)[-1] == pytest.approx(whole, rel=0.01)


def test_measured_shares_are_of_all_devices_time() -> None:
    job: Any = SimpleNamespace(compute_planned_utilization=lambda: 0.9)
    times = [DeviceTimes(10, 80, 10, 100), DeviceTimes(90, 5, 5, 100)]
    busy_shares = compute_busy_shares(job, Report([], [], None, [], times=times), None)
    assert busy_shares["utilization"] == 0.5 and busy_shares["bubble_fraction"] == 0.5
    assert busy_shares["planned_utilization"] == 0.9 and busy_shares["modelled_utilization"] is None
    assert compute_busy_shares(job, Report([], [], None, None), None)["utilization"] is None
