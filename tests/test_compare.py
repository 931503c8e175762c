"""`ipu_pipe.compare`: methods on a loop of the caller's own, beside the same comparison by hand."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
from dataclasses import replace
from html.parser import HTMLParser
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipu_pipe
from ipu_pipe.cli import compare as compare_command
from ipu_pipe.comparison import comparing, stage_times
from ipu_pipe.comparison.config_loop import ConfigLoop
from ipu_pipe.comparison.kept_trainings import describe_loop
from ipu_pipe.comparison.processes import open_workers
from ipu_pipe.comparison.trainings import MethodRow, Training
from ipu_pipe.comparison.verdicts import Estimate, Verdict, judge
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.record import Job
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.refusals import BEGIN
from ipu_pipe.report.static_page import Curve, draw_curves
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.timelines import make_schedule
from tests.command_line import run_here
from tests.support.runs import ROOT
from tools.documented import list_blocks

STAGES = ["2", "4", "6"]
UPDATES = 12


@pytest.fixture(autouse=True)
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the same times in every comparison: a forward 1 s, a backward 2 s, no update."""

    def measure(engine: Any) -> StageSeconds:
        count = len(engine.run.partition)
        nothing = (0.0,) * count
        return StageSeconds((1.0,) * count, (2.0,) * count, nothing, "as the test says", nothing)

    monkeypatch.setattr(stage_times, "measure_stages", measure)


def make_parts(seed: int) -> Any:
    """Make a model with dropout, its optimizer and a scheduler that is stepped each update."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=UPDATES + 1)
    return model, optimizer, scheduler


def draw_batch() -> Any:
    """Draw a batch from the global generator."""
    x = torch.randn(16, 8)
    return x, x[:, :4].argmax(1)


def run(pipeline: Callable[..., Any], seed: int) -> Any:
    """Train with an evaluation in the middle."""
    model, optimizer, scheduler = make_parts(seed)
    with pipeline(model, nn.functional.cross_entropy, optimizer) as pipe:
        for k in range(UPDATES):
            pipe.step(*draw_batch())
            scheduler.step()
            if k == UPDATES // 2:
                pipe.evaluate([draw_batch()], ["accuracy"])
    return {"weight": model[0].weight[0, 0]}


def compare_quietly(methods: Any, loop: Any = run, **keys: Any) -> Any:
    """Compare quietly, by default with one seed and the loop's rate alone."""
    chosen = {"stages": STAGES, "seeds": 1, "rates": (1,), "processes": 1, "quiet": True, **keys}
    return ipu_pipe.compare(loop, methods, **chosen)


def train_beside(method: str, seed: int, factor: float) -> Any:
    """Train as `run` does with a plain pipeline, whose rates are multiplied by hand after the scheduler."""
    model, optimizer, scheduler = make_parts(seed)
    losses: List[Any] = []
    values = None
    pipe = ipu_pipe.Pipeline(
        model, nn.functional.cross_entropy, optimizer, method, stages=STAGES, seed=seed
    )
    group = optimizer.param_groups[0]
    for k in range(UPDATES):
        rate = group["lr"]
        group["lr"] = rate * factor
        losses += [update.loss for update in pipe.step(*draw_batch())]
        group["lr"] = rate
        scheduler.step()
        if k == UPDATES // 2:
            values = pipe.evaluate([draw_batch()], ["accuracy"])
    losses += [update.loss for update in pipe.close()]
    return losses, values, model[0].weight[0, 0].item()


def test_the_losses_are_those_of_plain_pipelines_bit_for_bit():
    """The first training measures the stages at its first step, which changes nothing; a multiple of the rate
    acts after OneCycle."""
    methods = ["gpipe", "pipedream", "pipemare"]
    result = compare_quietly(methods, seeds=2, rates=(1, 0.3))
    for row in result.rows:
        for factor in (1.0, 0.3):
            for seed in (0, 1):
                training = row.trainings[factor][seed]
                losses, values, weight = train_beside(row.label, seed, factor)
                assert training.losses == losses
                assert training.evaluations == [{"update": UPDATES // 2 + 1, **values}]
                assert training.returned == {"weight": weight}


def test_measuring_the_stages_changes_no_training(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    training = compare_quietly(["gpipe"]).rows[0].trainings[1.0][0]
    assert training.losses == train_beside("gpipe", 0, 1.0)[0]
    assert all(second > 0 for second in training.seconds_at)


def test_the_generators_of_the_caller_go_on_as_before():
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    compare_quietly(["gpipe"])
    assert torch.equal(torch.randn(2), expected)


# ---- verdicts with known answers


def test_a_method_with_the_same_losses_in_less_time_wins_by_the_ratio_of_the_clock():
    """GPipe's passes overlap: N P slots become N + P - 1, with N = P = 4 and equal weights."""
    result = compare_quietly(["naive", "gpipe"], seeds=3)
    verdict = result.verdicts["gpipe"]
    assert verdict.is_sooner is True
    assert verdict.share.mean == pytest.approx(7 / 16) and verdict.share.half == 0
    assert "in 0.438 ± 0.000 of its predicted time" in verdict.sentence
    assert compare_quietly(["gpipe", "naive"], seeds=3).verdicts["naive"].is_sooner is False
    # by one seed nothing can be told
    assert compare_quietly(["naive", "gpipe"], seeds=1).verdicts["gpipe"].is_sooner is None


def fit(pipeline: Callable[..., Any], seed: int) -> None:
    """Fit one weight of stage 0 of four; the curvature is 2, and PipeMare's delay there 7 updates."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    for layer in model:
        nn.init.ones_(layer.weight).requires_grad_(False)
    model[0].weight.requires_grad_(True).data.fill_(2.0 + seed)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.25)
    pipe = pipeline(model, nn.functional.mse_loss, optimizer, microbatches=1)
    for _ in range(80):
        pipe.step(torch.ones(1, 1), torch.ones(1, 1))


def test_a_rate_at_which_pipemare_diverges_is_named_and_a_smaller_one_is_chosen():
    """The limit is (2 / 2) sin(pi / (4 x 7 + 2)) = 0.105 (PipeMare, Lemma 1): 0.25 diverges, 0.3 x 0.25 does not."""
    result = compare_quietly(["gpipe", "pipemare"], fit, stages=4, seeds=3)
    verdict = result.verdicts["pipemare"]
    assert result.rows[1].staleness == 7
    assert verdict.share is None and verdict.is_sooner is None
    assert re.match(r"pipemare (diverges|does not learn) with 3 of 3 seeds", verdict.sentence)
    result = compare_quietly(["gpipe", "pipemare"], fit, stages=4, seeds=1, rates=(1, 0.3, 0.1))
    pipemare = result.rows[1]
    assert pipemare.best in (0.3, 0.1) and not pipemare.compute_final(1.0) < 1
    assert all(training.has_learned for training in pipemare.chosen)


def make_falling_record(losses: List[float], pace: float) -> Training:
    """Make a training with these losses, an update each `pace` seconds."""
    return Training(losses=list(losses), seconds_at=[pace * (k + 1) for k in range(len(losses))])


def judge_paces(paces: Sequence[float], spread: float = 0.0, losses: int = 20) -> Verdict:
    """Judge a method with one seed for each pace against a baseline with the pace 1; the last seed has `losses`."""
    falling = [1.0 - k / 20 for k in range(20)]
    trainings = [make_falling_record(falling, pace) for pace in paces]
    trainings[-1] = make_falling_record(falling[:losses], paces[-1])
    row = MethodRow("a", {}, trainings={1.0: dict(enumerate(trainings))})
    seeds = {seed: make_falling_record(falling, 1.0) for seed in range(len(paces))}
    return judge(row, MethodRow("b", {}, trainings={1.0: seeds}), spread)


def test_a_share_is_judged_by_students_t_seed_by_seed():
    """Three seeds reach the loss in 0.5, 0.6 and 0.7 of the time: 0.6 ± 4.303 x 0.1 / sqrt(3)."""
    verdict = judge_paces([0.5, 0.6, 0.7])
    assert verdict.share is not None and verdict.share.half is not None
    assert verdict.share.mean == pytest.approx(0.6)
    assert verdict.share.half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert verdict.is_sooner is True
    assert judge_paces([1.5, 1.6, 1.7]).is_sooner is False
    assert judge_paces([0.5, 0.9, 1.3]).is_sooner is None
    # the spread of the stage times counts, too
    wide = judge_paces([0.5, 0.6, 0.7], spread=0.3)
    assert wide.is_sooner is None and "cannot be told" in wide.sentence
    # the last seed never reaches the loss
    assert "2 of 3 seeds: how soon cannot be told" in judge_paces([0.5] * 3, losses=19).sentence


def test_a_method_that_does_not_reach_the_loss_is_told_beside_the_baseline_at_its_end():
    """Story: a newcomer asked how much sooner, and read only that the loss is not reached."""
    falling = [1.0 - k / 20 for k in range(20)]
    row = MethodRow("a", {}, trainings={1.0: {0: make_falling_record([2.0] * 20, 0.4)}})
    baseline = MethodRow("b", {}, trainings={1.0: {0: make_falling_record(falling, 1.0)}})
    assert judge(row, baseline, 0.0).sentence == (
        "a does not reach b's final loss in as many samples: it ends at 2.00, b at 0.0500. After "
        "as much predicted time, 8 s, b is at 0.650."
    )
    # Story: of a loop that stopped early it was said, too, that the samples were as many
    row.trainings[1.0][0] = replace(make_falling_record(falling[:10], 1.0), samples_per_update=4)
    baseline.trainings[1.0][0].samples_per_update = 4
    assert (
        "b's final loss in 40 samples: it ends at 0.550, b at 0.0500 after 80. After"
        in judge(row, baseline, 0.0).sentence
    )
    # a method that ends before the baseline's first update is beside nothing
    row.trainings[1.0][0] = make_falling_record([2.0, 1.0], 0.4)
    assert judge(row, baseline, 0.0).sentence.endswith("b at 0.0500 after 80.")


# ---- time


def test_every_method_is_timed_by_one_set_of_stage_times():
    """A microbatch of 16 samples takes four times one of 4; a drain begins a stretch anew."""
    result = compare_quietly(["gpipe", "pipedream"])
    gpipe, pipedream = (row.trainings[1.0][0] for row in result.rows)
    assert (gpipe.microbatches, pipedream.microbatches) == (4, 1)
    assert gpipe.seconds_at == pytest.approx([21.0 * (k + 1) for k in range(UPDATES)])
    drained = UPDATES // 2 + 1
    # the first update of a stretch passes all stages, forwards and backwards
    assert pipedream.seconds_at[0] == pytest.approx(4 * 12.0)
    assert pipedream.seconds_at[drained] - pipedream.seconds_at[drained - 1] == pytest.approx(48.0)


def test_recomputation_heads_and_blocks_of_several_stages_are_timed_by_their_flops():
    recomputes = {"method": "gpipe", "recompute": True}
    names = ["gpipe", "local_greedy", "local_chunked"]
    result = compare_quietly({**{name: {} for name in names}, "recomputes": recomputes})
    rows = {row.label: row.chosen[0] for row in result.rows}
    # a backward has its forward's second before it
    ratio = rows["recomputes"].seconds_at[-1] / rows["gpipe"].seconds_at[-1]
    assert ratio == pytest.approx(4 / 3)
    assert (rows["local_chunked"].devices, rows["local_greedy"].devices) == (2, 4)
    paces = {
        name: training.seconds_at[-1] - training.seconds_at[-2] for name, training in rows.items()
    }
    # without heads a stage takes 4 x 3 s, and a block of two 24
    assert paces["local_greedy"] > 12 and paces["local_chunked"] > 24


def test_a_long_stretch_is_continued_at_its_pace(monkeypatch: pytest.MonkeyPatch):
    method = ipu_pipe.METHODS["pipedream_2bw"]
    job: Any = SimpleNamespace(
        rules=SimpleNamespace(switch=0),
        method=method,
        partition=range(4),
        schedule=SimpleNamespace(accumulate=4),
        placement=(0, 1, 2, 3),
    )
    costs = Costs([1.0, 1.1, 1.0, 0.9], [2.0, 2.0, 2.2, 2.0], [0.1] * 4)
    whole = Job.play_updates(job, costs, [30], 90)
    monkeypatch.setattr("ipu_pipe.schedule.clock.MOST_SIMULATED", 4 * 4 * 16)
    assert Job.play_updates(job, costs, [30], 90) == pytest.approx(whole, rel=0.01)
    times = clock(make_schedule(method, 4, 120, 4), costs)
    assert whole[:30] == pytest.approx(times.end[Kind.UPDATE].max(axis=0).tolist())


def test_hardware_predicts_the_times():
    result = compare_quietly(["gpipe", "pipedream"], hardware="h100x8")
    assert "h100x8" in result.times and result.spread == 0
    assert all(row.chosen[0].seconds_at[-1] > 0 for row in result.rows)


# ---- rows


def test_a_method_that_cannot_run_is_a_row_with_the_reason():
    def loop(pipeline: Callable[..., Any], seed: int) -> None:
        model, _, _ = make_parts(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipe = pipeline(model, nn.functional.cross_entropy, optimizer)
        x = torch.randn(18, 8)
        pipe.step(x, torch.zeros(18, dtype=torch.long))

    result = compare_quietly(["gpipe", "pipedream", "spectrain"], loop)
    reasons = {row.label: row.reason for row in result.rows}
    # 18 samples are no four microbatches
    assert "18 samples" in reasons["gpipe"] and not reasons["pipedream"]
    # without momentum
    assert "momentum" in reasons["spectrain"]
    assert result.baseline.label == "pipedream"
    assert f"gpipe cannot run: {reasons['gpipe']}" in repr(result)
    with pytest.raises(BadInput):
        compare_quietly(["gpipe"], loop)


def test_a_global_clip_is_divided_among_stages_where_the_method_does_not_flush():
    def loop(clip: Any) -> Callable[..., Any]:
        def train(pipeline: Callable[..., Any], seed: int) -> None:
            model, optimizer, _ = make_parts(seed)
            clips = {} if clip is None else {"clip": clip}
            pipe = pipeline(model, nn.functional.cross_entropy, optimizer, **clips)
            for _ in range(8):
                pipe.step(*draw_batch())

        return train

    result = compare_quietly(["gpipe", "pipedream"], loop(0.02))
    divided = {"pipedream": {"method": "pipedream", "clip": (0.02 / 2, "stage")}}
    by_hand = compare_quietly(divided, loop(None))
    assert result.rows[1].chosen[0].losses == by_hand.rows[0].chosen[0].losses
    assert not result.rows[0].notes and "0.01 for each stage" in result.rows[1].notes[0]


def test_a_best_rate_at_the_edge_has_one_more_tried():
    result = compare_quietly(["gpipe"], rates=(0.03, 0.01))
    assert sorted(result.rows[0].trainings) == [0.01, 0.03, 0.09]
    assert result.rows[0].best == 0.09
    assert "is the best, at the edge of all" in result.rows[0].notes[-1]


def test_a_method_that_diverges_at_all_rates_has_a_smaller_one_tried():
    """Story: a newcomer read that a method diverges, though a third of his least rate trained."""
    result = compare_quietly(["gpipe"], rates=(1e36, 1e18))
    (row,) = result.rows
    assert sorted(row.trainings) == [1, 1e18, 1e36] and row.best == 1
    assert row.notes[-1] == ("no given rate trains; 1 was tried, too, and does: give smaller rates")
    (row,) = compare_quietly(["gpipe"], rates=(1e36, 1e34)).rows
    assert row.best == 1e32 and row.notes[-1].startswith("no given rate trains, nor does 1e+32")


# ---- the folder


class Widened(nn.Linear):
    """A layer that a loop of this file uses."""


def make_widened() -> nn.Module:
    return Widened(2, 2)


def test_what_a_loop_uses_of_its_file_counts_as_the_loop() -> None:
    """Story: after a change of the model's class the same call gave the old trainings."""

    def loop(pipeline: Any, seed: int) -> None:
        make_widened()

    text = describe_loop(loop)
    assert "return Widened(2, 2)" in text and "class Widened(nn.Linear)" in text
    assert "def make_parts" not in text and "class Linear" not in text


def test_the_values_that_a_loop_was_made_with_count_as_the_loop() -> None:
    """Story: a loop made with another rate got the trainings of the first, by partial and by closure."""

    def train(pipeline: Any, seed: int, lr: float) -> None:
        pass

    def make_loop(lr: float) -> Any:
        def loop(pipeline: Any, seed: int) -> None:
            train(pipeline, seed, lr)

        return loop

    def change_rate(make: Callable[[float], Any]) -> bool:
        return describe_loop(make(0.1)) != describe_loop(make(0.2))

    assert change_rate(make_loop) and change_rate(lambda lr: functools.partial(train, lr=lr))
    assert describe_loop(make_loop(0.1)) == describe_loop(make_loop(0.1))
    assert not describe_loop(print)


WIDTH = 64
SETTINGS = {"width": [64], "make": make_widened}


class Named:
    size = 1

    @staticmethod
    def read() -> int:
        return WIDTH


def read_default(width: int = WIDTH) -> int:
    return width


@pytest.mark.parametrize(
    ("loop", "place", "change"),
    [
        (lambda: WIDTH, globals(), {"WIDTH": 128}),
        (lambda: SETTINGS["width"], SETTINGS, {"width": [128]}),
        (lambda: [WIDTH for _ in range(2)], globals(), {"WIDTH": None}),
        (lambda: Named.read(), globals(), {"WIDTH": {64}}),
        (lambda: Named(), Named, {"size": 2}),
        (lambda: read_default(), read_default, {"__defaults__": (128,)}),
    ],
)
def test_the_constants_that_a_loop_reads_count_as_the_loop(
    loop: Any, place: Any, change: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: after WIDTH = 64 became 128 the same call gave the old trainings."""
    before = describe_loop(loop)
    assert before and before == describe_loop(loop)
    for name, value in change.items():
        set_value = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
        set_value(place, name, value)
    assert describe_loop(loop) != before


def test_a_list_of_an_enclosing_function_counts_as_the_loop() -> None:
    widths, long = [64], list(range(100_000))
    widths_again = {"widths": widths, "again": None}
    widths_again["again"] = widths_again

    def loop(pipeline: Any, seed: int) -> Any:
        return widths_again, long, print

    before = describe_loop(loop)
    assert len(before) < 2000
    widths.append(128)
    after = describe_loop(loop)
    assert after != before
    long[50_000] = 0
    assert describe_loop(loop) != after


def test_what_a_comparison_is_given_is_refused_in_one_line() -> None:
    """Story: these ended in a traceback."""
    for methods in ([{"method": "gpipe"}], {"a": {"method": ["gpipe"]}}):
        with pytest.raises(BadInput, match="methods: "):
            compare_quietly(methods)
    for keys in ({"seeds": [[1]]}, {"rates": ([1],)}):
        with pytest.raises(BadInput, match=f"^{next(iter(keys))}: "):
            compare_quietly(["gpipe"], **keys)


def test_tiny_values_are_shown_with_their_digits() -> None:
    assert str(Estimate(5.68e-14, 1e-15)) == "5.68e-14 ± 1e-15"


class Interrupted:
    """A loop that Ctrl-C ends in its training number `at`; `count`: the trainings that began."""

    source = "the same loop"

    def __init__(self, at: float) -> None:
        self.at = at
        self.count = 0

    def __call__(self, pipeline: Any, seed: int) -> Any:
        self.count += 1
        if self.count > self.at:
            raise KeyboardInterrupt
        return run(pipeline, seed)


def strip_seconds(result: Any) -> Any:
    """Return a result's numbers without the seconds that this machine took."""
    numbers = json.loads(result.to_json())
    for row in numbers["methods"]:
        for training in row.get("trainings", ()):
            del training["wall_seconds"]
    return numbers


def test_an_interrupted_comparison_continues_to_the_same_result(tmp_path):
    keys = {"seeds": 2, "rates": (1, 0.3)}
    methods = ["gpipe", "pipedream"]
    whole = compare_quietly(methods, Interrupted(math.inf), **keys)
    first = Interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        compare_quietly(methods, first, out=tmp_path / "out", **keys)
    rest = Interrupted(math.inf)
    resumed = compare_quietly(methods, rest, out=tmp_path / "out", **keys)
    assert strip_seconds(resumed) == strip_seconds(whole)
    total = sum(len(seeds) for row in whole.rows for seeds in row.trainings.values())
    assert rest.count == total - 5
    again = Interrupted(0)
    assert strip_seconds(
        compare_quietly(methods, again, out=tmp_path / "out", **keys)
    ) == strip_seconds(whole)


# ---- trainings in forked processes


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two trainings run at once, on any machine and in a worker of the tests."""
    monkeypatch.setattr(comparing, "choose_process_count", lambda most: (most, "as the test says"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.usefixtures("one_thread")
class TestForked:
    METHODS = ("gpipe", "pipedream", "pipemare")
    KEYS: Dict[str, Any] = {"seeds": 2, "rates": (1, 0.3)}

    def test_trainings_at_once_have_the_losses_of_a_sequence(self, tmp_path):
        def loop(pipeline: Any, seed: int) -> int:
            run(pipeline, seed)
            return os.getpid()

        result = compare_quietly(self.METHODS, loop, processes=3, out=tmp_path / "out", **self.KEYS)
        sequence = compare_quietly(self.METHODS, loop, **self.KEYS)
        trainings = [
            t for row in result.rows for one in row.trainings.values() for t in one.values()
        ]
        # some methods have a third rate
        assert len(trainings) >= 12 and len({t.returned for t in trainings}) >= 4
        for numbers in (both := [strip_seconds(result), strip_seconds(sequence)]):
            for row in numbers["methods"]:
                for training in row["trainings"]:
                    del training["returned"]
        assert both[0] == both[1]

    @pytest.mark.parametrize("end", ["error", "unpicklable", "killed", "interrupt"])
    def test_a_training_that_fails_is_named_and_the_rest_continues(self, end, tmp_path):
        class Mine(ZeroDivisionError):
            """An exception that no other process can have."""

        class Loop:
            source = "the same loop"
            fails = True

            def __call__(self, pipeline: Any, seed: int) -> None:
                run(pipeline, seed)
                if seed == 1 and self.fails:
                    if end == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    kinds = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}
                    raise kinds.get(end, Mine)("mine")

        kinds = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}
        keys = {"processes": 2, "out": tmp_path / "out", **self.KEYS}
        loop = Loop()
        with pytest.raises(kinds.get(end, RunFault)) as caught:
            compare_quietly(self.METHODS, loop, **keys)
        told = f"{caught.value} {caught.value.__cause__}"
        assert re.search(r"training of \w+ at rate 1, seed 1", told)
        assert "exit code -9" in told if end == "killed" else "mine" in told
        assert not multiprocessing.active_children()
        loop.fails = False
        resumed = compare_quietly(self.METHODS, loop, **keys)
        assert strip_seconds(resumed) == strip_seconds(
            compare_quietly(self.METHODS, loop, **self.KEYS)
        )

    def test_a_comparison_that_continues_trains_one_here_first(self, tmp_path):
        """Story: the loop of a config with one thread a process continued one after another."""

        def loop(pipeline: Any, seed: int) -> bool:
            run(pipeline, seed)
            return os.getpid() == parent

        loop.source = "the same loop"  # type: ignore[attr-defined]
        parent = os.getpid()
        keys: Dict[str, Any] = {"loop": loop, "processes": 2, "out": tmp_path / "out"}
        compare_quietly(["gpipe"], **keys)
        result = compare_quietly(["gpipe"], seeds=4, **keys)
        trainings = result.rows[0].trainings[1.0]
        assert [trainings[seed].returned for seed in range(4)] == [True, True, False, False]

    def test_workers_end_with_a_parent_that_is_killed(self):
        reader, writer = multiprocessing.Pipe(duplex=False)

        def die() -> None:
            reader.close()
            with open_workers(3, lambda _: os.getpid(), range(6), str) as run_jobs:
                writer.send({pid for _, pid in run_jobs(iter(range(6)))})
                os.kill(os.getpid(), signal.SIGKILL)

        parent = multiprocessing.get_context("fork").Process(target=die)
        parent.start()
        parent.join()
        writer.close()
        workers = reader.recv()
        # all that were forked have the writing end: the pipe ends with the last of them
        has_ended = wait([reader], 60)
        for pid in () if has_ended else workers:
            os.kill(pid, signal.SIGKILL)
        assert has_ended

    def test_all_processes_share_the_times_of_the_first_training_that_has_any(
        self, tmp_path, monkeypatch
    ):
        """The first one may diverge at its first step, before the stages are measured."""

        def measure(engine: Any) -> StageSeconds:
            with (tmp_path / "pids").open("a") as file:
                file.write(f"{os.getpid()} ")
            return StageSeconds(*[(1.0,) * 4] * 3, "as the test says", (0.0,) * 4)

        def loop(pipeline: Any, seed: int) -> None:
            model, optimizer, _ = make_parts(seed)
            x, y = draw_batch()
            with pipeline(model, nn.functional.cross_entropy, optimizer) as pipe:
                for _ in range(3):
                    pipe.step(x / (seed > 0), y)

        monkeypatch.setattr(stage_times, "measure_stages", measure)
        keys = {"loop": loop, "processes": 2, "seeds": 3, "out": tmp_path / "out"}
        result = compare_quietly(["gpipe", "pipedream"], **keys)
        assert (tmp_path / "pids").read_text() == f"{os.getpid()} "
        assert "measured" in result.times

    def test_a_method_that_cannot_run_is_a_row_here_too(self):
        def loop(pipeline: Any, seed: int) -> None:
            model, _, _ = make_parts(seed)
            # spectrain needs momentum
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            with pipeline(model, nn.functional.cross_entropy, plain) as pipe:
                pipe.step(*draw_batch())

        methods = ["gpipe", "spectrain", "pipedream"]
        result = compare_quietly(methods, loop, processes=2, seeds=2)
        assert [bool(row.reason) for row in result.rows] == [False, True, False]


def test_a_method_that_is_refused_is_tried_once():
    tried: List[int] = []

    def loop(pipeline: Any, seed: int) -> None:
        tried.append(seed)
        raise BadInput("loop: no")

    with pytest.raises(BadInput):
        compare_quietly(["gpipe", "pipedream"], loop, seeds=3, rates=(1, 0.3))
    assert tried == [0, 0]


def test_where_every_training_diverges_at_once_no_times_are_claimed():
    def loop(pipeline: Any, seed: int) -> None:
        model, optimizer, _ = make_parts(seed)
        x, y = draw_batch()
        with pipeline(model, nn.functional.cross_entropy, optimizer) as pipe:
            pipe.step(x / 0, y)

    result = compare_quietly(["gpipe", "pipedream_flush"], loop)
    assert "None" not in str(result) and "no times" in result.times


def test_why_trainings_are_one_after_another_is_said(capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare_quietly(["gpipe", "pipedream"], processes=None, quiet=False)
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert re.search(r"1 training more, one after another \(.*\), about", said)
    # the signs of both languages, which only a `BadInput` chooses from, were once printed
    assert " backend.threads=1 in" in said
    assert BEGIN not in said


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stages": 2}, "stages"),
        ({"hardware": "h100x8"}, "hardware"),
        ({"loop": fit}, "loop.*line def fit"),
        ({"methods": {"gpipe": {"microbatches": 2}}}, "arguments"),
    ],
)
def test_the_folder_of_another_comparison_is_refused(change, word, tmp_path):
    compare_quietly(["gpipe"], out=tmp_path / "out")
    with pytest.raises(BadInput, match=word):
        compare_quietly(**{"methods": ["gpipe"], "out": tmp_path / "out", **change})
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"comparison\.json"):
        compare_quietly(["gpipe"], out=tmp_path)


# ---- the result


class Tags(HTMLParser):
    """The tags of a page that are open, and the attributes that would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.loads: List[Any] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.loads += [(name, value) for name, value in attrs if name in ("src", "href", "style")]
        if tag not in ("meta", "link", "line", "rect", "polygon", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_the_page_is_one_file_that_needs_no_network(tmp_path):
    result = compare_quietly(
        {"<b>": "gpipe", "2BW": "pipedream_2bw", "rows": {}}, seeds=2, rates=(1, 0.3)
    )
    path = result.save(tmp_path / "compare.html")
    page = path.read_text(encoding="utf-8")
    assert "http:" not in page and "https:" not in page and "<script" not in page
    assert "<b>" not in page and "&lt;b&gt; is the baseline" in page
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.loads == [("href", "data:,")]
    assert page.count("<polyline") == 4 and "rows cannot run" in page
    assert all(
        verdict.sentence.replace("<b>", "&lt;b&gt;").replace("'", "&#x27;") in page
        for verdict in result.verdicts.values()
    )
    assert "srcdoc=" in result._repr_html_()


VALUE = st.floats(-1e300, 1e300) | st.sampled_from([0.0, 1.0, math.inf, -math.inf, math.nan])


@given(
    curves=st.lists(st.lists(st.tuples(VALUE, VALUE, VALUE), max_size=4), max_size=3), y_top=VALUE
)
def test_curves_of_any_values_are_drawn_with_numbers_alone(curves: Any, y_top: float) -> None:
    """Story: a figure without a finite point, such as of one method that diverged at once, ended in a traceback."""
    columns = [np.array(points, np.float64).reshape(-1, 3).T for points in curves]
    drawn = [Curve(np.arange(float(len(rows.T))), *rows) for rows in columns]
    figure = draw_curves(drawn, "samples", "Loss", y_top)
    points = re.findall(r'points="([^"]*)"', figure)
    assert len(points) == 2 * len(curves)
    values = [float(part) for pair in points for part in re.split("[ ,]", pair) if part]
    assert np.isfinite(values).all() and "nan" not in figure and "inf" not in figure


def test_numbers_are_had_as_a_frame_and_as_json():
    result = compare_quietly(["gpipe", "pipedream"], seeds=2)
    records = result.frame()
    rows = records if isinstance(records, list) else records.to_dict("records")
    assert len(rows) == 2 * 2 * UPDATES
    assert list(rows[0]) == ["label", "rate", "seed", "update", "samples", "seconds", "loss"]
    assert (rows[-1]["label"], rows[-1]["samples"]) == ("pipedream", 16 * UPDATES)
    numbers = json.loads(result.to_json())
    assert [row["label"] for row in numbers["methods"]] == ["gpipe", "pipedream"]
    staleness = [row["staleness"] for row in numbers["methods"]]
    assert staleness == [0, 3]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"methods": "gpipe"}, "methods"),
        ({"methods": []}, "methods"),
        ({"methods": ["gpipe", "gpipe"]}, "methods"),
        ({"methods": ["1F1B"]}, "methods"),
        ({"methods": {"a": 5}}, "methods"),
        ({"methods": {"gpipe": {"stages": 2}}}, "methods"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"rates": (0,)}, "rates"),
        ({"rates": 0.1}, "rates"),
        ({"processes": 0}, "processes"),
        ({"hardware": "no such"}, "hardware"),
        ({"loop": 5}, "run"),
        ({"loop": lambda pipeline: None}, "run"),
        ({"loop": lambda pipeline, seed: None}, "run"),
        ({"loop": lambda pipeline, seed: pipeline(*make_parts(0)[:2], None, method="x")}, "pipeline"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_with_its_place(change, place):
    with pytest.raises(BadInput) as caught:
        compare_quietly(**{"methods": ["gpipe"], **change})
    assert len(caught.value.faults) == 1 and caught.value.faults[0].startswith(place)


def test_the_errors_of_a_loop_pass_unchanged():
    def loop(pipeline: Callable[..., Any], seed: int) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        compare_quietly(["gpipe"], loop)


# ---- the command


DIGITS = str(ROOT / "configs" / "mlp_digits.yaml")
SMALL = ("--set", "steps=6", "optimizer.lr=0.05", "--seeds", "1", "--rates", "1")


def test_the_command_trains_as_train_does(tmp_path, monkeypatch, capsys):
    arguments = ("--methods", "gpipe,pipedream", "--json", "--out", str(tmp_path / "out"))
    result = run_here(compare_command, DIGITS, *arguments, *SMALL, monkeypatch=monkeypatch, capsys=capsys)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["methods"]
    assert (tmp_path / "out" / "compare.html").exists()
    for row in rows:
        changes = [f"method={row['label']}", "steps=6", "optimizer.lr=0.05"]
        config = ipu_pipe.load_config(DIGITS, changes)
        summary = ipu_pipe.train(config, tmp_path / row["label"], quiet=True)
        values = row["trainings"][0]["evaluations"][-1]
        assert values["loss"] == summary["final"]["test_loss"]
        assert values["accuracy"] == summary["final"]["test_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["replicas=2", "gradient_accumulation=2"],
        ["optimizer={name: adamw, lr: 0.01, no_decay: norms_and_biases, weight_decay: 0.1}"],
        ["lr_schedule={name: cosine, warmup_steps: 3}", "method=pipemare"],
        ["precision=float64", "ema={decay: 0.9}", "clip={norm: 0.5, scope: stage}"],
        ["steps=null", "epochs=1", "evaluate={every: 1, subset: 50}", "method=local_greedy"],
    ],
)
def test_the_loop_of_a_config_evaluates_to_what_train_does(changes, tmp_path):
    keys = {change.partition("=")[0] for change in changes}
    usual = ["optimizer={name: sgd, lr: 0.05, momentum: 0.9}", "steps=6", "evaluate={steps: 3}"]
    usual = [change for change in usual if change.partition("=")[0] not in keys]
    config = ipu_pipe.load_config(DIGITS, usual + changes)
    ipu_pipe.train(config, tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    loop = ConfigLoop(config)
    result = compare_quietly(loop.describe_methods([config.method]), loop, stages=config.stages)
    losses = [values["loss"] for values in result.rows[0].chosen[0].evaluations]
    # a run evaluates before its first update, too
    assert losses == [line["test_loss"] for line in lines if "test_loss" in line][1:]


@pytest.mark.slow
def test_the_script_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = next(b for b in list_blocks(ROOT / "docs" / "compare.md") if b.file)
    text = block.text.replace("stages=4", "stages=4, seeds=1, rates=(1,)").replace(
        "range(10)", "range(1)"
    )
    Path(block.file).write_text(text, encoding="utf-8")
    runpy.run_path(block.file, run_name="__main__")
    assert "gpipe is the baseline" in capsys.readouterr().out
    assert (tmp_path / "compare.html").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--methods", "1F1B"), "--methods: 1F1B: must be one of"),
        (("--methods", "gpipe,gpipe"), "--methods: gpipe,gpipe: must be different"),
        (("--rates", "x"), "--rates"),
        (("--set", "early_stopping={}"), "early_stopping"),
        (("--set", "optimzer=5"), "optimzer"),
    ],
)
def test_bad_input_of_the_command_is_one_line_and_exit_2(arguments, word, monkeypatch, capsys):
    result = run_here(compare_command, DIGITS, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and word in lines[0]


def test_the_price_comes_first(capsys):
    compare_quietly(["gpipe", "pipedream"], seeds=2, rates=(1, 0.3), quiet=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("compare: 2 methods x 2 rates x 2 seeds: 8 trainings")
    assert "7 trainings more, one after another (as asked for), about" in lines[1]


def test_seconds_are_said_in_a_fitting_unit():
    assert [comparing.format_seconds(s) for s in (3.21, 600, 7200)] == ["3.2 s", "10 min", "2.0 h"]


def test_smoothing_is_over_the_last_updates_and_ends_where_a_training_diverged():
    training = make_falling_record([float(k) for k in range(40)], 1.0)
    assert training.smooth()[:3].tolist() == [math.inf, 0.5, 1.5]
    training.diverged = "loss is not finite"
    assert training.final == math.inf and not training.has_learned
    assert np.isfinite(training.smooth()[1:-1]).all()
