"""Test that the planner's search does little work and finds the best of all candidates, each played by the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, List, Tuple
from unittest.mock import Mock

import numpy as np
import pytest

from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.memory import make_lockstep_schedule
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan import batch_times
from ipu_pipe.plan.batch_times import BatchTimes
from ipu_pipe.plan.candidates import list_candidates, list_layouts
from ipu_pipe.plan.planner import ALIKE, NO_ROOM, find_least_memory, search
from ipu_pipe.plan.prediction import Costing, Problem, UnitSums, predict_cut
from ipu_pipe.schedule.clock import Costs, Transfer, clock, time_first_updates
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.timelines import make_schedule

FLUSHING = ["pipedream_flush", "gpipe"]
PIPELINES = ["pipedream_2bw", *FLUSHING, "pipedream"]
BY_DEVICE = [
    *("interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zb"),
    *("zbv", "v_half", "v_min", "dualpipe_v"),
]
INSIDE = {"name": "inside", "holds": 2, "bandwidth": 1e6, "latency": 0.0}
NETWORK = {"name": "network", "bandwidth": 1e2, "latency": 0.0, "shared_by": 2}


def make_problem_on_servers(
    seed: int, memory: float = 1e9, count: int = 6, **changes: Any
) -> Problem:
    """Return a problem of units of random sizes on servers of two devices of 1 FLOP a second."""
    rng = np.random.default_rng(seed)
    units = tuple(
        Unit(f"unit{i}", f, 2 * f, int(rng.integers(0, 30)), 4.0 * rng.integers(1, 9), 40.0)
        for i, f in enumerate(rng.integers(1, 9, count).astype(float).tolist())
    )
    rates = {"float32": {"peak_flops": 1.0, "achievable_share": 1.0}}
    device = {"memory_bytes": 1e4, "usable_share": 1.0, "memory_bandwidth": 1e9, "rates": rates}
    figures = {"devices": 4, "device": device, "links": [INSIDE, NETWORK]}
    hardware = read_hardware({**figures, **changes}, "here")
    return Problem(units, 8.0, hardware, memory, "float32", 1)


def draw_slow_links(seed: int) -> Any:
    """Return the links of servers of two or four devices, between fast and the bottleneck."""
    rng = np.random.default_rng(seed)
    holds, inside = int(rng.choice([2, 4])), 10 ** rng.uniform(0.5, 4)
    network = {**NETWORK, "bandwidth": 10 ** rng.uniform(0.5, 2.5), "latency": 1.0}
    return [{**INSIDE, "holds": holds, "bandwidth": inside, "latency": 0.3}, network]


def find_costings(problem: Problem, candidates: Any) -> List[Tuple[Costing, List[int]]]:
    """Return the costing and the cut of every candidate that fits, on every layout."""
    found = []
    for candidate in candidates:
        sums = UnitSums(problem, candidate.micro_batch_size)
        for layout in list_layouts(candidate.depth, candidate.width, candidate.placement):
            costing = Costing(problem, candidate, layout, sums)
            starts = costing.find_cut()
            found += [(costing, starts)] if starts is not None else []
    return found


@pytest.mark.parametrize("seed, memory, methods, batch, changes", [
    (0, 1e9, PIPELINES, 16, {}),
    (1, 4000.0, PIPELINES, 16, {}),
    (2, 1500.0, PIPELINES, 16, {}),
    (1, 1e9, ["pipedream_flush", *BY_DEVICE], 8, {}),
    (1, 2500.0, ["pipedream_flush", *BY_DEVICE], 8, {}),
    (0, 4000.0, FLUSHING, 16, {"lockstep": True}),
    (0, 1e9, PIPELINES[:3], 16, {"devices": 8, "links": draw_slow_links(0)}),
    (3, 3000.0, PIPELINES[:3], 16, {"devices": 8, "links": draw_slow_links(3)}),
])  # fmt: skip
def test_slow_links_hide_nothing_from_the_search(
    seed: int, memory: float, methods: List[str], batch: int, changes: Any
) -> None:
    """The search lists the best of all played candidates, and counts the others by the reason
    why it left them out."""
    devices = changes.get("devices", 4)
    task = make_problem_on_servers(seed, memory, count=max(6, devices), **changes)
    candidates = list(list_candidates(methods, devices, len(task.units), batch))
    result, rates, fits = search(task, candidates, 5), {}, set()
    for plan in (predict_cut(*found) for found in find_costings(task, candidates)):
        shape = plan.candidate.shape
        rates[shape] = max(plan.samples_per_second, rates.get(shape, 0.0))
        fits.add(plan.candidate)
    best = [plan.samples_per_second for plan in result.best]
    assert best or memory < 2000
    assert best == pytest.approx(sorted(rates.values(), reverse=True)[:5], rel=1e-9)
    shown = {plan.candidate.shape for plan in result.best}
    alike = sum(candidate.shape in shown for candidate in candidates)
    assert result.refused.get(ALIKE, 0) == alike - len(result.best)
    without_room = [one for one in candidates if one not in fits and one.shape not in shown]
    assert result.refused.get(NO_ROOM, 0) <= len(without_room)
    assert sum(result.refused.values()) + len(result.best) == len(candidates)
    for plan in result.best:
        assert max(device.total for device in plan.memory) <= memory
        assert len(plan.memory) == plan.candidate.depth


def test_least_memory_is_where_it_begins_to_fit() -> None:
    task = make_problem_on_servers(0, memory=10.0)
    candidates = list(list_candidates(PIPELINES, 4, 6, 16))
    assert not search(task, candidates, 5).best
    least_memory = find_least_memory(task, candidates)
    enough, short = (replace(task, memory_bytes=least_memory[0] + more) for more in (0, -1))
    assert search(enough, candidates, 1).best and not search(short, candidates, 1).best


@pytest.mark.parametrize(
    "method, lockstep",
    [*((name, False) for name in [*PIPELINES, *BY_DEVICE]), *((name, True) for name in FLUSHING)],
)
def test_long_batches_are_extended_as_the_clock_would_play_them(
    method: str, lockstep: bool
) -> None:
    """The extrapolated time of a batch of 90 microbatches equals the time of a clock that plays
    all of them, and the search's bound is not above it."""
    links = [{"name": "all", "bandwidth": 50.0, "latency": 0.1}]
    for seed in range(2):
        task = make_problem_on_servers(seed, devices=3, lockstep=lockstep, links=links)
        costing, starts = next(
            (costing, starts)
            for costing, starts in find_costings(task, list_candidates([method], 3, 6, 90))
            if costing.candidate.shape[1] == 3 and costing.candidate.gradient_accumulation == 90
        )
        row, stages = costing.candidate.method_row, costing.candidate.stages
        costs = costing.compute_costs(starts)
        seconds = BatchTimes(row, stages, costs).compute(90).seconds
        make = make_lockstep_schedule if lockstep else make_schedule
        # of a pipeline that never empties: the whole run's rate, its fill and drain apart
        counts = (90,) if row.flushes else (180, 360)
        played = [clock(make(row, stages, count, 90), costs).finish for count in counts]
        expected = played[0] if row.flushes else (played[1] - played[0]) / 2
        assert seconds == pytest.approx(expected, rel=1e-6)
        assert costing.bound_seconds(costs) <= seconds * (1 + 1e-9)


def test_bounds_hold_where_messages_wait() -> None:
    """If all-reduces and activations share links, the bound of a cut is not above the played
    time."""
    task = make_problem_on_servers(20, count=8, devices=8, links=draw_slow_links(20))
    for costing, starts in find_costings(task, list_candidates(PIPELINES[:3], 8, 8, 32, (False,))):
        pipeline, candidate = costing.make_batch_times(starts), costing.candidate
        seconds = pipeline.compute(candidate.gradient_accumulation).seconds
        # a batch of a pipeline that never empties may be a little shorter than those around it
        slack = 1e-9 if candidate.method_row.flushes else 0.003
        assert costing.bound_seconds(pipeline.costs) <= seconds * (1 + slack)


def test_a_gpt_on_32_devices_plays_few_passes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's bounds save most passes; their count is the same on every machine."""
    timing = Mock(wraps=time_first_updates)
    monkeypatch.setattr(batch_times, "time_first_updates", timing)
    embedding = Unit("0", 0.0, 0.0, 84_557_824, 3407872.0, 6144.0)
    block = Unit("", 35769024512.0, 72410464256.0, 33_248_384, 3407872.0, 54587392.0)
    head = Unit("65", 85714796544.0, 171429593088.0, 83_756_160, 0.0, 3407872.0)
    units = (embedding, *(replace(block, name=str(i)) for i in range(1, 65)), head)
    hardware = read_hardware("v100x8").with_devices(32)
    task = Problem(units, 4096.0, hardware, hardware.device.usable_bytes, "float16", 2)
    candidates = list(list_candidates(PIPELINES[:3], 32, len(units), 256))
    assert len(search(task, candidates, 10).best) == 10
    schedules = [call[0][0] for call in timing.call_args_list]
    assert 0 < sum(2 * one.stages * one.microbatches for one in schedules) < 250_000


def test_no_steady_state_is_faster_than_the_slowest_stage() -> None:
    """In this GPipe gradients wait for the last stages' all-reduces: the times of batches of 4,
    8 and 12 are on a line that the second stage determines, from about 14 on one that the first
    stage determines."""
    out, back = ("from 0", "to 1"), ("from 1", "to 0")
    servers = ("from 0", "to 0"), ("from 1", "to 1")
    costs = Costs(
        [15.0, 13.0, 11.0, 12.0], [30.0, 26.0, 22.0, 24.0], [0.0] * 4,
        onward=(Transfer(0.0, 0.3), Transfer(0.65, 1.0, out), Transfer(0.0, 0.3)),
        back=(Transfer(0.0, 0.3), Transfer(0.65, 1.0, back), Transfer(0.0, 0.3)),
        reduce=tuple(Transfer(seconds, 2.0, servers[s // 2]) for s, seconds in enumerate((12.4, 15.0, 35.2, 56.7))),
    )  # fmt: skip
    gpipe = METHODS["gpipe"]
    pipeline = BatchTimes(gpipe, 4, costs)
    slopes = np.diff([pipeline.compute(count).seconds for count in (4, 8, 12)])
    assert slopes[0] == pytest.approx(slopes[1]) and slopes[0] < 4 * 45
    for count in (32, 100):
        played = clock(make_schedule(gpipe, 4, count, count), costs).finish
        seconds = BatchTimes(gpipe, 4, costs).compute(count).seconds
        assert seconds == pytest.approx(played, rel=1e-9)
