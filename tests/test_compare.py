"""`ipu_pipe.compare`: methods on a loop of the caller's own, beside the same comparison by hand."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipu_pipe
from ipu_pipe.cli import compare as compare_command
from ipu_pipe.comparison import comparing, processes, stage_times
from ipu_pipe.comparison.config_loop import ConfigLoop
from ipu_pipe.comparison.kept_trainings import describe_loop
from ipu_pipe.comparison.processes import open_workers
from ipu_pipe.comparison.trainings import MethodRow, Training
from ipu_pipe.comparison.verdicts import Verdict, judge
from ipu_pipe.errors import BadInput, RunFault, run_command
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.refusals import BEGIN
from ipu_pipe.report.static_page import Curve, draw_curves
from tests.command_line import run_here
from tests.support.runs import DIGITS, ROOT, list_faults, read_column
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


def run(pipeline: Callable[..., Any], seed: int, factor: float = 1.0) -> Any:
    """Train with an evaluation in the middle; `factor` multiplies the rates after the scheduler."""
    model, optimizer, scheduler = make_parts(seed)
    pipe = pipeline(model, nn.functional.cross_entropy, optimizer)
    group = optimizer.param_groups[0]
    updates: List[Any] = []
    values = None
    for k in range(UPDATES):
        rate = group["lr"]
        group["lr"] = rate * factor
        updates += pipe.step(*draw_batch())
        group["lr"] = rate
        scheduler.step()
        if k == UPDATES // 2:
            values = pipe.evaluate([draw_batch()], ["accuracy"])
    updates += pipe.close()
    losses = [update.loss for update in updates]
    return {"losses": losses, "values": values, "weight": model[0].weight[0, 0].item()}


def compare_quietly(methods: Any, loop: Any = run, **keys: Any) -> Any:
    """Compare quietly, by default with one seed and the loop's rate alone."""
    chosen = {"stages": STAGES, "seeds": 1, "rates": (1,), "processes": 1, "quiet": True, **keys}
    return ipu_pipe.compare(loop, methods, **chosen)


def test_the_losses_are_those_of_plain_pipelines_bit_for_bit():
    """The first training measures the stages at its first step, which changes nothing; a multiple of the rate
    acts after OneCycle."""
    methods = ["gpipe", "pipedream", "pipemare"]
    for row in compare_quietly(methods, seeds=2, rates=(1, 0.3)).rows:
        for factor, seed in itertools.product((1.0, 0.3), (0, 1)):
            keys = {"method": row.label, "stages": STAGES, "seed": seed}
            expected = run(functools.partial(ipu_pipe.Pipeline, **keys), seed, factor)
            training = row.trainings[factor][seed]
            assert training.losses == expected["losses"]
            assert training.evaluations == [{"update": UPDATES // 2 + 1, **expected["values"]}]
            assert training.returned["weight"] == expected["weight"]


def test_the_generators_of_the_caller_go_on_as_before():
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    compare_quietly(["gpipe"])
    assert torch.equal(torch.randn(2), expected)


# ---- verdicts with known answers


def test_a_method_with_the_same_losses_in_less_time_wins_by_the_ratio_of_the_clock():
    """GPipe's passes overlap: N P slots become N + P - 1, with N = P = 4 and equal weights."""
    verdict = compare_quietly(["naive", "gpipe"], seeds=2).verdicts["gpipe"]
    assert verdict.is_sooner is True
    assert verdict.share.mean == pytest.approx(7 / 16) and verdict.share.half == 0
    # by one seed nothing can be told
    assert compare_quietly(["naive", "gpipe"]).verdicts["gpipe"].is_sooner is None


def make_falling_record(losses: List[float], pace: float) -> Training:
    """Make a training with these losses, an update each `pace` seconds."""
    return Training(losses=list(losses), seconds_at=[pace * (k + 1) for k in range(len(losses))])


def make_row(label: str, *trainings: Training) -> MethodRow:
    """Make a method with these trainings, one a seed, at one rate."""
    return MethodRow(label, {}, trainings={1.0: dict(enumerate(trainings))})


FALLING = [1.0 - k / 20 for k in range(20)]


def judge_paces(paces: Sequence[float], spread: float = 0.0, losses: int = 20) -> Verdict:
    """Judge a method with one seed for each pace against a baseline with the pace 1; the last seed has `losses`."""
    trainings = [make_falling_record(FALLING, pace) for pace in paces[:-1]]
    trainings.append(make_falling_record(FALLING[:losses], paces[-1]))
    baseline = [make_falling_record(FALLING, 1.0)] * len(paces)
    return judge(make_row("a", *trainings), make_row("b", *baseline), spread)


def test_a_share_is_judged_by_students_t_seed_by_seed():
    """Three seeds reach the loss in 0.5, 0.6 and 0.7 of the time: 0.6 ± 4.303 x 0.1 / sqrt(3)."""
    verdict = judge_paces([0.5, 0.6, 0.7])
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert verdict.share == (pytest.approx(0.6), pytest.approx(half, rel=1e-4))
    assert verdict.is_sooner is True
    assert judge_paces([1.5, 1.6, 1.7]).is_sooner is False
    assert judge_paces([0.5, 0.9, 1.3]).is_sooner is None
    # the spread of the stage times counts, too
    assert judge_paces([0.5, 0.6, 0.7], spread=0.3).is_sooner is None
    # the last seed never reaches the loss
    assert "2 of 3 seeds: how soon cannot be told" in judge_paces([0.5] * 3, losses=19).sentence


def test_a_method_that_does_not_reach_the_loss_is_told_beside_the_baseline_at_its_end():
    """Story: a newcomer asked how much sooner, and read only that the loss is not reached."""

    def tell(losses: List[float], samples: int = 0) -> str:
        method, baseline = (
            make_row(label, replace(record, samples_per_update=samples))
            for label, record in (
                ("a", make_falling_record(losses, 0.4)),
                ("b", make_falling_record(FALLING, 1.0)),
            )
        )
        return judge(method, baseline, 0.0).sentence

    assert tell([2.0] * 20).endswith(
        "it ends at 2.00, b at 0.0500. After as much predicted time, 8 s, b is at 0.650."
    )
    # Story: of a loop that stopped early it was said, too, that the samples were as many
    early = "b's final loss in 40 samples: it ends at 0.550, b at 0.0500 after 80. After"
    assert early in tell(FALLING[:10], 4)
    # a method that ends before the baseline's first update is beside nothing
    assert tell([2.0, 1.0], 4).endswith("b at 0.0500 after 80.")


# ---- time


def test_every_method_is_timed_by_one_set_of_stage_times():
    """A microbatch of 16 samples takes four times one of 4; a drain begins a stretch anew."""
    result = compare_quietly(["gpipe", "pipedream"])
    gpipe, pipedream = (row.trainings[1.0][0] for row in result.rows)
    assert (gpipe.microbatches, pipedream.microbatches) == (4, 1)
    assert gpipe.seconds_at == pytest.approx([21.0 * (k + 1) for k in range(UPDATES)])
    # the first update of a stretch passes all stages, forwards and backwards
    assert pipedream.seconds_at[0] == pytest.approx(4 * 12.0)
    at_drain = pipedream.seconds_at[UPDATES // 2 : UPDATES // 2 + 2]
    assert at_drain[1] - at_drain[0] == pytest.approx(48.0)
    on_hardware = compare_quietly(["gpipe"], hardware="h100x8")
    assert "h100x8" in on_hardware.times and on_hardware.spread == 0
    assert on_hardware.rows[0].chosen[0].seconds_at[-1] > 0


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


# ---- rows


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two trainings run at once, on any machine and in a worker of the tests."""
    monkeypatch.setattr(comparing, "choose_process_count", lambda most: (most, "as the test says"))


def train_with_plain_sgd(pipeline: Callable[..., Any], seed: int) -> None:
    """Train without momentum; 18 samples are no four microbatches."""
    model, _, _ = make_parts(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline(model, nn.functional.cross_entropy, optimizer) as pipe:
        pipe.step(torch.randn(18, 8), torch.zeros(18, dtype=torch.long))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_method_that_cannot_run_is_a_row_with_the_reason(processes: int, one_thread: None):
    methods = ["gpipe", "pipedream", "spectrain"]
    result = compare_quietly(methods, train_with_plain_sgd, processes=processes, seeds=2)
    reasons = {row.label: row.reason for row in result.rows}
    assert "18 samples" in reasons["gpipe"] and not reasons["pipedream"]
    assert "momentum" in reasons["spectrain"]
    assert result.baseline.label == "pipedream"
    assert f"gpipe cannot run: {reasons['gpipe']}" in repr(result)


@pytest.mark.parametrize(
    ("error", "tries"), [(BadInput("loop: no"), [0, 0]), (ZeroDivisionError("mine"), [0])]
)
def test_a_method_that_is_refused_is_tried_once_and_other_errors_pass_unchanged(error, tries):
    tried: List[int] = []

    def loop(pipeline: Any, seed: int) -> None:
        tried.append(seed)
        raise error

    with pytest.raises(type(error), match=str(error)):
        compare_quietly(["gpipe", "pipedream"], loop, seeds=3, rates=(1, 0.3))
    assert tried == tries


def test_a_global_clip_is_divided_among_stages_where_the_method_does_not_flush():
    def loop(pipeline: Callable[..., Any], seed: int, **clip: Any) -> None:
        model, optimizer, _ = make_parts(seed)
        pipe = pipeline(model, nn.functional.cross_entropy, optimizer, **clip)
        for _ in range(8):
            pipe.step(*draw_batch())

    result = compare_quietly(["gpipe", "pipedream"], functools.partial(loop, clip=0.02))
    divided = {"pipedream": {"method": "pipedream", "clip": (0.02 / 2, "stage")}}
    by_hand = compare_quietly(divided, loop)
    assert result.rows[1].chosen[0].losses == by_hand.rows[0].chosen[0].losses
    assert not result.rows[0].notes and "0.01 for each stage" in result.rows[1].notes[0]


@pytest.mark.parametrize(
    ("rates", "best", "note"),
    [
        ((0.03, 0.01), 0.09, "is the best, at the edge of all"),
        # Story: a newcomer read that a method diverges, though a third of his least rate trained
        ((1e36, 1e18), 1, "no given rate trains; 1 was tried, too, and does: give smaller rates"),
        ((1e36, 1e34), 1e32, "no given rate trains, nor does 1e+32"),
    ],
)
def test_a_best_rate_at_the_edge_and_rates_that_diverge_have_one_more_tried(rates, best, note):
    (row,) = compare_quietly(["gpipe"], rates=rates).rows
    assert sorted(row.trainings) == sorted([*rates, best])
    assert row.best == best and note in row.notes[-1]


# ---- the folder


class Widened(nn.Linear):
    """A layer that a loop of this file uses."""


def make_widened() -> nn.Module:
    return Widened(2, 2)


WIDTH = 64
SETTINGS = {"width": [64], "make": make_widened}


class Named:
    size = 1

    @staticmethod
    def read() -> int:
        return WIDTH


def read_default(width: int = WIDTH) -> int:
    return width


LISTS: Dict[str, Any] = {"short": [64], "long": [*range(100_000)]}
LISTS["again"] = LISTS
READERS = {
    "a constant": (lambda: WIDTH, globals(), {"WIDTH": 128}),
    "an item": (lambda: SETTINGS["width"], SETTINGS, {"width": [128]}),
    "within a comprehension": (lambda: [WIDTH for _ in range(2)], globals(), {"WIDTH": None}),
    "a static method": (lambda: Named.read(), globals(), {"WIDTH": {64}}),
    "a class": (lambda: Named(), Named, {"size": 2}),
    "a default": (lambda: read_default(), read_default, {"__defaults__": (128,)}),
    "a list": (lambda: (LISTS, print), LISTS, {"short": [128]}),
    "a long list": (lambda: LISTS, LISTS, {"long": [0] * 100_000}),
}


@pytest.mark.parametrize("kind", READERS)
def test_what_a_loop_reads_counts_as_the_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: after WIDTH = 64 became 128 the same call gave the old trainings."""
    loop, place, change = READERS[kind]
    before = describe_loop(loop)
    assert before and before == describe_loop(loop) and len(before) < 2000
    for name, value in change.items():
        set_value = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
        set_value(place, name, value)
    assert describe_loop(loop) != before


def test_what_a_loop_was_made_with_and_uses_of_its_file_counts_as_the_loop() -> None:
    """Story: a loop made with another rate, and one of a changed class, got the old trainings."""

    def make_loop(lr: float) -> Any:
        def loop(pipeline: Any, seed: int) -> Any:
            return make_widened(), lr

        return loop

    first, other = (describe_loop(make_loop(lr)) for lr in (0.1, 0.2))
    assert first != other and first == describe_loop(make_loop(0.1))
    assert "return Widened(2, 2)" in first and "class Widened(nn.Linear)" in first
    assert "def make_parts" not in first and "class Linear" not in first
    partials = [functools.partial(read_default, width) for width in (1, 2)]
    assert describe_loop(partials[0]) != describe_loop(partials[1])
    assert not describe_loop(print)


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
    keys = {"methods": ["gpipe", "pipedream"], "seeds": 2, "rates": (1, 0.3)}
    loops = [Interrupted(at) for at in (math.inf, 5, math.inf, 0)]
    whole = strip_seconds(compare_quietly(loop=loops[0], **keys))
    keys["out"] = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compare_quietly(loop=loops[1], **keys)
    for loop in loops[2:]:
        assert strip_seconds(compare_quietly(loop=loop, **keys)) == whole
    assert loops[2].count == loops[0].count - 5


# ---- trainings in forked processes

METHODS = ("gpipe", "pipedream")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


def run_and_tell(pipeline: Any, seed: int) -> int:
    run(pipeline, seed)
    return os.getpid()


ENDS: Dict[str, Any] = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}


@forks
@pytest.mark.parametrize("end", ["error", "unpicklable", "killed", "interrupt"])
def test_a_training_that_fails_is_named_and_the_rest_continues(end, one_thread, tmp_path):
    class Mine(ZeroDivisionError):
        """An exception that no other process can have."""

    class Loop(Interrupted):
        def __call__(self, pipeline: Any, seed: int) -> None:
            run(pipeline, seed)
            if seed == 1 and self.at == 0:
                if end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ENDS.get(end, Mine)("mine")

    keys = {"seeds": 2, "processes": 2, "out": tmp_path / "out"}
    with pytest.raises(ENDS.get(end, RunFault)) as caught:
        compare_quietly(METHODS, Loop(0), **keys)
    told = f"{caught.value} {caught.value.__cause__}"
    assert re.search(r"training of \w+ at rate 1, seed 1", told)
    assert "exit code -9" in told if end == "killed" else "mine" in told
    assert not multiprocessing.active_children()
    resumed = compare_quietly(METHODS, Loop(1), **keys)
    assert strip_seconds(resumed) == strip_seconds(compare_quietly(METHODS, Loop(1), seeds=2))


@forks
def test_a_comparison_that_continues_trains_one_here_first(one_thread, tmp_path):
    """Story: the loop of a config with one thread a process continued one after another."""
    keys: Dict[str, Any] = {"loop": run_and_tell, "processes": 2, "out": tmp_path / "out"}
    compare_quietly(["gpipe"], **keys)
    trainings = compare_quietly(["gpipe"], seeds=4, **keys).rows[0].trainings[1.0]
    here = [trainings[seed].returned == os.getpid() for seed in range(4)]
    assert here == [True, True, False, False]


@forks
def test_workers_end_with_a_parent_that_is_killed():
    reader, writer = multiprocessing.Pipe(duplex=False)

    def train(number: int) -> int:
        if number > 2:
            # story: a worker in the midst of a training went on to its end
            time.sleep(120)
        return os.getpid()

    def die() -> None:
        reader.close()
        with open_workers(3, train, range(6), str) as run_jobs:
            # two of the three train again now, and one waits
            writer.send({pid for _, pid in islice(run_jobs(iter(range(6))), 3)})
            os.kill(os.getpid(), signal.SIGKILL)

    parent = multiprocessing.get_context("fork").Process(target=die)
    parent.start()
    parent.join()
    writer.close()
    workers = reader.recv()
    # all that were forked have the writing end: the pipe ends with the last of them
    has_ended = wait([reader], 60)
    for pid in () if has_ended else workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert has_ended


def diverge_with_seed_0(pipeline: Any, seed: int) -> None:
    model, optimizer, _ = make_parts(seed)
    x, y = draw_batch()
    with pipeline(model, nn.functional.cross_entropy, optimizer) as pipe:
        for _ in range(3):
            pipe.step(x / (seed > 0), y)


@forks
def test_all_processes_share_the_times_of_the_first_training_that_has_any(
    one_thread, tmp_path, monkeypatch
):
    """The first one may diverge at its first step, before the stages are measured."""

    def measure(engine: Any) -> StageSeconds:
        with (tmp_path / "pids").open("a") as file:
            file.write(f"{os.getpid()} ")
        return StageSeconds(*[(1.0,) * 4] * 3, "as the test says", (0.0,) * 4)

    monkeypatch.setattr(stage_times, "measure_stages", measure)
    keys = {"loop": diverge_with_seed_0, "processes": 2, "seeds": 3, "out": tmp_path / "out"}
    assert "measured" in compare_quietly(["gpipe", "pipedream"], **keys).times
    assert (tmp_path / "pids").read_text() == f"{os.getpid()} "


def test_where_every_training_diverges_at_once_no_times_are_claimed():
    result = compare_quietly(["gpipe", "pipedream_flush"], diverge_with_seed_0)
    assert "None" not in str(result) and "no times" in result.times


def test_the_price_comes_first_and_why_trainings_are_one_after_another(capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    # other reasons: tests before it may have left threads in this process, and here may be a GPU
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(processes, "get_accelerator_name", lambda: "")
    compare_quietly(["gpipe", "pipedream"], seeds=2, processes=None, quiet=False)
    first, more = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("compare: 2 methods x 1 rate x 2 seeds: 4 trainings")
    assert re.search(r"3 trainings more, one after another \(.*\), about", more)
    # the signs of both languages, which only a `BadInput` chooses from, were once printed
    assert " backend.threads=1 in" in more and BEGIN not in more


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stages": 2}, "stages"),
        ({"hardware": "h100x8"}, "hardware"),
        ({"loop": run_and_tell}, "loop.*line def run_and_tell"),
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


def test_the_page_is_one_file_that_needs_no_network(tmp_path):
    result = compare_quietly({"<b>": "gpipe", "2BW": "pipedream_2bw", "rows": {}}, seeds=2)
    page = result.save(tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "http:" not in page and "https:" not in page and "<script" not in page
    assert re.findall(r"\b(?:src|href|style)=\S+", page) == ['href="data:,">']
    assert "<b>" not in page and "&lt;b&gt; is the baseline" in page
    assert page.count("<polyline") == 4 and "rows cannot run" in page
    assert "srcdoc=" in result._repr_html_()


VALUE = st.floats(-1e300, 1e300) | st.sampled_from([0.0, 1.0, math.inf, -math.inf, math.nan])


POINTS = st.lists(st.tuples(VALUE, VALUE, VALUE), max_size=4)


@given(curves=st.lists(POINTS, max_size=3), y_top=VALUE)
def test_curves_of_any_values_are_drawn_with_numbers_alone(curves: Any, y_top: float) -> None:
    """Story: a figure without a finite point, such as of one method that diverged at once, ended in a traceback."""
    columns = [np.array(points, np.float64).reshape(-1, 3).T for points in curves]
    drawn = [Curve(np.arange(float(len(rows.T))), *rows) for rows in columns]
    figure = draw_curves(drawn, "samples", "Loss", y_top)
    assert figure.count(' points="') == 2 * len(curves)
    assert "nan" not in figure and "inf" not in figure


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


REFUSED: Dict[str, List[Any]] = {
    # Story: what is no number or name ended in a traceback
    "methods": [
        *("gpipe", [], ["gpipe", "gpipe"], ["1F1B"], {"a": 5}, {"gpipe": {"stages": 2}}),
        *([{"method": "gpipe"}], {"a": {"method": ["gpipe"]}}),
    ],
    "seeds": [0, [1, 1], [[1]]],
    "rates": [0.1, (0,), ([1],)],
    "processes": [0],
    "hardware": ["no such"],
    "run": [5, lambda pipeline: None, lambda pipeline, seed: None],
    "pipeline": [lambda pipeline, seed: pipeline(*make_parts(0)[:2], None, method="x")],
}


@pytest.mark.parametrize("place", REFUSED)
def test_a_refusal_is_one_line_with_its_place(place):
    key = "loop" if place in ("run", "pipeline") else place
    for value in REFUSED[place]:
        (fault,) = list_faults(compare_quietly, **{"methods": ["gpipe"], key: value})
        assert fault.startswith(f"{place}: ")


# ---- the command


SMALL = ("--set", "steps=6", "optimizer.lr=0.05", "seed=3", "--seeds", "1", "--rates", "1")


def test_the_command_trains_as_train_does(tmp_path, monkeypatch, capsys):
    arguments = ("--methods", "gpipe,pipedream", "--json", "--out", str(tmp_path / "out"))
    result = run_here(
        compare_command, DIGITS, *arguments, *SMALL, monkeypatch=monkeypatch, capsys=capsys
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "compare.html").exists()
    for row in json.loads(result.stdout)["methods"]:
        config = ipu_pipe.load_config(DIGITS, [f"method={row['label']}", *SMALL[1:4]])
        final = ipu_pipe.train(config, tmp_path / row["label"], quiet=True)["final"]
        values = row["trainings"][0]["evaluations"][-1]
        found = (values["loss"], values["accuracy"])
        assert found == (final["test_loss"], final["test_accuracy"])


def test_the_page_is_written_if_nobody_reads_the_json(tmp_path, monkeypatch):
    """Story: with `--json --out DIR | head -1` and PYTHONUNBUFFERED there was no page, and exit
    code 0."""
    words = ["compare", DIGITS, "--methods", "gpipe", "--json", "--out", str(tmp_path), *SMALL]
    monkeypatch.setattr(sys, "argv", words)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream, pytest.raises(SystemExit) as raised:
        monkeypatch.setattr(sys, "stdout", stream)
        run_command(compare_command.main)
    assert raised.value.code == 0 and (tmp_path / "compare.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["replicas=2", "gradient_accumulation=2"],
        ["optimizer={name: adamw, lr: 0.01, no_decay: norms_and_biases, weight_decay: 0.1}"],
        ["lr_schedule={name: cosine, warmup_steps: 3}", "method=pipemare"],
        ["precision=float64", "ema={decay: 0.9}", "clip={norm: 0.5, scope: stage}"],
        ["steps=null", "epochs=1", "evaluate={every: 1, subset: 50}", "method=local_greedy"],
        ["steps=null", "epochs=2", "evaluate={every: 1, subset: 50}", "method=local_sgd"],
        [
            *("steps=null", "epochs=2", "data.subset=128"),
            "lr_schedule={name: torch.optim.lr_scheduler.ExponentialLR, args: {gamma: 0.1}, interval: epoch}",
        ],
    ],
)
def test_the_loop_of_a_config_evaluates_to_what_train_does(changes, tmp_path):
    keys = {change.partition("=")[0] for change in changes}
    usual = ["optimizer={name: sgd, lr: 0.05, momentum: 0.9}", "steps=6", "evaluate={steps: 3}"]
    usual = [change for change in usual if change.partition("=")[0] not in keys]
    config = ipu_pipe.load_config(DIGITS, usual + changes)
    ipu_pipe.train(config, tmp_path / "run", quiet=True)
    loop = ConfigLoop(config)
    result = compare_quietly(loop.describe_methods([config.method]), loop, stages=config.stages)
    losses = [values["loss"] for values in result.rows[0].chosen[0].evaluations]
    # a run evaluates before its first update, too
    assert losses == read_column(tmp_path / "run", "test_loss")[1:]


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
    ("options", "word"),
    [
        ("--methods 1F1B", "--methods: 1F1B: must be one of"),
        ("--rates x", "--rates"),
        ("--set early_stopping={}", "early_stopping"),
        ("--quiet --set data.subset=32 steps=5", "2 microbatches an epoch do not fill one batch"),
    ],
)
def test_bad_input_of_the_command_is_one_line_and_exit_2(options, word, monkeypatch, capsys):
    words = options.split()
    result = run_here(compare_command, DIGITS, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ") and word in result.stderr


def test_smoothing_is_over_the_last_updates_and_ends_where_a_training_diverged():
    training = make_falling_record([float(k) for k in range(40)], 1.0)
    assert training.smooth()[:3].tolist() == [math.inf, 0.5, 1.5]
    training.diverged = "loss is not finite"
    assert training.final == math.inf and not training.has_learned
    baseline = make_row("b", make_falling_record([1.0, 0.5], 1.0))
    verdict = judge(make_row("a", training), baseline, 0.0)
    assert verdict.share is None and "diverges" in verdict.sentence
    assert np.isfinite(training.smooth()[1:-1]).all()
