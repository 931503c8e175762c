"""Check memory and utilization against the papers' figures, and against counts on the schedules themselves."""

from __future__ import annotations

import json
import math
from functools import lru_cache
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

MIB = 2**20


@lru_cache(maxsize=None)
def count_resnet50_weights(classes: int) -> Tuple[int, ...]:
    """Return the parameters of each stage of ResNet-50, with one stage for each weight tensor."""
    model = resnet.resnet50(classes, small_images=classes == 10)
    part = partition(model, torch.zeros(1, 3, 32, 32), "finest")
    return tuple(size for _, _, size in describe_stages(part, model))


# ---- weights and optimizer


@pytest.mark.parametrize("moments, copies, ratio", [(0, 2, 1.5), (1, 3, 4 / 3), (2, 4, 1.25)])
def test_copies_of_the_weights(moments: int, copies: int, ratio: float) -> None:
    """PipeMare's Table 2 states 1.33x for momentum SGD with T2, and 1.25x for Adam."""
    without, accumulator = (
        compute_paper_figures(make_figure_arguments("gpipe", 3, 4, moments=moments, t2=t2))
        for t2 in (0, 1)
    )
    assert (without["weight_optimizer_copies"], without["weight_optimizer_ratio"]) == (copies, 1.0)
    assert accumulator["weight_optimizer_ratio"] == pytest.approx(ratio)


def test_copies_of_the_weights_with_two_rules_that_keep_state() -> None:
    """Story: 2BW has two versions, a gradient, the momentum and two accumulators, which were counted as one."""
    rules = "method_args={delay_compensation: {adaptive: true}, error_feedback: {}}"
    job = build(
        load_config(
            "configs/mlp_digits.yaml", ["method=pipedream_2bw", "stages=2", "steps=4", rules]
        )
    )
    figures = compute_memory_figures(job)
    assert figures is not None and figures["weight_optimizer_copies"] == 6


@pytest.mark.parametrize(
    "classes, parameters, mib, paper",
    [(10, 23_520_842, 269.2, 270), (1000, 25_557_032, 292.5, 293)],
)
def test_memory_of_resnet50(classes: int, parameters: int, mib: float, paper: int) -> None:
    """PipeMare's Table 2 states these figures, with MiB called MB."""
    weights = count_resnet50_weights(classes)
    assert len(weights) == 107 and sum(weights) == parameters
    size = 3 * 4 * sum(weights) / MIB  # momentum SGD
    assert size == pytest.approx(mib, abs=0.05) and size == pytest.approx(paper, abs=1)


@pytest.mark.parametrize(
    "classes, N, plain, rounded, paper", [(10, 8, 2.67, 2.87, 2.70), (1000, 16, 1.59, 1.79, 1.61)]
)
def test_pipedream_on_resnet50(
    classes: int, N: int, plain: float, rounded: float, paper: float
) -> None:
    weights = count_resnet50_weights(classes)
    ratios = [compute_pipedream_ratio(weights, 3, N, up) for up in (False, True)]
    assert ratios == pytest.approx([plain, rounded], abs=0.005)
    assert ratios[0] == pytest.approx(paper, abs=0.035)


def test_pipedream_by_hand() -> None:
    """On three stages with N = 2 the delays tau are 5/2, 3/2 and 1/2."""
    weights = [1, 2, 5]
    exact = (3 + (2.5 + 2 * 1.5 + 5 * 0.5) / 8) / 4
    assert compute_pipedream_ratio(weights, 4, 2, rounded=False) == pytest.approx(exact)
    assert compute_pipedream_ratio(weights, 3, 2, rounded=True) == pytest.approx(
        (2 + (3 + 2 * 2 + 5 * 1) / 8) / 3
    )


@pytest.mark.parametrize("P, N", [(2, 1), (5, 3), (9, 4)])
def test_pipedream_rounded_counts_the_dataflow_schedules_lags(P: int, N: int) -> None:
    """Check with weights on one stage alone, where the ratio determines that stage's delay tau."""
    method = resolve_method("pipedream", {"schedule": "dataflow", "turn": 1})
    lags = VersionTable(make_schedule(method, P, 1, N), method).greatest_lag().tolist()
    taus = [compute_pipedream_ratio(unit, 3, N, rounded=True) * 3 - 2 for unit in np.eye(P)]
    assert taus == pytest.approx(lags)


# ---- activations


def count_activation_stash(P: int, turn: int = 1) -> np.ndarray:
    """Return the microbatches (P,) that each stage of the dataflow schedule keeps between two steps,
    without recomputation: 2(P-i) + turn."""
    return 2 * np.arange(P - 1, -1, -1) + (turn if P > 1 else 0)


def count_recompute_stash(P: int, segments: int = 0) -> np.ndarray:
    """Return the microbatches (P,) that PipeMare keeps with recomputation, as its appendix A.3 counts them, without the turn.

    The first stage of a segment keeps at least the input of the 2(P-i) microbatches that it has sent on. The j-th stage (from 1)
    of a segment of S keeps the 2(S-j) whose activations are recomputed before their backward.
    """
    stash: List[int] = []
    for segment in np.array_split(np.arange(P), segments or round(math.sqrt(P))):
        stash += [2 * (P - 1 - s) if s == segment[0] else 2 * (segment[-1] - s) for s in segment]
    return np.array(stash)


def count_in_flight(name: str, P: int, M: int, turn: int = 1) -> List[int]:
    return list(
        make_schedule(resolve_method(name, {"turn": turn}), P, M, 1).max_in_flight().tolist()
    )


@pytest.mark.parametrize("P", [2, 3, 8, 107])
def test_stash_is_the_schedules_but_for_the_step_itself(P: int) -> None:
    """The stash is 2(P-i) + turn between steps, and one more inside a step, after its forward; appendix A.3 omits the turn."""
    between = count_activation_stash(P)
    assert between.tolist() == [2 * (P - i) + 1 for i in range(1, P + 1)]
    assert (between + 1).tolist() == count_in_flight("pipemare", P, 4 * P)
    assert (count_activation_stash(P, turn=0) + 1).tolist() == count_in_flight(
        "pipelined_backprop", P, 4 * P, turn=0
    )
    paper = count_recompute_stash(P, P)  # every stage a segment: 2(P-i)
    assert paper.tolist() == [2 * (P - i) for i in range(1, P + 1)]
    assert (paper + 2).tolist() == count_in_flight("pipemare", P, 4 * P)


def test_one_stage_keeps_one_microbatch() -> None:
    assert count_activation_stash(1).tolist() == [0] and count_in_flight("pipemare", 1, 4) == [1]
    # no turn: nothing is recomputed ahead
    assert [counts.tolist() for counts in count_kept_by_segments([3], 0, 1)] == [[2], [1]]


def test_no_more_is_recomputed_than_is_in_flight() -> None:
    assert [counts.tolist() for counts in count_kept_by_segments([2, 2, 1], 1, 1)] == [
        [0, 0, 0],
        [2, 2, 1],
    ]
    assert [counts.tolist() for counts in count_kept_by_segments([9, 9, 9], 1, 1)] == [
        [3, 0, 0],
        [6, 4, 2],
    ]


def test_recompute_stash_of_the_papers_example() -> None:
    """PipeMare's Figure 9 shows 16 stages in 4 segments."""
    heads = {0: 30, 4: 22, 8: 14, 12: 6}
    expected = [heads.get(s, 2 * (3 - s % 4)) for s in range(16)]
    assert count_recompute_stash(16, 4).tolist() == expected
    assert count_recompute_stash(16).tolist() == expected
    assert count_recompute_stash(7, 3).tolist() == [12, 2, 0, 6, 0, 2, 0]  # segments of 3, 2, 2


@pytest.mark.parametrize("root", [2, 3, 7, 10])
def test_activations_have_the_orders_of_table_4(root: int) -> None:
    """PipeMare, Table 4, states P^2 and, with recomputation by sqrt(P) segments, P^(3/2)."""
    P = root**2
    flying = count_in_flight("pipemare", P, 3 * P)
    kept_counts = count_kept_by_segments(flying, root, 1)
    assert sum(flying) == P**2 + P
    assert (kept_counts.inputs + kept_counts.activations).sum() == 2 * root**3


@pytest.mark.parametrize(
    "P, segments, order, counted",
    [
        (107, 10, 0.097, 1982 / 11449), (107, 11, 0.097, 1982 / 11449),
        (107, 0, 0.097, 1982 / 11449), (91, 0, 0.105, 1548 / 8281),
        (93, 10, 0.104, 1590 / 8649), (91, 10, 0.105, 1548 / 8281), (91, 9, 0.105, 1550 / 8281),
    ],
)  # fmt: skip
def test_recompute_ratios(P: int, segments: int, order: float, counted: float) -> None:
    """PipeMare, Table 5, states the ratio of orders; the counts come to about twice that."""
    figures = compute_paper_figures(make_figure_arguments("pipemare", P, 8))
    assert figures["recompute_ratio_order"] == pytest.approx(order, abs=0.0005)
    ratio = count_recompute_stash(P, segments).sum() / count_activation_stash(P).sum()
    assert ratio == pytest.approx(counted, rel=1e-12) and 0.17 <= ratio <= 0.20
    flying = count_in_flight("pipemare", P, 3 * P)
    kept_counts = count_kept_by_segments(flying, segments, 1)
    assert (
        kept_counts.inputs + kept_counts.activations == count_recompute_stash(P, segments) + 2
    ).all()


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
        kept_counts = count_kept_by_segments(flying, segments, turn)
        counted = (
            int((saved * flying).sum()),
            int((saved * kept_counts.activations + entering * kept_counts.inputs).sum()),
        )
        expected = count_bytes_step_by_step(P, M, turn, segments, saved, entering)
        assert counted[0] >= expected[0] and counted[1] >= expected[1]
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
    for asynchronous, synchronous, (P, N), percent in (
        (70, 30, (107, 16), 33),
        (76, 4, (91, 116), 96),
    ):
        assert (
            round(100 * amortize_utilization([(synchronous, N / (N + P - 1)), (asynchronous, 1)]))
            == percent
        )
    assert amortize_utilization([(0, 0.1), (5, 1)]) == 1
    assert amortize_utilization([(5, 0.1)]) == pytest.approx(0.1)


def test_the_dataflow_schedule_is_busy_by_the_papers_law() -> None:
    """The utilization of N samples on S stages is N/(N+2S-2) (Kosson et al. 2021)."""
    for N, S in ((1, 1), (1, 4), (7, 4), (100, 34)):
        assert make_schedule(METHODS["pipelined_backprop"], S, N, N).slot_count == N + 2 * S - 2


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
    weights, saved, entering = [4, 8, 12, 16], [100, 101, 102, 103], [10, 11, 12, 10]
    total, activations = sum(weights), sum(saved)
    assert figures == {
        "weight_optimizer_copies": 4.0,
        "weight_optimizer_ratio": pytest.approx(4 / 3),
        "weight_optimizer_bytes": 4 * total,
        "pipedream_ratio": compute_pipedream_ratio(weights, 3, 8, False),
        "pipedream_ratio_rounded": 1.0,
        "activation_bytes": 8 * 100 + 6 * 101 + 4 * 102 + 2 * 103,
        "activation_bytes_with_recompute": 4 * 100 + 4 * 10 + 2 * 101 + 4 * 102 + 2 * 103,
        "stash_microbatches": [8, 6, 4, 2],
        "stash_microbatches_with_recompute": [8, 2, 4, 2],
        "recompute_ratio_counted": 16 / 20,
        "recompute_ratio_order": 0.5,
        # Narayanan et al. 2021, section 3, d = 4, m = 8: versions of the weights, and microbatches in flight
        "footprint_per_worker": {
            name: {
                "with_recompute": versions * total / 4 + activations / 4 + flying * max(entering),
                "without_recompute": versions * total / 4 + flying * activations / 4,
            }
            for name, versions, flying in (
                ("gpipe", 1, 8),
                ("pipedream_flush", 1, 4),
                ("pipedream_2bw", 2, 4),
            )
        },
    }
    default = compute_paper_figures(
        make_figure_arguments("pipemare", 4, 8, t2=1)
    )  # two are the square root of four
    assert default == figures == json.loads(json.dumps(figures))


def test_report_counts_older_versions_of_the_weights() -> None:
    """Two versions of everything with 2BW: 1 + 3 copies; PipeDream's are the schedule's, stage by stage."""
    assert (
        compute_paper_figures(make_figure_arguments("pipedream_2bw", 3, 4))[
            "weight_optimizer_copies"
        ]
        == 4.0
    )
    pipedream = make_figure_arguments("pipedream", 3, 1, moments=2)
    figures, copies = compute_paper_figures(pipedream), pipedream.weight_copies.tolist()
    size = sum(weight * (3 + alive) for weight, alive in zip((4, 8, 12), copies))
    assert copies[0] > copies[-1] == 1 and figures["weight_optimizer_bytes"] == size
    assert figures["weight_optimizer_ratio"] == pytest.approx(size / (4 * 24))
    assert figures["pipedream_ratio"] == pytest.approx((3 + (4 * 5 + 8 * 3 + 12 * 1) / 24) / 4)


def test_report_goes_by_the_method_as_changed() -> None:
    turned = resolve_method("pipelined_backprop", {"turn": 1})
    flying = make_schedule(turned, 4, 48, 8).max_in_flight()
    figures = compute_paper_figures(
        make_figure_arguments("pipelined_backprop", 4, 8, in_flight=flying, method=turned)
    )
    assert figures["stash_microbatches_with_recompute"] == [8, 2, 4, 2]
    alternating = resolve_method("pipemare", {"schedule": "1f1b"})
    assert (
        compute_paper_figures(make_figure_arguments("pipemare", 4, 8, method=alternating))[
            "recompute_ratio_order"
        ]
        is None
    )
    plain = compute_paper_figures(make_figure_arguments("pipelined_backprop", 4, 8))
    assert plain["stash_microbatches"] == [7, 5, 3, 1] and plain[
        "stash_microbatches_with_recompute"
    ] == [7, 1, 3, 1]
    assert (
        plain["activation_bytes_with_recompute"] == 3 * 100 + 4 * 10 + 1 * 101 + 3 * 102 + 1 * 103
    )


RECOMPUTED = (
    "activation_bytes_with_recompute", "stash_microbatches_with_recompute", "recompute_ratio_counted",
    "recompute_ratio_order",
)  # fmt: skip


@pytest.mark.parametrize("name", PLAYED)
def test_report_of_every_method_is_null_where_a_figure_has_no_meaning(name: str) -> None:
    figures = compute_paper_figures(make_figure_arguments(name, 5, 6))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    dataflow = name in ("pipemare", "pipelined_backprop", "spectrain")
    assert [key for key, value in figures.items() if value is None] == (
        [] if dataflow else list(RECOMPUTED)
    )
    if name != "pipedream_2bw":
        few = compute_paper_figures(make_figure_arguments(name, 5, 2))["footprint_per_worker"]
        assert few["pipedream_2bw"] == {"with_recompute": None, "without_recompute": None}
        assert few["pipedream_flush"] == few["gpipe"]
        single = compute_paper_figures(make_figure_arguments(name, 1, 2))
        assert all(
            single[key] is None
            for key in (*RECOMPUTED, "pipedream_ratio", "pipedream_ratio_rounded")
        )
