"""Check the analysis of a run against modelled traces, version tables and traces written by hand."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence

import numpy as np
import pytest

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.analysis.devices import MOST_POINTS
from ipu_pipe.report.analysis.text import compute_differences, format_analysis, format_comparison
from ipu_pipe.report.run_trace import build_modelled_events
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import WAIT, Counter, Counters, Event, Events, Trace
from tests.support.runs import list_faults

UNITS = [
    4.0,
    1.0,
    1.0,
    1.0,
    1.0,
    2.0,
    2.0,
    4.0,
]  # forward times in microseconds; a backward takes twice as long


def make_modelled_trace(
    name: str, begins: Sequence[int], accumulate: int, batches: int, **more: Any
) -> Trace:
    """Make the modelled trace of UNITS with stages at `begins`. A backward takes two forwards; with zbv three, and is split."""
    method, backward = resolve_method(name, {}), 3 if name == "zbv" else 2
    edges = [*begins, len(UNITS)]
    forward = [sum(UNITS[a:b]) for a, b in zip(edges, edges[1:])]
    count, stages = accumulate * batches, len(begins)
    schedule = make_schedule(method, stages, count, accumulate)
    table = VersionTable(schedule, method)
    splits = forward if name == "zbv" else ()
    costs = Costs(
        forward, [backward * cost for cost in forward], [0.5] * stages, weight_gradient=splits
    )
    versions, devices = (
        (table.forward(0, count), table.backward(0, count)),
        list(schedule.device_of_stage),
    )
    sizes = None if name == "zbv" else [100] * stages
    events, counters = build_modelled_events(
        clock(schedule, costs), versions, 1000.0, devices, sizes
    )
    metadata = {
        "method": name, "method_args": {}, "stages": stages, "accumulate": accumulate, "microbatches": count, "modelled": True,
        "device_of_stage": devices, "units": list_units(begins, [1e9 * unit for unit in UNITS], backward),
        "planned_bubble_fraction": 1 - schedule.busy_share(), **more,
    }  # fmt: skip
    return Trace(events, counters, metadata)


def list_units(
    begins: Sequence[int], flops: Sequence[float], backward: float = 2
) -> List[Dict[str, Any]]:
    """Return metadata of the layers of UNITS, with the FLOPs of each forward; a backward has `backward` times as many."""
    return [
        {"name": f"layer{i}", "stage": sum(i >= begin for begin in begins) - 1, "forward_flops": count,
         "backward_flops": backward * count, "crossing_bytes": 100}
        for i, count in enumerate(flops)
    ]  # fmt: skip


def list_begins(bottleneck: Dict[str, Any]) -> List[int]:
    """Return the layers at which stages begin after the advised move."""
    return [int(unit[len("layer") :]) for unit in bottleneck["move"]["begins_then"]]


def analyze_events(
    events: Sequence[Event], counters: Sequence[Counter] = (), **metadata: Any
) -> Dict[str, Any]:
    """Analyze a trace of these events, and check that the analysis is valid JSON."""
    analysis = analyze(
        Trace(Events.from_rows(events), Counters.from_rows(counters), metadata), "a trace"
    )
    json.dumps(analysis, allow_nan=False)
    return analysis


def make_event(
    device: int, kind: str, start: int, end: int, microbatch: int = 0, **more: Any
) -> Event:
    fields: Dict[str, Any] = {"stage": device, "version": 0, "bytes": None, **more}
    return Event(
        device=device, kind=kind, microbatch=microbatch, start_ns=start, end_ns=end, **fields
    )


# ---- the bottleneck, and the gain from moving a boundary


@pytest.mark.parametrize(
    "name, accumulate, batches", [("gpipe", 6, 2), ("pipedream_flush", 6, 2), ("pipedream", 1, 400)]
)
def test_the_stated_gain_of_a_move_is_that_of_the_moved_stages(
    name: str, accumulate: int, batches: int
) -> None:
    """Check the stated gain of a move against the modelled trace of the moved stages."""
    before = analyze(make_modelled_trace(name, [0, 1, 2], accumulate, batches), "before")
    result = before["bottleneck"]
    assert (result["what"], result["stage"], result["device"]) == ("stage", 2, 2)
    begins = list_begins(result)
    assert begins != [0, 1, 2] and result["gain"] > 0.3
    assert result["move"]["busy_now_ns"] == [12000.0, 3000.0, 33000.0]
    after = analyze(make_modelled_trace(name, begins, accumulate, batches), "after")
    assert result["move"]["busy_then_ns"] == [
        stage["forward_ns"] + stage["backward_ns"] for stage in after["stages"]
    ]
    # for pipedream the ends of the run, where the pipeline fills and drains, are a small part of it
    measured = before["span_ns"] / after["span_ns"] - 1
    assert result["gain"] == pytest.approx(measured, rel=0.02 if name == "pipedream" else 1e-6)
    assert after["bottleneck"]["gain"] == 0.0
    assert f"stage 1 at layer{begins[1]} instead of layer1" in result["do"]
    # the layers' times are proportional to their FLOPs
    assert result["time_per_flop_ratio"] == pytest.approx(1) and result[
        "gain_range"
    ] == pytest.approx([result["gain"]] * 2)


@pytest.mark.parametrize("begins", [[0, 1, 2], [0, 5, 7], [0, 3, 6], [0, 6, 7]])
def test_the_gain_is_within_its_range_if_flops_do_not_predict_times(begins: List[int]) -> None:
    units = list_units(begins, [1e9] * len(UNITS))
    before = analyze(make_modelled_trace("pipedream_flush", begins, 6, 2, units=units), "before")
    result = before["bottleneck"]
    after = analyze(make_modelled_trace("pipedream_flush", list_begins(result), 6, 2), "after")
    low, high = result["gain_range"]
    assert low <= result["gain"] <= high and result["time_per_flop_ratio"] > 1
    assert low - 1e-9 <= before["span_ns"] / after["span_ns"] - 1 <= high + 1e-9


def test_even_stages_are_reported_as_the_schedules_own_bubble() -> None:
    result = analyze(make_modelled_trace("gpipe", [0, 5], 2, 3), "even")
    # (P - 1) / (N + P - 1), Huang et al. 2019; slightly different, since updates count as compute
    assert result["planned_bubble_fraction"] == pytest.approx(1 / 3)
    assert result["bubble_fraction"] == pytest.approx(1 / 3, abs=0.01)
    assert (
        result["imbalance"]
        == result["bottleneck"]["gain"]
        == result["bottleneck"]["gain_if_balanced"]
        == 0.0
    )
    assert "more microbatches per update" in result["bottleneck"]["do"]


def test_a_missing_gain_has_a_reason() -> None:
    trace = make_modelled_trace("gpipe", [0, 1, 2], 3, 2)
    for key, reason in {"units": "units", "method": "does not name its method"}.items():
        metadata = {other: value for other, value in trace.metadata.items() if other != key}
        result = analyze(trace._replace(metadata=metadata), "x")["bottleneck"]
        assert result["gain"] is None and result["move"] is None and reason in result["why_no_gain"]
    assert analyze(trace, "x")["bottleneck"]["gain_if_balanced"] > 0.3
    other = analyze(
        trace._replace(metadata={**trace.metadata, "method": "of another version"}), "x"
    )
    assert "cannot be rebuilt" in other["bottleneck"]["why_no_gain"]


def test_a_link_or_evaluations_may_be_the_bottleneck() -> None:
    passes = [
        make_event(d, "forward", 1000 * m + 100 * d, 1000 * m + 100 * d + 100, m)
        for m in range(4)
        for d in (0, 1)
    ]
    message: Dict[str, Any] = {"peer": 1, "carries": "activations", "bytes": 8}
    sends = [make_event(0, "send", 1000 * m + 100, 1000 * m + 900, m, **message) for m in range(4)]
    result = analyze_events([*passes, *sends])["bottleneck"]
    assert (result["what"], result["device"]) == ("link", 0) and "800 ns" in result["why"]
    result = analyze_events([*passes, make_event(1, "evaluate", 4000, 40000)])["bottleneck"]
    assert result["what"] == "outside" and "evaluat" in result["why"]


def test_a_waiting_device_names_whom_it_waits_for() -> None:
    """Device 0 waits, since stage 0 takes 2 ms and stage 1 takes 20 ms."""
    events: List[Event] = []
    for m in range(5):
        at = m * 20_000_000
        events += [
            make_event(0, "forward", at, at + 2_000_000, m),
            make_event(0, WAIT, at + 2_000_000, at + 20_000_000, m, peer=1),
            make_event(1, "forward", at, at + 20_000_000, m),
        ]
    result = analyze_events(events)
    assert [device["busy_ns"] for device in result["devices"]] == [10_000_000, 100_000_000]
    assert result["span_ns"] == 100_000_000
    assert (
        result["devices"][0]["waits_for"] == {"1": 72_000_000}
        and result["devices"][0]["ramp_down_ns"] == 18_000_000
    )
    assert (
        result["bottleneck"]["stage"] == 1
        and "device 0 waits for it 72.0% of the time" in result["bottleneck"]["why"]
    )
    assert result["stages"][0]["of_greatest"] == pytest.approx(0.1) and result[
        "imbalance"
    ] == pytest.approx(0.45)
    assert "stage 1 on device 1" in format_analysis(result)


def test_the_gain_of_a_move_with_several_stages_on_a_device() -> None:
    """The gain of zbv is computed with split backwards, as the trace has them."""
    before = analyze(make_modelled_trace("zbv", [0, 1, 2, 3], 6, 1), "before")
    result = before["bottleneck"]
    after = analyze(make_modelled_trace("zbv", list_begins(result), 6, 1), "after")
    assert result["gain"] > 0.3 and result["gain"] == pytest.approx(
        before["span_ns"] / after["span_ns"] - 1, rel=1e-6
    )


# ---- stages, stragglers, FLOPs


def test_stragglers_and_flops() -> None:
    events = [
        make_event(0, "forward", 1000 * m, 1000 * m + (500 if m == 7 else 100), m)
        for m in range(10)
    ]
    events += [make_event(0, "backward", 1000 * m + 600, 1000 * m + 700, m) for m in range(10)]
    unit = {
        "name": "a",
        "stage": 0,
        "forward_flops": 30.0,
        "backward_flops": 60.0,
        "crossing_bytes": 0,
    }
    result = analyze_events(events, units=[unit])
    assert result["stragglers"] == [
        {"stage": 0, "kind": "forward", "count": 1, "lost_ns": 400, "median_ns": 100.0,
         "longest": [{"microbatch": 7, "at_ns": 7000, "duration_ns": 500}]}
    ]  # fmt: skip
    (stage,) = result["stages"]
    assert stage["flops_per_second"] == pytest.approx(90 * 10 / 2400 * 1e9)
    assert (stage["forward_ns"], stage["busy_ns"], stage["busy_ns_per_microbatch"]) == (
        100.0,
        2400,
        200.0,
    )


def test_halves_of_backwards_and_several_stages_of_a_device() -> None:
    """The time of a backward is the mean over whole and split ones; a device reports its busy time for each of its stages."""
    events = [make_event(0, "forward", 100 * m, 100 * m + 10, m) for m in range(4)]
    events += [make_event(0, "backward", 100 * m + 20, 100 * m + 50, m) for m in (0, 1, 2)]
    events += [
        make_event(0, "input gradient", 320, 332, 3),
        make_event(0, "weight gradient", 340, 346, 3),
    ]
    events += [make_event(0, "forward", 100 * m + 60, 100 * m + 65, m, stage=3) for m in range(2)]
    result = analyze_events(events)
    assert result["devices"][0]["stages"] == [0, 3]
    assert result["devices"][0]["busy_ns_by_stage"] == {"0": 40 + 90 + 18, "3": 10}
    assert sum(result["devices"][0]["busy_ns_by_stage"].values()) == result["devices"][0]["busy_ns"]
    keys = ("backward_ns", "input_gradient_ns", "weight_gradient_ns")
    assert [result["stages"][0][key] for key in keys] == [(3 * 30 + 18) / 4, 12, 6]
    assert [result["stages"][1][key] for key in keys] == [None] * 3
    text = format_analysis(result)
    assert "weight gradient" in text and "busy in stage" in text
    plain = format_analysis(
        analyze_events([make_event(0, "forward", 0, 10), make_event(0, "backward", 10, 20)])
    )
    assert "weight gradient" not in plain and "busy in stage" not in plain


# ---- staleness


@pytest.mark.parametrize(
    "name", ["gpipe", "pipedream", "pipedream_2bw", "pipemare", "local_greedy"]
)
def test_staleness_is_the_version_tables(name: str) -> None:
    accumulate, batches = 4, 6
    trace = make_modelled_trace(name, [0, 2, 5], accumulate, batches)
    method = METHODS[name]
    table = VersionTable(make_schedule(method, 3, accumulate * batches, accumulate), method)
    update = np.arange(accumulate * batches) // accumulate
    staleness = analyze(trace, "x")["staleness"]
    for row, *versions in zip(
        staleness, table.forward(0, len(update)), table.backward(0, len(update))
    ):
        lags = [
            {"mean": (update - version).mean(), "greatest": (update - version).max()}
            for version in versions
        ]
        assert [row["forward_versions"], row["backward_versions"]] == lags and row[
            "time_ns"
        ] is not None


def test_staleness_in_time() -> None:
    events = [make_event(0, "forward", 10 * m, 10 * m + 5, m) for m in range(4)]
    events += [
        make_event(0, "update", 100, 120, 0, version=1),
        make_event(0, "update", 200, 220, 1, version=2),
    ]
    result = analyze_events(events, accumulate=2)["staleness"]
    assert result[0]["time_ns"] == {"median": (110 + 120 + 190 + 200) / 4, "greatest": 200}
    assert (
        result[0]["forward_versions"] == {"mean": 0.5, "greatest": 1}
        and result[0]["backward_versions"] is None
    )


# ---- links


def test_links_by_messages_and_their_latency() -> None:
    events = [make_event(0, "forward", 0, 10)]
    events += [
        make_event(0, "send", 100 * m, 100 * m + 5, m, peer=1, carries="activations", bytes=64)
        for m in range(3)
    ]
    # the message of the last wait may have arrived before it
    for start, end, m in ((0, 12, 0), (190, 216, 2), (0, 1, 9), (101, 190, 1)):
        events.append(make_event(1, WAIT, start, end, m, peer=0, carries="activations"))
    events.append(make_event(1, WAIT, 0, 1, 0, peer=0, carries="gradients"))
    events.append(make_event(1, "send", 300, 330, 0, peer=0, carries="gradients", bytes=None))
    result = analyze_events(events)["links"]
    assert result == [
        {"src": 0, "dst": 1, "carries": "activations", "messages": 3, "bytes": 192, "bytes_per_microbatch": 64.0, "busy_ns": 15,
         "busy_ns_per_microbatch": 5.0,
         "latency_ns": {"waited": 2, "min": 12, "median": 14.0}, "counted": "messages"},
        {"src": 1, "dst": 0, "carries": "gradients", "messages": 1, "bytes": None, "bytes_per_microbatch": None, "busy_ns": 30,
         "busy_ns_per_microbatch": 30.0,
         "latency_ns": None, "counted": "messages"},
    ]  # fmt: skip


# ---- memory


def test_memory_at_its_peak() -> None:
    counters = [
        Counter(0, "weights (bytes)", 0, 100.0), Counter(0, "activations (bytes)", 5, 40.0),
        Counter(0, "gradients (bytes)", 20, 30.0),
        Counter(0, "activations (bytes)", 20, 10.0), Counter(0, "activations (bytes)", 30, 60.0),
        Counter(0, "gradients (bytes)", 40, 0.0),
        Counter(0, "microbatches in flight", 31, 1e9), Counter(1, "weights (bytes)", 7, float("nan")),
    ]  # fmt: skip
    passes = [
        ("forward", 0, 10, 3),
        ("forward", 10, 25, 4),
        ("backward", 26, 29, 3),
        ("forward", 50, 60, 5),
    ]
    (result,) = analyze_events([make_event(0, *row) for row in passes], counters)["memory"]
    assert (result["device"], result["peak_bytes"], result["at_ns"]) == (0, 190, 30)
    assert result["categories"] == {"weights": 100, "gradients": 30, "activations": 60}
    assert result["microbatches"] == [4]
    assert result["over_time"] == [[0, 100], [5, 140], [20, 140], [30, 190], [40, 160]]


def test_memory_over_time_is_thinned_but_keeps_its_peak() -> None:
    counters = [Counter(0, "weights (bytes)", t, 1.0 + (t == 1234) * 98) for t in range(5000)]
    (result,) = analyze_events([make_event(0, "forward", 0, 5000)], counters)["memory"]
    assert len(result["over_time"]) == MOST_POINTS
    assert max(size for _, size in result["over_time"]) == result["peak_bytes"] == 99


# ---- the whole analysis


def test_replicas_devices_are_distinguished() -> None:
    events = [
        make_event(0, "forward", 0, 10),
        make_event(2, "forward", 0, 30, stage=0),
        make_event(1, "forward", 10, 20, stage=1),
    ]
    result = analyze_events(
        events,
        method="gpipe",
        stages=2,
        replicas=2,
        device_of_stage=[0, 1],
        accumulate=1,
        microbatches=1,
    )
    assert [device["index"] for device in result["devices"]] == [0, 1, 2, 3] and result["devices"][
        3
    ]["idle_ns"] == 30
    assert result["stages"][0]["devices"] == [0, 2]


def test_a_modelled_trace_plays_one_replica() -> None:
    """Story: the devices of other replicas, which a modelled trace does not have, were reported as 100 % idle."""
    trace = make_modelled_trace("gpipe", [0, 5], 2, 3)
    alone, one_of_two = (
        analyze(trace._replace(metadata={**trace.metadata, "replicas": count}), "x")
        for count in (1, 2)
    )
    assert (
        one_of_two["devices"] == alone["devices"]
        and one_of_two["bubble_fraction"] == alone["bubble_fraction"]
    )
    assert any("2 replicas" in note for note in one_of_two["notes"])


def test_metadata_that_no_run_writes_are_refused() -> None:
    wrong = {
        "stages": "x",
        "accumulate": 0,
        "units": [3],
        "replicas": True,
        "device_of_stage": [-1],
        "method": 5,
    }
    faults = list_faults(analyze_events, [make_event(0, "forward", 0, 1)], **wrong)
    assert len(faults) == 6 and all("a trace: metadata: " in fault for fault in faults)


def test_metadata_of_an_impossible_schedule_give_no_gain() -> None:
    passes = [
        make_event(d, kind, d + late, d + late + 1)
        for d in (0, 1)
        for late, kind in enumerate(("forward", "backward"))
    ]
    for odd in (
        {"stages": 1 << 30},
        {"method": "pipedream_2bw", "accumulate": 1},
        {"accumulate": 1 << 30},
    ):
        result = analyze_events(
            passes, **{"method": "gpipe", "stages": 2, "accumulate": 1, "microbatches": 4, **odd}
        )
        assert result["span_ns"] == 3 and result["bottleneck"]["gain"] is None


def test_two_analyses_are_compared_side_by_side() -> None:
    one, two = (
        analyze_events([make_event(0, "forward", 0, end), make_event(1, "forward", 5, 20)])
        for end in (10, 16)
    )
    rows = {row["name"]: row for row in compute_differences(one, two)}
    assert rows["devices[0].busy_ns"] == {
        "name": "devices[0].busy_ns",
        "this": 10,
        "other": 16,
        "difference": -6,
    }
    three = analyze_events([make_event(0, "forward", 0, 10)])
    rows = {row["name"]: row for row in compute_differences(one, three)}
    assert rows["devices[1].busy_ns"] == {
        "name": "devices[1].busy_ns",
        "this": 15,
        "other": None,
        "difference": None,
    }
    stage = next(
        line for line in format_comparison(one, two).splitlines() if line.startswith("stage 0")
    )
    assert stage.split()[-1] == "-37.5%"
    stage = next(
        line for line in format_comparison(one, three).splitlines() if line.startswith("stage 1")
    )
    assert stage.split()[-2:] == ["-", "-"]
