"""Test that the planner's search does little work and finds the same plans: bounds, and passes
played one by one, against trying all candidates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List

import numpy as np
import pytest

from ipu_pipe.hardware.description import Hardware, read_hardware
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan import batch_times
from ipu_pipe.plan.batch_times import BatchTimes
from ipu_pipe.plan.candidates import Candidate, list_candidates, list_layouts
from ipu_pipe.plan.planner import ALIKE, NO_ROOM, search
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, UnitSums, predict_cut
from ipu_pipe.schedule.clock import Costs, Transfer, clock, time_first_updates
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule

PIPELINES = ["pipedream_2bw", "pipedream_flush", "gpipe"]


def make_slow_servers(seed: int, devices: int = 8) -> Hardware:
    """Return servers of two or four devices of 1 FLOP a second, with links between fast and the
    bottleneck."""
    rng = np.random.default_rng(seed)
    rates = {"float32": {"peak_flops": 1.0, "achievable_share": 1.0}}
    figures: Dict[str, Any] = {
        "devices": devices,
        "device": {
            "memory_bytes": 1e4,
            "usable_share": 1.0,
            "memory_bandwidth": 1e9,
            "rates": rates,
        },
        "links": [
            {
                "name": "inside",
                "holds": int(rng.choice([2, 4])),
                "bandwidth": 10 ** rng.uniform(0.5, 4),
                "latency": 0.3,
            },
            {
                "name": "network",
                "bandwidth": 10 ** rng.uniform(0.5, 2.5),
                "latency": 1.0,
                "shared_by": 2,
            },
        ],
    }
    return read_hardware(figures, "here")


def make_problem_on_slow_links(
    seed: int, memory: float = 1e9, devices: int = 8, count: int = 8
) -> Problem:
    """Return a problem of units of random sizes on servers with slow links."""
    rng = np.random.default_rng(seed)
    units = tuple(
        Unit(f"unit{i}", f, 2 * f, int(rng.integers(0, 30)), 4.0 * rng.integers(1, 9), 40.0)
        for i, f in enumerate(rng.integers(1, 9, count).astype(float).tolist())
    )
    return Problem(units, 8.0, make_slow_servers(seed, devices), memory, "float32", 1)


def predict_all(problem: Problem, candidates: List[Candidate]) -> List[Prediction]:
    """Return the played prediction of every candidate that fits, on every layout."""
    predictions = []
    for candidate in candidates:
        for layout in list_layouts(candidate.depth, candidate.width):
            costing = Costing(
                problem, candidate, layout, UnitSums(problem, candidate.micro_batch_size)
            )
            starts = costing.find_cut()
            predictions += [predict_cut(costing, starts)] if starts is not None else []
    return predictions


@pytest.mark.parametrize("memory", [1e9, 3000.0])
def test_slow_links_hide_nothing_from_the_search(memory: float) -> None:
    """The search lists the best of all played candidates, and counts the others by the reason
    why it left them out."""
    for seed in (0, 3):
        task = make_problem_on_slow_links(seed, memory)
        candidates = list(list_candidates(PIPELINES, 8, 8, 16))
        result, rates, fits = search(task, candidates, 5), {}, set()
        for plan in predict_all(task, candidates):
            rates[plan.candidate.shape] = max(
                plan.samples_per_second, rates.get(plan.candidate.shape, 0.0)
            )
            fits.add(plan.candidate)
        best = [plan.samples_per_second for plan in result.best]
        assert best == pytest.approx(sorted(rates.values(), reverse=True)[:5], rel=1e-12)
        shown = {plan.candidate.shape for plan in result.best}
        assert result.refused.get(ALIKE, 0) == sum(
            candidate.shape in shown for candidate in candidates
        ) - len(result.best)
        assert result.refused.get(NO_ROOM, 0) <= sum(
            candidate not in fits and candidate.shape not in shown for candidate in candidates
        )
        assert sum(result.refused.values()) + len(result.best) == len(candidates)


def test_bounds_hold_where_messages_wait() -> None:
    """If all-reduces and activations share links, the bound of a cut is not above the played
    time."""
    for seed in (20, 21):
        task = make_problem_on_slow_links(seed)
        for candidate in list_candidates(PIPELINES, 8, 8, 32, (False,)):
            for layout in list_layouts(candidate.depth, candidate.width):
                costing = Costing(
                    task, candidate, layout, UnitSums(task, candidate.micro_batch_size)
                )
                starts = costing.find_cut()
                assert starts is not None
                pipeline, count = costing.make_batch_times(starts), candidate.gradient_accumulation
                least = costing.bound_seconds(pipeline.costs)
                # a batch of a pipeline that never empties may be a little shorter than those around it
                most = pipeline.compute(count).seconds * (
                    1.003 if not METHODS[candidate.method].flushes else 1 + 1e-9
                )
                assert least <= most, (candidate, layout)


def count_played_passes(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """Patch the clock's player of single passes, and return a list that gets the count of each
    call."""
    counts: List[int] = []

    def time_and_count(schedule: Schedule, costs: Costs, updates: int) -> Any:
        counts.append(2 * schedule.stages * schedule.microbatches)
        return time_first_updates(schedule, costs, updates)

    monkeypatch.setattr(batch_times, "time_first_updates", time_and_count)
    return counts


def test_a_gpt_on_32_devices_plays_few_passes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's bounds save most passes; their count is the same on every machine."""
    embedding = Unit(
        "0",
        0.0,
        0.0,
        84_557_824,
        3407872.0,
        6144.0,
        forward_moved=182755328.0,
        backward_moved=179345408.0,
    )
    block = Unit(
        "", 35769024512.0, 72410464256.0, 33_248_384, 3407872.0, 54587392.0, forward_moved=71586816.0,
        backward_moved=173866240.0,
    )  # fmt: skip
    norm = Unit(
        "65",
        0.0,
        0.0,
        3328,
        3407872.0,
        3411968.0,
        forward_moved=6826496.0,
        backward_moved=10241024.0,
    )
    head = Unit(
        "66", 85714796544.0, 171429593088.0, 83_756_160, 0.0, 3407872.0, backward_moved=103123200.0
    )
    units = (embedding, *(replace(block, name=str(i)) for i in range(1, 65)), norm, head)
    hardware = read_hardware("v100x8").with_devices(32)
    task = Problem(units, 4096.0, hardware, hardware.device.usable_bytes, "float16", 2)
    candidates = list(list_candidates(PIPELINES, 32, len(units), 256))
    counts = count_played_passes(monkeypatch)
    answer = search(task, candidates, 10)
    assert len(answer.best) == 10
    assert 0 < sum(counts) < 200_000, sum(counts)


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
    slopes = [pipeline.compute(n + 4).seconds - pipeline.compute(n).seconds for n in (4, 8)]
    assert slopes[0] == pytest.approx(slopes[1]) and slopes[0] < 4 * 45
    for count in (32, 100):
        assert BatchTimes(gpipe, 4, costs).compute(count).seconds == pytest.approx(
            clock(make_schedule(gpipe, 4, count, count), costs).finish, rel=1e-9
        )
