"""Check memory and utilization against the papers' figures, and against counts on the schedules themselves."""

from __future__ import annotations

import json
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch

from ipu_pipe.config.load import load_config
from ipu_pipe.hardware.paper_figures import (
    PipelineSizes,
    compute_paper_figures,
    compute_pipedream_ratio,
    compute_worker_footprint,
)
from ipu_pipe.model.stages import describe_stages, partition
from ipu_pipe.report.memory import compute_memory_figures
from ipu_pipe.run.build import build
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import amortize_utilization, compute_utilization, make_schedule
from ipu_pipe.schedule.versions import VersionTable, count_kept_by_segments, count_weight_copies
from models import resnet
from tests.slot_simulation import PLAYED
from tests.support.runs import DIGITS

# ---- weights and optimizer


@pytest.mark.parametrize("moments, copies, ratio", [(0, 2, 1.5), (1, 3, 4 / 3), (2, 4, 1.25)])
def test_copies_of_the_weights(moments: int, copies: int, ratio: float) -> None:
    """PipeMare's Table 2 states 1.33x for momentum SGD with T2, and 1.25x for Adam."""
    for t2, expected in ((0, 1.0), (1, ratio)):
        sizes = make_figure_arguments("gpipe", 3, 4, moments=moments, t2=t2)
        figures = compute_paper_figures(sizes)
        assert figures["weight_optimizer_copies"] == copies + t2
        assert figures["weight_optimizer_ratio"] == pytest.approx(expected)


def test_copies_of_the_weights_with_two_rules_that_keep_state() -> None:
    """Story: 2BW has two versions, a gradient, the momentum and two accumulators, which were counted as one."""
    rules = "method_args={delay_compensation: {adaptive: true}, error_feedback: {}}"
    changes = ["method=pipedream_2bw", "stages=2", "steps=4", rules]
    figures = compute_memory_figures(build(load_config(DIGITS, changes)))
    assert figures is not None and figures["weight_optimizer_copies"] == 6


@pytest.mark.parametrize(
    "classes, parameters, memory, N, ratios, paper",
    [
        (10, 23_520_842, 269.2, 8, [2.67, 2.87], 2.70),
        (1000, 25_557_032, 292.5, 16, [1.59, 1.79], 1.61),
    ],
)
def test_memory_of_resnet50(
    classes: int, parameters: int, memory: float, N: int, ratios: List[float], paper: float
) -> None:
    """PipeMare's Table 2 states 270 and 293, with MiB called MB, and PipeDream's ratios."""
    model = resnet.resnet50(classes, small_images=classes == 10)
    part = partition(model, torch.zeros(1, 3, 32, 32), "finest")
    weights = [size for _, _, size in describe_stages(part, model)]
    assert len(weights) == 107 and sum(weights) == parameters
    assert 3 * 4 * sum(weights) / 2**20 == pytest.approx(memory, abs=0.05)  # momentum SGD
    found = [compute_pipedream_ratio(weights, 3, N, rounded) for rounded in (False, True)]
    assert found == pytest.approx(ratios, abs=0.005) and found[0] == pytest.approx(paper, abs=0.035)


@pytest.mark.parametrize("P, N", [(2, 1), (5, 3), (9, 4)])
def test_pipedream_rounded_counts_the_dataflow_schedules_lags(P: int, N: int) -> None:
    """Check with weights on one stage alone, where the ratio determines that stage's delay tau."""
    method = resolve_method("pipedream", {"schedule": "dataflow", "turn": 1})
    lags = VersionTable(make_schedule(method, P, 1, N), method).greatest_lag().tolist()
    taus = [compute_pipedream_ratio(unit, 3, N, rounded=True) * 3 - 2 for unit in np.eye(P)]
    assert taus == pytest.approx(lags)


# ---- activations


def count_in_flight(name: str, P: int, M: int, turn: int = 1) -> List[int]:
    method = resolve_method(name, {"turn": turn})
    return list(make_schedule(method, P, M, 1).max_in_flight().tolist())


def count_kept(P: int, segments: int) -> List[int]:
    """Return the microbatches of which PipeMare's stages keep something with recomputation."""
    kept = count_kept_by_segments(count_in_flight("pipemare", P, 3 * P), segments, 1)
    return list((kept.inputs + kept.activations).tolist())


def test_one_stage_keeps_one_microbatch() -> None:
    assert count_in_flight("pipemare", 1, 4) == [1]
    # no turn: nothing is recomputed ahead
    assert [counts.tolist() for counts in count_kept_by_segments([3], 0, 1)] == [[2], [1]]


def test_recompute_stash_of_the_papers_example() -> None:
    """PipeMare's Figure 9 shows 16 stages in 4 segments. The schedule's stash has 2 more: the step itself and the turn,
    which appendix A.3 omits."""
    heads = {0: 30, 4: 22, 8: 14, 12: 6}
    expected = [heads.get(s, 2 * (3 - s % 4)) + 2 for s in range(16)]
    # 4 is the square root, which is the default
    assert count_kept(16, 4) == count_kept(16, 0) == expected
    assert count_kept(7, 3) == [14, 4, 2, 8, 2, 4, 2]  # segments of 3, 2, 2


@pytest.mark.parametrize("root", [2, 3, 7, 10])
def test_activations_have_the_orders_of_table_4(root: int) -> None:
    """PipeMare, Table 4, states P^2 and, with recomputation by sqrt(P) segments, P^(3/2)."""
    P = root**2
    assert sum(count_in_flight("pipemare", P, 3 * P)) == P**2 + P
    assert sum(count_kept(P, root)) == 2 * root**3


@pytest.mark.parametrize("P, order", [(107, 0.097), (91, 0.105), (93, 0.104)])
def test_recompute_ratios(P: int, order: float) -> None:
    """PipeMare, Table 5, states the ratio of orders; the counts come to about twice that."""
    figures = compute_paper_figures(make_figure_arguments("pipemare", P, 8))
    assert figures["recompute_ratio_order"] == pytest.approx(order, abs=0.0005)


def count_bytes_step_by_step(
    P: int, M: int, turn: int, segments: int, saved: np.ndarray, entering: np.ndarray
) -> Tuple[int, int]:
    """Count the stashed bytes after the forward of each step of the schedule, before its backward; return the greatest
    counts without and with recomputation."""
    schedule = make_schedule(resolve_method("pipemare", {"turn": turn}), P, M, 1)
    forward, backward = (schedule.slots(kind, 0, M) for kind in (Kind.FORWARD, Kind.BACKWARD))
    most = [0, 0]
    groups = np.array_split(np.arange(P), segments)
    for step in range(schedule.slot_count):
        alive = (forward <= step) & (step <= backward)
        with_recompute = 0
        for group in groups:
            # a segment recomputes forward, one stage a step, and ends as its last stage turns the microbatch around
            last = backward[group[-1]] - (turn if P > 1 else 0)
            for s in group:
                recomputed = alive[s] & (last - (group[-1] - s) <= step)
                with_recompute += saved[s] * recomputed.sum()
                if s == group[0]:
                    with_recompute += entering[s] * (alive[s] & ~recomputed).sum()
        most = [max(most[0], (saved * alive.sum(axis=1)).sum()), max(most[1], with_recompute)]
    return int(most[0]), int(most[1])


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("P, segments", [(1, 1), (2, 1), (5, 2), (9, 3), (10, 4), (6, 6)])
def test_activation_bytes_are_those_of_the_schedule_played_out(
    P: int, segments: int, turn: int
) -> None:
    sizes = np.random.default_rng(P)
    saved, entering = sizes.integers(100, 200, P), sizes.integers(1, 50, P)
    for M in (3 * P, 3, 1) if P > 2 else (3 * P,):
        flying = count_in_flight("pipemare", P, M, turn)
        kept = count_kept_by_segments(flying, segments, turn)
        recomputed = saved * kept.activations + entering * kept.inputs
        counted = (int((saved * flying).sum()), int(recomputed.sum()))
        expected = count_bytes_step_by_step(P, M, turn, segments, saved, entering)
        assert all(bound >= most for bound, most in zip(counted, expected))
        if M == 3 * P:  # only a full pipeline has all its stages at their peaks together
            assert counted == expected


# ---- the memory of a worker


def test_worker_footprint_equals_the_counts_of_the_schedules() -> None:
    """The first stage's in-flight microbatches and its weight versions are those of the schedules."""
    for d, m in ((4, 16), (4, 4), (3, 7), (6, 2)):
        for recompute in (False, True):
            counted = compute_worker_footprint(0, 0 if recompute else d, 1, d, m, recompute)
            for name, flying in counted.items():
                if name == "pipedream_2bw" and m < d:
                    assert flying is None
                else:
                    schedule = make_schedule(METHODS[name], d, 4 * m, m)
                    assert flying == schedule.max_in_flight()[0], (name, d, m)
                    versions = compute_worker_footprint(d, 0, 0, d, m, recompute)[name]
                    assert versions == count_weight_copies(VersionTable(schedule, METHODS[name]))[0]


# ---- utilization


@pytest.mark.parametrize("P, N, percent", [(107, 8, 7), (107, 16, 13), (93, 19, 17), (91, 116, 56)])
def test_gpipe_utilization(P: int, N: int, percent: int) -> None:
    """PipeMare's Table 1 states the formula, its Table 2 these percentages."""
    busy = compute_utilization(METHODS["gpipe"], P, N)
    assert busy == pytest.approx(N / (N + P - 1), rel=1e-12) and round(100 * busy) == percent


def test_amortized_utilization() -> None:
    """Table 2 states for PipeMareW 33 % on ImageNet, with 30 of 100 epochs synchronous, and 96 % on WMT, with 4 of 80."""
    for asynchronous, synchronous, P, N, percent in ((70, 30, 107, 16, 33), (76, 4, 91, 116, 96)):
        busy = amortize_utilization([(synchronous, N / (N + P - 1)), (asynchronous, 1)])
        assert round(100 * busy) == percent
    assert amortize_utilization([(0, 0.1), (5, 1)]) == 1
    assert amortize_utilization([(5, 0.1)]) == pytest.approx(0.1)


# ---- the whole report


def make_figure_arguments(name: str, P: int, N: int, **others: Any) -> PipelineSizes:
    schedule = make_schedule(METHODS[name], P, 12 * max(P, N), N)
    sizes = {
        "weight_bytes": [4 * (s + 1) for s in range(P)], "saved_bytes": [100 + s for s in range(P)],
        "input_bytes": [10 + s % 3 for s in range(P)], "moments": 1, "t2": False, "method": METHODS[name],
        "accumulate": N,
        "in_flight": schedule.max_in_flight(),
        "weight_copies": count_weight_copies(VersionTable(schedule, METHODS[name])), **others,
    }  # fmt: skip
    return PipelineSizes(**sizes)


def test_report_of_pipemare() -> None:
    """Check every figure for four stages, N = 8 and two segments."""
    two_segments = resolve_method("pipemare", {"recompute": {"segments": 2}})
    figures = compute_paper_figures(
        make_figure_arguments("pipemare", 4, 8, t2=1, method=two_segments)
    )
    weights, activations = [4, 8, 12, 16], 100 + 101 + 102 + 103
    # Narayanan et al. 2021, section 3, d = 4, m = 8: versions of the weights, and microbatches in flight
    counts = {"gpipe": (1, 8), "pipedream_flush": (1, 4), "pipedream_2bw": (2, 4)}
    per_worker = {
        name: {
            "with_recompute": versions * 10 + activations / 4 + flying * 12,
            "without_recompute": versions * 10 + flying * activations / 4,
        }
        for name, (versions, flying) in counts.items()
    }
    assert figures == {
        "weight_optimizer_copies": 4.0,
        "weight_optimizer_ratio": pytest.approx(4 / 3),
        "weight_optimizer_bytes": 4 * 40,
        "pipedream_ratio": compute_pipedream_ratio(weights, 3, 8, False),
        "pipedream_ratio_rounded": 1.0,
        "activation_bytes": 8 * 100 + 6 * 101 + 4 * 102 + 2 * 103,
        "activation_bytes_with_recompute": 4 * 100 + 4 * 10 + 2 * 101 + 4 * 102 + 2 * 103,
        "stash_microbatches": [8, 6, 4, 2],
        "stash_microbatches_with_recompute": [8, 2, 4, 2],
        "recompute_ratio_counted": 16 / 20,
        "recompute_ratio_order": 0.5,
        "footprint_per_worker": per_worker,
    }
    # two are the square root of four
    assert compute_paper_figures(make_figure_arguments("pipemare", 4, 8, t2=1)) == figures
    # the figures go by the method as changed
    flying = [7, 5, 3, 1]
    plain = compute_paper_figures(make_figure_arguments("pipelined_backprop", 4, 8))
    assert plain["stash_microbatches"] == flying
    assert plain["stash_microbatches_with_recompute"] == [7, 1, 3, 1]
    turned = resolve_method("pipelined_backprop", {"turn": 1})
    arguments = {"in_flight": np.array(flying) + 1, "method": turned}
    figures = compute_paper_figures(make_figure_arguments("pipelined_backprop", 4, 8, **arguments))
    assert figures["stash_microbatches_with_recompute"] == [8, 2, 4, 2]
    other = resolve_method("pipemare", {"schedule": "1f1b"})
    figures = compute_paper_figures(make_figure_arguments("pipemare", 4, 8, method=other))
    assert figures["recompute_ratio_order"] is None


def test_report_counts_older_versions_of_the_weights() -> None:
    """Two versions of everything with 2BW: 1 + 3 copies; PipeDream's are the schedule's, stage by stage."""
    figures = compute_paper_figures(make_figure_arguments("pipedream_2bw", 3, 4))
    assert figures["weight_optimizer_copies"] == 4.0
    figures = compute_paper_figures(make_figure_arguments("pipedream", 3, 1, moments=2))
    size = 4 * (3 + 3) + 8 * (3 + 2) + 12 * (3 + 1)
    assert figures["weight_optimizer_bytes"] == size
    assert figures["weight_optimizer_ratio"] == pytest.approx(size / (4 * 24))
    assert figures["pipedream_ratio"] == pytest.approx((3 + (4 * 5 + 8 * 3 + 12 * 1) / 24) / 4)


@pytest.mark.parametrize("name", PLAYED)
def test_report_of_every_method_is_null_where_a_figure_has_no_meaning(name: str) -> None:
    figures = compute_paper_figures(make_figure_arguments(name, 5, 6))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    null = [key for key, value in figures.items() if value is None]
    assert (null == []) == (name in ("pipemare", "pipelined_backprop", "spectrain"))
    assert all("recompute" in key for key in null)
    single = compute_paper_figures(make_figure_arguments(name, 1, 2))
    assert single["pipedream_ratio"] is single["recompute_ratio_order"] is None
