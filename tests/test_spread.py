"""Check the spread of modelled times: when passes are repeated, and that nothing is named inside it.

Story: eight traces of one unchanged pipeline named stages 3, 1, 0, 1, 0, 2, 2 and 5 as the slowest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import pytest

from ipu_pipe.model import timing
from ipu_pipe.model.devices import DeviceKind
from ipu_pipe.model.timing import (
    BEST,
    MOST_REPEATS,
    BestSeconds,
    Clock,
    combine_spreads,
    repeat_until_close,
)
from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.analysis.text import format_analysis, format_comparison
from ipu_pipe.report.run_trace import (
    build_modelled_events,
)
from ipu_pipe.run.train import train
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import Trace
from ipu_pipe.trace.reading import read_trace
from tests.support.runs import list_faults, read_summary
from tests.test_modelled import load_modelled_config

CPU = DeviceKind("cpu")
FOREVER = 1e9
RECORDED = json.loads((Path(__file__).parent / "noisy_stage_times.json").read_text())
# the first pass of each series of passes that is cut from a recorded one
FIRST = range(0, len(RECORDED["even"]) - MOST_REPEATS + 1, 4)


def repeat_passes(series: Sequence[Any], seconds: float = FOREVER) -> Tuple[BestSeconds, int]:
    """Repeat passes (ways, stages) that take the recorded seconds, one after another. Return the best and their number."""
    passes = iter(series)
    best = repeat_until_close(lambda clock: np.array(next(passes)), CPU, seconds)
    return best, len(series) - len(list(passes))


def make_trace(seconds: Sequence[float], spreads: Any, devices: Any = None, **more: Any) -> Trace:
    """Make the modelled trace of GPipe on stages whose passes take `seconds`, a third of it forward."""
    count = len(seconds)
    method = METHODS["gpipe"]
    schedule = make_schedule(method, count, 8, 4)
    table = VersionTable(schedule, method)
    costs = Costs([s / 3 for s in seconds], [2 * s / 3 for s in seconds], [0.0] * count)
    versions = table.forward(0, 8), table.backward(0, 8)
    device_of_stage = list(devices or range(count))
    events, counters = build_modelled_events(
        clock(schedule, costs, None, device_of_stage), versions, 1e9, device_of_stage, [100] * count
    )
    metadata: Dict[str, Any] = {
        "method": "gpipe", "stages": count, "accumulate": 4, "modelled": True,
        "device_of_stage": device_of_stage, **more,
    }  # fmt: skip
    if spreads is not None:
        metadata["spread"] = list(spreads)
    return Trace(events, counters, metadata)


def analyze_recorded(name: str, first: int) -> Dict[str, Any]:
    """Analyze the modelled trace of the recorded series `name` from its pass `first` on."""
    best, _ = repeat_passes(1e-6 * np.array(RECORDED[name][first:], float))
    return analyze(make_trace(best.least.sum(axis=0).tolist(), best.spread.tolist()), name)


# ---- recorded times


@pytest.mark.parametrize("first", FIRST)
def test_no_stage_is_named_where_the_slowest_one_changes(first: int) -> None:
    """The medians of three passes of this series name stage 7 or 0."""
    analysis = analyze_recorded("even", first)
    worst, rows = analysis["bottleneck"], analysis["stages"]
    assert worst["stage"] is worst["device"] is None and worst["what"] == "stage"
    assert {0, 7} <= set(worst["within_spread"])
    greatest = max(row["spread"] for row in rows if row["index"] in worst["within_spread"])
    assert f"{greatest:.1%}" in worst["why"]


@pytest.mark.parametrize("first", FIRST)
def test_a_stage_that_is_clearly_slowest_is_named(first: int) -> None:
    analysis = analyze_recorded("slow", first)
    worst = analysis["bottleneck"]
    assert (worst["stage"], worst["device"], worst["within_spread"]) == (3, 3, [])


# ---- how often passes are repeated


def test_equal_passes_are_repeated_a_few_times_and_noisy_ones_at_most_forty_times() -> None:
    equal, alternating = [[[1.0, 2.0]]] * 99, [[[1.0, 2.0 + 0.5 * i]] for i in range(99)]
    assert repeat_passes(equal)[1] == BEST
    assert repeat_passes(alternating[::-1])[1] == MOST_REPEATS


def test_passes_end_with_the_seconds_that_they_may_take() -> None:
    """Two passes are the fewest, since one has no spread."""
    best, count = repeat_passes([[[1.0]], [[1.5]], [[9.0]]], 0.0)
    assert best.least.tolist() == [[1.0]] and best.spread.tolist() == [0.5] and count == 2


def test_the_spread_is_that_of_the_five_least_passes() -> None:
    """Times of both ways count; slow passes do not."""
    passes = (4.0, 1.1, 1.0, 1.2, 9.0, 1.05, 1.15)
    best = timing.find_best([np.array([[a], [2 * a]]) for a in passes])
    assert best.least.tolist() == [[1.0], [2.0]] and best.spread == pytest.approx([0.2])
    assert timing.find_best([np.zeros((1, 2))] * 2).spread.tolist() == [0.0, 0.0]


def test_a_short_stage_does_not_make_a_pipeline_doubtful() -> None:
    """A stage that takes a hundredth of the longest one may be off by half of its time."""
    assert combine_spreads([1.0, 0.01], [0.02, 0.5]) == 0.02 and combine_spreads([], []) == 0.0
    assert repeat_passes([[[1.0, 0.01 + 0.001 * i]] for i in range(99)])[1] == BEST


@pytest.mark.parametrize("waits, kind, expected", [
    ((3, 3), "cpu", time.thread_time), ((3, 4), "cpu", time.perf_counter), ((None, None), "cpu", time.perf_counter),
    ((3, 3), "cuda", time.perf_counter),
])  # fmt: skip
def test_the_processor_time_counts_where_a_pass_does_not_wait(
    waits: Any, kind: str, expected: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that sleeps or waits for a device has its time by the wall clock."""
    counts: Iterator[Any] = iter(waits)
    monkeypatch.setattr(timing, "_count_waits", lambda: next(counts))
    clocks: List[Clock] = []
    repeat_until_close(
        lambda clock: clocks.append(clock) or np.ones((1, 1)), DeviceKind(kind), FOREVER
    )
    assert clocks == [time.perf_counter] + [expected] * (BEST - 1)


# ---- the spread reaches text, JSON and advice


def test_the_spread_is_in_the_figures_and_the_text_of_an_analysis() -> None:
    analysis = analyze(make_trace([1.0, 2.0], [0.03, 0.04]), "x")
    assert [row["spread"] for row in analysis["stages"]] == [0.03, 0.04]
    assert analysis["spread"] == pytest.approx(0.04)
    # all passes of a stage take its one time, which is no measure of noise
    assert analysis["noise"] is None and {row["noise"] for row in analysis["stages"]} == {None}
    assert "spread 4.0%" in format_analysis(analysis)


def test_an_undecided_bottleneck_names_no_stage_anywhere_in_the_text() -> None:
    analysis = analyze(make_trace([1.0, 1.9, 2.0, 1.95], [0.03, 0.12, 0.05, 0.01]), "x")
    answer = format_analysis(analysis).partition("\n\ndevice ")[0]
    assert "Bottleneck: not known\n" in answer
    assert "stages 1, 2 and 3 are within the spread of 12.0%\n" in answer
    assert "Critical path" not in answer and "waits for it" not in answer
    assert "move about 14% of their work" in analysis["bottleneck"]["do"]


def test_the_pass_to_shorten_is_named_only_beyond_the_spread() -> None:
    """Stage 1 is slowest in both; whether its backward or its forward saves more is within the second spread."""
    for spread, named in ((0.1, True), (1.2, False)):
        text = format_analysis(analyze(make_trace([1.0, 2.5], [spread] * 2), "x"))
        assert "Critical path: stage 1" in text
        assert ("if the backward passes of stage 1 were 10% shorter" in text) is named
        assert (" passes of stage " in text) is named


@pytest.mark.parametrize("seconds, device, stage, equals", [
    ([2.0, 1.0, 3.0, 1.0], 0, 2, []),
    # device 0 is slowest; which of its stages 0 and 2 is only within the spread
    ([2.0, 1.0, 2.02, 1.0], 0, None, [0, 2]),
    ([2.0, 2.0, 1.0, 1.01], None, None, [0, 1, 2, 3]),
])  # fmt: skip
def test_stages_of_one_device_are_told_apart_beyond_their_spread_alone(
    seconds: Any, device: Any, stage: Any, equals: List[int]
) -> None:
    trace = make_trace(seconds, [0.05] * 4, devices=(0, 1, 0, 1))
    worst = analyze(trace, "x")["bottleneck"]
    assert (worst["device"], worst["stage"], worst["within_spread"]) == (device, stage, equals)
    assert device == 0 or "no one device is slowest: devices 0 and 1" in worst["why"]


UNITS = [
    {"name": f"layer{i}", "stage": int(i > 2), "forward_flops": 1.0, "backward_flops": 2.0, "crossing_bytes": 1}
    for i in range(5)
]  # fmt: skip


def test_a_boundary_is_advised_only_if_it_gains_more_than_the_spread() -> None:
    """Stage 0 has three equal layers and stage 1 two quicker ones: moving one gains a third."""
    for spread, advised in ((0.01, True), (0.25, True), (0.4, False)):
        worst = analyze(make_trace([4.0, 1.0], [spread] * 2, units=UNITS), "x")["bottleneck"]
        assert 0.25 < worst["gain"] < 0.4 and worst["stage"] == 0
        assert ("begin stage 1 at layer2" in worst["do"]) is advised
        assert ("more than the spread of 40.0%" in worst["do"]) is not advised


def test_a_difference_of_two_traces_is_told_from_their_spread() -> None:
    first, near, far = (
        analyze(make_trace([1.0, last], [spread] * 2), "x")
        for last, spread in ((2.0, 0.03), (2.08, 0.04), (3.0, 0.04))
    )
    assert format_comparison(first, near).count("within spread)") == 4
    assert "-33.3% (spread 5.0%)" in format_comparison(first, far)
    # a measured trace has noise, and a modelled one of old none
    old = analyze(make_trace([1.0, 2.0], None), "old")
    assert "spread" not in format_comparison(first, old)


@pytest.mark.parametrize("spread", [None, [0.1]])
def test_a_trace_without_its_spreads_is_read_and_says_so(spread: Any) -> None:
    analysis = analyze(make_trace([1.0, 1.0, 1.01], spread), "x")
    assert analysis["bottleneck"]["stage"] == 2 and analysis["bottleneck"]["within_spread"] == []
    assert analysis["spread"] is None and "of slowest" in format_analysis(analysis)
    assert any("no spread of its modelled times" in note for note in analysis["notes"])


@pytest.mark.parametrize("spread", [[-0.1, 0.1], "wide", [None, 0.1], [float("nan"), 0.1]])
def test_a_damaged_spread_is_refused(spread: Any) -> None:
    trace = make_trace([1.0, 2.0], None, spread=spread)
    (fault,) = list_faults(analyze, trace, "x")
    assert fault.startswith("x: metadata: spread: ")


# ---- of a run


def test_a_run_records_and_prints_its_spread(tmp_path: Path, capsys: Any) -> None:
    train(load_modelled_config("stages=3"), tmp_path / "run")
    spread = read_summary(tmp_path / "run")["modelled_spread"]
    printed = f"(the schedule with the stages' measured passes, which repeat within {spread:.1%})"
    assert spread >= 0 and printed in capsys.readouterr().out
    analysis = analyze(read_trace(tmp_path / "run"), "run")
    assert all(row["spread"] >= 0 for row in analysis["stages"]) and analysis["spread"] >= 0
    assert "(the least of repeated passes of 8 samples after training)" in analysis["why_modelled"]
